"""Reductions along any dimension, with any number of feature axes, become reductions that regions support.

Before: ``zeros.index_add(1, dst, z[:, src] * w)``, with ``z: [batch, nodes, channels]``;
        ``segment_reduce(t[src] * w, ...)``, with ``t: [nodes, channels, 3, 3]`` and ``w: [edges, channels, 1, 1]``
After:  ``segment_reduce(z.permute(1, 0, 2)[src] * w, dst, n, "sum").permute(1, 0, 2)``;
        ``segment_reduce(t.view(-1, channels, 9)[src] * w.view(-1, channels, 1), ...).view(-1, channels, 3, 3)``
Why it pays: a batch axis is one more feature axis of the same edges, and elementwise arithmetic does not depend on the
number of axes. One region replaces rows per edge for every graph in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import aten, drop_unused, guarded_same, is_one, is_tensor, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.pointwise import POINTWISE
from gnncompile.passes.pre_grad.canonicalize import Reduction, gather_of, reduction_of
from gnncompile.passes.pre_grad.message import MAX_WIDTH
from gnncompile.passes.pre_grad.normalize_sizes import size_node

MOST_AXES = 2
"""The most feature axes of a region."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        found = reduction_of(ctx, node)
        new = _edges_first(ctx, found) if found is not None and found.dim > 0 else None
        if new is not None:
            node.replace_all_uses_with(new)
    drop_unused(ctx.graph)
    for node in ctx.graph.find_nodes(op="call_function", target=own.segment_reduce.default):
        if value(node).dim() - 1 > MOST_AXES:
            _flatten(ctx, node)
    drop_unused(ctx.graph)


def _edges_first(ctx: Context, found: Reduction) -> fx.Node | None:
    """Returns a reduction along dimension `found.dim` as one along the first; None where a region would not pay."""
    shape, dim = value(found.src).shape, found.dim
    widths = [_compat.size_now(size) for k, size in enumerate(shape) if k != dim]
    known = [width for width in widths if width is not None]
    if len(known) < len(widths) or not 0 < math.prod(known) <= MAX_WIDTH:
        return None
    with ctx.graph.inserting_before(found.node):
        moved = _EdgesFirst(ctx, found.node, len(shape), dim, shape[dim])
        src = moved.of(found.src)
        if not moved.gathers:
            return None
        size = size_node(ctx, found.base, found.node, dim)
        reduced = ctx.call(own.segment_reduce.default, src, found.index, size, found.reduce, like=found.node)
        back = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
        reduced = ctx.call(aten.permute.default, reduced, back, like=found.node)
        # The user may take a view of the result, which needs contiguous memory.
        reduced = ctx.call(aten.clone.default, reduced, like=found.node, memory_format=torch.contiguous_format)
        return found.onto_base(ctx, reduced)


class _Elementwise:
    """Computes the message of a reduction again, from tensors with moved or merged axes."""

    def __init__(self, ctx: Context, at: fx.Node) -> None:
        self.ctx, self.at = ctx, at
        self.gathers = 0
        self.known: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """Returns the node with the new axes."""
        if node not in self.known:
            self.known[node] = self._operation(node) or self.leaf(node)
        return self.known[node]

    def _operation(self, node: fx.Node) -> fx.Node | None:
        ctx = self.ctx
        if node.op != "call_function" or node in ctx.written or not ctx.same_mode(node, self.at):
            return None
        gather = self.gather(node)
        if gather is not None:
            self.gathers += 1
            return gather
        if node.target in POINTWISE or node.target is aten.dropout.default:
            args = [self.operand(a, node) if is_tensor(a) else a for a in node.args]
            return None if any(a is None for a in args) else ctx.call(node.target, *args, like=node, **node.kwargs)  # type: ignore[arg-type]
        return self.other(node)

    def leaf(self, node: fx.Node) -> fx.Node:
        """Returns a tensor that no rule here computes, with the new axes."""
        raise NotImplementedError

    def gather(self, node: fx.Node) -> fx.Node | None:
        """Returns the gather with the new axes, or None if the node is no gather."""
        raise NotImplementedError

    def operand(self, arg: Any, of: fx.Node) -> fx.Node | None:
        """Returns an operand of a pointwise operation with the new axes. The operand may have fewer axes."""
        raise NotImplementedError

    def other(self, node: fx.Node) -> fx.Node | None:
        """Returns an operation along single axes with the new axes, or None if it is not supported."""
        return None


