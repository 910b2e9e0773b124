"""The plan by which processes exchange rows of nodes, and the process groups that plans are run on.

Each process holds the rows of its own nodes. Its edges also read rows of other processes, the *halo*. An edge list of a
part numbers sources in the order own rows, then halo rows; destinations are own rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gnncompile.exc import InternalError
from gnncompile.layout.side_table import SideTable


class Splits(NamedTuple):
    """The numbers of rows that an exchange sends to and receives from each rank, and the number of own rows."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    own: int


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """The rows of one node type that a process sends to and receives from the others.

    Attributes:
        send: The own rows that others read, by the rank that reads them, int64 ``[num_sent]``.
        halo: A tensor ``[num_halo, 0]``, int8, whose size is the number of rows that come from others.
        sent: The number of rows that go to each rank.
        received: The number of rows that come from each rank.
        own: The number of own rows.
        partition: Names the partition: parts of one partition have the same name.
        rank: The rank that holds the part.
        sizes: The numbers of own nodes and of edges of each type in the part.
    """

    send: Tensor
    halo: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    own: int
    partition: str
    rank: int
    sizes: frozenset[int]

    @property
    def splits(self) -> Splits:
        """The numbers of rows of an exchange."""
        return Splits(self.sent, self.received, self.own)


def make_plan(
    send: Tensor, sent: list[int], received: list[int], own: int, partition: str, rank: int, sizes: frozenset[int]
) -> HaloPlan:
    """Returns a plan, and remembers its splits by the identity of `send`: the exchange must not ask the device."""
    halo = torch.empty(sum(received), 0, dtype=torch.int8, device=send.device)
    plan = HaloPlan(send, halo, tuple(sent), tuple(received), own, partition, rank, sizes)
    _splits.set(send, plan.splits)
    for tensor in (send, halo):
        _partitions.set(tensor, partition)
    return plan


_splits: SideTable[Splits] = SideTable()
"""By the `send` of a plan: its splits."""

_partitions: SideTable[str] = SideTable()
"""By each index tensor by which compiled code knows a part: the name of its partition."""

_plans: SideTable[HaloPlan] = SideTable()
"""By the edge list of a part: the plan of its sources."""


def splits(send: Tensor) -> Splits:
    """Returns the splits of a plan."""
    found = _splits.get(send)
    if found is None:
        raise InternalError("an exchange has lost its plan; please report it")
    return found


def partition_of(tensor: Tensor) -> str | None:
    """Returns the name of the partition of an index tensor of a part: `send`, `halo`, or a row of its edge list.

    Returns None for any other tensor.
    """
    return _partitions.get(tensor)


def name_rows(rows: Iterable[Tensor], partition: str) -> None:
    """Notes the partition of the rows of a part's edge list."""
    for row in rows:
        if _partitions.get(row) is None:
            _partitions.set(row, partition)


def attach_plan(edge_index: Tensor, plan: HaloPlan) -> None:
    """Notes the plan of an edge list's sources."""
    _plans.set(edge_index, plan)


def plan_of(edge_index: Tensor) -> HaloPlan | None:
    """Returns the plan of an edge list's sources, or None if the edge list belongs to no part."""
    return _plans.get(edge_index)


def with_room(rows: Tensor, num_halo: int) -> Tensor:
    """Returns a copy of rows of own nodes. After the rows comes memory into which exchanges may receive halo rows.

    A write to the copy is seen by exchanges. A view or a clone of the copy has no such memory.

    Args:
        rows: Rows of own nodes ``[own, ...]``, of any dtype that may be sent.
        num_halo: The number of halo rows.

    Returns:
        The copy ``[own, ...]``, contiguous; a leaf that requires grad if `rows` does.
    """
    joined = rows.new_empty((rows.size(0) + num_halo, *rows.shape[1:]))
    joined[: rows.size(0)] = rows.detach()
    # A view would share the version counter, and each exchange would seem to change the rows.
    own = joined.new_empty(0).set_(joined.untyped_storage(), 0, rows.shape, joined.stride())
    _rooms.set(own, joined)
    return own.requires_grad_(rows.requires_grad)


def copy_with_room(rows: Tensor) -> Tensor | None:
    """Returns a copy of rows that has the room for halo rows that `rows` has, or None if `rows` has no such room."""
    joined = _rooms.get(rows)
    if joined is None or joined.data_ptr() != rows.data_ptr() or not rows.is_contiguous():
        return None
    return with_room(rows.detach(), joined.size(0) - rows.size(0))


def joined_rows(rows: Tensor, halo: Tensor) -> Tensor:
    """Returns own rows, then room for halo rows, ``[own + num_halo, ...]``: in the same memory if there is room.

    Args:
        rows: Rows of own nodes ``[own, ...]``.
        halo: The halo of a plan ``[num_halo, 0]``.
    """
    size = (rows.size(0) + halo.size(0), *rows.shape[1:])
    joined = _rooms.get(rows)
    if joined is None or joined.shape != size or joined.data_ptr() != rows.data_ptr() or joined.dtype != rows.dtype:
        joined = rows.new_empty(size)
        joined[: rows.size(0)] = rows.detach()
    return joined


_rooms: SideTable[Tensor] = SideTable()
"""By rows of own nodes: the same rows, then room for halo rows."""


class Rows(NamedTuple):
    """Some consecutive rows of a layout, as a layout of their own.

    Attributes:
        rowptr: int32 ``[rows + 1]``; begins with 0.
        first: Their first edge in the whole layout.
        last: The edge after their last one.
    """

    rowptr: Tensor
    first: int
    last: int


def own_and_halo(rowptr: Tensor, own: int) -> tuple[Rows, Rows]:
    """Returns the own rows of a layout, and its halo rows. The host waits for the device once for each layout.

    Args:
        rowptr: int32 ``[own + num_halo + 1]``.
        own: The number of own rows.
    """
    found = _ranges.get(rowptr)
    if found is None or found[0].rowptr.size(0) != own + 1:
        first, last = rowptr[[own, -1]].tolist()
        found = Rows(rowptr[: own + 1].clone(), 0, first), Rows(rowptr[own:] - first, first, last)
        _ranges.set(rowptr, found)
    return found


_ranges: SideTable[tuple[Rows, Rows]] = SideTable()
"""By the rowptr of a layout: its own rows and its halo rows."""


_groups: dict[str, dist.ProcessGroup] = {}
"""The process groups of compiled models, by name: captured graphs hold strings."""


def name_group(group: dist.ProcessGroup) -> str:
    """Returns the name by which exchanges find a process group."""
    name = str(group.group_name)
    _groups[name] = group
    return name


def group_of(name: str) -> dist.ProcessGroup:
    """Returns the process group of a name."""
    return _groups[name]
