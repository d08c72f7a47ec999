"""A real Prefect on this machine for laptops, demos and tests: a server, and a worker for each pool."""
