"""Masked reductions over padded rows. Each function is inlined into the graph in place of an operation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnncompile.device import HALVES


def cleared(x: Tensor, mask: Tensor, fill: float | bool = 0) -> Tensor:
    """Returns the tensor with its padded rows filled; `mask` is broadcast to the shape of `x`."""
    return torch.where(mask, x, torch.full((), fill, dtype=x.dtype, device=x.device))


def total(x: Tensor, mask: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Returns the sum of the valid rows."""
    return cleared(x, mask).sum(dims, keepdim, dtype=dtype)


def mean(x: Tensor, mask: Tensor, number: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Returns the mean of the valid rows; `number` counts them, or the valid pairs of padded rows and columns."""
    others = math.prod(x.shape[d] for d in dims if mask.shape[d] == 1)
    wide = x.float() if x.dtype in HALVES else x
    return (cleared(wide, mask).sum(dims, keepdim) / (number.to(wide.dtype) * others)).to(x.dtype)


def variance(
    x: Tensor, mask: Tensor, number: Tensor, dims: list[int], keepdim: bool, correction: float, root: bool
) -> Tensor:
    """Returns the variance of the valid rows, or its square root if `root`."""
    others = math.prod(x.shape[d] for d in dims if mask.shape[d] == 1)
    wide = x.float() if x.dtype in HALVES else x
    many = number.to(wide.dtype) * others
    centre = cleared(wide, mask).sum(dims, True) / many
    found = cleared(wide - centre, mask).square().sum(dims, keepdim) / (many - correction).clamp(min=0)
    return (found.sqrt() if root else found).to(x.dtype)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mask: Tensor,
    number: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """:func:`torch.nn.functional.batch_norm` in training, with the statistics of the valid rows.

    The running statistics are updated from the valid rows too; without valid rows they stay as they are.
    """
    dims = [0, *range(2, x.dim())]
    shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
    wide = x.float() if x.dtype in HALVES else x
    many = number.clamp(min=1).to(wide.dtype) * math.prod(x.shape[2:])
    centre = cleared(wide, mask).sum(dims) / many
    centred = wide - centre.view(shape)
    spread = cleared(centred, mask).square().sum(dims) / many
    if running_mean is not None and running_var is not None:
        unbiased = spread.detach() * (many / (many - 1))
        for running, new in ((running_mean, centre.detach()), (running_var, unbiased)):
            moved = running * (1 - momentum) + new.to(running.dtype) * momentum
            running.copy_(torch.where(number > 0, moved, running))
    out = centred * torch.rsqrt(spread + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(x.dtype)


NONE, MEAN, SUM = 0, 1, 2
"""The reductions of a loss, as torch numbers them."""


def reduced(losses: Tensor, mask: Tensor, number: Tensor, reduction: int) -> Tensor:
    """Returns the sum or mean of the losses of valid rows."""
    dims = list(range(losses.dim()))
    if reduction == SUM:
        return total(losses, mask, dims, False, None)
    return mean(losses, mask, number, dims, False)


def ignored(target: Tensor, mask: Tensor, index: int) -> Tensor:
    """Returns the target classes, with the ignored class in padded rows."""
    return torch.where(mask, target, torch.full((), index, dtype=target.dtype, device=target.device))


def places(mask: Tensor, more: int) -> Tensor:
    """Returns the indices where a mask is True, the other indices, and `more` zeros: int64 ``[rows + more, 1]``."""
    rows = torch.arange(mask.shape[0], device=mask.device)
    true = mask.cumsum(0)
    place = torch.where(mask, true - 1, true[-1] + rows - true)
    return torch.zeros(mask.shape[0] + more, dtype=torch.int64, device=mask.device).scatter(0, place, rows).unsqueeze(1)
