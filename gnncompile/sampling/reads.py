"""Estimates how often a sampler reads each node, to choose the rows that a cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, ArgumentTypeError, IndexOutOfRangeError
from gnncompile.sampling.arguments import vector

STEP = 2**26
"""Edges that are looked at together, which bounds the memory."""


def expected_reads(
    colptr: Tensor, row: Tensor, num_neighbors: Sequence[int], *, batch_size: int, seeds: Tensor | None = None
) -> Tensor:
    r"""Returns how often a mini-batch is expected to draw each node, float32 ``[num_nodes]``.

    Mini-batches of seeds drawn uniformly. A node :math:`u` is in hop :math:`k` with probability :math:`p_k(u)`, and
    each of its :math:`d_u` edges is drawn with probability :math:`\min(1, f_k / d_u)`. So :math:`v` is drawn
    :math:`r_{k+1}(v) = \sum_{v \to u} p_k(u) \min(1, f_k / d_u)` times, and :math:`p_{k+1}(v) = 1 - e^{-r_{k+1}(v)}`.
    This follows T. Kaler et al., Communication-Efficient Graph Neural Networks with Probabilistic Neighborhood
    Expansion Analysis and Caching (SALIENT++), MLSys 2023. Weights and times of edges are not regarded.

    Args:
        colptr: The first edge of each destination in CSC order, int32 or int64 ``[num_nodes + 1]``.
        row: The source of each edge, int32 or int64 ``[num_edges]``.
        num_neighbors: For each hop, the most neighbours of a node; a negative number takes all.
        batch_size: The seeds of a mini-batch.
        seeds: The nodes that seeds are drawn from, an integer, ``[num_seeds]``; None takes all nodes.

    Raises:
        IndexError: A seed or a source is outside the graph.
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, or `batch_size` is not positive.
    """
    device = colptr.device
    colptr = vector("colptr", colptr, (torch.int32, torch.int64), None, device)
    row = vector("row", row, (torch.int32, torch.int64), None, device)
    _check(colptr, row, batch_size)
    seeds = None if seeds is None else _nodes(seeds, colptr.numel() - 1)
    num_nodes = colptr.numel() - 1
    degree = (colptr[1:] - colptr[:-1]).float()
    number = num_nodes if seeds is None else seeds.numel()
    share = min(batch_size / max(number, 1), 1.0)
    if seeds is None:
        chance = torch.full((num_nodes,), share, device=device)
    else:
        chance = torch.zeros(num_nodes, device=device)
        chance[seeds.to(device)] = share
    reads = chance.clone()
    for fan_out in num_neighbors:
        drawn = chance if fan_out < 0 else chance * (fan_out / degree).clamp(max=1)  # no edge reads what 0 / 0 gives
        found = torch.zeros(num_nodes, device=device)
        for begin in range(0, row.numel(), STEP):
            source = row[begin : begin + STEP]
            edge = torch.arange(begin, begin + source.numel(), device=device, dtype=colptr.dtype)
            found.index_add_(0, source, drawn[torch.searchsorted(colptr, edge, right=True) - 1])
        reads += found
        chance = 1 - torch.exp(-found)
    return reads


def _check(colptr: Tensor, row: Tensor, batch_size: int) -> None:
    if colptr.numel() < 1 or int(colptr[-1]) != row.numel():
        raise ArgumentError(
            f"colptr: found {colptr[-1:].tolist()} as the last entry, expected [{row.numel()}], the number of edges in "
            "row; give a graph in CSC order."
        )
    if row.numel():
        least, most = (int(value) for value in row.aminmax())
        if least < 0 or most >= colptr.numel() - 1:
            raise IndexOutOfRangeError(
                f"row: found nodes {least} to {most}, expected 0 to {colptr.numel() - 2}, nodes of the graph."
            )
    if batch_size < 1:
        raise ArgumentError(f"batch_size: found {batch_size}, expected at least 1, the seeds of a mini-batch.")


def _nodes(seeds: Tensor, num_nodes: int) -> Tensor:
    if seeds.is_floating_point() or seeds.is_complex() or seeds.dtype is torch.bool:
        raise ArgumentTypeError(
            f"seeds: found dtype {seeds.dtype}, expected integers, the nodes that seeds are drawn from; call "
            "mask.nonzero().flatten() for a mask."
        )
    seeds = vector("seeds", seeds.long(), (torch.int64,), None, seeds.device)
    if seeds.numel():
        least, most = (int(value) for value in seeds.aminmax())
        if least < 0 or most >= num_nodes:
            raise IndexOutOfRangeError(
                f"seeds: found nodes {least} to {most}, expected 0 to {num_nodes - 1}, nodes of the graph."
            )
    return seeds
