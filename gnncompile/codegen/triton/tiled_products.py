"""Products over all edges, ``left.T @ right``: the gradients of the weights of layers on edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import launch
from gnncompile.codegen.triton.tile import NARROWEST
from gnncompile.device import HALVES, device_of


class EdgeProduct(NamedTuple):
    """A product over all edges.

    Attributes:
        left: ``[edges, rows]``, contiguous.
        right: ``[edges, columns]``, contiguous, of the dtype of `left`. A single column stands for equal columns.
        out: ``[rows, columns]``, contiguous, of any floating dtype.
    """

    left: Tensor
    right: Tensor
    out: Tensor


def write_products(products: Sequence[EdgeProduct]) -> None:
    """Writes products over the same edges. In 16 bits, two narrow ones share their launches."""
    waiting: dict[torch.dtype, EdgeProduct] = {}
    for one in products:
        if not _joins(one):
            _write(one)
        elif one.out.dtype in waiting:
            launch.over_rows(launch.OverRows(*waiting.pop(one.out.dtype), None), launch.OverRows(*one, None))
        else:
            waiting[one.out.dtype] = one
    for one in waiting.values():
        _write(one)


def _write(product: EdgeProduct) -> None:
    left, right, out = product
    if _is_tuned(left, right):
        launch.over_rows(launch.OverRows(left, right, out, None))
    elif out.dtype is left.dtype and out.shape == (left.size(1), right.size(1)):
        torch.mm(left.t(), right, out=out)
    else:
        out.copy_(left.t() @ right)


def _joins(product: EdgeProduct) -> bool:
    """Whether a product is faster in a launch with another one."""
    widths = product.left.size(1), product.right.size(1)
    return _is_tuned_half(product.left, *widths) and max(widths) <= tuning.HALF_PRODUCTS.widest


def _is_tuned(left: Tensor, right: Tensor) -> bool:
    """Whether our product is faster than the library's."""
    widths = left.size(1), right.size(1)
    if left.numel() * widths[1] < tuning.TILES.least_over_rows:
        return False
    if left.dtype in HALVES:
        return _is_tuned_half(left, *widths) and tuning.HALF_PRODUCTS.pays_alone(*widths)
    return (
        left.dtype is torch.float32
        and device_of(left.device).multiplies_in_parts
        and all(width % 4 == 0 or width >= NARROWEST for width in widths)
    )


def _is_tuned_half(left: Tensor, *widths: int) -> bool:
    """Whether our kernels for 16 bits take matrices of these widths. Without edges there is nothing to launch."""
    return (
        left.dtype in HALVES
        and left.size(0) > 0
        and device_of(left.device).has_tuned_products
        and min(widths) >= NARROWEST
    )
