"""Small graphs for tests, and the CSR layout of a list of edges in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gnncompile.ir.reference import Layout

EDGE_LISTS = {
    "unsorted, duplicates, hub": torch.tensor([[3, 0, 2, 0, 1, 4, 4, 0, 2], [0, 1, 0, 1, 0, 0, 2, 0, 3]]),
    "no edge": torch.empty(2, 0, dtype=torch.long),
    "one edge": torch.tensor([[2], [2]]),
}
"""Edge lists ``[2, num_edges]`` of graphs with 5 nodes, by name."""


def layout(row: Tensor, col: Tensor, num_rows: int, alive: Tensor | None = None) -> Layout:
    """Returns the layout of edges: ordered by row, and in the given order within a row.

    Args:
        row: The row that owns each edge, ``[num_edges]``.
        col: The other end of each edge, ``[num_edges]``.
        num_rows: Number of rows.
        alive: Which edges are not masked out, bool ``[num_edges]``. Masked edges are stored from ``rowptr[-1]`` on.
    """
    key = row if alive is None else torch.where(alive, row, num_rows)
    edge = torch.argsort(key, stable=True)
    degree = torch.bincount(key, minlength=num_rows + 1)[:num_rows]
    rowptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=row.device)
    rowptr[1:] = degree.cumsum(0)
    return Layout(rowptr, col[edge].int(), edge.int())
