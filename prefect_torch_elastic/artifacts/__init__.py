"""What people see of a run in the UI of Prefect: pages of text, and what puts them there."""
