"""Makes padded rows of a mini-batch change nothing."""
