"""Gangs on Kubernetes: one JobSet for each, which Kueue admits and a Prefect worker watches."""
