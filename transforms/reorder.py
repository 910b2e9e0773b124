"""Reorders nodes so that neighbours lie near each other in memory."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from gnncompile.exc import ArgumentError

from .edges import plain
from .node_order import graph_of_nodes, refuse_unordered, select_nodes
from .orders import ORDERS


@functional_transform("reorder")
class Reorder(BaseTransform):
    r"""Renumbers the nodes of a graph (functional name: :obj:`reorder`).

    Message passing reads the rows of neighbours. If these rows lie near each other, caches hold them. Node attributes
    are permuted. All node indices are renumbered: those of :obj:`edge_index` and of every attribute that PyG increases
    by the number of nodes when it batches graphs (:obj:`edge_label_index`, :obj:`face`). Edges keep their order, so
    apply :class:`SortByDestination` afterwards.

    The node that is now in row :obj:`i` was in row :obj:`data.node_order[i]` of its graph before (:obj:`[num_nodes]`,
    int64). :func:`restore_order` puts a model's output back in that order. Transforms that renumber nodes compose.

    Works on :class:`Data`, :class:`HeteroData` (each node type is ordered by itself, from the edges of all types) and
    batches of either. The graphs of a batch keep their order and can still be taken apart. The input object and its
    tensors are not changed.

    Args:
        method: :obj:`"rcm"`, reverse Cuthill-McKee; :obj:`"bfs"`, breadth first from the first node of each component;
            :obj:`"degree"`, most edges first; :obj:`"metis"`, by parts of about 1,000 nodes with few edges between
            parts, for which pymetis must be installed. The first two use scipy, or the slower networkx if scipy is not
            installed.

    Raises:
        ValueError: an unknown method; edges held as a matrix (:obj:`adj_t`); or a neighbour loader's sample, whose
            seed nodes must stay first.
        ImportError: :obj:`"metis"` without pymetis.
    """

    def __init__(self, method: str = "rcm") -> None:
        if method not in ORDERS:
            raise ArgumentError(f"method: got {method!r}, expected one of {sorted(ORDERS)}")
        self.method = method

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Returns `data` with its nodes in another order."""
        refuse_unordered(data, "Reorder")
        starts, total = _starts(data)
        pairs = [_numbered(store, starts) for store in data.edge_stores if "edge_index" in store]
        if not pairs or not total:
            return data
        order = ORDERS[self.method](torch.cat(pairs, dim=1), total)
        chosen = {}
        for store in data.node_stores:
            start = starts[store._key]
            own = order[(order >= start) & (order < start + store.num_nodes)] - start
            graph = graph_of_nodes(data, store)
            chosen[store._key] = own if graph is None else own[torch.argsort(graph[own], stable=True)]
        select_nodes(data, chosen)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method!r})"


def _starts(data: Any) -> tuple[dict[str | None, int], int]:
    """Returns the first index of each node type when all types are numbered together, and the number of all nodes."""
    starts, total = {}, 0
    for store in data.node_stores:
        starts[store._key] = total
        total += int(store.num_nodes)
    return starts, total


def _numbered(store: Any, starts: dict[str | None, int]) -> Tensor:
    edges = plain(store.edge_index)
    if store._key is None:
        return edges
    return torch.stack([edges[0] + starts[store._key[0]], edges[1] + starts[store._key[-1]]])
