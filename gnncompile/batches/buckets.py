"""Learns a few sizes to which mini-batches are padded. All worker processes share them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp

from gnncompile.batches.row_types import EDGES, GRAPHS, NODES, RowTypes

MOST = 4
"""The most buckets, if the user gives no number."""

SLACK = 0.1
"""A new bucket is larger than its first mini-batch by this fraction."""

WASTE = 0.35
"""A mini-batch that padding would grow by more than this fraction gets a new bucket, while more buckets may be made."""

MOST_KINDS = 30
"""Mini-batches with more row types than this are not padded."""

_SCHEMAS = 8
"""The most schemas that one loader's mini-batches may have; further ones are not padded. A schema is the names of all
row types of a mini-batch.
"""


class Buckets:
    """The sizes that mini-batches are padded to, one for each row type: nodes, edges, graphs.

    Padded edges join padded nodes, so padding adds at least two nodes of each type. It adds at least one graph, and
    each padded graph gets at least one padded node. The sizes are held in shared memory.

    Args:
        most: The largest number of buckets for mini-batches of one schema.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Each row is a bucket: a hash of its schema, then the size of each row type. Unused entries are 0.
        self._table = torch.zeros(_SCHEMAS * most, 1 + MOST_KINDS, dtype=torch.int64).share_memory_()
        self._lock: Any = mp.get_context("spawn").Lock()

    def sizes(self) -> list[tuple[int, ...]]:
        """Returns the sizes of all buckets so far."""
        return [tuple(n for n in row[1:].tolist() if n) for row in self._table if row[1]]

    def choose(self, kinds: RowTypes) -> tuple[int, ...] | None:
        """Returns the bucket for a mini-batch, or None if the mini-batch can't be padded."""
        counts = kinds.counts
        if not kinds.certain or not counts or len(counts) > MOST_KINDS:
            return None
        with self._lock:
            rows = self._rows(zlib.crc32("\n".join(kinds.names).encode()) + 1)
            if rows is None:
                return None
            known = [tuple(row[1 : 1 + len(counts)].tolist()) for row in rows if row[1]]
            best = min((b for b in known if _holds(b, kinds)), key=sum, default=None)
            full = len(known) == self.most
            spare = max(64, 10 * len(counts))  # a row type without a row is padded to 8
            if best is not None and (full or sum(best) <= (1 + WASTE) * sum(counts) + spare):
                return best
            place, new = len(known), _sizes(counts, kinds, SLACK)
            if full:  # no bucket is large enough: the largest bucket grows
                place = max(range(len(known)), key=lambda k: sum(known[k]))
                new = _sizes([max(c, size - 1) for c, size in zip(counts, known[place], strict=True)], kinds, 0.0)
            rows[place][1 : 1 + len(counts)] = torch.tensor(new)
            return new

    def _rows(self, schema: int) -> list[Tensor] | None:
        """Returns the rows of the table for a schema's buckets, or None if there are too many schemas."""
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
    """Returns the sizes of a new bucket. Only one graph is added: most loaders yield a constant number of graphs."""
    return tuple(
        c + 1 if name == GRAPHS else _rounded(int(c * (1 + slack)) + 2)
        for c, name in zip(counts, kinds.names, strict=True)
    )


def _rounded(size: int) -> int:
    """Rounds a size up to a multiple of about 1/32 of the size."""
    step = max(1 << max(size.bit_length() - 5, 0), 8)
    return -(-size // step) * step
