"""Ops that sample edges, or drop the edges that are marked dead; most results have a data-dependent size.

As ops they cause no graph break. Each costs one sync per step.

- ``live_edges(edge_index)``: the edges that are not marked dead (:mod:`gnncompile.ops.segment`). The passes fill in the
  argument ``alive``.
- ``dropped_edges(edge_index, p)``: see :func:`torch_geometric.utils.dropout_edge`.
- ``negative_edges(edge_index, num_nodes, ratio, is_undirected, batch)``: see
  :meth:`torch_geometric.nn.SuperGATConv.negative_sampling`. Like PyG, it draws from Python's random generator.
- ``random_permutation(n, dtype, device)``: :func:`torch.randperm`. Inductor has a pattern for rows that torch's own
  ``randperm`` permutes, as the corruption of DeepGraphInfomax does, and fails on it (torch 2.13).
- ``other_edges(edge_index, num_nodes, num_samples, method, is_undirected)``: see
  :func:`torch_geometric.utils.negative_sampling`.
- ``negative_targets(edge_index, num_nodes, self_loops)``: see
  :func:`torch_geometric.utils.structured_negative_sampling`; one destination per edge.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import SuperGATConv
from torch_geometric.utils import dropout_edge, negative_sampling, structured_negative_sampling

from gnncompile import _compat
from gnncompile.ops.region import LIBRARY

LIBRARY.define("live_edges(Tensor edge_index, Tensor? alive=None) -> Tensor")
LIBRARY.define(
    "dropped_edges(Tensor edge_index, float p) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
LIBRARY.define(
    "negative_edges(Tensor edge_index, SymInt num_nodes, float ratio, bool is_undirected, Tensor? batch) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

LIBRARY.define(
    "other_edges(Tensor edge_index, SymInt num_nodes, SymInt num_samples, str method, bool is_undirected) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
LIBRARY.define(
    "negative_targets(Tensor edge_index, SymInt num_nodes, bool self_loops) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

LIBRARY.define(
    "random_permutation(SymInt n, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def live_edges(edge_index: Tensor, alive: Tensor | None = None) -> Tensor:
    """The columns of `edge_index` ``[2, num_edges]`` where `alive` ``[num_edges]`` is True."""
    return edge_index.clone() if alive is None else edge_index[:, alive].contiguous()


def dropped_edges(edge_index: Tensor, p: float) -> Tensor:
    """The edges that are left when each is dropped with probability `p`."""
    left: Tensor = dropout_edge(edge_index, p, training=True)[0]
    return left.contiguous()


def negative_edges(
    edge_index: Tensor, num_nodes: int, ratio: float, is_undirected: bool, batch: Tensor | None
) -> Tensor:
    """About ``ratio * num_edges`` pairs of nodes without an edge between them, ``[2, num_negatives]``."""
    layer: Any = SimpleNamespace(neg_sample_ratio=ratio, edge_sample_ratio=1.0, is_undirected=is_undirected)
    sampled: Tensor = SuperGATConv.negative_sampling(layer, edge_index, num_nodes, batch)
    return sampled.contiguous()


def other_edges(edge_index: Tensor, num_nodes: int, num_samples: int, method: str, is_undirected: bool) -> Tensor:
    """About `num_samples` pairs of nodes without an edge between them, ``[2, num_negatives]``."""
    sampled: Tensor = negative_sampling(edge_index, num_nodes, num_samples, method, is_undirected)
    return sampled.contiguous()


def negative_targets(edge_index: Tensor, num_nodes: int, self_loops: bool) -> Tensor:
    """For each edge, a node to which the edge's source has no edge, ``[num_edges]``.

    The node may be the source itself only if `self_loops`.
    """
    found: Tensor = structured_negative_sampling(edge_index, num_nodes, self_loops)[2]
    return found


def random_permutation(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The integers from 0 to ``n - 1`` in random order, ``[n]``."""
    return torch.randperm(n, dtype=dtype, device=device)


def _fake_permutation(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(n, dtype=dtype, device=device)


def _fake(edge_index: Tensor, *_: Any) -> Tensor:
    return edge_index.new_empty((2, _compat.unknown_size()))


for _op in (live_edges, dropped_edges, negative_edges, other_edges):
    LIBRARY.impl(_op.__name__, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_op.__name__}", _fake, lib=LIBRARY)


def _fake_targets(edge_index: Tensor, num_nodes: Any, self_loops: bool) -> Tensor:
    return edge_index.new_empty(edge_index.size(1), dtype=torch.long)


LIBRARY.impl("negative_targets", negative_targets, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::negative_targets", _fake_targets, lib=LIBRARY)
LIBRARY.impl("random_permutation", random_permutation, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::random_permutation", _fake_permutation, lib=LIBRARY)
