"""Replacements for operations while :mod:`gnncompile.passes.pre_grad.expand_gradients` differentiates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.ops import higher_order
from gnncompile.ops.segment import segment_reduce
from gnncompile.passes.analysis import aten, own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Any:
        ctx.save_for_backward(index)
        ctx.rows = table.size(0)
        return aten.index_select.default(table, 0, index)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return own.segment_reduce.default(cotangent, index, ctx.rows, "sum"), None


def _index_select(table: Tensor, dim: int, index: Tensor) -> Any:
    if dim == 0 and table.dim() > 0 and index.dim() == 1:
        return cast(Any, _Gather).apply(table, index)
    return aten.index_select.default(table, dim, index)


def _segment_reduce(rows: Tensor, index: Tensor, size: Any, reduce: str) -> Any:
    return (
        segment_reduce(rows, index, size, reduce)
        if reduce == "mul"
        else own.segment_reduce.default(rows, index, size, reduce)
    )


def _batch_norm(
    rows: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool
) -> Any:
    """Batch norm that does not update the running statistics, since the forward has already updated them."""
    if not training:
        return aten.batch_norm.default(rows, weight, bias, mean, var, training, momentum, eps, cudnn)
    others = [axis for axis in range(rows.dim()) if axis != 1]
    shape = [1, -1] + [1] * (rows.dim() - 2)
    return _normalised(rows, others, weight, bias, eps, shape)


def _layer_norm(
    rows: Tensor, sizes: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> Tensor:
    return _normalised(rows, list(range(-len(sizes), 0)), weight, bias, eps, list(sizes))


def _normalised(rows: Tensor, axes: list[int], weight: Any, bias: Any, eps: float, shape: list[Any]) -> Tensor:
    """A norm in plain arithmetic: in torch, the second gradients of norms treat sizes as constants."""
    centred = rows - rows.mean(axes, keepdim=True)
    out = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


RULES: dict[Any, Callable[..., Any]] = {
    aten.index_select.default: _index_select,
    own.segment_reduce.default: _segment_reduce,
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
    own.nested.default: higher_order.call,
}

_BACKWARDS = (
    aten.sigmoid_backward,
    aten.tanh_backward,
    aten.threshold_backward,
    aten.leaky_relu_backward,
    aten.elu_backward,
    aten.silu_backward,
    aten.softplus_backward,
    aten.gelu_backward,
    aten.hardtanh_backward,
    aten.hardswish_backward,
    aten.hardsigmoid_backward,
    aten.mish_backward,
    aten.log_sigmoid_backward,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.slice_backward,
    aten.select_backward,
)

TABLE: dict[Any, Callable[..., Any]] = _compat.get_decompositions(_BACKWARDS)
"""Decompositions of backward operations into plain arithmetic, which regions can compute."""
