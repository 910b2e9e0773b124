"""Sorts edges by row on a GPU, stably, by a radix sort of few launches. Imports Triton.

Torch's sort takes 20 launches, with those that clear memory and with the kernels around it. Each costs the host more
than the GPU where there are some hundred thousand edges. Here a digit of 8 bits takes three launches: edges are counted
by blocks and digits, the counts are added up, and each block writes its edges to their places. There are no more digits
than the rows have, one or two.
:mod:`gnncompile.codegen.triton.sorting` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile.codegen.triton import radix_kernels
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel

MOST_EDGES = 2**20
"""The most edges. Where there are more, torch's sort is as fast."""
MOST_ROWS = 2**16 - 1
"""The most rows. A row, and the number of rows, which edges to drop have, must have two digits."""
BINS = 256
"""The values of a digit."""
SCANNED = 8
"""The bins whose counts a program adds up."""

_BITS = 10
BLOCK = 1 << _BITS
"""The edges of a program."""

DIGIT = 8
"""The bits of a digit."""

NUMBERS = {
    "radix_edges": MOST_EDGES,
    "radix_rows": MOST_ROWS,
    "radix_block": BLOCK,
    "bins": BINS,
    "scanned": SCANNED,
    "digit": DIGIT,
}
"""What a package must know to launch the kernels."""

_MANY, _WARPS = 256, 4
"""The blocks whose counts a program reads at once, and the warps of a program."""


def fits(num_rows: int, num_edges: int) -> bool:
    """Whether a graph has few enough rows and edges."""
    return num_edges <= MOST_EDGES and num_rows <= MOST_ROWS


class _Stage(NamedTuple):
    """A kernel and what is the same in all of its launches.

    Attributes:
        kernel: The kernel.
        names: The names of its tensors.
        types: Their dtypes.
        numbers: How many int32 numbers it takes.
        constants: Its constants.
    """

    kernel: Kernel
    names: tuple[str, ...]
    types: tuple[torch.dtype, ...]
    numbers: int
    constants: tuple[Any, ...]

    def launch(self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        self.kernel(programs, tensors, numbers, self.constants)

    def entry(self) -> Entry:
        return self.kernel.entry(self.names, self.types, self.numbers, self.constants)

    def compile_ahead(self) -> None:
        self.kernel.compile_ahead(self.types, self.numbers, self.constants)


def _stage(kernel: Any, names: Sequence[str], types: Sequence[torch.dtype], numbers: int, *constants: Any) -> _Stage:
    return _Stage(Kernel(kernel, num_warps=_WARPS), tuple(names), tuple(types), numbers, constants)


_KEY, _COUNT = torch.int32, torch.int16
_SUMS, _SUM_TYPES = ("counts", "earlier", "totals"), (_COUNT, torch.int32, torch.int32)
_MOVED, _MOVED_TYPES = ("key", "order", *_SUMS, "new_key", "new_order"), (_KEY, _KEY, *_SUM_TYPES, _KEY, _KEY)

_scan = _stage(radix_kernels.scan, _SUMS, _SUM_TYPES, 1, BINS, SCANNED, _MANY)
_scatter = _stage(radix_kernels.scatter, _MOVED, _MOVED_TYPES, 2, _BITS, BINS)
_count = _stage(radix_kernels.count, ("key", "counts"), (_KEY, _COUNT), 2, BLOCK, BINS)


@cache
def _count_rows(index: torch.dtype, other: torch.dtype, wraps: tuple[bool, bool], masked: bool) -> _Stage:
    """Returns what writes the keys and counts their first digits, for indices of two dtypes."""
    types = (index, other, torch.bool, _KEY, _COUNT, torch.bool)
    names = ("index", "other", "alive", "key", "counts", "bad")
    return _stage(radix_kernels.count_rows, names, types, 3, *wraps, masked, BLOCK, BINS)


def sort(
    given: Sequence[Tensor],
    bad: Tensor,
    sizes: Sequence[int],
    wraps: tuple[bool, bool],
    masked: bool,
    spare: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the sorted rows of edges, and the numbers of the edges in this order, int32 ``[num_edges]``.

    The row of an edge that is dropped is the number of rows.

    Args:
        given: index, other and alive: see :func:`gnncompile.codegen.triton.sorting.sort_edges`.
        bad: Set if an entry is out of range, bool ``[1]``.
        sizes: The numbers of edges, rows and columns.
        wraps: Whether negative rows and columns count from the end.
        masked: Whether `alive` is read.
        spare: A tensor to write to, int32 ``[num_edges]``.
    """
    edges, rows, _ = sizes
    blocks, adding = -(-edges // BLOCK), BINS // SCANNED
    count_rows = _count_rows(given[0].dtype, given[1].dtype, wraps, masked)
    counts = spare.new_empty((blocks, BINS), dtype=_COUNT)
    sums = [counts, spare.new_empty((blocks, BINS)), spare.new_empty((BINS,))]
    first_key, key, order = (torch.empty_like(spare) for _ in range(3))
    count_rows.launch(blocks, [*given, first_key, counts, bad], sizes)
    _scan.launch(adding, sums, [blocks])
    if rows < BINS:
        _scatter.launch(blocks, [first_key, first_key, *sums, key, order], [edges, 0])
        return key, order
    _scatter.launch(blocks, [first_key, first_key, *sums, key, spare], [edges, 0])
    _count.launch(blocks, [key, counts], [edges, DIGIT])
    _scan.launch(adding, sums, [blocks])
    _scatter.launch(blocks, [key, spare, *sums, first_key, order], [edges, DIGIT])
    return first_key, order


def entries(index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool]) -> dict[str, Entry]:
    """Returns the kernels for packages by their names."""
    stages = (_count_rows(index, other, wraps, masked), _scan, _scatter, _count)
    return dict(zip(("count_rows", "scan", "scatter", "count"), (stage.entry() for stage in stages), strict=True))


def compile_ahead(index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool], rows: int) -> None:
    """Starts to compile the kernels for a graph, in other threads."""
    for stage in (_count_rows(index, other, wraps, masked), _scan, _scatter, *([_count] if rows >= BINS else [])):
        stage.compile_ahead()
