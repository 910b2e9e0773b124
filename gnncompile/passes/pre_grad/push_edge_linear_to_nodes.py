"""Linear layers of edge rows that only dot products and weighted sums read are applied to nodes instead.

With ``e = linear(edge_attr, w).view(-1, heads, channels)`` and the weight as ``w: [heads, channels, columns]``:

Before: ``(q[dst] * (k[src] + e)).sum(-1)``
After:  ``(q[dst] * k[src]).sum(-1) + (u[dst] * edge_attr.unsqueeze(1)).sum(-1)``, ``u = einsum("nhc,hck->nhk", q, w)``
Before: ``(e * att).sum(-1)``
After:  ``linear(edge_attr, einsum("hc,hck->hk", att, w))``
Before: ``segment_reduce((v[src] + e) * alpha, dst, n, "sum")``
After:  ``segment_reduce(v[src] * alpha, dst, n, "sum") + einsum("nhk,hck->nhc", s, w)``,
        ``s = segment_reduce(edge_attr.unsqueeze(1) * alpha, dst, n, "sum")``
Why it pays: `e` and its gradient, as wide as the messages, would be stored for every edge. Attention that adds edge
features to keys and values is written like this. After the pass a region reads the few columns of the edge features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import (
    alike,
    aten,
    drop_unused,
    is_one,
    is_tensor,
    own,
    per_row,
    same_shape,
    same_size,
    value,
)
from gnncompile.passes.context import Context

_VIEWS = (aten.view.default, aten.reshape.default)
_SUMS = ("sum", "mean")


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in ctx.graph.find_nodes(op="call_function", target=aten.linear.default):
        uses = _uses(ctx, node)
        if not uses or not all(_pays(use) for use in uses):
            continue
        new = [_rewritten(ctx, use) for use in uses]
        if all(alike(n, use.root) for n, use in zip(new, uses, strict=True)):
            for n, use in zip(new, uses, strict=True):
                use.root.replace_all_uses_with(n)
        drop_unused(ctx.graph)


@dataclass(frozen=True)
class _Use:
    """A sum over channels or edges that is linear in the rows of a layer.

    Attributes:
        layer: The linear layer.
        rows: The result of the layer, seen as ``[rows, heads, channels]`` or ``[rows, channels]``.
        steps: The operations on the rows before the sum: add, mul or div, each with its other operand.
        root: The sum.
    """

    layer: Any
    rows: fx.Node
    steps: tuple[tuple[Any, Any], ...]
    root: Any

    @property
    def features(self) -> tuple[int, ...]:
        """The feature shape: (heads, channels), or (channels,)."""
        return tuple(value(self.rows).shape[1:])

    @property
    def dot(self) -> bool:
        """Whether the sum is over channels, not over edges."""
        return self.root.target is aten.sum.dim_IntList

    @property
    def wide(self) -> list[fx.Node]:
        """Factors that differ by channel."""
        return [other for op, other in self.steps if op is aten.mul.Tensor and not per_row(other)]

    @property
    def index(self) -> fx.Node | None:
        """The index by which the wide factors are gathered, or None."""
        gathers: list[Any] = [w for w in self.wide if _is_gather(w)]
        return gathers[0].args[2] if gathers else None


def _uses(ctx: Context, layer: Any) -> list[_Use] | None:
    """Returns all uses of a layer, or None if a reader of the layer does not fit."""
    if value(layer).dim() != 2 or not is_tensor(layer.args[1]) or not ctx.movable(layer, layer):
        return None
    uses = list(_follow(ctx, _Use(layer, layer, (), layer)))
    if len({use.root for use in uses}) < len(uses) or not all(map(_fits, uses)):
        return None
    read = [node for use in uses for node in (use.root, *filter(_is_gather, use.wide))]
    return uses if all(ctx.movable(node, layer) for node in read) else None


def _follow(ctx: Context, use: _Use) -> Iterator[_Use]:
    """Yields the uses that continue an unfinished use, whose root is its last operation so far."""
    at = use.root
    for user in at.users:
        args: Any = user.args
        if at not in args or not ctx.movable(user, use.layer):
            yield _Use(use.layer, use.rows, use.steps, user)
        elif user.target in _VIEWS and at is use.layer and same_size(value(user).shape[0], value(at).shape[0]):
            yield from _follow(ctx, _Use(use.layer, user, (), user))
        elif _is_step(user, at):
            other = args[1] if args[0] is at else args[0]
            yield from _follow(ctx, _Use(use.layer, use.rows, (*use.steps, (user.target, other)), user))
        else:
            yield _Use(use.layer, use.rows, use.steps, user)


def _is_step(node: fx.Node, at: fx.Node) -> bool:
    """Whether a node adds to rows or scales them, without giving them another shape."""
    args: Any = node.args
    if node.target not in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor) or node.kwargs or args[0] is args[1]:
        return False
    if node.target is aten.div.Tensor and (args[0] is not at or not per_row(args[1])):
        return False
    return same_shape(node, at)


def _fits(use: _Use) -> bool:
    """Whether a use ends in a sum, and its wide factors come from nodes."""
    args: Any = use.root.args
    rank = len(use.features) + 1
    if rank > 3 or not all(isinstance(size, int) for size in use.features):
        return False
    if not use.dot:
        return use.root.target is own.segment_reduce.default and args[3] in _SUMS and not use.wide
    if [axis % rank for axis in args[1] or ()] != [rank - 1] or use.root.kwargs or not use.wide:
        return False
    return all(_of_nodes(w, use) for w in use.wide)


def _of_nodes(factor: fx.Node, use: _Use) -> bool:
    """Whether a factor is the same for all rows, or gathered by the same index as the other factors."""
    shape = value(factor).shape
    if _is_gather(factor):
        return factor.args[2] is use.index and tuple(shape[1:]) == use.features
    return len(shape) <= len(use.features) or is_one(shape[0])


def _pays(use: _Use) -> bool:
    """Whether a region reads no more elements per edge and head after the rewrite than before."""
    channels, columns = use.features[-1], value(use.layer.args[1]).shape[1]
    folds = use.dot and use.index is None
    return bool(channels > 1 and isinstance(columns, int) and (folds or columns <= channels))


def _rewritten(ctx: Context, use: _Use) -> fx.Node | None:
    """Returns the sum, split into the layer's part and the rest; None if that is not possible."""
    with ctx.graph.inserting_before(use.root):
        part = _dot(ctx, use) if use.dot else _weighted_sum(ctx, use)
        rest = _without_layer(ctx, use)
        if rest is None:
            return part
        if not same_shape(rest, use.rows):
            return None
        rest = ctx.call(use.root.target, rest, *use.root.args[1:], like=use.root)
        return ctx.call(aten.add.Tensor, rest, part, like=use.root)


