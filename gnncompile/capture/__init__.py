"""Takes a model and its inputs in: Dynamo, substitutes for PyG helpers, checks, the compiled object."""
