"""The rows of an edge list as two tensors that begin where it has them: its memory is not taken twice.

A view of the second row would begin at an offset, the number of edges, which Dynamo guards. These are tensors without
one. They are forgotten with the edge list they were made of, or when that was changed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from types import MappingProxyType
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


class _Call(threading.local):
    """The edge lists of the call that runs in this thread, by the identity of their first rows."""

    edges: Mapping[int, Tensor] = MappingProxyType({})


_call = _Call()


class edges_of_call:  # noqa: N801  (used as a function)
    """Lets :func:`joined` and :func:`row_of` find the caller's edge lists, by ``id(row)`` of their first rows."""

    __slots__ = ("edges", "outer")

    def __init__(self, edges: Mapping[int, Tensor]) -> None:
        self.edges = edges

    def __enter__(self) -> None:
        self.outer, _call.edges = _call.edges, self.edges

    def __exit__(self, *_: object) -> None:
        _call.edges = self.outer


def joined(row: Tensor, col: Tensor) -> Tensor:
    """The edge list of the running call that these are the rows of: the caller's own tensor."""
    found = _call.edges.get(id(row))
    return torch.stack([row, col]) if found is None else found


def row_of(row: Tensor, col: Tensor, which: int) -> Tensor:
    """One of both rows of an edge list of the running call, in the memory of the caller's own tensor."""
    mine, found = (row, col)[which], _call.edges.get(id(row))
    if found is None:
        return mine
    theirs = found[which]
    return mine if mine.data_ptr() == theirs.data_ptr() else theirs
