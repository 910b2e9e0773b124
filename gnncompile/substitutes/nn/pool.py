"""Substitutes for PyG's pooling. A size that depends on the batch vector alone is computed from it, not from scores.

For anything but PyG's own layer on plain tensors, PyG's code is traced as written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models.gpse import GNNInductiveHybridMultiHead
from torch_geometric.nn.pool.pool import pool_edge
from torch_geometric.nn.pool.select.topk import topk
from torch_geometric.utils import cumsum

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list, sizes_and_starts
from gnncompile.substitutes.utils import merged

_OPS: Any = torch.ops.gnncompile

_topk, _pool_edge = copy_of(topk), copy_of(pool_edge)


@substitute(topk)
def best_of_each_graph(
    x: Tensor, ratio: float | int | None, batch: Tensor, min_score: float | None = None, tol: float = 1e-7
) -> Tensor:
    """See ``torch_geometric.nn.pool.select.topk``. The batch vector alone gives the number of nodes kept per graph."""
    if min_score is not None or ratio is None or batch.dim() != 1:
        return _topk(x, ratio, batch, min_score, tol)  # type: ignore[no-any-return]
    owner = torch.sort(batch, stable=True)[0]
    sizes, starts = sizes_and_starts(batch, _OPS.num_segments(batch))
    share = (float(ratio) * sizes.to(x.dtype)).ceil().to(torch.long)
    k = torch.full_like(sizes, int(ratio)) if ratio >= 1 else share
    place = torch.arange(batch.size(0), device=batch.device) - starts.index_select(0, owner)
    kept = (place < k.index_select(0, owner)).nonzero().view(-1)
    by_score = torch.sort(x.view(-1), descending=True)[1]
    by_graph = torch.sort(batch.index_select(0, by_score), stable=True)[1]
    chosen = by_score.index_select(0, by_graph.index_select(0, kept))
    return _OPS.chosen_rows(chosen, batch, owner.index_select(0, kept))  # type: ignore[no-any-return]


@substitute(cumsum)
def cumulative_sum(x: Tensor, dim: int = 0) -> Tensor:
    """See :func:`torch_geometric.utils.cumsum`. PyG writes into a view, which could not be hoisted out of the step."""
    shape = [1 if axis == dim % x.dim() else size for axis, size in enumerate(x.size())]
    return torch.cat([x.new_zeros(shape), x.cumsum(dim)], dim)


@substitute(pool_edge)
def edges_between_clusters(
    cluster: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None, reduce: str = "sum"
) -> tuple[Tensor, Tensor | None]:
    """See ``torch_geometric.nn.pool.pool.pool_edge``; edges within clusters and duplicates are removed in one step."""
    summed = edge_attr is None or edge_attr.dtype != torch.bool
    if not is_edge_list(edge_index) or not summed:
        return _pool_edge(cluster, edge_index, edge_attr, reduce)  # type: ignore[no-any-return]
    ends = cluster.index_select(0, edge_index.reshape(-1)).view(2, -1)
    attributes = [] if edge_attr is None else [edge_attr]
    found, attributes = merged(ends, attributes, cluster.size(0), reduce, alive=ends[0] != ends[1])
    return found, attributes[0] if attributes else None


@substitute(GNNInductiveHybridMultiHead._apply_index)
def apply_index(self: Any, batch: Any, virtual_node: bool, pad_node: int, pad_graph: int) -> Any:
    """See the head of ``torch_geometric.nn.GPSE``, which loops over graphs to leave out the last node of each."""
    node_pred, node_true = batch.node_feature, batch.y
    if virtual_node:
        owner, order = torch.sort(batch.batch, stable=True)
        following = torch.cat([owner, owner.new_full((1,), -1)])[1:]
        kept = order.index_select(0, (owner == following).nonzero().view(-1))
        node_pred, node_true = node_pred.index_select(0, kept), node_true.index_select(0, kept)
    pred = self._pad_and_stack(node_pred, batch.graph_feature, pad_node, pad_graph)
    return pred, self._pad_and_stack(node_true, batch.y_graph, pad_node, pad_graph)
