"""Computes the seal of a layout by launches, in a program that is traced for a package. Imports Triton.

:mod:`gnncompile.ops.seal` says what a seal is. Those here are other numbers than those of a CPU: a package compares a
seal with its own alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton import layout_kernels
from gnncompile.codegen.triton.hub_lists import Launch
from gnncompile.codegen.triton.launcher import Kernel

_BLOCK = 4096
"""The entries of a program."""

_kernel = Kernel(layout_kernels.seal, num_warps=tuning.TILES.short_warps)


def seal(tensors: Sequence[Tensor], sizes: Sequence[Any], launch: Launch) -> Tensor:
    """Returns the seal of tensors, int64 ``[1]``. It takes one launch for each of them.

    Args:
        tensors: The tensors.
        sizes: Numbers that the seal depends on as well.
        launch: Launches a kernel.
    """
    total = tensors[0].new_zeros((1,), dtype=torch.int64)
    nothing = total.new_empty((0,))
    for part, (tensor, size) in enumerate(zip_longest(tensors, sizes)):
        values = nothing if tensor is None else tensor.reshape(-1)
        bits = 8 * values.dtype.itemsize if values.dtype.is_floating_point else 0
        entry = _kernel.entry(("values", "total"), (values.dtype, torch.int64), 3, (bits, _BLOCK))
        numbers = [values.numel(), part, 0 if size is None else size]
        programs = torch.sym_max(-(-values.numel() // _BLOCK), 1)
        (total,) = launch(entry, [values, total], numbers, programs, [1])
    return total
