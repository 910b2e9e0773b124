"""Equal computations are done once.

Before: every layer computes the same self loops and the same normalisation from ``edge_index``.
After:  one computation for all layers.
Why it pays: one structure serves all layers; region forming can compare indices by identity.
"""

from __future__ import annotations

from torch import fx

from gnncompile.passes.analysis import origins, value_numbers
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad import wrap_negative_indices


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    firsts: dict[int, fx.Node] = {}
    for node, number in value_numbers(ctx.graph, ctx.written).items():
        first = firsts.setdefault(number, node)
        if first is not node:
            first.meta["origins"] = (*origins(first), *origins(node))
            wrap_negative_indices.take_over(first, node)
            node.replace_all_uses_with(first)
            ctx.graph.erase_node(node)
