"""Sorts edges by destination and computes CSR row pointers: on the CPU in worker processes, or where the edges are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnncompile.batches.row_types import EDGE_INDEX
from gnncompile.device import device_of
from gnncompile.layout.csr import MAX_INDEX

_DIGIT = 1 << 16


def order_of(index: Tensor) -> Tensor:
    """Returns the permutation that sorts an index stably, int64 ``[n]``. The index has no negative values.

    On a CPU the sort goes 16 bits at a time, from the lowest: NumPy sorts uint16 values by counting.
    """
    if _is_on_gpu(index):
        return index.sort(stable=True)[1]
    values = index.numpy()
    order = np.argsort((values % _DIGIT).astype(np.uint16), kind="stable")
    high = values // _DIGIT
    while high.size and high.max() > 0:
        order = order[np.argsort((high % _DIGIT).astype(np.uint16)[order], kind="stable")]
        high = high // _DIGIT
    return torch.from_numpy(order)


def highest(value: Tensor, rows: int) -> tuple[int | None, ...]:
    """Returns one more than the highest value of an index, or of each row of an edge list.

    An entry is None if a value is negative, or if the tensor is not an integer tensor with `rows` dimensions.

    Args:
        value: An index ``[n]`` or an edge list ``[2, num_edges]``.
        rows: The number of entries to return: 1 for an index, 2 for an edge list.
    """
    if value.dtype not in (torch.int64, torch.int32) or value.dim() != rows:
        return (None,) * rows
    return tuple(_highest(part) for part in ([value] if rows == 1 else value))


def _highest(index: Tensor) -> int | None:
    if index.numel() == 0:
        return 0
    if _is_on_gpu(index):
        low, high = torch.stack(index.aminmax()).tolist()
        return None if low < 0 else high + 1
    # Read as unsigned, a negative number is larger than any index: one maximum finds both.
    values = index.numpy()
    high = int(values.view(np.uint64 if index.dtype is torch.int64 else np.uint32).max())
    return high + 1 if high <= np.iinfo(values.dtype).max else None


def sort(store: Any, rows: dict[str, int], found: tuple[int | None, ...], limits: tuple[int, int]) -> bool:
    """Sorts the edges of a store by destination, stably, and permutes every edge attribute alike.

    Args:
        store: A store of PyG's with edges; its tensors are replaced by sorted ones.
        rows: The row type of each attribute.
        found: The result of :func:`highest` for the edges.
        limits: The numbers of sources and destinations.

    Returns:
        Whether the edges are sorted now. False if there are more than `MAX_INDEX` edges, or if an entry is no valid
        node index; the compiled model's own check reports such an entry.
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
    """Whether the values of an index never decrease."""
    if _is_on_gpu(index):
        return bool((index[1:] >= index[:-1]).all())
    values = index.numpy()
    return bool((values[1:] >= values[:-1]).all())


def pointers(index: Tensor, size: int) -> Tensor:
    """Returns the row pointers (rowptr) of an index after sorting, int32 ``[size + 1]``."""
    made = torch.zeros(size + 1, dtype=torch.int32, device=index.device)
    torch.cumsum(index.bincount(minlength=size), 0, dtype=torch.int32, out=made[1:])
    return made


def _is_on_gpu(index: Tensor) -> bool:
    """Whether torch has to sort, since NumPy reads host memory only."""
    return device_of(index.device).host_waits
