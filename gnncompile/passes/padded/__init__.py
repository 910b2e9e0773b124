"""Keeps padded rows of a mini-batch from changing the results."""
