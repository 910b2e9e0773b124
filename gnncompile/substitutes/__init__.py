"""What Dynamo traces in place of functions and methods of PyG, while gnncompile captures."""

import gnncompile.ops  # noqa: F401  (substitutes call these operations)
