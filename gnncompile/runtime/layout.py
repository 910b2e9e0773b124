"""Builds CSR layouts, and checks the indices while it reads them.

On a GPU the check must not wait for the device: its result is copied to the host in the background and looked at when
the next layout is built or the next step starts (:func:`check_pending`), so a bad index raises one call late there.
Until then bad edges are treated as masked out: nothing is read or written outside a tensor.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class _Pending:
    bad: Tensor
    done: torch.cuda.Event
    limits: tuple[int, int]


_pending: deque[_Pending] = deque()
_lock = threading.Lock()


def csr(
    index: Tensor, other: Tensor, num_rows: int, num_columns: int, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges ordered by `index`, stably.

    Args:
        index: The row of each edge, ``[num_edges]``, int64 or int32.
        other: The other end of each edge, ``[num_edges]``.
        num_rows: Valid values of `index` are below it.
        num_columns: Valid values of `other` are below it.
        alive: Edges to keep, bool ``[num_edges]``; the rest goes behind the last row.

    Returns:
        rowptr ``[num_rows + 1]``, col ``[num_edges]``, edge ``[num_edges]``, all int32.

    Raises:
        IndexError: An index is out of range (on a GPU: at a later call).
    """
    if max(index.numel(), num_rows, num_columns) > INT32_MAX:
        raise ValueError(f"graph with {index.numel()} edges: kernels index with int32, at most {INT32_MAX} are possible")
    bad = (index < 0) | (index >= num_rows) | (other < 0) | (other >= num_columns)
    _report(bad, index, other, (num_rows, num_columns))
    masked = bad if alive is None else bad | ~alive
    # Masked edges sort behind the last row, where no kernel looks.
    row = torch.where(masked, num_rows, index).to(torch.int32)
    row, order = torch.sort(row, stable=True)
    # Counting by search keeps this free of atomics and of a data-dependent size.
    rowptr = torch.searchsorted(row, torch.arange(num_rows + 1, device=row.device, dtype=torch.int32), out_int32=True)
    return rowptr, other.clamp(0, max(num_columns - 1, 0)).to(torch.int32)[order], order.to(torch.int32)


def _report(bad: Tensor, index: Tensor, other: Tensor, limits: tuple[int, int]) -> None:
    if bad.device.type == "cpu":
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            _raise((int(index[at]), int(other[at])), limits, at)
        return
    if torch.cuda.is_current_stream_capturing():
        return
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(bad.any(), non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    with _lock:
        _pending.append(_Pending(host, done, limits))


def check_pending(wait: bool = False) -> None:
    """Raises IndexError for a bad index that an earlier layout on a GPU found; without `wait` it never blocks."""
    while _pending:
        with _lock:
            if not _pending or not (wait or _pending[0].done.query()):
                return
            first = _pending.popleft()
        if wait:
            first.done.synchronize()
        if bool(first.bad):
            _raise(None, first.limits, None)


def _raise(found: tuple[int, int] | None, limits: tuple[int, int], at: int | None) -> None:
    what = f"edge {at} joins nodes {found[0]} and {found[1]}" if found is not None else "an edge has an end"
    raise IndexError(
        f"edge_index: {what} outside the graph; expected indices from 0 to {limits[0] - 1} and 0 to {limits[1] - 1}. "
        "Check edge_index against x.size(0), or pass the right size/num_nodes."
    )


def inverse_degree(rowptr: Tensor, dtype: str) -> Tensor:
    """1 / max(number of edges, 1) of every row: ``[num_rows]``, "float32" or "float64"."""
    degree = (rowptr[1:] - rowptr[:-1]).clamp(min=1)
    return degree.to(getattr(torch, dtype)).reciprocal()
