"""A row of an edge list is taken from the tensors that the edge list was built from.

Before: ``select(cat([mark_dead(stack([row, col]), alive), loops], 1), 0, 1)``
After:  ``cat([mark_dead(col, alive), select(loops, 0, 1)])``
Why it pays: one index is one node wherever it is used, so regions and structure are shared by all layers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, drop_unused, is_tensor, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import written_input
from gnncompile.passes.pre_grad.indices import COPIES


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        taken = _taken(node)
        if taken is None or value(taken[0]).dim() != 2:
            continue
        source, axis, position = taken
        with ctx.graph.inserting_before(node):
            position = position % 2 if _two(source, axis) else position
            found = row_of(ctx, source, position, node, axis) if node not in ctx.written else None
        if found is not None:
            node.replace_all_uses_with(found)
    drop_unused(ctx.graph)


def _taken(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Returns the edge list, the axis and the index of the row that a node takes, or None for other nodes."""
    args: Any = node.args
    if node.target is operator.getitem:
        made = args[0]
        if isinstance(made, fx.Node) and made.target is aten.unbind.int and len(value(made)) == 2:
            return made.args[0], (made.args[1] if len(made.args) > 1 else 0) % 2, args[1]  # type: ignore[return-value,operator]
        return None
    if node.op != "call_function" or not args or not is_tensor(args[0]):
        return None
    if node.target is aten.select.int:
        single = _single(args[0]) if args[2] in (0, -1) else None
        if single is not None and args[1] % value(args[0]).dim() == single[1]:
            return single
        return (args[0], args[1] % 2, args[2]) if isinstance(args[2], int) and value(args[0]).dim() == 2 else None
    if node.target in _TO_ONE_AXIS and value(node).dim() == 1:
        return _single(args[0])
    return None


_TO_ONE_AXIS = (aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.reshape.default)


def _single(node: Any) -> tuple[fx.Node, int, int] | None:
    """Returns the edge list, the axis and the index of a row that a node keeps as ``[1, num_edges]``, or None."""
    args: Any = node.args
    if node.target is aten.slice.Tensor and value(args[0]).dim() == 2 and len(args) == 4:
        source, axis, start, _ = args
        if isinstance(start, int) and isinstance(value(node).shape[axis], int) and value(node).shape[axis] == 1:
            return source, axis % 2, start
    if node.target is operator.getitem and args[0].target in (aten.split.Tensor, aten.chunk.default):
        source, count, *axis = args[0].args
        each = count if args[0].target is aten.split.Tensor else 2 // max(count, 1)
        if value(source).dim() == 2 and each == 1:
            return source, (axis or [0])[0] % 2, args[1]
    return None


def _two(source: fx.Node, axis: int = 0) -> bool:
    return isinstance(value(source).shape[axis], int) and value(source).shape[axis] == 2


def row_of(ctx: Context, source: Any, position: int, at: fx.Node, axis: int = 0) -> fx.Node | None:
    """Returns the 1-D ``source[position]`` along an axis without building `source`, or None if it must be built."""
    args: Any = source.args
    if source.op != "call_function" or not _two(source, axis):
        return None
    if source in ctx.written:
        parts = args[0] if source.target is aten.stack.default else ()
        if all(isinstance(p, fx.Node) and p.op == "placeholder" for p in parts) and parts:
            raise written_input()
        return None
    if source.target is aten.stack.default and (args[1] if len(args) > 1 else 0) % 2 == axis:
        return args[0][position]  # type: ignore[no-any-return]
    if source.target is own.mark_dead.default and axis == 0:
        inner = _row_or_select(ctx, args[0], position, at, axis)
        return ctx.call(own.mark_dead.default, inner, args[1], like=at)
    if source.target is aten.cat.default and len(args) > 1 and args[1] % 2 == 1 - axis:
        return ctx.call(aten.cat.default, [_row_or_select(ctx, s, position, at, axis) for s in args[0]], like=at)
    if not args or args[0] in ctx.written or not is_tensor(args[0]) or value(args[0]).dim() != 2:
        return None
    if source.target in COPIES:
        inner = _row_or_select(ctx, args[0], position, at, axis)
        return ctx.call(source.target, inner, *args[1:], like=at, **source.kwargs)
    if source.target is aten.t.default or (source.target is aten.transpose.int and args[1] % 2 != args[2] % 2):
        return _row_or_select(ctx, args[0], position, at, 1 - axis)
    if source.target is aten.flip.default and [dim % 2 for dim in args[1]] == [axis]:
        return _row_or_select(ctx, args[0], 1 - position, at, axis)
    return None


def _row_or_select(ctx: Context, source: Any, position: int, at: fx.Node, axis: int = 0) -> fx.Node:
    found = row_of(ctx, source, position, at, axis)
    return found if found is not None else ctx.call(aten.select.int, source, axis, position, like=at)


def alive_of(ctx: Context, index: fx.Node) -> fx.Node | None:
    """Returns the mask of live edges of an index or of an edge list ``[2, num_edges]``; None if all edges live.

    The mask is found by following the operations that built the index.
    """
    if index.op != "call_function":
        return None
    if index.target is own.mark_dead.default:
        inner, alive = alive_of(ctx, index.args[0]), index.args[1]  # type: ignore[arg-type]
        return alive if inner is None else ctx.call(aten.logical_and.default, inner, alive)  # type: ignore[return-value]
    if index.target is aten.cat.default and _joins_edges(index):
        parts: list[fx.Node] = list(index.args[0])  # type: ignore[arg-type]
        masks = [alive_of(ctx, p) for p in parts]
        if all(m is None for m in masks):
            return None
        filled = [m if m is not None else _all_alive(ctx, p) for m, p in zip(masks, parts, strict=True)]
        return ctx.call(aten.cat.default, filled)
    return None


def _joins_edges(node: fx.Node) -> bool:
    axis = node.args[1] if len(node.args) > 1 else 0
    return value(node).dim() == 1 or (value(node).dim() == 2 and axis in (1, -1))


def _all_alive(ctx: Context, index: fx.Node) -> fx.Node:
    fake = value(index)
    length = ctx.call(aten.sym_size.int, index, fake.dim() - 1)
    return ctx.call(aten.full.default, [length], True, dtype=torch.bool, device=fake.device)
