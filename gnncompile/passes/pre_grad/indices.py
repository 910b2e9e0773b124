"""Finds the index of rows ``[num_items]`` that a tensor of indices repeats or reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, guarded_same, is_one, is_tensor, same_size, value
from gnncompile.passes.context import Context

COPIES = {
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.other,
    aten.to.dtype_layout,
    aten._to_copy.default,
}
"""Operations that return the same integers, perhaps in a new tensor or another dtype."""

_INTEGERS = (torch.int64, torch.int32)


def is_index(node: Any) -> bool:
    """Whether a node is a tensor of indices ``[num_items]``."""
    return is_tensor(node) and value(node).dim() == 1 and value(node).dtype in _INTEGERS


def uncopied(ctx: Context, node: fx.Node) -> fx.Node:
    """Returns the integer tensor that a node copies, if it is on the same device and nothing writes to it."""
    while node.op == "call_function" and node.target in COPIES and node not in ctx.written:
        inner: Any = node.args[0]
        same = is_tensor(inner) and value(inner).dtype in _INTEGERS and value(inner).device == value(node).device
        if not same or inner in ctx.written:
            break
        node = inner
    return node


def index_along(ctx: Context, node: Any, axis: int) -> fx.Node | None:
    """Returns the index ``[num_items]`` along `axis` that `node` repeats along all other axes, or None."""
    if not is_tensor(node) or value(node).dtype not in _INTEGERS:
        return None
    node = uncopied(ctx, node)
    whole = node if value(node).dim() == 1 else None
    if node.op != "call_function" or node in ctx.written:
        return whole
    found = _before(node, axis)
    if found is None:
        return whole
    inner, at = found
    before, after = value(inner).shape, value(node).shape
    if at < 0 or at >= len(before) or inner in ctx.written or not same_size(before[at], after[axis]):
        return whole
    return index_along(ctx, inner, at) or whole


def _before(node: fx.Node, axis: int) -> tuple[Any, int] | None:
    """Returns the tensor that a node repeats or reshapes, and the axis there that corresponds to `axis`. Else None."""
    args: Any = node.args
    target, rank = node.target, value(node).dim()
    if target in (aten.stack.default, aten.cat.default):
        return _joined(args, axis, rank, stacked=target is aten.stack.default)
    if not args or not is_tensor(args[0]):
        return None
    inner = args[0]
    before = value(inner).dim()
    if target in (aten.expand.default, aten.expand_as.default, aten.broadcast_to.default):
        return inner, axis - (rank - before)
    if target is aten.repeat.default:
        return (inner, axis - (rank - before)) if is_one(args[1][axis]) else None
    if target is aten.repeat_interleave.self_int and len(args) > 2 and args[2] is not None:
        return (inner, axis) if args[2] % rank != axis else None
    if target is aten.unsqueeze.default:
        at = args[1] % rank
        return (inner, axis - (at < axis)) if at != axis else None
    if target in (aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.flatten.using_ints):
        return _reshaped(inner, node, axis)
    if target is aten.t.default:
        return inner, 1 - axis
    if target is aten.transpose.int:
        one, other = args[1] % rank, args[2] % rank
        return inner, {one: other, other: one}.get(axis, axis)
    if target is aten.permute.default:
        return inner, args[1][axis] % rank
    return None


def _joined(args: Any, axis: int, rank: int, stacked: bool) -> tuple[Any, int] | None:
    """The case of :func:`_before` for a concatenation or stack of one tensor with itself."""
    parts, at = args[0], (args[1] if len(args) > 1 else 0) % rank
    if at == axis or any(part is not parts[0] for part in parts):
        return None
    return parts[0], axis - (stacked and at < axis)


def _reshaped(inner: Any, node: fx.Node, axis: int) -> tuple[Any, int] | None:
    """The case of :func:`_before` for a reshape. An axis is kept if all axes before it are kept."""
    before, after = value(inner).shape, value(node).shape
    wide = [k for k, size in enumerate(before) if not is_one(size)]
    others = [size for k, size in enumerate(after) if k != axis]
    if len(wide) <= 1 and all(map(is_one, others)):
        return inner, wide[0] if wide else 0
    front = len(before) > axis and all(map(same_size, before[:axis], after[:axis]))
    return (inner, axis) if front else None


def fits(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two shapes are equal. If they are equal only now, a guard recompiles for other shapes."""
    return len(sizes) == len(others) and all(map(guarded_same, sizes, others))
