"""Substitutes: the functions that Dynamo traces instead of PyG's functions and methods while gnncompile captures."""

import gnncompile.ops  # noqa: F401  (substitutes call these operations)
