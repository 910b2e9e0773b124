"""Decompositions of torch's composite operations without comparisons of sizes, while gnncompile captures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.ops.opaque import opaque

aten = torch.ops.aten


def cdist(
    ordinary: Callable[..., Tensor], x1: Tensor, x2: Tensor, p: float = 2, compute_mode: int | None = None
) -> Any:
    """See :func:`torch.cdist`, which subtracts rows for up to 25 rows, and uses a matrix product for more."""
    if p != 2 or compute_mode in (1, 2) or x1.dtype != x2.dtype:
        return ordinary(x1, x2, p, compute_mode)
    return opaque("distances", (x1, x2))[0]


def attention(
    ordinary: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """See :func:`torch.nn.functional.scaled_dot_product_attention`, which compares sizes to see if a mask has all rows.

    For float64, the fake of the fused op has a wrong dtype for a tensor saved for its gradient, up to torch 2.12.
    """
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    if query.dtype is torch.float64 and torch.__version__ < "2.13":
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, query.new_zeros(()), -math.inf)
        plain = aten._scaled_dot_product_attention_math.default
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)[0]
    return ordinary(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def batch_norm(
    ordinary: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """See :func:`torch.nn.functional.batch_norm`, which compares sizes to find out whether there are rows.

    The statistics of zero rows are NaN. ``torch.where`` keeps them out of the running statistics and of the gradient of
    the weight, on the device.
    """
    values: Any = math.prod(size for dim, size in enumerate(x.shape) if dim != 1)
    settings = training, momentum, eps, cudnn_enabled
    if not training or isinstance(values, int):
        return ordinary(x, weight, bias, running_mean, running_var, *settings)
    # In float32, four times as large as the flag: with a larger dtype, the backward would be given the flag itself.
    occupied = torch.full((), values, dtype=torch.float32, device=x.device) > 0
    if weight is not None:
        weight = torch.where(occupied, weight, weight.detach())
    if running_mean is None or running_var is None:
        return ordinary(x, weight, bias, running_mean, running_var, *settings)
    mean, var = running_mean.clone(), running_var.clone()
    out = ordinary(x, weight, bias, mean, var, *settings)
    running_mean.copy_(torch.where(occupied, mean, running_mean))
    running_var.copy_(torch.where(occupied, var, running_var))
    return out


def variance(
    ordinary: Callable[..., Tensor], x: Tensor, dims: Sequence[int] | None, unbiased: bool, keepdim: bool, root: bool
) -> Tensor:
    """See :func:`torch.var` and, if `root`, :func:`torch.std`.

    Their gradients compare the number of values with the correction, or divide by the difference on the host. Here the
    device divides.
    """
    dims = list(dims) if dims else list(range(x.dim()))
    values: Any = math.prod(x.shape[dim] for dim in dims)
    if isinstance(values, int) or not (x.is_floating_point() and x.requires_grad):
        return ordinary()
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = (wide - wide.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    freedom = torch.full((), values, dtype=wide.dtype, device=x.device) - int(unbiased)
    found = squares / freedom.clamp(min=0)
    if root:  # the gradient of equal values is 0
        equal = found == 0
        found = torch.where(equal, found.detach(), torch.where(equal, 1, found).sqrt())
    return found.to(x.dtype)


def _decompose_variance(kind: Any, root: bool) -> None:
    def of_all(ordinary: Callable[..., Tensor], x: Tensor, unbiased: bool = True) -> Tensor:
        return variance(partial(ordinary, x, unbiased), x, None, unbiased, False, root)

    def of_dims(
        ordinary: Callable[..., Tensor], x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False
    ) -> Tensor:
        return variance(partial(ordinary, x, dim, unbiased, keepdim), x, dim, unbiased, keepdim, root)

    _compat.decompose(kind.default, of_all)
    _compat.decompose(kind.dim, of_dims)


def install() -> None:
    """Registers the decompositions with torch."""
    _compat.decompose(aten.cdist.default, cdist)
    _compat.decompose(aten.scaled_dot_product_attention.default, attention)
    _compat.decompose(aten.batch_norm.default, batch_norm)
    _decompose_variance(aten.var, root=False)
    _decompose_variance(aten.std, root=True)
