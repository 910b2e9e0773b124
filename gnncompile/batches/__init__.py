"""Mini-batches on their way from a loader to a compiled model."""
