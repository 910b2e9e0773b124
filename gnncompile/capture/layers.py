"""PyG's layers whose own code looks at data, without the look where there is a way around it.

What is not PyG's own layer on a plain edge list is traced as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import SuperGATConv

from gnncompile.runtime import sampling_ops  # noqa: F401  (defines the ops)

_OPS: Any = torch.ops.gnncompile


def positive_sampling(self: Any, edge_index: Tensor) -> Tensor:
    """See :meth:`torch_geometric.nn.SuperGATConv.positive_sampling`."""
    live: Tensor = _OPS.live_edges(edge_index)
    p = 1.0 - self.edge_sample_ratio
    return _OPS.dropped_edges(live, p) if self.training and p > 0 else live


def negative_sampling(self: Any, edge_index: Tensor, num_nodes: int, batch: Tensor | None = None) -> Tensor:
    """See :meth:`torch_geometric.nn.SuperGATConv.negative_sampling`."""
    ratio = self.neg_sample_ratio * self.edge_sample_ratio
    live = _OPS.live_edges(edge_index)
    return _OPS.negative_edges(live, num_nodes, ratio, self.is_undirected, batch)  # type: ignore[no-any-return]


METHODS: dict[Callable[..., Any], Callable[..., Any]] = {
    SuperGATConv.positive_sampling: positive_sampling,
    SuperGATConv.negative_sampling: negative_sampling,
}
"""What is traced in place of PyG's methods."""
