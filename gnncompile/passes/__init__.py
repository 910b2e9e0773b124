"""Rewrites captured graphs: aten operations become regions, a structure program, and a graph for Inductor."""

import gnncompile.ops  # noqa: F401  (passes name these operations)
