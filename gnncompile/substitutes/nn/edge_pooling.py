"""Substitutes for PyG's pooling that contracts edges: ``EdgePooling`` and ``ClusterPooling``.

An op finds the cluster of each node (:mod:`gnncompile.ops.matching`). The rows and edges of the clusters are computed
by message passing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import ClusterPooling, EdgePooling
from torch_geometric.nn.pool.cluster_pool import UnpoolInfo as ClusterInfo
from torch_geometric.nn.pool.edge_pool import UnpoolInfo as EdgeInfo
from torch_geometric.utils import scatter

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list
from gnncompile.substitutes.utils import merged

_OPS: Any = torch.ops.gnncompile

_merge_edges = copy_of(EdgePooling._merge_edges)
_merge_clusters = copy_of(ClusterPooling._merge_edges)


@substitute(EdgePooling._merge_edges)
def merge_edges(self: Any, x: Tensor, edge_index: Any, batch: Tensor, edge_score: Tensor) -> Any:
    """See ``torch_geometric.nn.EdgePooling._merge_edges``."""
    if not is_edge_list(edge_index):
        return _merge_edges(self, x, edge_index, batch, edge_score)
    cluster, chosen, single = _OPS.matched_edges(edge_index, edge_score.detach(), x.size(0))
    clusters = chosen.size(0) + single.size(0)
    score = torch.cat([edge_score.index_select(0, chosen), x.new_ones(single.size(0))])
    pooled = scatter(x, cluster, dim=0, dim_size=clusters, reduce="sum") * score.view(-1, 1)
    ends = cluster.index_select(0, edge_index.reshape(-1)).view(2, -1)
    info = EdgeInfo(edge_index=edge_index, cluster=cluster, batch=batch, new_edge_score=score)
    return pooled, merged(ends, [], clusters)[0], batch.new_zeros(clusters).scatter(0, cluster, batch), info


@substitute(ClusterPooling._merge_edges)
def merge_clusters(self: Any, x: Tensor, edge_index: Any, batch: Tensor, edge_score: Tensor) -> Any:
    """See ``torch_geometric.nn.ClusterPooling._merge_edges``; no ``[num_nodes, num_nodes]`` matrix is made."""
    if not is_edge_list(edge_index):
        return _merge_clusters(self, x, edge_index, batch, edge_score)
    contracted = edge_score.detach() > self.threshold
    cluster, first = _OPS.components(edge_index, contracted, x.size(0))
    clusters = first.size(0)
    ends = cluster.index_select(0, edge_index.reshape(-1)).view(2, -1)
    rows = x.index_select(0, edge_index[0]) * edge_score.view(-1, 1)
    pooled = scatter(rows, ends[1], dim=0, dim_size=clusters, reduce="sum")
    touched = scatter(contracted.long().repeat(2), edge_index.reshape(-1), dim=0, dim_size=x.size(0), reduce="sum")
    alone = (touched == 0).to(x.dtype).view(-1, 1)
    pooled = pooled + scatter(x * alone, cluster, dim=0, dim_size=clusters, reduce="sum")
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:  # PyG's sums are products of matrices
        pooled = pooled.to(torch.get_autocast_dtype(x.device.type))
    found = merged(ends, [], clusters, alive=ends[0] != ends[1])[0]
    return pooled, found, batch.new_zeros(clusters).scatter(0, cluster, batch), ClusterInfo(edge_index, cluster, batch)
