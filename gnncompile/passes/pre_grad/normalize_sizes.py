"""Sizes and constant tensors are computed from the graph's inputs, not from intermediate tensors.

Before: ``x_j = x[col]; ones = new_ones(x_j, [sym_size(x_j, 0)])``
After:  ``ones = full([num_edges], 1.0)``
Why it pays: structure (degrees, self loops) that only borrowed a dtype or a size from the features can be hoisted.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from gnncompile.passes.analysis import aten, drop_unused, own, value
from gnncompile.passes.context import Context

_FILLS = {
    "zeros": 0,
    "ones": 1,
    "new_zeros": 0,
    "zeros_like": 0,
    "new_ones": 1,
    "ones_like": 1,
    "new_full": None,
    "full_like": None,
}


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    names = Symbols(ctx)
    for node in list(ctx.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.sym_size.int or node.target is own.num_segments.default:
            with ctx.graph.inserting_before(node):
                size = names.node(value(node))
            if isinstance(size, fx.Node) and size is not node:
                node.replace_all_uses_with(size)
            elif isinstance(size, int):
                _replace(node, size)
        elif node.target is aten.slice.Tensor:
            _end(ctx, names, node)
        elif isinstance(node.target, torch._ops.OpOverload):
            _fill(ctx, names, node)
    for node in list(ctx.graph.nodes):
        if node.target is own.sized.default:
            node.replace_all_uses_with(node.args[0])
    drop_unused(ctx.graph)


def _replace(node: fx.Node, number: int) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: number if n is node else n)


def _end(ctx: Context, names: Symbols, node: fx.Node) -> None:
    """Replaces an open end of a slice by the size. For a write to the slice, Inductor compares the end with the size.

    A slice of all rows is removed.
    """
    given: list[Any] = list(node.args)
    source, dim, start, end, step = given + [0, None, None, 1][len(given) - 1 :]
    if isinstance(end, fx.Node) or (end is not None and end < sys.maxsize):
        return
    if start in (None, 0) and step == 1 and source.op == "call_function" and all(u.op != "output" for u in node.users):
        node.replace_all_uses_with(source)
        return
    with ctx.graph.inserting_before(node):
        size = names.node(value(source).shape[dim])
    if size is not None:
        node.args = (source, dim, start, size, step)


def _fill(ctx: Context, names: Symbols, node: fx.Node) -> None:
    kind = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if kind not in _FILLS:
        return
    number: Any = _FILLS[kind]
    if number is None:
        number = node.args[-1]
    if isinstance(number, fx.Node):
        return
    fake = value(node)
    with ctx.graph.inserting_before(node):
        size = [names.node(s) for s in fake.shape]
        if any(s is None for s in size):
            return
        if fake.dtype == torch.bool:
            number = bool(number)
        elif fake.dtype.is_floating_point:
            number = float(number)
        new = ctx.call(aten.full.default, size, number, dtype=fake.dtype, device=fake.device, like=node)
    node.replace_all_uses_with(new)
    ctx.graph.erase_node(node)


class Symbols:
    """Makes nodes for symbolic sizes from the graph's inputs."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.bound: dict[sympy.Symbol, fx.Node] = {}
        inputs = [n for n in ctx.graph.nodes if n.op == "placeholder"]
        for node in inputs:
            if isinstance(node.meta["val"], torch.SymInt):
                self._bind(node.meta["val"], node)
        with ctx.graph.inserting_after(inputs[-1]) if inputs else ctx.graph.inserting_before():
            for node in inputs:
                if isinstance(node.meta["val"], torch.Tensor):
                    for axis, size in enumerate(node.meta["val"].shape):
                        if self._unbound(size):
                            self._bind(size, ctx.call(aten.sym_size.int, node, axis))

    def _unbound(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in self.bound

    def _bind(self, size: Any, node: fx.Node) -> None:
        if size.node.expr.is_Symbol:
            self.bound.setdefault(size.node.expr, node)

    def node(self, size: Any) -> Any:
        """Returns a node or an int that equals `size`, or None if the inputs do not determine it."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self.expression(size.node.expr)

    def expression(self, expr: sympy.Expr) -> Any:
        """Returns a node or an int that equals an expression of symbols, or None."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self.bound.get(expr)
        if not (expr.is_Add or expr.is_Mul):
            return None
        parts = [self.expression(e) for e in expr.args]
        if any(p is None for p in parts):
            return None
        op = operator.add if expr.is_Add else operator.mul
        total = parts[0]
        for part in parts[1:]:
            if isinstance(total, int) and isinstance(part, int):
                total = op(total, part)
            else:
                total = self.ctx.call(op, total, part)
        return total


def size_node(ctx: Context, table: fx.Node, at: fx.Node, axis: int = 0) -> Any:
    """Returns the size of a table along an axis: a number, or a node that is known before `at`.

    Equal sizes get the same node, since regions share a layout only if its arguments are the same nodes.
    """
    rows = value(table).shape[axis]
    if isinstance(rows, int):
        return rows
    key = f"size {rows}"
    known = ctx.shared_nodes.get(key)
    if known is None or at < known:
        size = Symbols(ctx).node(rows)
        known = size if size is not None else ctx.call(aten.sym_size.int, table, axis)
        ctx.shared_nodes[key] = known
    return known


def number_of(number: Any) -> Any:
    """Returns the (symbolic) number of a size, which may be a node."""
    return value(number) if isinstance(number, fx.Node) else number
