"""Adds up the sums of a kernel's programs and writes them to the outputs of a region. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.rounding import rounded
from gnncompile.codegen.triton.text import block_kernel

_COLUMNS, _ROWS = 32, 32
"""The columns that a program adds up, and the rows that it reads at once."""


@triton.jit
def column_sums(partial, out, block, programs, length, first, size, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Writes block number `block` of an output, if the output has that many. Returns the number among later blocks."""
    if (block >= 0) & (block * COLUMNS < size):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < size
        total = tl.zeros([ROWS, COLUMNS], partial.dtype.element_ty)
        for begin in range(0, programs, ROWS):
            program = begin + tl.arange(0, ROWS)
            place = program[:, None].to(tl.int64) * length + (first + column)[None, :]
            total += tl.load(partial + place, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
        tl.store(out + column, rounded(tl.sum(total, 0), out.dtype.element_ty), mask=inside)
    return block - tl.cdiv(size, COLUMNS)


@lru_cache(maxsize=256)
def _kernel(outputs: int) -> Any:
    """Returns a kernel that writes this number of outputs."""
    names = [f"out{k}" for k in range(outputs)]
    numbers = ["programs", "length", *chain(*((f"first{k}", f"size{k}") for k in range(outputs)))]
    sizes = f"{_COLUMNS}, {_ROWS}"
    text = block_kernel(
        f"Sums over programs, {outputs} outputs.",
        "from gnncompile.codegen.triton.program_sums import column_sums",
        f"@triton.jit(do_not_specialize={numbers})",
        f"add_up({', '.join(('partial', *names, *numbers))})",
        (
            f"column_sums(partial, {name}, block, programs, length, first{k}, size{k}, {sizes})"
            for k, name in enumerate(names)
        ),
    )
    return load_module(text).add_up


class ProgramSums:
    """Adds up the sums of a kernel's programs into outputs.

    Args:
        places: For each output, where it begins among the sums of a program, and its number of elements.

    Attributes:
        programs: The number of programs of a launch.
        places: The numbers that a kernel takes after the shape of the sums.
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self.places = list(chain(*places))
        self.programs = sum(-(-size // _COLUMNS) for _, size in places)
        self._kernel = Kernel(_kernel(len(places)), num_warps=tuning.TILES.short_warps)

    def compile_ahead(self, partial: torch.dtype, outputs: Sequence[torch.dtype]) -> None:
        """Starts to compile the kernel. The arguments are the dtypes of the tensors of a call."""
        self._kernel.compile_ahead([partial, *outputs], 2 + len(self.places), ())

    def entry(self, names: Sequence[str], types: Sequence[torch.dtype]) -> Entry:
        """Returns the kernel, for packages. The arguments are the names and the dtypes of the tensors of a call."""
        return self._kernel.entry(names, types, 2 + len(self.places), ())

    def __call__(self, partial: Tensor, outputs: Sequence[Tensor]) -> None:
        """Writes the outputs, on the current device.

        Args:
            partial: The sums, ``[programs, length]``, contiguous. Of no programs, the sums are 0.
            outputs: Contiguous, of any floating dtypes, which are the same in every call.
        """
        self._kernel(self.programs, (partial, *outputs), (*partial.shape, *self.places), ())
