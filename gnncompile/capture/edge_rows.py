"""The rows of an edge list as two tensors that share its memory.

A view of the second row has a storage offset, the number of edges, on which Dynamo guards. The tensors made here have
offset 0. They are dropped when their edge list is freed or changed.
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
from gnncompile.device import device_of
from gnncompile.layout.edge_memory import is_aligned
from gnncompile.layout.identity_cache import never_written


class _Shared(NamedTuple):
    """An edge list, its two rows, and its address, version, shape and strides when the rows were made."""

    of: weakref.ref[Tensor]
    rows: tuple[Tensor, ...]
    place: tuple[Any, ...]


_shared: dict[int, _Shared] = {}  # by id, because a weak reference as the key would dominate the look-up's time


def can_share(edge_index: Tensor) -> bool:
    """Whether the rows of an edge list ``[2, num_edges]`` may share its memory.

    The rows must be contiguous, and changes of the edge list noticeable by its version.
    """
    is_packed = edge_index.stride(1) == 1
    return is_packed and not edge_index.is_inference() and device_of(edge_index.device).has_addresses


def share(edge_index: Tensor) -> tuple[Tensor, ...]:
    """Makes the rows of an edge list, which :func:`shared` returns from now on."""
    if torch.is_inference_mode_enabled():  # tensors that are made there have no version
        with torch.inference_mode(False):
            return share(edge_index)
    rows = _row(edge_index, 0), _row(edge_index, 1)
    key = id(edge_index)
    _shared[key] = _Shared(weakref.ref(edge_index, functools.partial(_forget, key)), rows, _place(edge_index))
    return rows


def _forget(key: int, of: weakref.ref[Tensor]) -> None:
    found = _shared.get(key)
    if found is not None and found.of is of:  # else the entry is of a newer tensor with the same id
        del _shared[key]


def _row(edge_index: Tensor, which: int) -> Tensor:
    """A row in its own memory, or a copy if Inductor would copy it in each call: :func:`is_aligned`."""
    row = _compat.buffer_in(edge_index, (edge_index.size(1),), (1,), which * edge_index.stride(0))
    return never_written(_compat.same_memory(row, edge_index) if is_aligned(row) else row.clone())


def shared(edge_index: Tensor) -> tuple[Tensor, ...] | None:
    """The rows of an edge list, each ``[num_edges]``; None unless :func:`share` made them and it is unchanged since."""
    found = _shared.get(id(edge_index))
    if found is None or found.of() is not edge_index or found.place != _place(edge_index):
        return None
    return found.rows


def _place(edge_index: Tensor) -> tuple[Any, ...]:
    version = None if edge_index.is_inference() else edge_index._version
    return edge_index.data_ptr(), version, edge_index.shape, edge_index.stride()


class _Call(threading.local):
    """The edge lists of the call that runs in this thread, by the ``id`` of their first rows."""

    edges: Mapping[int, Tensor] = MappingProxyType({})


_call = _Call()


class edges_of_call:  # noqa: N801  (used as a function)
    """Lets :func:`joined` and :func:`row_of` find the caller's edge lists in this block.

    Args:
        edges: The edge lists, by the ``id`` of their first rows.
    """

    __slots__ = ("edges", "outer")

    def __init__(self, edges: Mapping[int, Tensor]) -> None:
        self.edges = edges

    def __enter__(self) -> None:
        self.outer, _call.edges = _call.edges, self.edges

    def __exit__(self, *_: object) -> None:
        _call.edges = self.outer


def joined(row: Tensor, col: Tensor) -> Tensor:
    """The caller's own edge list whose rows these are; a new stack of both rows if the running call has none."""
    found = _call.edges.get(id(row))
    return torch.stack([row, col]) if found is None else found


def row_of(row: Tensor, col: Tensor, which: int) -> Tensor:
    """Row 0 or 1 (`which`) of an edge list of the running call, in the memory of the caller's own tensor."""
    mine, found = (row, col)[which], _call.edges.get(id(row))
    if found is None:
        return mine
    theirs = found[which]
    return mine if mine.data_ptr() == theirs.data_ptr() else theirs
