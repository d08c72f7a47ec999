"""What runs on a node: the launcher of a local gang, one agent per node, its fork server, the ranks.

Nothing in here imports Prefect or a Kubernetes client.
"""
