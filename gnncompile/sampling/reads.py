"""Estimates how often a sampler reads each node, to choose the rows that a cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        seeds: The nodes that seeds are drawn from, int64 ``[num_seeds]``; None takes all nodes.
    """
    num_nodes, device = colptr.numel() - 1, colptr.device
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
