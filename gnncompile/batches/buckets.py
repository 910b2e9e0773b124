"""Learns a few sizes to which mini-batches are padded, in whichever process they are made."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp

from gnncompile.batches.row_types import EDGES, GRAPHS, NODES, RowTypes
from gnncompile.layout.batch_metadata import ENOUGH

MOST = 4
"""Buckets, if the user does not say how many."""

SLACK = 0.1
"""How much larger a new bucket is than the mini-batch that it is made for."""

WASTE = 0.35
"""A mini-batch that would grow by more than this gets a bucket of its own, while there may be more of them."""

MOST_KINDS = 30
"""Mini-batches of more kinds of things are not padded."""

_SCHEMAS = 8
"""Kinds of mini-batches (of nodes and edges of such types) that one loader may yield and that are padded."""


class Buckets:
    """Sizes for mini-batches of all kinds of things: nodes, edges, graphs.

    There are at least two nodes more (of each type) than in the mini-batch, one graph more, and as many nodes more as
    there are graphs more: padded edges join two padded nodes, and each padded graph has one. The sizes stand in shared
    memory.

    Args:
        most: How many buckets there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # A row: its schema and the size of each kind; zeros where there is no bucket yet.
        self._table = torch.zeros(_SCHEMAS * most, 1 + MOST_KINDS, dtype=torch.int64).share_memory_()
        self._lock: Any = mp.get_context("spawn").Lock()

    def sizes(self) -> list[tuple[int, ...]]:
        """All buckets so far."""
        return [tuple(n for n in row[1:].tolist() if n) for row in self._table if row[1]]

    def choose(self, kinds: RowTypes) -> tuple[int, ...] | None:
        """The bucket for a mini-batch; None where it is not padded."""
        counts = kinds.counts
        if not kinds.certain or min(counts, default=0) < ENOUGH or len(counts) > MOST_KINDS:
            return None
        with self._lock:
            rows = self._rows(zlib.crc32("\n".join(kinds.names).encode()) + 1)
            if rows is None:
                return None
            known = [tuple(row[1 : 1 + len(counts)].tolist()) for row in rows if row[1]]
            best = min((b for b in known if _holds(b, kinds)), key=sum, default=None)
            full = len(known) == self.most
            if best is not None and (full or sum(best) <= (1 + WASTE) * sum(counts) + 64):
                return best
            place, new = len(known), _sizes(counts, kinds, SLACK)
            if full:  # none holds it: the largest one grows
                place = max(range(len(known)), key=lambda k: sum(known[k]))
                new = _sizes([max(c, size - 1) for c, size in zip(counts, known[place], strict=True)], kinds, 0.0)
            rows[place][1 : 1 + len(counts)] = torch.tensor(new)
            return new

    def _rows(self, schema: int) -> list[Tensor] | None:
        """The places for the buckets of a schema; None where there are too many schemas."""
        for start in range(0, len(self._table), self.most):
            rows = self._table[start : start + self.most]
            if int(rows[0, 0]) in (0, schema):
                rows[:, 0] = schema
                return list(rows)
        return None


def _holds(bucket: Sequence[int], kinds: RowTypes) -> bool:
    room = [size - count for size, count in zip(bucket, kinds.counts, strict=True)]
    graphs = room[kinds.graphs] if kinds.graphs is not None else 0
    least = {EDGES: 0, NODES: max(2, graphs), GRAPHS: 1}
    return all(left >= least[name.split()[0]] for left, name in zip(room, kinds.names, strict=True))


def _sizes(counts: Sequence[int], kinds: RowTypes, slack: float) -> tuple[int, ...]:
    """Graphs are not padded beyond the one that is needed: most loaders have as many in each mini-batch."""
    return tuple(
        c + 1 if name == GRAPHS else _rounded(int(c * (1 + slack)) + 2)
        for c, name in zip(counts, kinds.names, strict=True)
    )


def _rounded(size: int) -> int:
    """Up to the next multiple of about a 32nd of it."""
    step = max(1 << max(size.bit_length() - 5, 0), 8)
    return -(-size // step) * step
