"""Copies views of matrices, such as transposed slices of weights, in one launch. Imports Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.matrix_view import View
from gnncompile.codegen.triton.launcher import Kernel, on_device
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.rounding import rounded
from gnncompile.codegen.triton.text import block_kernel

_BLOCK = 1024
"""The elements that a program copies."""


@triton.jit
def copy_block(
    source,
    out,
    block,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies block number `block` of a view, if the view has that many. Returns the number among later blocks."""
    if (block >= 0) & (block * BLOCK < ROWS * COLUMNS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < ROWS * COLUMNS
        place = OFFSET + (at // COLUMNS) * ROW_STRIDE + (at % COLUMNS) * COLUMN_STRIDE
        value = tl.load(source + place, mask=inside)
        tl.store(out + at, rounded(value, out.dtype.element_ty), mask=inside)
    return block - (ROWS * COLUMNS + BLOCK - 1) // BLOCK


@lru_cache(maxsize=1024)
def _kernel(views: tuple[View, ...]) -> Any:
    names = [(f"source{k}", f"out{k}") for k in range(len(views))]
    text = block_kernel(
        f"Copies of {len(views)} matrices.",
        "from gnncompile.codegen.triton.matrix_copies import copy_block",
        "@triton.jit",
        f"copy_matrices({', '.join(sum(names, ()))})",
        (
            f"copy_block({source}, {out}, block, {', '.join(map(str, view))}, {_BLOCK})"
            for (source, out), view in zip(names, views, strict=True)
        ),
    )
    return load_module(text).copy_matrices


class MatrixCopies:
    """Copies views of matrices to new memory, row after row.

    Args:
        views: The view of each matrix.
        types: The dtypes of the matrices, then the dtypes of the copies. A value is rounded to the copy's dtype.
    """

    def __init__(self, views: Sequence[View], types: Sequence[torch.dtype]) -> None:
        found = tuple(views)
        self._programs = sum(math.ceil(view.rows * view.columns / _BLOCK) for view in found)
        self._kernel = Kernel(_kernel(found), num_warps=tuning.TILES.short_warps)
        half = len(found)
        self._kernel.compile_ahead([t for pair in zip(types[:half], types[half:], strict=True) for t in pair], 0, ())

    def __call__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """Launches the kernel on the device of the copies, which are contiguous."""
        given = [tensor for pair in zip(sources, copies, strict=True) for tensor in pair]
        with on_device(copies[0].get_device()):
            self._kernel(self._programs, given, (), ())
