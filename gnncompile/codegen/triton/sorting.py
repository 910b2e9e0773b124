"""Sorts the edges of a layout in a package, by launches that depend on sizes alone. Imports Triton.

Few edges are sorted by one launch, in which each edge counts the edges before it. Operations of torch's would take
about ten launches, which is most of the time of a small graph. Other edges take two launches beside torch's sort.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton import sort_kernels
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel

FEW = 4096
"""The most edges, and the most rows and one, that are sorted by counting. The work grows as their square."""

_WARPS = tuning.TILES.short_warps
_rank, _keys, _place = (
    Kernel(kernel, num_warps=_WARPS) for kernel in (sort_kernels.rank, sort_kernels.keys, sort_kernels.place)
)
_RANKED, _STEP = 16, 128
"""The edges or rows of a program of the kernel that counts, and those that it compares them with at once."""
_BLOCK = 1024
"""The edges or rows of a program of the other kernels."""


@dataclass(frozen=True)
class Sort:
    """The kernels that sort edges.

    Attributes:
        rank: Sorts few edges: index, other, alive; rowptr, col, edge, bad.
        keys: Writes the keys of many edges: index, other, alive; key, bad.
        place: Writes the layout of sorted keys: key, order, other; rowptr, col, edge.
    """

    rank: Entry
    keys: Entry
    place: Entry

    @staticmethod
    def of(index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool]) -> Sort:
        """Returns the kernels for indices of two dtypes, whose negative entries may count from the end.

        Args:
            index: The dtype of the rows.
            other: The dtype of the columns.
            masked: Whether some edges are dropped. If none is, the kernels do not read `alive`.
            wraps: Whether negative rows and columns count from the end.
        """
        given, layout = (index, other, torch.bool), (torch.int32,) * 3
        names = ("index", "other", "alive")
        made = ("rowptr", "col", "edge")
        constants = (*wraps, masked)
        return Sort(
            *(
                # an index may be a row of edge_index
                replace(entry, aligned=False, flag="index" if "bad" in entry.names else None)
                for entry in (
                    _rank.entry((*names, *made, "bad"), (*given, *layout, torch.bool), 3, (*constants, _RANKED, _STEP)),
                    _keys.entry((*names, "key", "bad"), (*given, torch.int32, torch.bool), 3, (*constants, _BLOCK)),
                    _place.entry(
                        ("key", "order", "other", *made), (torch.int32, torch.int64, other, *layout), 3, (_BLOCK,)
                    ),
                )
            )
        )

    @property
    def entries(self) -> tuple[Entry, Entry, Entry]:
        """The kernels in the order of the attributes."""
        return self.rank, self.keys, self.place

    numbers = FEW, _RANKED, _BLOCK
    """The most edges that `rank` sorts, and the edges or rows of a program of `rank` and of the others."""

    def run(
        self, index: Tensor, other: Tensor, alive: Tensor | None, num_rows: int, num_columns: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns rowptr ``[num_rows + 1]``, col, edge ``[num_edges]``, int32, and whether an edge is out of range.

        Args:
            index: The row of each edge, ``[num_edges]``.
            other: The other end of each edge, ``[num_edges]``.
            alive: The edges to keep, bool ``[num_edges]``, or None.
            num_rows: The number of rows.
            num_columns: The number of columns.
        """
        edges, sizes = index.size(0), [index.size(0), num_rows, num_columns]
        rowptr, col, edge = (index.new_empty((n,), dtype=torch.int32) for n in (num_rows + 1, edges, edges))
        bad = index.new_zeros((1,), dtype=torch.bool)
        given = [index, other, bad if alive is None else alive]
        if edges <= FEW and num_rows < FEW:
            programs = _blocks(edges, _RANKED) + _blocks(num_rows + 1, _RANKED)
            self.rank.run([*given, rowptr, col, edge, bad], sizes, programs)
            return rowptr, col, edge, bad
        self.keys.run([*given, edge, bad], sizes, _blocks(edges, _BLOCK))
        key, order = torch.sort(edge, stable=True)
        programs = _blocks(edges, _BLOCK) + _blocks(num_rows + 1, _BLOCK)
        self.place.run([key, order, other, rowptr, col, edge], sizes, programs)
        return rowptr, col, edge, bad


def _blocks(number: int, block: int) -> int:
    return -(-number // block)
