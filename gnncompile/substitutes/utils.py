"""Substitutes for PyG's functions of edge lists that branch on data, written without branches.

For anything but a plain edge list, PyG's function is traced as written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import (
    coalesce,
    is_undirected,
    negative_sampling,
    scatter,
    sort_edge_index,
    structured_negative_sampling,
    to_dense_adj,
)

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list, sizes_and_starts

_OPS: Any = torch.ops.gnncompile

_coalesce = copy_of(coalesce)
_sort_edge_index = copy_of(sort_edge_index)
_is_undirected = copy_of(is_undirected)
_to_dense_adj = copy_of(to_dense_adj)
_negative_sampling = copy_of(negative_sampling)
_structured_negative_sampling = copy_of(structured_negative_sampling)
_MISSING = coalesce.__defaults__[0]


@substitute(coalesce)
def merged_edges(
    edge_index: Tensor,
    edge_attr: Any = _MISSING,
    num_nodes: int | None = None,
    reduce: str = "sum",
    is_sorted: bool = False,
    sort_by_row: bool = True,
) -> Any:
    """See :func:`torch_geometric.utils.coalesce`; edges without duplicates take the same path as others."""
    attributes = [edge_attr] if isinstance(edge_attr, Tensor) else edge_attr
    alone = attributes is None or isinstance(attributes, str)
    if not is_edge_list(edge_index) or not (alone or all(_has_sum(a) for a in attributes)):
        return _coalesce(edge_index, edge_attr, num_nodes, reduce, is_sorted, sort_by_row)
    if num_nodes is None:
        num_nodes = _OPS.num_segments(edge_index.reshape(-1))
    found, kept = merged(edge_index, [] if alone else attributes, num_nodes, reduce, is_sorted, sort_by_row)
    if alone:
        return (found, None) if edge_attr is None else found
    return found, kept[0] if isinstance(edge_attr, Tensor) else kept


def merged(
    edge_index: Tensor,
    attributes: list[Tensor],
    num_nodes: Any,
    reduce: str = "sum",
    is_sorted: bool = False,
    sort_by_row: bool = True,
    alive: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Sorts edges and merges duplicates, with one look at the data. Returns the edges and their reduced attributes.

    Args:
        edge_index: ``[2, num_edges]``.
        attributes: Each ``[num_edges, ...]``.
        num_nodes: The number of nodes.
        reduce: How the attributes of duplicate edges are reduced.
        is_sorted: Whether the edges are sorted already; not together with `alive`.
        sort_by_row: Whether to sort by source first, else by destination first.
        alive: Whether to keep each edge, bool ``[num_edges]``; None keeps all.
    """
    first, second = edge_index[1 - int(sort_by_row)], edge_index[int(sort_by_row)]
    key = first * num_nodes + second
    if alive is not None:
        key = torch.where(
            alive, key, -1
        )  # a dropped edge sorts first, and counts as a duplicate of the -1 before the first key
    if not is_sorted:
        key, order = torch.sort(key, stable=True)
        edge_index = edge_index.index_select(1, order)
        attributes = [a.index_select(0, order) for a in attributes]
    new = key > torch.cat([key.new_full((1,), -1), key])[: key.size(0)]
    kept = new.nonzero().view(-1)
    group, dead = new.cumsum(0), 0 if alive is not None else 1
    sums = [scatter(a, group - dead, 0, kept.size(0) + 1 - dead, reduce) for a in attributes]
    return edge_index.index_select(1, kept), sums if alive is None else [one[1:] for one in sums]


@substitute(sort_edge_index)
def sorted_edges(
    edge_index: Tensor, edge_attr: Any = _MISSING, num_nodes: int | None = None, sort_by_row: bool = True
) -> Any:
    """See :func:`torch_geometric.utils.sort_edge_index`.

    The sort keys are not checked for overflow: layouts take fewer than 2^31 nodes.
    """
    if not is_edge_list(edge_index):
        return _sort_edge_index(edge_index, edge_attr, num_nodes, sort_by_row)
    if num_nodes is None:
        num_nodes = _OPS.num_segments(edge_index.reshape(-1))
    key = edge_index[1 - int(sort_by_row)].long() * num_nodes + edge_index[int(sort_by_row)]
    order = torch.sort(key, stable=True)[1]
    found = edge_index.index_select(1, order)
    if isinstance(edge_attr, Tensor):
        return found, edge_attr.index_select(0, order)
    if isinstance(edge_attr, (list, tuple)):
        return found, [a.index_select(0, order) for a in edge_attr]
    return (found, None) if edge_attr is None else found