def _without_layer(ctx: Context, use: _Use) -> Any:
    """Returns the summands without the product of the layer, but with its bias; None if there are none."""
    bias = (*use.layer.args, None)[2]
    rest: Any = ctx.call(aten.reshape.default, bias, list(use.features), like=use.layer) if bias is not None else None
    for target, other in use.steps:
        if rest is not None:
            rest = ctx.call(target, rest, other, like=use.root)
        elif target is aten.add.Tensor:
            rest = other
    return rest


def _dot(ctx: Context, use: _Use) -> fx.Node:
    """Returns the dot product of the wide factors with the layer's product, over channels."""
    tables = [w.args[0] if _is_gather(w) else w for w in use.wide]
    table = reduce(lambda a, b: ctx.call(aten.mul.Tensor, a, b, like=use.root), tables)
    weight = _weight(ctx, use)
    if use.index is not None:
        narrow = ctx.call(aten.index_select.default, _by_head(ctx, table, weight), 0, use.index, like=use.root)
        product = ctx.call(aten.mul.Tensor, narrow, _columns(ctx, use), like=use.root)
    else:
        folded = ctx.call(aten.mul.Tensor, ctx.call(aten.unsqueeze.default, table, -1), weight, like=use.root)
        folded = ctx.call(aten.sum.dim_IntList, folded, [-2], like=use.root)
        folded = ctx.call(aten.reshape.default, folded, [-1, int(value(weight).shape[-1])], like=use.root)
        product = ctx.call(aten.linear.default, use.layer.args[0], folded, like=use.layer)
        product = ctx.call(aten.unsqueeze.default, product, -1, like=use.root) if len(use.features) > 1 else product
    return ctx.call(use.root.target, _scaled(ctx, use, product), *use.root.args[1:], like=use.root)


