"""Products over all edges, ``left.T @ right``: the gradients of the weights of layers on edges."""

from __future__ import annotations

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import launch
from gnncompile.codegen.triton.tile import NARROWEST
from gnncompile.device import device_of


def write_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Writes ``left.T @ right``.

    Args:
        left: ``[edges, rows]``, contiguous.
        right: ``[edges, columns]``, contiguous, of the dtype of `left`. A single column stands for equal columns.
        out: ``[rows, columns]``, contiguous, of any floating dtype.
    """
    if _is_tuned(left, right):
        found = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
        launch.over_rows(launch.OverRows(left, right, found, None))
    elif out.dtype is left.dtype and out.shape == (left.size(1), right.size(1)):
        found = torch.mm(left.t(), right, out=out)
    else:
        found = left.t() @ right
    if found is not out:
        out.copy_(found)


def _is_tuned(left: Tensor, right: Tensor) -> bool:
    """Whether our product in bfloat16 parts is faster than the library's."""
    return (
        left.dtype is torch.float32
        and device_of(left.device).multiplies_in_parts
        and all(matrix.size(1) % 4 == 0 or matrix.size(1) >= NARROWEST for matrix in (left, right))
        and left.numel() * right.size(1) >= tuning.TILES.least_over_rows
    )