@substitute(is_undirected)
def undirected(edge_index: Tensor, edge_attr: Any = None, num_nodes: int | None = None) -> Any:
    """See :func:`torch_geometric.utils.is_undirected`. The differences are counted, and the data is read once."""
    if not is_edge_list(edge_index):
        return _is_undirected(edge_index, edge_attr, num_nodes)
    attributes = [edge_attr] if isinstance(edge_attr, Tensor) else list(edge_attr or [])
    ahead, theirs = sorted_edges(edge_index, attributes, num_nodes, True)
    back, ours = sorted_edges(edge_index, attributes, num_nodes, False)
    differing = (ahead != back.flip(0)).sum()
    for one, other in zip(theirs, ours, strict=True):
        differing = differing + (one != other).sum()
    return differing.item() == 0


def _has_sum(attribute: Tensor) -> bool:
    return attribute.dtype != torch.bool


@substitute(to_dense_adj)
def dense_adjacency(
    edge_index: Tensor,
    batch: Tensor | None = None,
    edge_attr: Tensor | None = None,
    max_num_nodes: int | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """See :func:`torch_geometric.utils.to_dense_adj`; edges of nodes beyond `max_num_nodes` go to a spare entry."""
    if not is_edge_list(edge_index):
        return _to_dense_adj(edge_index, batch, edge_attr, max_num_nodes, batch_size)  # type: ignore[no-any-return]
    if batch is None:
        nodes = _OPS.num_segments(edge_index.reshape(-1))
        graphs = 1 if batch_size is None else batch_size
        owner, source, target = torch.zeros_like(edge_index[0]), edge_index[0], edge_index[1]
        longest = nodes if max_num_nodes is None else max_num_nodes
    else:
        graphs = _OPS.num_segments(batch) if batch_size is None else batch_size
        place = sizes_and_starts(batch, graphs)[1].index_select(0, batch)
        owner, source, target = (
            batch.index_select(0, edge_index[0]),
            *(e - place.index_select(0, e) for e in edge_index),
        )
        longest = _OPS.longest_segment(batch) if max_num_nodes is None else max_num_nodes
    if edge_attr is None:
        edge_attr = torch.ones(edge_index.size(1), device=edge_index.device)
    spare = graphs * longest * longest
    index = (owner * longest + source) * longest + target
    index = torch.where(torch.logical_and(source < longest, target < longest), index, spare)
    dense = scatter(edge_attr, index, 0, spare + 1, "sum")[:spare]
    return dense.view(graphs, longest, longest, *edge_attr.shape[1:])  # type: ignore[no-any-return]


@substitute(negative_sampling)
def other_edges(
    edge_index: Tensor,
    num_nodes: Any = None,
    num_neg_samples: Any = None,
    method: str = "sparse",
    force_undirected: bool = False,
) -> Tensor:
    """See :func:`torch_geometric.utils.negative_sampling`, which loops until it has found enough edges."""
    if not is_edge_list(edge_index) or isinstance(num_nodes, (tuple, list)):
        return _negative_sampling(edge_index, num_nodes, num_neg_samples, method, force_undirected)  # type: ignore[no-any-return]
    if num_nodes is None:
        num_nodes = _OPS.num_segments(edge_index.reshape(-1))
    if num_neg_samples is None:
        num_neg_samples = edge_index.size(1)
    elif isinstance(num_neg_samples, float):
        num_neg_samples = int(num_neg_samples * edge_index.size(1))
    return _OPS.other_edges(edge_index, num_nodes, num_neg_samples, method, force_undirected)  # type: ignore[no-any-return]


@substitute(structured_negative_sampling)
def negative_targets(
    edge_index: Tensor, num_nodes: int | None = None, contains_neg_self_loops: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`torch_geometric.utils.structured_negative_sampling`, which loops, with NumPy, until all are found."""
    if not is_edge_list(edge_index):
        return _structured_negative_sampling(edge_index, num_nodes, contains_neg_self_loops)  # type: ignore[no-any-return]
    if num_nodes is None:
        num_nodes = _OPS.num_segments(edge_index.reshape(-1))
    found = _OPS.negative_targets(edge_index, num_nodes, contains_neg_self_loops)
    return edge_index[0], edge_index[1], found
