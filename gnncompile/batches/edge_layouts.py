"""Edges sorted by destination, and laid out both ways: what kernels want, made by worker processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnncompile.batches.row_types import EDGE_INDEX
from gnncompile.layout.csr import MAX_INDEX

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


def highest(value: Tensor, rows: int) -> tuple[int | None, ...]:
    """One more than the highest value of an index, or of each row of an edge list; None where one is negative, or it is
    none of these.
    """
    if value.dtype not in (torch.int64, torch.int32) or value.dim() != rows:
        return (None,) * rows
    return tuple(_highest(part) for part in ([value] if rows == 1 else value))


def _highest(index: Tensor) -> int | None:
    if index.numel() == 0:
        return 0
    # A negative number is a large one without its sign: one walk tells both.
    values = index.numpy()
    high = int(values.view(np.uint64 if index.dtype is torch.int64 else np.uint32).max())
    return high + 1 if high <= np.iinfo(values.dtype).max else None


def sort(store: Any, rows: dict[str, int], found: tuple[int | None, ...], limits: tuple[int, int]) -> bool:
    """Sorts the edges of a store by destination, stably, and all that has a row for each.

    Args:
        store: Of a ``Data``; it gets new tensors.
        rows: Of which kind the rows of its attributes are.
        found: What :func:`highest` says of the edges.
        limits: How many sources and destinations there are.

    Returns:
        Whether the edges are sorted; not where they are no edges, of which the model's own check says what is wrong.
    """
    edges = store[EDGE_INDEX]
    if EDGE_INDEX not in rows or edges.size(1) > MAX_INDEX:
        return False
    if any(high is None or high > limit for high, limit in zip(found, limits, strict=True)):
        return False
    if not is_sorted(edges[1]):
        order = order_of(edges[1])
        for key, kind in rows.items():
            if kind == rows[EDGE_INDEX]:
                store[key] = store[key].index_select(1 if key == EDGE_INDEX else 0, order)
    return True


def is_sorted(index: Tensor) -> bool:
    """Whether no number is smaller than the one before."""
    values = index.numpy()
    return bool((values[1:] >= values[:-1]).all())


def pointers(index: Tensor, size: int) -> Tensor:
    """Where the rows of an index begin once it is sorted, int32 ``[size + 1]``."""
    made = torch.zeros(size + 1, dtype=torch.int32)
    torch.cumsum(index.bincount(minlength=size), 0, dtype=torch.int32, out=made[1:])
    return made
