"""Arithmetic on gathered rows of which messages only read slices is computed slice by slice.

Before: ``a, b = (x[src] * linear(e, w)).split(n, dim=-1)``
After:  ``a = x[:, :n][src] * linear(e, w[:n])``, ``b = x[:, n:][src] * linear(e, w[n:])``
Why it pays: the regions that read the slices compute them in their walks. Otherwise the whole rows would be written for
each edge, and in the gradient the slices would be joined and written again.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, drop_unused, is_tensor, value
from gnncompile.passes.context import Context
from gnncompile.passes.pointwise import POINTWISE
from gnncompile.passes.pre_grad.message import makes_messages

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
"""Operations that take a tensor apart into slices."""

Columns = tuple[int, int]
"""The first column of a slice, and the column behind its last one."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        if node.target in POINTWISE and is_tensor(node) and value(node).dim() > 1:
            slices = _slices(ctx, node)
            if slices and all(map(makes_messages, slices)):
                _replace(ctx, node, slices)
    drop_unused(ctx.graph)


def _slices(ctx: Context, node: fx.Node) -> dict[fx.Node, Columns]:
    """Returns the slices along the last axis that read a value; empty if something else reads it, or the whole."""
    found: dict[fx.Node, Columns] = {}
    width = value(node).shape[-1]
    for user in node.users:
        if not isinstance(width, int) or not _is_free(ctx, user, node):
            return {}
        if user.target in SPLITS:
            if not _on_last_axis(user, 2) or any(part.target is not operator.getitem for part in user.users):
                return {}
            ends = [0]
            for part in value(user):
                ends.append(ends[-1] + int(part.shape[-1]))
            found.update({part: (ends[part.args[1]], ends[part.args[1] + 1]) for part in user.users})  # type: ignore
        elif user.target is aten.slice.Tensor and _on_last_axis(user, 1):
            start, stop, step = slice(*user.args[2:5]).indices(width)
            if step != 1:
                return {}
            found[user] = (start, max(start, stop))
        else:
            return {}
    whole = any(columns == (0, width) for columns in found.values())
    return {} if whole else {part: columns for part, columns in found.items() if part.users}


def _on_last_axis(node: fx.Node, place: int) -> bool:
    """Whether the axis that is argument `place` of a node is the last one."""
    dim: Any = node.args[place] if len(node.args) > place else 0
    dims = value(node.args[0]).dim()  # type: ignore[arg-type]
    return bool(dim % dims == dims - 1)


def _is_free(ctx: Context, node: fx.Node, top: fx.Node) -> bool:
    """Whether a node may be rewritten: nothing writes to it, and it runs in the modes of `top`."""
    return node.op == "call_function" and node not in ctx.written and ctx.same_mode(node, top)


def _replace(ctx: Context, top: fx.Node, slices: dict[fx.Node, Columns]) -> None:
    slicing = _Slicing(ctx, top)
    if not slicing.gathers:
        return
    for part, columns in slices.items():
        with ctx.graph.inserting_before(part):
            new = slicing.sliced(top, columns)
        if value(new).dtype == value(part).dtype:
            part.replace_all_uses_with(new)


class _Slicing:
    """Builds columns of a value from columns of what it is computed from.

    Attributes:
        inner: The operations that only compute the value `top`, and `top` itself.
        gathers: Whether some of them gather rows of a table.
    """

    def __init__(self, ctx: Context, top: fx.Node) -> None:
        self.ctx, self.top, self.width = ctx, top, int(value(top).shape[-1])
        self.inner = {top}
        todo = [top]
        while todo:
            node = todo.pop()
            for arg in node.all_input_nodes if node.target in POINTWISE else ():
                if self._is_inner(arg):
                    self.inner.add(arg)
                    todo.append(arg)
        self.gathers = any(node.target is aten.index_select.default for node in self.inner)

    def _is_inner(self, node: fx.Node) -> bool:
        if not is_tensor(node) or not self._is_wide(node) or not _is_free(self.ctx, node, self.top):
            return False
        if not self.inner.issuperset(node.users):
            return False
        if node.target is aten.index_select.default:
            return bool(node.args[1] == 0 and value(node).dim() > 1)
        return node.target is aten.linear.default or node.target in POINTWISE

    def _is_wide(self, node: fx.Node) -> bool:
        shape = value(node).shape
        return len(shape) > 0 and bool(isinstance(shape[-1], int) and shape[-1] == self.width)

    def sliced(self, arg: Any, columns: Columns) -> Any:
        """Returns columns of an argument; the argument itself if it is the same for all columns."""
        if not is_tensor(arg) or not self._is_wide(arg):
            return arg
        ctx, args = self.ctx, arg.args
        if arg not in self.inner:
            return ctx.call(aten.slice.Tensor, arg, -1, *columns, like=self.top)
        if arg.target is aten.index_select.default:
            table = ctx.call(aten.slice.Tensor, args[0], -1, *columns, like=arg)
            return ctx.call(aten.index_select.default, table, 0, args[2], like=arg)
        if arg.target is aten.linear.default:
            weight, *bias = (ctx.call(aten.slice.Tensor, a, 0, *columns, like=arg) for a in args[1:] if a is not None)
            product = ctx.call(aten.linear.default, args[0], weight, like=arg)
            return ctx.call(aten.add.Tensor, product, bias[0], like=arg) if bias else product
        kwargs = {name: self.sliced(given, columns) for name, given in arg.kwargs.items()}
        return ctx.call(arg.target, *(self.sliced(a, columns) for a in args), like=arg, **kwargs)
