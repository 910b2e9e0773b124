"""Packs the rows that an exchange sends, and adds the rows that arrive: by a Triton kernel on a GPU, else by torch.

Both move rows at the speed of the memory. On a GPU ``index_select`` and ``index_add_`` take two to three times as long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnncompile.device import device_of

_TILE, _WIDEST = 1024, 512
"""The elements that a program moves, and the most elements of a row that it moves."""

_MOVED = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32}
"""The types of rows that the kernel moves."""


def packed(x: Tensor, index: Tensor) -> Tensor:
    """Returns rows of `x`.

    Args:
        x: ``[rows, ...]``.
        index: The rows to return, int64 ``[number]``, known to be rows of `x`.

    Returns:
        ``[number, ...]``.
    """
    if not _by_kernel(x):
        return x.index_select(0, index)
    out = x.new_empty((index.size(0), *x.shape[1:]))
    move(out, x, index, adds=False)
    return out


def add_rows(out: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows to rows of `out`, in place.

    Args:
        out: ``[num_rows, ...]``.
        index: The rows of `out` to add to, int64 ``[number]``: each once, and known to be rows of `out`.
        rows: What to add, ``[number, ...]``, of the same type.
    """
    if _by_kernel(out) and rows.is_contiguous():
        move(out, rows, index, adds=True)
    else:
        out.index_add_(0, index, rows)


def _by_kernel(x: Tensor) -> bool:
    return device_of(x.device).has_streams and x.dtype in _MOVED and x.is_contiguous()


def move(out: Tensor, x: Tensor, index: Tensor, adds: bool) -> None:
    """Runs the kernel: copies row ``index[i]`` of `x` to row i of `out`, or adds row i of `x` to row ``index[i]``."""
    from gnncompile.codegen.triton.exchange_launch import launch  # imports Triton

    size, number = math.prod(x.shape[1:]), index.size(0)
    if size and number:
        width = min(1 << (size - 1).bit_length(), _WIDEST)
        tall = max(_TILE // width, 1)
        tiles = -(-number // tall) * -(-size // width)
        launch(out, x, index, tiles, (size, width, tall, adds))
