"""Prepares mini-batches between a loader and a compiled model."""
