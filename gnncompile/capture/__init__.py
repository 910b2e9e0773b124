"""Takes a model and its inputs in: Dynamo, substitutes for PyG helpers, checks, the compiled object."""

import gnncompile.ops  # noqa: F401  (captured graphs hold these operations)
