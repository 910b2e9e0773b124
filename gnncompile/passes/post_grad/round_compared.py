"""Low-precision values are rounded before they are tested for equality. Runs after differentiation, on each graph.

Before: ``ties = eq(y, amax(y))``, with `y` in bfloat16 or float16
After:  ``ties = eq(rounded(y), rounded(amax(y)))``
Why it pays: it does not; the gradient of a maximum finds the maximum by this test. Inductor computes low-precision
values in float32, and rounds only what it writes to memory. A value that it has just computed differs from the written
maximum: no value is equal, and the gradient is 0 / 0.
"""

from __future__ import annotations

from torch import fx

from gnncompile.device import HALVES
from gnncompile.passes.analysis import aten, is_tensor, own, value

_TESTS = (aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar)


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    rounded: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _TESTS:
            for given in node.all_input_nodes:
                if _is_computed(given):
                    if given not in rounded:
                        rounded[given] = _round(graph, given)
                    node.replace_input_with(given, rounded[given])


def _is_computed(node: fx.Node) -> bool:
    """Whether a node may be computed in a higher precision than that of its dtype."""
    return node.op == "call_function" and is_tensor(node) and value(node).dtype in HALVES


def _round(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_after(node):
        rounded = graph.call_function(own.rounded.default, (node,))
    rounded.meta["val"] = value(node).clone()
    return rounded
