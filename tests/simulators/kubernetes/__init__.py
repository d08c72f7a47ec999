"""A simulated Kubernetes control plane: an API server with the kinds that gangs need, and its controllers."""
