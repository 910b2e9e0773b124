"""Edges sorted by destination, and laid out both ways: what kernels want, made by worker processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnncompile.batches.kinds import EDGE_INDEX
from gnncompile.runtime.layout import MAX_INDEX

_DIGIT = 1 << 16


def order_of(index: Tensor) -> Tensor:
    """The stable order of an index without negative numbers, int64 ``[n]``.

    Sorted by its lower and then by its upper 16 bits, for each of which NumPy counts.
    """
    values = index.numpy()
    order = np.argsort((values % _DIGIT).astype(np.uint16), kind="stable")
    high = values // _DIGIT
    while high.size and high.max() > 0:
        order = order[np.argsort((high % _DIGIT).astype(np.uint16)[order], kind="stable")]
        high = high // _DIGIT
    return torch.from_numpy(order)


def sort(store: Any, rows: dict[str, int], sources: int, destinations: int) -> bool:
    """Sorts the edges of a store by destination, stably, and all that has a row for each.

    Args:
        store: Of a ``Data``; it gets new tensors.
        rows: Of which kind the rows of its attributes are.
        sources: How many there are.
        destinations: How many there are.

    Returns:
        Whether the edges are sorted; not where they are no edges, of which the model's own check says what is wrong.
    """
    edges = store[EDGE_INDEX]
    if edges.dtype not in (torch.int64, torch.int32) or EDGE_INDEX not in rows or edges.size(1) > MAX_INDEX:
        return False
    row, col = edges
    if edges.numel() and (int(edges.min()) < 0 or int(row.max()) >= sources or int(col.max()) >= destinations):
        return False
    if not bool((col[1:] >= col[:-1]).all()):
        order = order_of(col)
        for key, kind in rows.items():
            if kind == rows[EDGE_INDEX]:
                store[key] = store[key].index_select(1 if key == EDGE_INDEX else 0, order)
    return True


def pointers(index: Tensor, size: int) -> Tensor:
    """Where the rows of an index begin once it is sorted, int32 ``[size + 1]``."""
    made = torch.zeros(size + 1, dtype=torch.int32)
    torch.cumsum(index.bincount(minlength=size), 0, dtype=torch.int32, out=made[1:])
    return made


def shared(number: int, first: int, end: int) -> Tensor:
    """So many things shared by those from `first` to `end` evenly, in order, int64 ``[number]``."""
    return first + torch.arange(number) * (end - first) // max(number, 1)


def ring(number: int, sources: tuple[int, int], destinations: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Sources and destinations of padded edges, between padded nodes (from the first to the end of them), sorted by
    destination.
    """
    col = shared(number, *destinations)
    return sources[0] + (col - destinations[0] + 1) % max(sources[1] - sources[0], 1), col
