"""The plan by which processes exchange rows of nodes, and the process groups that plans are run on.

Each process holds the rows of its own nodes. Its edges also read rows of other processes, the *halo*. An edge list of a
part numbers sources in the order own rows, then halo rows; destinations are own rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gnncompile.exc import InternalError
from gnncompile.layout.side_table import SideTable


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


def make_plan(
    send: Tensor, sent: list[int], received: list[int], own: int, partition: str, rank: int, sizes: frozenset[int]
) -> HaloPlan:
    """Returns a plan, and remembers its splits by the identity of `send`: the exchange must not ask the device."""
    halo = torch.empty(sum(received), 0, dtype=torch.int8, device=send.device)
    plan = HaloPlan(send, halo, tuple(sent), tuple(received), own, partition, rank, sizes)
    _splits.set(send, (plan.sent, plan.received))
    return plan


_splits: SideTable[tuple[tuple[int, ...], tuple[int, ...]]] = SideTable()
"""By the `send` of a plan: the numbers of rows that go to and come from each rank."""

_plans: SideTable[HaloPlan] = SideTable()
"""By the edge list of a part: the plan of its sources."""


def splits(send: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the numbers of rows that go to and come from each rank."""
    found = _splits.get(send)
    if found is None:
        raise InternalError("an exchange has lost its plan; please report it")
    return found


def attach_plan(edge_index: Tensor, plan: HaloPlan) -> None:
    """Notes the plan of an edge list's sources."""
    _plans.set(edge_index, plan)


def plan_of(edge_index: Tensor) -> HaloPlan | None:
    """Returns the plan of an edge list's sources, or None if the edge list belongs to no part."""
    return _plans.get(edge_index)


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
