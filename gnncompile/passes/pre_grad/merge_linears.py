"""A sum of linear layers of the same rows becomes one layer.

Before: ``stack([linear(a, v) + linear(x, w1), linear(b, u) + linear(x, w2)]).sum(0)``
After:  ``linear(a, v) + linear(x, w1 + w2) + linear(b, u)``
Why it pays: weights are small and rows are many. Models with several edge types have many such sums: the layer of each
type has its own weight for a node's own row, and the results of the layers are added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import alike, aten, drop_unused, value
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in ctx.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        _unstack(ctx, node)
    drop_unused(ctx.graph)
    inner: set[fx.Node] = set()
    for node in reversed(ctx.graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        if node not in inner and _is_sum(ctx, node, node):
            _merge(ctx, node, _terms(ctx, node, node, inner))
    drop_unused(ctx.graph)


def _unstack(ctx: Context, node: fx.Node) -> None:
    """Replaces a sum over stacked tensors by a chain of additions."""
    stack: Any = node.args[0]
    if stack.target is not aten.stack.default or len(stack.users) > 1 or {stack, node} & ctx.written:
        return
    tensors, dim = (*stack.args, 0)[:2]
    if dim != 0 or node.args[1:] != ([0],) or node.kwargs or not ctx.same_mode(stack, node):
        return
    if value(node).dtype not in (torch.float32, torch.float64):
        return  # in 16 bits a sum rounds only once, and a sum of bools gives integers
    with ctx.graph.inserting_before(node):
        node.replace_all_uses_with(ctx.added(tensors, like=node))


def _is_sum(ctx: Context, node: Any, top: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape, and is `top` or a term that only the sum `top` reads."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(alike(a, node) for a in node.args):
        return False
    return node is top or _belongs(ctx, node, top)


def _belongs(ctx: Context, node: fx.Node, top: fx.Node) -> bool:
    return len(node.users) == 1 and node not in ctx.written and ctx.same_mode(node, top)


def _terms(ctx: Context, node: Any, top: fx.Node, inner: set[fx.Node]) -> list[fx.Node]:
    """Returns the terms of a sum, from left to right. Adds the nested sums to `inner`."""
    if not _is_sum(ctx, node, top):
        return [node]
    inner.add(node)
    return [term for part in node.args for term in _terms(ctx, part, top, inner)]


def _merge(ctx: Context, top: fx.Node, terms: list[fx.Node]) -> None:
    """Replaces the terms that are layers of the same rows by one layer."""
    layers: dict[Any, list[fx.Node]] = {}
    for position, term in enumerate(terms):
        is_layer = term.target is aten.linear.default and value(term).dim() == 2 and _belongs(ctx, term, top)
        layers.setdefault(term.args[0] if is_layer else position, []).append(term)
    if len(layers) == len(terms):
        return
    with ctx.graph.inserting_before(top):
        merged = [_layer(ctx, same) if len(same) > 1 else same[0] for same in layers.values()]
        top.replace_all_uses_with(ctx.added(merged, like=top))


def _layer(ctx: Context, layers: list[fx.Node]) -> fx.Node:
    """Returns one layer that equals the sum of linear layers of the same rows."""
    weight = ctx.added([layer.args[1] for layer in layers], like=layers[0])
    biases = [layer.args[2] for layer in layers if len(layer.args) > 2 and layer.args[2] is not None]
    bias = [ctx.added(biases, like=layers[0])] if biases else []
    return ctx.call(aten.linear.default, layers[0].args[0], weight, *bias, like=layers[0])
