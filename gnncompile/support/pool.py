"""Cases for ``torch_geometric.nn.pool``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_geometric.nn import pool
from torch_geometric.utils import sort_edge_index

from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Absent, Case

ROWS = ("x", "batch")
GRAPH = ("x", "batch_edge_index")
BATCH = {"batch": "batch"}
CLUSTER = "needs torch-cluster"
LEFT: Any = {"asks": 1, "asks_for": "how many edges are left between the nodes that are kept"}
MERGED: Any = {"asks": 2, "asks_for": "which nodes become one, and how many edges are left between these"}
MEET: Any = {"asks": 4, "asks_for": "how many entries two products of sparse matrices have, and are made of"}
LEAST: Any = {"asks": 2, "asks_for": "how many nodes score enough, and how many edges are left between them"}


class _InOrder(nn.Module):
    """Sorts the edges that a pooling returns, because their order differs: in eager the sparse library chooses it.

    The edge weights are detached, because eager has no gradient for them.
    """

    def __init__(self, pooling: nn.Module) -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the results of the pooling, with sorted edges."""
        x, edge_index, edge_weight, *others = self.pooling(*args, **kwargs)
        edge_weight = None if edge_weight is None else edge_weight.detach()
        return x, *sort_edge_index(edge_index, edge_weight, num_nodes=x.size(0)), *others


POOL: tuple[Case | Absent, ...] = (
    Case("global_add_pool", lambda: pool.global_add_pool, ROWS),
    Case("global_mean_pool", lambda: pool.global_mean_pool, ROWS),
    Case("global_max_pool", lambda: pool.global_max_pool, ROWS),
    *(Absent(f"{kind}Index", "an index for search, no layer") for kind in ("KNN", "L2KNN", "MIPSKNN")),
    *(Absent(f"Approx{kind}Index", "an index for search, no layer") for kind in ("L2KNN", "MIPSKNN")),
    Case("TopKPooling", lambda: pool.TopKPooling(C), (*GRAPH, "edge_attr", "batch"), **LEFT),
    Case("TopKPooling [least score]", lambda: pool.TopKPooling(C, min_score=0.05), GRAPH, BATCH, **LEAST),
    Case("SAGPooling", lambda: pool.SAGPooling(C), GRAPH, BATCH, **LEFT),
    Case("EdgePooling", lambda: pool.EdgePooling(C), (*GRAPH, "batch"), **MERGED),
    Case("ClusterPooling", lambda: pool.ClusterPooling(C), (*GRAPH, "batch"), dtype=torch.float32, **MERGED),
    Case("ASAPooling", lambda: _InOrder(pool.ASAPooling(C)), GRAPH, BATCH, dtype=torch.float32, **MEET),
    Case(
        "ASAPooling [weights, self loops]",
        lambda: _InOrder(pool.ASAPooling(C, ratio=0.8, add_self_loops=True)),
        (*GRAPH, "edge_weight", "batch"),
        asks=5,
        asks_for=f"{MEET['asks_for']}, and how many of them are no self loops",
    ),
    Absent("PANPooling", "needs torch-sparse"),
    Case("MemPooling", lambda: pool.MemPooling(C, C, heads=2, num_clusters=3), ROWS),
    Case("max_pool", lambda: pool.max_pool, ("sorted_index", "data")),
    Case("avg_pool", lambda: pool.avg_pool, ("sorted_index", "data")),
    Case("max_pool_x", lambda: pool.max_pool_x, ("sorted_index", "x", "batch")),
    Case("avg_pool_x", lambda: pool.avg_pool_x, ("sorted_index", "x", "batch")),
    Case("max_pool_neighbor_x", lambda: pool.max_pool_neighbor_x, ("data",)),
    Case("avg_pool_neighbor_x", lambda: pool.avg_pool_neighbor_x, ("data",)),
    *(
        Absent(name, CLUSTER)
        for name in ("graclus", "voxel_grid", "fps", "knn", "knn_graph", "radius", "radius_graph", "nearest")
    ),
    Absent("approx_knn", "needs pynndescent, and searches on the CPU"),
    Absent("approx_knn_graph", "needs pynndescent, and searches on the CPU"),
)
