"""Samples neighbourhoods of seeds, for mini-batches of large graphs."""
