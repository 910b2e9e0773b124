"""Matrix products on tensor cores, written in Triton: of 16 bits, and in float32 accuracy."""

MOST_SIDE_BY_SIDE = 4
"""Most products of the same rows in one launch."""
MOST_READ = 3
"""Most tensors that an epilogue reads beside the product."""
MOST_WRITTEN = 2
"""Most results of an epilogue."""
MOST_OF_FACTOR = 2
"""Most tensors that a factor of a product over rows is computed from."""
