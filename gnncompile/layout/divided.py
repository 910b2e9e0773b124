"""Divides the edges of a layout over a part of a graph: edges from own rows, and edges from halo rows.

Both halves are layouts of the same rows, and keep the order of the edges within a row. They are remembered by the
identity of the layout's rowptr, since compiled graphs pass layouts as plain tensors, and take 8 bytes per edge as long
as the layout lives. The host waits for the device when a layout is divided for the first time, or values in its order.
It can't while a CUDA graph is captured, so then only what is remembered is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.layout.side_table import SideTable, version_of
from gnncompile.layout.streams import Ordered


class Edges(NamedTuple):
    """Some edges of each row of a layout, as a layout of their own.

    Attributes:
        rowptr: int32 ``[rows + 1]``.
        col: int32 ``[num_edges]``.
        edge: int32 ``[num_edges]``; empty if the whole layout has no indices of edges.
    """

    rowptr: Tensor
    col: Tensor
    edge: Tensor


@dataclass(frozen=True)
class Divided:
    """The edges of a layout in two halves.

    Attributes:
        own: The number of own rows among the columns, which come first.
        versions: The versions of the whole layout's tensors.
        halves: The edges from own rows, and the edges from halo rows.
        order: Lets other streams wait for the tensors.
    """

    own: int
    versions: tuple[int, ...]
    halves: tuple[Edges, Edges]
    order: Ordered | None


def divided(layout: Sequence[Tensor], own: int) -> Divided | None:
    """Returns a layout in two halves; None while a CUDA graph is captured, if the layout was not divided before.

    Args:
        layout: rowptr ``[rows + 1]``, col and edge ``[num_edges]``, int32. Masked edges come after ``rowptr[-1]``, and
            belong to no half.
        own: The number of own rows, which come first among the columns.
    """
    rowptr, col, edge = layout
    found = _divided.get(rowptr)
    versions = tuple(map(version_of, layout))
    if found is None or (found.own, found.versions) != (own, versions):
        if device_of(rowptr.device).is_capturing:
            return None
        found = _divide(rowptr, col, edge, own, versions)
        _divided.set(rowptr, found)
    if found.order is not None:
        found.order.follow()
    return found


def divided_values(values: Tensor, layout: Sequence[Tensor], known: Divided) -> tuple[Tensor, Tensor] | None:
    """Returns values that are in the order of a layout, ``[num_edges, ...]``, for each half of the layout.

    They are remembered by the identity of `values`, which hold graph structure. Returns None while a CUDA graph is
    captured, if they were not divided before.

    Args:
        values: ``[num_edges, ...]``.
        layout: rowptr, col and edge of the whole layout.
        known: Its halves.
    """
    version = version_of(values)
    found = _values.get(values)
    if found is None or found.version != version or found.layout is not known.halves[0].rowptr:
        if device_of(values.device).is_capturing:
            return None
        first, second = (values[chosen] for chosen in _chosen(layout, known.own))
        found = _Values(version, known.halves[0].rowptr, (first, second), Ordered.after([first, second]))
        _values.set(values, found)
    if found.order is not None:
        found.order.follow()
    return found.halves


def _divide(rowptr: Tensor, col: Tensor, edge: Tensor, own: int, versions: tuple[int, ...]) -> Divided:
    first, second = (
        Edges(_rowptr(rowptr, mask), col[mask], edge[mask] if edge.numel() else edge)
        for mask in _chosen((rowptr, col, edge), own)
    )
    return Divided(own, versions, (first, second), Ordered.after([*first, *second]))


def _chosen(layout: Sequence[Tensor], own: int) -> tuple[Tensor, Tensor]:
    """Returns for each half of a layout which edges it has, bool ``[num_edges]``."""
    rowptr, col, _ = layout
    alive, of_own = torch.arange(col.size(0), dtype=torch.int32, device=col.device) < rowptr[-1], col < own
    return alive & of_own, alive & ~of_own


def _rowptr(rowptr: Tensor, chosen: Tensor) -> Tensor:
    """Returns the rowptr of the chosen edges of a layout."""
    return torch.nn.functional.pad(chosen.cumsum(0, dtype=torch.int32), (1, 0))[rowptr]


@dataclass(frozen=True)
class _Values:
    version: int
    layout: Tensor
    halves: tuple[Tensor, Tensor]
    order: Ordered | None


_divided: SideTable[Divided] = SideTable()
"""By the rowptr of a layout."""

_values: SideTable[_Values] = SideTable()
"""By values in the order of a layout."""
