"""Chooses the part of each node: equal numbers of in-edges, and few edges between parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy
import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, MissingLibraryError

METHODS = ("contiguous", "rcm", "metis")


def assign(edges: Tensor, starts: Sequence[int], num_parts: int, method: str) -> tuple[Tensor, Tensor]:
    """Returns the part of each node, and an order in which the nodes of a part lie near their neighbours.

    Args:
        edges: All edges ``[2, num_edges]``, with the nodes of all types numbered together.
        starts: The first node of each type, and the number of all nodes.
        num_parts: The number of parts.
        method: One of :data:`METHODS`.

    Returns:
        The part of each node, and the nodes in order, int64 ``[num_nodes]`` each.

    Raises:
        ValueError: The method is unknown.
        ImportError: ``"metis"`` without pymetis, or ``"rcm"`` without scipy.
    """
    if method not in METHODS:
        raise ArgumentError(f"method: found {method!r}, expected one of {', '.join(map(repr, METHODS))}.")
    total = starts[-1]
    order = torch.arange(total)
    # A node without edges has rows too: it weighs as much as one edge.
    weight = torch.bincount(edges[1], minlength=total) + 1
    if method == "metis" and num_parts > 1 and total > 0:
        return _metis(edges, weight, num_parts), order
    if method == "rcm" and total > 0:
        order = _rcm(edges, total)
        return _cut(weight, order, num_parts), order
    parts = [_cut(weight[a:b], torch.arange(b - a), num_parts) for a, b in pairwise(starts)]
    return torch.cat(parts) if parts else order, order


def _cut(weight: Tensor, order: Tensor, num_parts: int) -> Tensor:
    """Cuts nodes in an order into parts of about equal weight: a node goes where the middle of its weight lies."""
    ordered = weight[order]
    middle = ordered.cumsum(0) * 2 - ordered
    part = torch.empty_like(order)
    part[order] = (middle * num_parts // max(2 * int(weight.sum()), 1)).clamp(max=num_parts - 1)
    return part


def _rcm(edges: Tensor, total: int) -> Tensor:
    """Orders nodes by reverse Cuthill-McKee (`Cuthill and McKee, 1969 <https://doi.org/10.1145/800195.805928>`_)."""
    try:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError as error:
        raise MissingLibraryError(
            "method: found 'rcm', which needs scipy. Install it (pip install scipy), or take 'contiguous'."
        ) from error
    row, col = torch.cat([edges, edges.flip(0)], dim=1).numpy()
    matrix = coo_matrix((numpy.ones(len(row), dtype=numpy.int8), (row, col)), shape=(total, total)).tocsr()
    return torch.from_numpy(reverse_cuthill_mckee(matrix, symmetric_mode=True).astype("int64"))


def _metis(edges: Tensor, weight: Tensor, num_parts: int) -> Tensor:
    """Parts of METIS (`Karypis and Kumar, 1998 <https://doi.org/10.1137/S1064827595287997>`_), by weights of nodes."""
    try:
        import pymetis
    except ImportError as error:
        raise MissingLibraryError(
            "method: found 'metis', which needs pymetis. Install it (pip install 'gnncompile[metis]'), or take 'rcm'."
        ) from error
    both = torch.cat([edges, edges.flip(0)], dim=1)
    both = torch.unique(both[:, both[0] != both[1]], dim=1)  # METIS takes each neighbour once, and no self loops
    starts = torch.nn.functional.pad(torch.bincount(both[0], minlength=weight.numel()).cumsum(0), (1, 0))
    adjacency = pymetis.CSRAdjacency(adj_starts=starts.tolist(), adjacent=both[1].tolist())
    return torch.tensor(pymetis.part_graph(num_parts, adjacency=adjacency, vweights=weight.tolist())[1])
