"""Products of float32 matrices on tensor cores, in Triton."""
