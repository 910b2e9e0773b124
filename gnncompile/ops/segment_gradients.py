"""Gradient formulas of the marker ops of :mod:`gnncompile.ops.segment`, made of marker ops.

They run on fake tensors only: while Dynamo traces a ``torch.autograd.grad`` of the model, and while
:mod:`gnncompile.passes.pre_grad.expand_gradients` replaces its marker.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.exc import InternalError
from gnncompile.ops.region import LIBRARY

_OPS: Any = torch.ops.gnncompile


def _keep_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    src, index, ctx.size, ctx.reduce = inputs
    ctx.save_for_backward(src, index, output)


def _reduce(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
    src, index, out = ctx.saved_tensors
    if ctx.reduce in ("max", "min"):
        chosen = (src == out.index_select(0, index)).to(src.dtype)
        # Ties share the gradient evenly. The initial zero of scatter_reduce takes part in a tie at zero.
        ties = _OPS.segment_reduce(chosen, index, ctx.size, "sum") + (out == 0).to(src.dtype)
        return chosen * (cotangent / ties).index_select(0, index), None, None, None
    if ctx.reduce == "mul":
        _shape_only("mul")
        return cotangent.index_select(0, index) * src, None, None, None
    if ctx.reduce == "mean":
        count = _OPS.segment_reduce(src.new_ones(src.size(0)), index, ctx.size, "sum").clamp(min=1)
        cotangent = cotangent / count.view([-1] + [1] * (src.dim() - 1))
    return cotangent.index_select(0, index), None, None, None


def _keep_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, ctx.size = inputs
    ctx.save_for_backward(index, output)


def _softmax(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
    index, out = ctx.saved_tensors
    weighted = out * cotangent
    total = _OPS.segment_reduce(weighted, index, ctx.size, "sum")
    return weighted - out * total.index_select(0, index), None, None


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.rate = inputs
    ctx.save_for_backward(seed)


def _dropout(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
    return _OPS.edge_dropout(cotangent, ctx.saved_tensors[0], ctx.rate), None, None


def _keep_adjacency(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _adjacency(ctx: Any, cotangent: Tensor) -> tuple[None, None, Tensor, None]:
    _shape_only("adjacency")
    row, col = ctx.saved_tensors
    return None, None, cotangent[row, col], None


def _shape_only(name: str) -> None:
    """Raises RuntimeError if a graph would record this gradient, which has the right shape but wrong values."""
    if _compat.recording_operations():
        raise InternalError(f"the marker op {name} was differentiated; the passes must write it out, please report it")


for _name, _formula, _keep in (
    ("segment_reduce", _reduce, _keep_reduce),
    ("segment_softmax", _softmax, _keep_softmax),
    ("edge_dropout", _dropout, _keep_dropout),
    ("adjacency", _adjacency, _keep_adjacency),
):
    torch.library.register_autograd(f"gnncompile::{_name}", _formula, setup_context=_keep, lib=LIBRARY)
