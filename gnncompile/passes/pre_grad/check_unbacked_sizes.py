"""Data-dependent sizes that the capture took to be equal to other sizes are checked at run time.

Before: ``y = x[mask]; z = x + y``, captured for a mask that selects all rows
After:  ``y = x[mask]; assert y.size(0) == x.size(0); z = x + y``
Why it pays: it does not. Tracing to aten ops drops such a check, since both sizes have one symbol by then. Without the
check a kernel would read rows that do not exist.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.layout.structure_program import ADVICE
from gnncompile.passes.analysis import aten, drop_unused, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad.normalize_sizes import Symbols


def run(ctx: Context) -> None:
    """Adds the checks to the graph."""
    places, assumed = Symbols(ctx), []
    for node in list(ctx.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_scalar.default and getattr(node.args[0], "target", None) is operator.eq:
            node.args = (node.args[0], ADVICE)
        for dim, size in _sizes(node):
            symbol, meaning = _compat.own_symbol(size), size.node.expr
            if symbol is None or symbol in places.bound:
                continue
            with ctx.graph.inserting_after(node):
                number = node if dim is None else _size(ctx, node, dim)
            places.bound[symbol] = number
            if symbol != meaning:
                assumed.append((number, meaning))
    for number, meaning in assumed:
        _check(ctx, places, number, meaning)
    drop_unused(ctx.graph)


def _sizes(node: fx.Node) -> list[tuple[int | None, torch.SymInt]]:
    """Returns the symbolic sizes of a tensor with their dimensions, or a symbolic number with None."""
    found = node.meta.get("val")
    sizes: list[Any] = list(enumerate(found.shape)) if isinstance(found, torch.Tensor) else [(None, found)]
    return [(dim, size) for dim, size in sizes if isinstance(size, torch.SymInt)]


def _size(ctx: Context, node: fx.Node, dim: int) -> fx.Node:
    size = ctx.graph.call_function(aten.sym_size.int, (node, dim))
    size.meta["val"] = value(node).shape[dim]
    return size


def _check(ctx: Context, places: Symbols, number: fx.Node, meaning: Any) -> None:
    """Asserts at run time that a size equals the expression that the capture assumed."""
    last = [number, *(places.bound[s] for s in meaning.free_symbols if s in places.bound)]
    after = max((n for n in last if n.op != "placeholder"), default=number)
    marker = after.next
    with ctx.graph.inserting_before(marker):
        expected = places.expression(meaning)
        if expected is not None:
            equal = ctx.call(operator.eq, number, expected)
            ctx.call(aten._assert_scalar.default, equal, ADVICE)
