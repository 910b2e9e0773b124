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

NUMBERS = MOST_EDGES, MOST_ROWS, BLOCK, BINS, SCANNED, DIGIT
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


@cache
def _stages(index: torch.dtype, other: torch.dtype, wraps: tuple[bool, bool], masked: bool) -> tuple[_Stage, ...]:
    """Returns what counts the first digits of rows, adds up counts, sorts by a digit, and counts the second digits."""
    word, short = torch.int32, torch.int16
    sums, sum_names = (short, word, word), ("counts", "earlier", "totals")
    scattered, scattered_names = (word, word, *sums, word, word), ("key", "order", *sum_names, "new_key", "new_order")
    rows, row_names = (index, other, torch.bool, word, short, torch.bool), ("index", "other", "alive", "key", "counts")

    def stage(kernel: Any, names: tuple[str, ...], types: tuple[torch.dtype, ...], *more: Any) -> _Stage:
        return _Stage(Kernel(kernel, num_warps=_WARPS), names, types, *more)

    return (
        stage(radix_kernels.count_rows, (*row_names, "bad"), rows, 3, (*wraps, masked, BLOCK, BINS)),
        stage(radix_kernels.scan, sum_names, sums, 1, (BINS, SCANNED, _MANY)),
        stage(radix_kernels.scatter, scattered_names, scattered, 2, (_BITS, BINS)),
        stage(radix_kernels.count, ("key", "counts"), (word, short), 2, (BLOCK, BINS)),
    )


def sort(
    given: Sequence[Tensor],
    bad: Tensor,
    sizes: Sequence[int],
    wraps: tuple[bool, bool],
    masked: bool,
    scratch: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns the sorted rows of edges, and the numbers of the edges in this order, int32 ``[num_edges]``.

    The row of an edge that is dropped is the number of rows.

    Args:
        given: index, other and alive: see :func:`gnncompile.codegen.triton.sorting.sort_edges`.
        bad: Set if an entry is out of range, bool ``[1]``.
        sizes: The numbers of edges, rows and columns.
        wraps: Whether negative rows and columns count from the end.
        masked: Whether `alive` is read.
        scratch: Two tensors to write to, int32 ``[num_edges]``.
    """
    edges, rows, _ = sizes
    blocks, adding = -(-edges // BLOCK), BINS // SCANNED
    count_rows, scan, scatter, count = _stages(given[0].dtype, given[1].dtype, wraps, masked)
    first_key, first_order = scratch
    counts = first_key.new_empty((blocks, BINS), dtype=torch.int16)
    sums = [counts, first_key.new_empty((blocks, BINS)), first_key.new_empty((BINS,))]
    key, order = torch.empty_like(first_key), torch.empty_like(first_key)
    count_rows.launch(blocks, [*given, first_key, counts, bad], sizes)
    scan.launch(adding, sums, [blocks])
    if rows < BINS:
        scatter.launch(blocks, [first_key, first_key, *sums, key, order], [edges, 0])
        return key, order
    scatter.launch(blocks, [first_key, first_key, *sums, key, first_order], [edges, 0])
    count.launch(blocks, [key, counts], [edges, DIGIT])
    scan.launch(adding, sums, [blocks])
    scatter.launch(blocks, [key, first_order, *sums, first_key, order], [edges, DIGIT])
    return first_key, order


def entries(index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool]) -> tuple[Entry, ...]:
    """Returns the kernels for packages, each once, in the order of :func:`sort`."""
    return tuple(stage.entry() for stage in _stages(index, other, wraps, masked))


def compile_ahead(index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool], rows: int) -> None:
    """Starts to compile the kernels for a graph, in other threads."""
    stages = _stages(index, other, wraps, masked)
    for stage in stages[:3] if rows < BINS else stages:
        stage.compile_ahead()