def _weighted_sum(ctx: Context, use: _Use) -> fx.Node:
    """Returns the sum over edges of the layer's product, with the layer applied after the sum."""
    message = _scaled(ctx, use, _columns(ctx, use))
    total = ctx.call(own.segment_reduce.default, message, *use.root.args[1:], like=use.root)
    if len(use.features) > 1 and is_one(value(total).shape[1]):  # the same for all heads
        total = ctx.call(aten.squeeze.dim, total, 1, like=use.root)
        total = ctx.call(aten.linear.default, total, use.layer.args[1], like=use.layer)
        return ctx.call(aten.view.default, total, [-1, *use.features], like=use.root)
    weight = ctx.call(aten.transpose.int, _weight(ctx, use), -1, -2, like=use.layer)
    return _by_head(ctx, total, weight)


def _columns(ctx: Context, use: _Use) -> Any:
    """Returns the input rows of the layer, in the dtype of its product, with an axis for the heads."""
    rows: Any = use.layer.args[0]
    rows = ctx.in_dtype_of(rows, use.layer)
    return ctx.call(aten.unsqueeze.default, rows, 1, like=use.layer) if len(use.features) > 1 else rows


def _scaled(ctx: Context, use: _Use, product: Any) -> Any:
    """Returns a product times the factors that are the same for all channels."""
    for target, other in use.steps:
        if target is not aten.add.Tensor and per_row(other):
            product = ctx.call(target, product, other, like=use.root)
    return product


def _weight(ctx: Context, use: _Use) -> fx.Node:
    """Returns the weight as ``[heads, channels, columns]`` or ``[channels, columns]``."""
    weight: Any = use.layer.args[1]
    return ctx.call(aten.reshape.default, weight, [*use.features, int(value(weight).shape[1])], like=use.layer)


def _by_head(ctx: Context, rows: Any, weight: fx.Node) -> fx.Node:
    """Returns ``einsum("nha,hab->nhb")``, or the product of two matrices if there are no heads.

    The heads share one product with a block-diagonal matrix. A batch with one product for each head would be slow: the
    library takes 5.7 ms for the gradient of a weight that 170,000 rows of 4 heads add up to.
    """
    if value(weight).dim() == 2:
        return ctx.call(aten.mm.default, rows, weight, like=rows)
    heads, before, after = (int(size) for size in value(weight).shape)
    if heads > 1:
        same = ctx.call(aten.eye.default, heads, dtype=torch.bool, device=value(weight).device, like=rows)
        same = ctx.call(aten.reshape.default, same, [heads, 1, heads, 1], like=rows)
        weight = ctx.call(aten.unsqueeze.default, weight, 2, like=rows)
        weight = ctx.call(aten.where.ScalarOther, same, weight, 0.0, like=rows)
    weight = ctx.call(aten.reshape.default, weight, [heads * before, heads * after], like=rows)
    rows = ctx.call(aten.reshape.default, rows, [-1, heads * before], like=rows)
    product = ctx.call(aten.mm.default, rows, weight, like=rows)
    return ctx.call(aten.view.default, product, [-1, heads, after], like=rows)


def _is_gather(node: Any) -> bool:
    return node.target is aten.index_select.default and node.args[1] == 0
