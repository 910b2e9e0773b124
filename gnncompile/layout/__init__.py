"""Graph structure in memory: CSR layouts, caches by the identity of tensors, and metadata from loaders."""
