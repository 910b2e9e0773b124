"""Values whose maximum is taken are written to memory, for the gradient of the maximum.

Before: ``m = amax(y)``, where Inductor may compute `y` in several kernels
After:  ``z = stored(y); m = amax(z)``, where all kernels read `z`
Why it pays: it does not. The gradient goes to the values that are equal to the maximum. A value that is computed again
may differ in the last bit, so no value would be equal, and the gradient would be 0 / 0.
"""

from __future__ import annotations

import math

from torch import fx

from gnncompile.passes.analysis import aten, own
from gnncompile.passes.context import Context

_EXTREMES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_NORMS = (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        if node in ctx.needs_grad and _is_extreme(node):
            (given,) = node.all_input_nodes
            if given.op == "call_function":
                with ctx.graph.inserting_before(node):
                    node.replace_input_with(given, ctx.call(own.stored.default, given, like=given))


def _is_extreme(node: fx.Node) -> bool:
    if node.target in _NORMS:
        return len(node.args) > 1 and node.args[1] in (math.inf, -math.inf)
    return node.target in _EXTREMES
