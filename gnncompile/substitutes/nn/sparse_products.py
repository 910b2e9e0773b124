"""Substitutes for PyG's layers that multiply two sparse matrices: ``GraphUNet`` and ``ASAPooling``.

The pairs of entries that meet in a product, and their places in it, are graph structure: integers, computed once per
distinct graph unless an earlier layer computes that graph. The rest of the product is a weighted sum over these pairs.
The entries of a product are sorted here. In eager, their order is up to the library of sparse products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, leaky_relu
from torch_geometric.nn import ASAPooling, GraphUNet
from torch_geometric.utils import scatter, softmax

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list, sizes_and_starts
from gnncompile.substitutes.self_loops import loop_attributes
from gnncompile.substitutes.utils import merged

_augment_adj = copy_of(GraphUNet.augment_adj)
_asap_forward = copy_of(ASAPooling.forward)


class Entries(NamedTuple):
    """A sparse matrix as its entries. Several entries at one place count as their sum.

    Attributes:
        row: The row of each entry, ``[num_entries]``.
        col: The column of each entry, ``[num_entries]``.
        values: The value of each entry, ``[num_entries]``; None if nobody reads the values.
        alive: Whether each entry exists, bool ``[num_entries]``; None if all do.
    """

    row: Tensor
    col: Tensor
    values: Tensor | None
    alive: Tensor | None = None


def product(one: Entries, other: Entries, inner: Any, columns: Any, diagonal: bool = True) -> Entries:
    """The product of two sparse matrices, with entries sorted by row, one per place.

    Costs two looks at the data: for the number of pairs that meet, and for the number of places in the product.

    Args:
        one: ``[rows, inner]``.
        other: ``[inner, columns]``.
        inner: The number of columns of the first, and of rows of the second.
        columns: The number of columns of the second; without a diagonal, also the number of rows of the first.
        diagonal: Whether the result keeps its diagonal.
    """
    first, second = meeting(one, other, inner)
    ends = torch.stack([one.row.index_select(0, first), other.col.index_select(0, second)])
    values = []
    if one.values is not None and other.values is not None:
        values = [one.values.index_select(0, first) * other.values.index_select(0, second)]
    places, sums = merged(ends, values, columns, alive=None if diagonal else ends[0] != ends[1])
    return Entries(places[0], places[1], sums[0] if sums else None)


def meeting(one: Entries, other: Entries, inner: Any) -> tuple[Tensor, Tensor]:
    """All pairs of entries where the column of the first matrix's entry is the row of the second's.

    Returns the positions of the entries in the first and in the second matrix, both ``[num_pairs]``.
    """
    row = other.row if other.alive is None else torch.where(other.alive, other.row, inner)
    by_row = torch.sort(row, stable=True)[1]
    counts, starts = sizes_and_starts(row, inner + 1)
    times = counts.index_select(0, one.col)
    if one.alive is not None:
        times = torch.where(one.alive, times, 0)
    first = torch.arange(times.size(0), device=times.device).repeat_interleave(times)
    before = starts.index_select(0, one.col) - (times.cumsum(0) - times)
    place = torch.arange(first.size(0), device=times.device) + before.index_select(0, first)
    return first, by_row.index_select(0, place)


@substitute(GraphUNet.augment_adj)
def augment_adj(self: Any, edge_index: Any, edge_weight: Tensor, num_nodes: int) -> Any:
    """See ``torch_geometric.nn.GraphUNet.augment_adj``: all paths of two edges, with a self loop at each node."""
    if not is_edge_list(edge_index) or type(self).augment_adj is not GraphUNet.augment_adj:
        return _augment_adj(self, edge_index, edge_weight, num_nodes)
    nodes = torch.arange(num_nodes, device=edge_index.device)
    row, col = torch.cat([edge_index[0], nodes]), torch.cat([edge_index[1], nodes])
    weight = torch.cat([edge_weight, edge_weight.new_ones(num_nodes)])
    alive = torch.cat([edge_index[0] != edge_index[1], torch.ones_like(nodes, dtype=torch.bool)])
    matrix = Entries(row, col, weight, alive)
    found = product(matrix, matrix, num_nodes, num_nodes, diagonal=False)
    return torch.stack([found.row, found.col]), found.values


def with_loops(edge_index: Tensor, edge_weight: Tensor | None, num_nodes: Any) -> tuple[Tensor, Tensor | None]:
    """See :func:`torch_geometric.utils.add_remaining_self_loops`; new loops have weight 1.

    Edges are removed, not masked, which costs a look at the data.
    """
    row, col = edge_index[0], edge_index[1]
    kept = (row != col).nonzero().view(-1)
    nodes = torch.arange(num_nodes, device=edge_index.device)
    full = torch.cat([edge_index.index_select(1, kept), torch.stack([nodes, nodes])], dim=1)
    if edge_weight is None:
        return full, None
    loops = loop_attributes(edge_index, edge_weight, 1.0, num_nodes)
    return full, torch.cat([edge_weight.index_select(0, kept), loops])


@substitute(ASAPooling.forward)
def asap_forward(
    self: Any, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None, batch: Tensor | None = None
) -> Any:
    """See :class:`torch_geometric.nn.ASAPooling`."""
    own = type(self).forward is ASAPooling.forward
    if not own or not is_edge_list(edge_index) or (edge_weight is not None and edge_weight.dim() != 1):
        return _asap_forward(self, x, edge_index, edge_weight, batch)
    nodes = x.size(0)
    edges, weight = with_loops(edge_index, edge_weight, nodes)
    batch = edge_index.new_zeros(nodes) if batch is None else batch
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    x_pool = x
    if self.gnn_intra_cluster is not None:
        x_pool = self.gnn_intra_cluster(x=x, edge_index=edges, edge_weight=weight)
    x_pool_j = x_pool.index_select(0, edges[0])
    x_q = self.lin(scatter(x_pool_j, edges[1], dim=0, dim_size=nodes, reduce="max")).index_select(0, edges[1])
    score = self.att(torch.cat([x_q, x_pool_j], dim=-1)).view(-1)
    score = softmax(leaky_relu(score, self.negative_slope), edges[1], num_nodes=nodes)
    score = dropout(score, p=self.dropout, training=self.training)
    x = scatter(x.index_select(0, edges[0]) * score.view(-1, 1), edges[1], dim=0, dim_size=nodes, reduce="sum")
    fitness = self.gnn_score(x, edges).sigmoid().view(-1)
    perm = self.select(fitness, batch).node_index
    x = x.index_select(0, perm) * fitness.index_select(0, perm).view(-1, 1)
    found, weight = _coarsened(edges, weight, score, perm, nodes, self.add_self_loops)
    return x, found, weight, batch.index_select(0, perm), perm


def _coarsened(
    edges: Tensor, weight: Tensor | None, score: Tensor, perm: Tensor, nodes: Any, loops: bool
) -> tuple[Tensor, Tensor | None]:
    """The edges between clusters, ``S^T A S``, and their weights; with a self loop at each cluster if `loops`."""
    clusters, device = perm.size(0), perm.device
    rank = perm.new_full((nodes,), -1).index_put((perm,), torch.arange(clusters, device=device))
    cluster = rank.index_select(0, edges[1])
    shares = None if weight is None else score
    members = Entries(edges[0], cluster, shares, cluster >= 0)
    reached = product(Entries(edges[0], edges[1], weight), members, nodes, clusters)
    transposed = Entries(cluster, edges[0], shares, members.alive)
    if not loops:
        found = product(transposed, reached, nodes, clusters, diagonal=False)
        return torch.stack([found.row, found.col]), found.values
    found = product(transposed, reached, nodes, clusters)
    return with_loops(torch.stack([found.row, found.col]), found.values, clusters)
