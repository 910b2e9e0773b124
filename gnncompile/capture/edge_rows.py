"""The rows of an edge list as two tensors that begin where it has them: its memory is not taken twice.

A view of the second row would begin at an offset, the number of edges, which Dynamo guards. These are tensors without
one. They are forgotten with the edge list they were made of, or when that was changed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile import _compat

ALIGNMENT = 16
"""Bytes. On a GPU, Inductor copies an input in each call that does not begin at a multiple of them."""


class _Shared(NamedTuple):
    """The edge list, both rows of it, and its place and version at that time."""

    of: weakref.ref[Tensor]
    rows: tuple[Tensor, ...]
    place: tuple[Any, ...]


_shared: dict[int, _Shared] = {}  # by id: to make a key of a weak reference takes longer than all else in a look-up


def can_share(edge_index: Tensor) -> bool:
    """Whether the rows of an edge list ``[2, num_edges]`` may be in its own memory: where they are contiguous, and a
    change of it is noticed.
    """
    return edge_index.stride(1) == 1 and not edge_index.is_inference() and edge_index.device.type in ("cpu", "cuda")


def share(edge_index: Tensor) -> list[Tensor]:
    """Makes the rows, for :func:`shared`; returns nothing that would keep their memory."""
    with torch.inference_mode(False):  # tensors that are made in it have no version
        rows = tuple(map(_row, edge_index.detach().unbind(0)))
    key = id(edge_index)
    _shared[key] = _Shared(weakref.ref(edge_index, functools.partial(_forget, key)), rows, _place(edge_index))
    return []


def _forget(key: int, of: weakref.ref[Tensor]) -> None:
    found = _shared.get(key)
    if found is not None and found.of is of:  # and not another tensor's that has come to its address
        del _shared[key]


def _row(row: Tensor) -> Tensor:
    """The row where it is, or a copy where each call would make one."""
    return row.clone() if row.is_cuda and row.data_ptr() % ALIGNMENT else _compat.same_memory(row)


def shared(edge_index: Tensor) -> tuple[Tensor, ...] | None:
    """The rows, each ``[num_edges]``, if they were made of this very tensor as it is now."""
    found = _shared.get(id(edge_index))
    if found is None or found.of() is not edge_index or found.place != _place(edge_index):
        return None
    return found.rows


def _place(edge_index: Tensor) -> tuple[Any, ...]:
    version = None if edge_index.is_inference() else edge_index._version
    return edge_index.data_ptr(), version, edge_index.shape, edge_index.stride()
