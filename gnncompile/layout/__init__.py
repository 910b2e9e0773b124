"""Graph structure in memory: CSR layouts, what was made from which tensors, and what a loader attached to them."""
