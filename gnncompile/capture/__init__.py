"""Captures a model with Dynamo: the compiled object, input checks, and the backend that runs the passes."""

import gnncompile.ops  # noqa: F401  (captured graphs hold these operations)