class _EdgesFirst(_Elementwise):
    """Moves the edge axis of the tensors of a message to the front."""

    def __init__(self, ctx: Context, at: fx.Node, rank: int, dim: int, edges: Any) -> None:
        super().__init__(ctx, at)
        self.rank, self.dim, self.edges = rank, dim, edges

    def leaf(self, node: fx.Node) -> fx.Node:
        return self._front(node, self.dim)

    def _front(self, node: fx.Node, axis: int) -> fx.Node:
        if axis == 0:
            return node
        order = [axis, *(k for k in range(value(node).dim()) if k != axis)]
        return self.ctx.call(aten.permute.default, node, order, like=self.at)

    def gather(self, node: fx.Node) -> fx.Node | None:
        found = gather_of(self.ctx, node) if value(node).dim() == self.rank else None
        if found is None or found.dim != self.dim or found.table in self.ctx.written:
            return None
        return self.ctx.call(aten.index_select.default, self.leaf(found.table), 0, found.index, like=node)

    def operand(self, arg: Any, of: fx.Node) -> fx.Node | None:
        missing = self.rank - value(arg).dim()
        if value(of).dim() != self.rank:
            return None
        if missing == 0:
            wide = same_size(value(arg).shape[self.dim], self.edges)
            return self.of(arg) if wide else self.leaf(arg)
        if self.dim < missing:
            return arg  # type: ignore[no-any-return]  # features alone
        front = self._front(arg, self.dim - missing)
        for _ in range(missing):
            front = self.ctx.call(aten.unsqueeze.default, front, 1, like=self.at)
        return front

    def other(self, node: fx.Node) -> fx.Node | None:
        args: Any = node.args
        if value(node).dim() != self.rank or self.dim == self.rank - 1:
            return None
        if node.target is aten.linear.default and value(args[0]).dim() == self.rank:
            return self.ctx.call(node.target, self.of(args[0]), *args[1:], like=node)
        if node.target is aten.cat.default and (args[1] if len(args) > 1 else 0) % self.rank == self.rank - 1:
            return self.ctx.call(node.target, [self.of(part) for part in args[0]], -1, like=node)
        return None


def _flatten(ctx: Context, reduction: fx.Node) -> None:
    """Merges several feature axes into two, if each tensor of the message has all axes of a merged group, or none."""
    src, *others = reduction.args
    features = value(src).shape[1:]  # type: ignore[arg-type]
    if not all(isinstance(_compat.size_now(size), int) for size in features):
        return
    for split in range(len(features) - 1, 0, -1):
        with ctx.graph.inserting_before(reduction):
            flat = _Flat(ctx, reduction, features, split)
            try:
                rows = flat.of(src)  # type: ignore[arg-type]
            except _Uneven:
                continue
            reduced = ctx.call(own.segment_reduce.default, rows, *others, like=reduction)
            whole = [-1, *(int(size) for size in features)]
            reduction.replace_all_uses_with(ctx.call(aten.view.default, reduced, whole, like=reduction))
            return


class _Uneven(Exception):  # noqa: N818  (always caught)
    """A tensor has some, but not all, of the axes that would be merged into one."""


class _Flat(_Elementwise):
    """Merges the feature axes of the tensors of a message into two: the first `split` axes, and the others."""

    def __init__(self, ctx: Context, at: fx.Node, features: Sequence[Any], split: int) -> None:
        super().__init__(ctx, at)
        self.features, self.split = features, split

    def _widths(self, node: fx.Node, sizes: Sequence[Any]) -> list[int]:
        """Returns the two merged widths of a tensor with these feature sizes. Raises _Uneven."""
        sizes = [1] * (len(self.features) - len(sizes)) + list(sizes)
        found = []
        for group in (slice(None, self.split), slice(self.split, None)):
            here, full = sizes[group], self.features[group]
            if not all(map(is_one, here)) and not all(map(guarded_same, here, full)):
                raise _Uneven
            found.append(math.prod(int(size) for size in here))
        return found

    def leaf(self, node: fx.Node) -> fx.Node:
        shape = [-1, *self._widths(node, value(node).shape[1:])]
        return self.ctx.call(aten.reshape.default, node, shape, like=self.at)

    def gather(self, node: fx.Node) -> fx.Node | None:
        args: Any = node.args
        if node.target is not aten.index_select.default or args[1] != 0 or args[0] in self.ctx.written:
            return None
        return self.ctx.call(node.target, self.leaf(args[0]), 0, args[2], like=node)

    def operand(self, arg: Any, of: fx.Node) -> fx.Node | None:
        rank = len(self.features) + 1
        if value(of).dim() != rank:
            return None
        sizes = value(arg).shape
        if len(sizes) == rank:
            return self.of(arg) if same_size(sizes[0], value(of).shape[0]) else self.leaf(arg)
        return self.ctx.call(aten.reshape.default, arg, self._widths(arg, sizes), like=self.at)
