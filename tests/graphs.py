"""Small graphs for tests: the layout of a list of edges, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gnncompile.ir.reference import Layout

EDGE_LISTS = {
    "unsorted, duplicates, hub": torch.tensor([[3, 0, 2, 0, 1, 4, 4, 0, 2], [0, 1, 0, 1, 0, 0, 2, 0, 3]]),
    "no edge": torch.empty(2, 0, dtype=torch.long),
    "one edge": torch.tensor([[2], [2]]),
}
"""Edges among 5 nodes."""


def layout(row: Tensor, col: Tensor, num_rows: int, alive: Tensor | None = None) -> Layout:
    """Orders edges by row, in their original order within a row.

    Args:
        row: The row that owns each edge, ``[num_edges]``.
        col: The other end of each edge, ``[num_edges]``.
        num_rows: Number of rows.
        alive: Which edges count, bool ``[num_edges]``; the others stand behind ``rowptr[-1]``.
    """
    key = row if alive is None else torch.where(alive, row, num_rows)
    edge = torch.argsort(key, stable=True)
    degree = torch.bincount(key, minlength=num_rows + 1)[:num_rows]
    rowptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=row.device)
    rowptr[1:] = degree.cumsum(0)
    return Layout(rowptr, col[edge].int(), edge.int())
