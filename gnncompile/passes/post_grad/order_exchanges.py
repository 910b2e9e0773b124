"""All exchanges of a graph are chained, so every process runs them in the same order.

Before: ``a = halo_exchange(x, ..., []); b = halo_exchange(y, ..., [])``, which Inductor may run in any order
After:  ``b = halo_exchange(y, ..., [a])``
Why it pays: it does not; an exchange meets the exchange of the other processes that was started at the same place.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_G = torch.ops.gnncompile
_EXCHANGES = {
    _G.halo_exchange.default,
    _G.halo_return.default,
    _G.all_reduce.default,
    _G.count_rows.default,
    _G.sum_gradients.default,
}


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    before: fx.Node | None = None
    for node in list(graph.nodes):
        if node.target not in _EXCHANGES:
            continue
        if before is not None:
            node.args = (*node.args[:-1], [before])
        before = node
        if node.target is _G.sum_gradients.default:
            before = next((user for user in node.users if user.target is operator.getitem), None)
