"""Products with weights as launches that depend on sizes alone, so that a program can be traced. Imports Triton.

In a process, the number of rows of a call chooses the tile. A traced program keeps the tile for the rows of the traced
call. Its results are new tensors, so no tensor of the program changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm.launch import Factors, Way, Weight, order_of, plan_by_rows, split_kernel
from gnncompile.codegen.triton.hub_lists import Launch

_NAMES = ("left", "right", "other_left", "other_right", "added", "gate", "out")


def product(
    factors: Sequence[Factors],
    added: Tensor | None,
    gate: Tensor | None,
    relu: bool,
    expected: int | None,
    start: Launch,
) -> Tensor:
    """Returns a product with a weight, or the sum of two: see :func:`gnncompile.codegen.gemm.launch.by_rows`.

    Args:
        factors: The factors of each product. The sizes of weights are numbers.
        added: ``[columns]`` or ``[rows, columns]``, or None.
        gate: ``[rows, columns]``, or None.
        relu: Whether to write zeros in place of negative results.
        expected: The rows to expect, which the tile is chosen by; None if they are unknown.
        start: Launches a kernel.

    Returns:
        ``[rows, columns]``.
    """
    left, right = factors[0]
    rows, columns = left.size(0), right.size(1)
    few = expected is not None and expected <= tuning.TILES.few_rows
    weights = [_without_gaps(weight) for _, weight in factors]
    kind = "nothing" if added is None else "row" if added.dim() == 1 else "matrix"
    plan = plan_by_rows(left.dtype, few, tuple(way for _, way in weights), (kind, relu, gate is not None))
    ready = [_ready(weight, read, start) for (weight, _), read in zip(weights, plan.weights, strict=True)]
    matrices = [m for (matrix, _), weight in zip(factors, ready, strict=True) for m in (matrix, weight)]
    out = left.new_empty((rows, columns))
    given = [*matrices[:2], *matrices[-2:], *(left if one is None else one for one in (added, gate)), out]
    entry = plan.kernel.entry(_NAMES, [one.dtype for one in given], 1 + len(plan.numbers), plan.constants)
    programs = -(-rows // plan.rows) * plan.across
    return start(entry, given, [rows, *plan.numbers], programs, [len(given) - 1])[0]


def _without_gaps(weight: Tensor) -> tuple[Tensor, Way]:
    """Returns a weight as it lies in memory, contiguous, and its depth, its columns and their distances in memory."""
    depth, columns = (int(size) for size in weight.shape)
    down, across = weight.stride()
    transposed, _ = order_of((depth, columns, down, across))
    if transposed:
        return weight.t().contiguous(), (depth, columns, 1, depth)
    return weight.contiguous(), (depth, columns, columns, 1)


def _ready(weight: Tensor, read: Weight, start: Launch) -> Tensor:
    """Returns what a kernel reads of a weight without gaps: itself, or its three bfloat16 parts."""
    if read.becomes == "itself":
        return weight
    parts, block = weight.new_empty((3, *read.padded), dtype=torch.bfloat16), tuning.TILES.split_block
    entry = split_kernel.entry(("weight", "parts"), (weight.dtype, parts.dtype), 5, (read.transposed, block))
    numbers: list[Any] = [*(reversed(weight.shape) if read.transposed else weight.shape), read.pitch, *read.padded]
    return start(entry, [weight, parts], numbers, -(-read.padded[0] * read.padded[1] // block), [1])[0]
