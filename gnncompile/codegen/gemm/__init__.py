"""Matrix products in float32 accuracy on tensor cores, written in Triton."""
