"""What runs in a step: ops, kernels, layouts and the memory of graph structure."""
