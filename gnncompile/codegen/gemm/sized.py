"""Products with weights as launches that depend on sizes alone, so that a program can be traced. Imports Triton.

In a process, the number of rows of a call chooses the tile. A traced program keeps the tile for the rows of the traced
call. A product is a new tensor, also where a process would add it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import MOST_READ
from gnncompile.codegen.gemm.launch import Factors, ending, kind_of, plan_by_rows
from gnncompile.codegen.gemm.weights import Way, elements_of_parts, splitting, storage_order
from gnncompile.codegen.triton.hub_lists import Launch

_NAMES = ("left", "right", "other_left", "other_right", "added", "first", "second", "third", "out", "other_out")


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
    few = expected is not None and expected <= tuning.TILES.few_rows
    stored = [_stored(weight) for _, weight in factors]
    ends = kind_of(added), relu, ending(gate is not None)
    plan = plan_by_rows(left.dtype, few, tuple(way for _, way in stored), ends)
    weights = [
        weight if read.becomes == "itself" else in_parts(weight, way[:2], read.padded, read.transposed, start)
        for (weight, way), read in zip(stored, plan.weights, strict=True)
    ]
    out = left.new_empty((left.size(0), right.size(1)))
    given = [
        *(left, weights[0]),
        *(factors[-1][0], weights[-1]),  # of the second product; a single product stands here again, and is not read
        left if added is None else added,
        *[left if gate is None else gate] * MOST_READ,
        out,
        left,  # there is no second result
    ]
    entry = plan.kernel.entry(_NAMES, [one.dtype for one in given], 1 + len(plan.numbers), plan.constants)
    programs = -(-left.size(0) // plan.rows) * plan.across
    return start(entry, given, [left.size(0), *plan.numbers], programs, [_NAMES.index("out")])[0]


def _stored(weight: Tensor) -> tuple[Tensor, Way]:
    """Returns a weight as a contiguous tensor, transposed if its columns lie together, and how it lies in memory.

    A weight with gaps is copied here, so the plan finds none. So is one whose strides depend on sizes of the graph: to
    compare them would make these sizes numbers.
    """
    depth, columns = (int(size) for size in weight.shape)
    strides: Any = weight.stride()
    down, across = strides
    if not (isinstance(down, int) and isinstance(across, int)):
        return weight.clone(memory_format=torch.contiguous_format), (depth, columns, columns, 1)
    transposed, _ = storage_order((depth, columns, down, across))
    if transposed:
        return weight.t().contiguous(), (depth, columns, 1, depth)
    return weight.contiguous(), (depth, columns, columns, 1)


def in_parts(weight: Tensor, size: tuple[int, int], padded: tuple[int, int], transposed: bool, start: Launch) -> Tensor:
    """Returns a weight in two float16 parts: see :func:`gnncompile.codegen.gemm.scaled.split`.

    Args:
        weight: Contiguous, of any floating dtype.
        size: Its depth and its columns.
        padded: The size of a part.
        transposed: Whether its columns lie together.
        start: Launches a kernel.
    """
    parts = weight.new_empty(elements_of_parts(padded), dtype=torch.float16)
    numbers = [*size, size[0] if transposed else size[1], *padded]
    for kernel, programs, constants in splitting(size, padded, transposed):
        entry = kernel.entry(("weight", "parts"), (weight.dtype, parts.dtype), len(numbers), constants)
        parts = start(entry, [weight, parts], numbers, programs, [1])[0]
    return parts
