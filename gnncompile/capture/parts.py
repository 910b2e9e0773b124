"""Takes the edge lists of a part apart for the compiled code; checks that processes hold parts of one partition."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gnncompile.exc import ArgumentError, ArgumentTypeError, PartitionError
from gnncompile.layout.agreement import collect
from gnncompile.layout.halo import HaloPlan, Splits, group_of, name_group

_OPS: Any = torch.ops.gnncompile


class PartEdges(NamedTuple):
    """An edge list of a part: its rows, and the plan by which halo rows of its sources are exchanged."""

    row: Tensor
    col: Tensor
    send: Tensor
    halo: Tensor
    group: str


def join(value: PartEdges) -> Tensor:
    """Returns the edge list as the model sees it; traced by Dynamo."""
    return torch.stack(_OPS.partitioned(*value))


def group_name(mesh: Any, dynamic: bool | None) -> str:
    """Returns the name of a mesh's process group.

    Raises:
        TypeError: `mesh` is no ``DeviceMesh``.
        ValueError: The mesh has several dimensions, or sizes are not symbolic.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh: found {type(mesh).__name__}, expected a DeviceMesh. Make one with "
            'torch.distributed.init_device_mesh("cuda", (world_size,)).'
        )
    if mesh.ndim != 1:
        raise ArgumentError(f"mesh: found {mesh.ndim} dimensions, expected one. Pass one of them, as in mesh['parts'].")
    if dynamic is False:
        raise ArgumentError("dynamic: found False, expected None or True with a mesh: parts differ in size.")
    return name_group(mesh.get_group())


class PartCheck:
    """Checks the parts of a model's calls.

    Args:
        group: The name of the process group.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.agreed: set[str] = set()
        self.last: list[Splits] = []
        """The numbers of rows that the last call exchanges, for each node type that is exchanged."""

    def __call__(self, plans: list[HaloPlan], rows: list[tuple[str, int]]) -> None:
        """Checks a call before it runs.

        Args:
            plans: The plans of its edge lists.
            rows: The name and the number of rows of each tensor argument.

        Raises:
            ValueError: No argument is an edge list of a part, or an argument has rows of something else.
            PartitionError: Processes hold parts of different partitions, or a part of another rank.
        """
        if not plans:
            raise ArgumentError(
                "edge_index: found no edge list of a part among the arguments, expected one, since the model was "
                "compiled with a mesh. Pass the tensors of part.data (of part.to(device).data on another device) as "
                "they are: a copy, as .contiguous() or .clone() may make it, belongs to no part."
            )
        sizes = frozenset[int]().union(*(plan.sizes for plan in plans))
        for name, size in rows:
            if size not in sizes:
                raise ArgumentError(
                    f"{name}: found {size} rows, expected rows of this part's nodes or edges ({sorted(sizes)}). Pass "
                    "a mask of all rows for some of them; make tensors without rows buffers of the model."
                )
        self.last = list(dict.fromkeys(plan.splits for plan in plans))
        for plan in plans:
            if plan.partition not in self.agreed:
                self._agree(plan)
            rank = dist.get_rank(group_of(self.group))
            if plan.rank != rank:
                raise PartitionError(
                    f"edge_index: found part {plan.rank} of partition {plan.partition} on rank {rank}, expected part "
                    f"{rank}. Load it with gnncompile.load_part(folder, rank, world_size)."
                )

    def _agree(self, plan: HaloPlan) -> None:
        """Compares the partition of all processes, once per partition."""
        size = dist.get_world_size(group_of(self.group))
        mine = [plan.partition, str(plan.rank), str(len(plan.sent))]
        found = collect(self.group, "a part of a new partition", mine)
        wrong = [
            f"rank {k} has part {part} of {count} of partition {name}"
            for k, (name, part, count) in enumerate(found)
            if (name, part, count) != (plan.partition, str(k), str(size))
        ]
        if wrong:
            raise PartitionError(
                f"edge_index: found {'; '.join(wrong)}, expected part k of {size} of partition {plan.partition} on "
                "rank k. Load the parts of one partition with gnncompile.load_part(folder, rank, world_size)."
            )
        self.agreed.add(plan.partition)
