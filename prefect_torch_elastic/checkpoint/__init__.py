"""Checkpoints of a gang: saved behind the training, verified when read, exact on any number of ranks."""
