"""Matrix products on tensor cores, written in Triton: of 16 bits, and in float32 accuracy."""

MOST_SIDE_BY_SIDE = 4
"""Most products of the same rows in one launch."""
