"""Errors about edges with an end outside of the graph.

The host does not wait for a GPU to tell it. A kernel sets a byte of the host's memory if it meets such an edge, which
costs no launch, copy or event. The byte is read at the next call (:func:`check_pending`), so the error comes one call
late. What was built without such a kernel is copied to the host in the background, and read there.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from gnncompile.device import ALIGNMENT, device_of
from gnncompile.exc import IndexOutOfRangeError
from gnncompile.layout.arriving import Arriving

Limits = tuple[int, int]
"""The numbers of rows and of columns of a layout."""


@dataclass(frozen=True)
class _Pending:
    bad: Arriving
    limits: Limits | None


class _Notes:
    """Bytes of pinned memory, which kernels set and the host clears. Layouts take them in turn.

    If a byte is taken again before the host has read it, the error names the limits of the later layout.

    Args:
        memory: Zeros that kernels can write to, bool ``[NUMBER, ALIGNMENT]``.
    """

    NUMBER = 256

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._address, self._size = memory, memory.data_ptr(), memory.numel()
        self._places: list[Tensor] = [row[:1] for row in memory]
        self._limits: list[Limits | None] = [None] * self.NUMBER
        self._next = itertools.count().__next__

    def take(self, limits: Limits) -> Tensor:
        """Returns the place for the next layout, bool ``[1]``."""
        at = self._next() % self.NUMBER
        self._limits[at] = limits
        return self._places[at]

    def is_any_set(self) -> bool:
        """Whether a byte is set."""
        return b"\1" in self._read()

    def clear(self) -> Limits | None:
        """Clears the bytes that are set. Returns the limits of one of their layouts; None if no byte is set."""
        found = [at for at, byte in enumerate(self._read()[::ALIGNMENT]) if byte]
        for at in found:  # not all bytes: a kernel may set another one meanwhile
            self._places[at].zero_()
        return self._limits[found[0]] if found else None

    def _read(self) -> bytes:
        return ctypes.string_at(self._address, self._size)


_notes: list[_Notes] = []
"""The notes of this process, once a GPU has built a layout."""
_pending: deque[_Pending] = deque()
_flags: dict[torch.device, Tensor] = {}
"""For each GPU, whether a layout that a CUDA graph built had a bad index, bool ``[1]``."""
_lock = threading.Lock()


def place_for(device: torch.device, limits: Limits) -> Tensor | None:
    """Returns where a kernel notes a bad index, bool ``[1]``. It sets the place, but never clears it.

    Returns None on a CPU, and where nothing notes bad indices: in a CUDA graph without :func:`watch`.

    Args:
        device: The device of the kernel.
        limits: The numbers of rows and columns.
    """
    if not device_of(device).host_waits:
        return None
    if device_of(device).is_capturing:
        return _flags.get(device)
    if not _notes:
        with _lock:
            _notes[:] = _notes or [_new_notes()]
    return _notes[0].take(limits)


def _new_notes() -> _Notes:
    with torch.inference_mode(False):  # a tensor that is made there can't be written to elsewhere
        return _Notes(torch.zeros(_Notes.NUMBER, ALIGNMENT, dtype=torch.bool, device="cpu", pin_memory=True))


def report(bad: Tensor, index: Tensor, other: Tensor, limits: Limits) -> None:
    """Raises IndexError for a bad index, on a GPU at a later call.

    Args:
        bad: Bools, of which one is true if an edge is out of range. On a CPU, one for each edge.
        index: The row of each edge.
        other: The other end of each edge.
        limits: The numbers of rows and columns.
    """
    if not device_of(bad.device).host_waits:
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise_out_of_range((int(index[at]), int(other[at])), limits, at, index is other)
        return
    if device_of(bad.device).is_capturing:
        flag = _flags.get(bad.device)
        if flag is not None:
            flag.logical_or_(bad.any())
        return
    pending = _Pending(Arriving.of(bad.any()), limits)
    with _lock:
        _pending.append(pending)


def watch(device: torch.device) -> None:
    """Makes the flag in which layouts built by a CUDA graph note bad indices. Must be called before the capture."""
    if device not in _flags:
        with torch.inference_mode(False):
            _flags[device] = torch.zeros((1,), dtype=torch.bool, device=device)


def look(device: torch.device) -> None:
    """Starts to ask whether a CUDA graph noted a bad index. A later :func:`check_pending` raises the error."""
    if device in _flags:
        with _lock:
            _pending.append(_Pending(Arriving.of(_flags[device]), None))


def check_pending(wait: bool = False) -> None:
    """Raises IndexError for a bad index that an earlier layout on a GPU found.

    Args:
        wait: Whether to wait for the current GPU first. Else this never blocks.
    """
    if _notes:
        if wait:
            torch.cuda.synchronize()
        if _notes[0].is_any_set() and not torch.cuda.is_current_stream_capturing():
            with _lock:
                limits = _notes[0].clear()
            if limits is not None:
                _raise_late(limits)
    while _pending and not torch.cuda.is_current_stream_capturing():
        with _lock:
            if not _pending or not (wait or _pending[0].bad.done.query()):
                return
            first = _pending.popleft()
        if wait:
            first.bad.done.synchronize()
        if bool(first.bad.host):
            _raise_late(first.limits)


def _raise_late(limits: Limits | None) -> NoReturn:
    for flag in _flags.values():
        flag.zero_()
    raise_out_of_range(None, limits, None, False)


def raise_out_of_range(
    found: tuple[int, int] | None, limits: Limits | None, at: int | None, segments: bool
) -> NoReturn:
    """Raises IndexError for an edge with an end outside of the graph.

    Args:
        found: The row and the column of the edge; None if they are not known.
        limits: The numbers of rows and columns; None if they are not known.
        at: The position of the edge.
        segments: Whether rows and columns are one index, such as a batch vector.
    """
    if segments and found is not None and limits is not None:
        raise IndexOutOfRangeError(
            f"edge_index or batch: entry {at} is {found[0]}, outside the graph; expected indices from "
            f"{_range(limits[0])}. Check edge_index against x.size(0), batch against the number of graphs (size, "
            "batch_size), edge_type against num_relations."
        )
    what = f"edge {at} joins nodes {found[0]} and {found[1]}" if found is not None else "an edge has an end"
    expected = f"; expected indices from {_range(limits[0])} and {_range(limits[1])}" if limits is not None else ""
    raise IndexOutOfRangeError(
        f"edge_index: {what} outside the graph{expected}. Check edge_index against x.size(0), or pass the right "
        "size/num_nodes; where edges have types, check edge_type against num_relations."
    )


def _range(limit: int) -> str:
    return f"0 to {limit - 1}" if limit else "no rows"
