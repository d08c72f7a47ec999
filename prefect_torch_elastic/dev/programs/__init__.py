"""The processes of a stack that import Prefect; `supervisor` starts them and imports none of it."""
