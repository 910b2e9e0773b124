"""Rows and columns of an edge list are followed through the operations that built it.

Before: ``select(cat([mark_dead(stack([row, col]), alive), loops], 1), 0, 1)``
After:  ``cat([mark_dead(col, alive), select(loops, 0, 1)])``
Why it pays: one index is one node wherever it is used, so regions and structure are shared by all layers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile.passes.context import Context, WrittenInput, aten, drop_unused, own, value


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, fx.Node) and source.target is aten.unbind.int and len(value(source)) == 2:
                axis = source.args[1] if len(source.args) > 1 else 0
                _replace(ctx, node, source.args[0], axis, node.args[1])
        elif node.op == "call_function" and node.target is aten.select.int:
            _replace(ctx, node, *node.args)
    drop_unused(ctx.graph)


def _replace(ctx: Context, node: fx.Node, source: Any, axis: Any, position: Any) -> None:
    if axis != 0 or not isinstance(position, int) or value(source).dim() != 2:
        return
    with ctx.graph.inserting_before(node):
        found = _row(ctx, source, position % 2 if _two(source) else position, node)
    if found is not None:
        node.replace_all_uses_with(found)


def _two(source: fx.Node) -> bool:
    return isinstance(value(source).shape[0], int) and value(source).shape[0] == 2


def _row(ctx: Context, source: fx.Node, position: int, at: fx.Node) -> fx.Node | None:
    """The 1-D tensor ``source[position]`` without building `source`, or None where it must be built."""
    if source.op != "call_function" or not _two(source):
        return None
    if source in ctx.written:
        parts = source.args[0] if source.target is aten.stack.default else ()
        if all(isinstance(p, fx.Node) and p.op == "placeholder" for p in parts) and parts:  # type: ignore[union-attr]
            raise WrittenInput
        return None
    if source.target is aten.stack.default and (len(source.args) == 1 or source.args[1] == 0):
        return source.args[0][position]  # type: ignore[index,return-value]
    if source.target is own.mark_dead.default:
        inner = _row_or_select(ctx, source.args[0], position, at)
        return ctx.call(own.mark_dead.default, inner, source.args[1], like=at)
    if source.target is aten.cat.default and len(source.args) > 1 and source.args[1] in (1, -1):
        parts = [_row_or_select(ctx, s, position, at) for s in source.args[0]]  # type: ignore[union-attr]
        return ctx.call(aten.cat.default, parts, like=at)
    return None


def _row_or_select(ctx: Context, source: Any, position: int, at: fx.Node) -> fx.Node:
    found = _row(ctx, source, position, at)
    return found if found is not None else ctx.call(aten.select.int, source, 0, position, like=at)


def alive_of(ctx: Context, index: fx.Node) -> fx.Node | None:
    """The mask of edges that are not dead, from how an index (or an edge list ``[2, num_edges]``) was built; None where
    all edges live.
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
