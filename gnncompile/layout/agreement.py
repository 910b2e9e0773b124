"""Compares what the processes of a mesh have captured, which partition they hold, and what they record.

A collective would not do: a process that captures a graph alone would meet an exchange of the others, and both would
read rows that are none. So processes write to the store of their group, and read what the others wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist

from gnncompile.exc import PartitionError
from gnncompile.layout.halo import group_of

_FAILED = "failed"

_rounds: Counter[str] = Counter()
"""By the name of a group: how often this process has written."""


def collect(group: str, what: str, mine: Sequence[str]) -> list[list[str]]:
    """Returns what each process of a group has written in this round, by rank.

    Args:
        group: The name of the process group.
        what: The occasion, for errors, such as "a new graph". All processes must have the same one.
        mine: What this process writes.

    Raises:
        PartitionError: Another process failed, met something else, or wrote nothing within the time-out of
            ``init_process_group``.
    """
    _write(group, [what, *mine])
    members = group_of(group)
    rank, size = dist.get_rank(members), dist.get_world_size(members)
    found: list[list[str]] = []
    for other in range(size):
        try:
            found.append(json.loads(members.get_group_store().get(_key(group, other))))
        except RuntimeError as error:
            raise PartitionError(
                f"rank {rank} of {size} met {what}, but rank {other} did not in time: {error}. All processes must call "
                "the model alike. See the errors of the other ranks."
            ) from error
    for other, (occasion, *rest) in enumerate(found):
        if occasion == _FAILED:
            raise PartitionError(f"rank {rank} of {size} met {what}, but rank {other} failed: {rest[0]}")
        if occasion != what:
            raise PartitionError(
                f"rank {rank} of {size} met {what}, but rank {other} met {occasion}. All processes must call the model "
                "alike."
            )
    _forget(group)
    return [rest for _, *rest in found]


def tell_failure(group: str, error: BaseException) -> None:
    """Tells the other processes that this one fails in this round, so they need not wait for it."""
    _write(group, [_FAILED, str(error)])


def union(group: str, what: str, mine: Iterable[int]) -> list[int]:
    """Returns all indices that any process of a group has, in ascending order. The arguments are those of `collect`."""
    found = collect(group, what, [str(one) for one in sorted(mine)])
    return sorted({int(one) for indices in found for one in indices})


def same_exchanges(group: str, mine: Sequence[tuple[str, str]]) -> None:
    """Checks that all processes have captured the same exchanges in the same order.

    Args:
        group: The name of the process group.
        mine: Each exchange of the captured graph, and the user's line that it comes from.

    Raises:
        PartitionError: Processes have captured different exchanges. All of them raise it.
    """
    found = collect(group, "a new graph", [json.dumps(one) for one in mine])
    graphs = [[tuple(json.loads(text)) for text in rest] for rest in found]
    for at in range(max(map(len, graphs))):
        here = [graph[at] if at < len(graph) else ("no further exchange", "") for graph in graphs]
        if len({what for what, _ in here}) > 1:
            told = "; ".join(
                f"rank {rank}: {what}{f' ({line})' if line not in ('', '?') else ''}"
                for rank, (what, line) in enumerate(here)
            )
            raise PartitionError(
                f"the processes have captured different graphs. Exchange {at + 1} is {told}. All processes must call "
                "the same model, in the same mode, with arguments of the same dtypes and numbers of features."
            )


def _write(group: str, text: list[str]) -> None:
    _rounds[group] += 1
    members = group_of(group)
    members.get_group_store().set(_key(group, dist.get_rank(members)), json.dumps(text))


def _forget(group: str) -> None:
    """Deletes what this process wrote in the round before. All processes have written since, so they have read it."""
    members = group_of(group)
    with suppress(RuntimeError, NotImplementedError):  # not all stores delete
        members.get_group_store().delete_key(_key(group, dist.get_rank(members), before=1))


def _key(group: str, rank: int, before: int = 0) -> str:
    return f"gnncompile/{group}/{_rounds[group] - before}/{rank}"
