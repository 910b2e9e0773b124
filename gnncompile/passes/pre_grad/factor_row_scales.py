"""A linear layer of rows joined with scaled copies of themselves scales its results instead.

Before: ``linear(cat([x, a, a * s, a * t], -1), w, b)`` with one `s` and one `t` for each row
After:  ``linear(x, w0, b) + (z0 + z1 * s + z2 * t)``, ``z0, z1, z2 = linear(a, cat([w1, w2, w3])).split(...)``
Why it pays: the copies and their gradients are no longer written and read. Each copy is as wide as all aggregations of
a node together; a result is only as wide as the layer. PNA scales its aggregations by functions of the degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, drop_unused, is_tensor, known_size, per_row, same_shape, value
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for cat in ctx.graph.find_nodes(op="call_function", target=aten.cat.default):
        layers = _layers(ctx, cat)
        pieces = _pieces(ctx, cat) if layers else None
        if pieces is None:
            continue
        copied = {p.base for p in pieces if p.scale is not None}
        if copied and all(_pays(layer, pieces, copied) for layer in layers):
            for layer in layers:
                _rewrite(ctx, layer, pieces, copied)
    drop_unused(ctx.graph)


@dataclass(frozen=True)
class _Piece:
    """A range of columns that a layer reads: a tensor times a factor per row, or the tensor alone."""

    base: fx.Node
    scale: fx.Node | None
    columns: tuple[int, int]


def _layers(ctx: Context, cat: fx.Node) -> list[fx.Node]:
    """Returns the layers that read a concatenation of columns or its towers; empty if it has other readers."""
    dim = (*cat.args, 0)[1]
    rank = value(cat).dim()
    if value(cat).dtype not in (torch.float32, torch.float64) or dim not in (-1, rank - 1) or rank not in (2, 3):
        return []  # in 16 bits a sum of sums is rounded more often
    found: list[Any] = list(cat.users)
    if rank == 3:
        towers = all(n.target is aten.select.int and n.args[:2] == (cat, 1) for n in found)
        found = [user for tower in found for user in tower.users] if towers else []
    rows = [cat] if rank == 2 else list(cat.users)
    fit = all(n.target is aten.linear.default and n.args[0] in rows and is_tensor(n.args[1]) for n in found)
    return found if fit and all(ctx.same_mode(n, cat) for n in found) and not ctx.written & {cat, *rows} else []


def _pieces(ctx: Context, cat: fx.Node) -> list[_Piece] | None:
    """Returns the pieces of a concatenation, nested concatenations included; None if a width is unknown."""
    tensors = list(_flat(ctx, cat, cat))
    widths = [w for w in (known_size(value(t).shape[-1]) for t in tensors) if w is not None]
    if len(widths) < len(tensors) or ctx.written & set(tensors):
        return None
    columns = list(pairwise((0, *accumulate(widths))))
    return [_Piece(*_factors(ctx, tensor, cat), at) for tensor, at in zip(tensors, columns, strict=True)]


def _flat(ctx: Context, cat: Any, top: fx.Node) -> Any:
    for tensor in cat.args[0]:
        inner = tensor.target is aten.cat.default and tensor.args[1:] in ((-1,), (value(top).dim() - 1,))
        if inner and len(tensor.users) == 1 and ctx.same_mode(tensor, top):
            yield from _flat(ctx, tensor, top)
        else:
            yield tensor


def _factors(ctx: Context, tensor: Any, cat: fx.Node) -> tuple[Any, Any]:
    """Returns (base, scale) if a tensor is a base times a factor per row, or else (tensor, None)."""
    if tensor.target is aten.mul.Tensor and not tensor.kwargs and ctx.same_mode(tensor, cat):
        for base, scale in (tensor.args[:2], tensor.args[1::-1]):
            by_row = is_tensor(scale) and per_row(scale) and value(scale).dim() == value(cat).dim()
            if by_row and same_shape(base, tensor) and value(base).dtype == value(scale).dtype:
                return base, scale
    return tensor, None


def _pays(layer: Any, pieces: list[_Piece], copied: set[fx.Node]) -> bool:
    """Whether the layer is no wider than each copied tensor, and a base occurs in more than one piece."""
    width = value(layer.args[1]).shape[0]
    copies = [p for p in pieces if p.base in copied]
    return (
        isinstance(width, int)
        and len(copies) > len(copied)
        and all(width <= p.columns[1] - p.columns[0] for p in copies)
    )


def _rewrite(ctx: Context, layer: Any, pieces: list[_Piece], copied: set[fx.Node]) -> None:
    """Replaces the layer by a layer for each copied tensor, and one layer for all other tensors."""
    rest = [p for p in pieces if p.base not in copied]
    bias = (*layer.args, None)[2]
    with ctx.graph.inserting_before(layer):
        once = dict.fromkeys(p.base for p in pieces if p.base in copied)
        terms = [_scaled_sum(ctx, layer, [p for p in pieces if p.base is base]) for base in once]
        if rest:
            bases = [p.base for p in rest]
            rows = bases[0] if len(bases) == 1 else ctx.call(aten.cat.default, bases, -1, like=layer)
            weights = [_weight(ctx, layer, p) for p in rest]
            weight = weights[0] if len(weights) == 1 else ctx.call(aten.cat.default, weights, 1, like=layer)
            terms.insert(0, ctx.call(aten.linear.default, _tower(ctx, layer, rows), weight, bias, like=layer))
        elif bias is not None:
            terms.append(bias)
        layer.replace_all_uses_with(ctx.in_dtype_of(ctx.added(terms, like=layer), layer))


def _scaled_sum(ctx: Context, layer: Any, copies: list[_Piece]) -> Any:
    """Returns the sum of the layer's results for all copies of a tensor, each scaled by its factor."""
    weight = ctx.call(aten.cat.default, [_weight(ctx, layer, p) for p in copies], 0, like=layer)
    width = int(value(layer.args[1]).shape[0])
    wide = ctx.call(aten.linear.default, _tower(ctx, layer, copies[0].base), weight, like=layer)
    terms = []
    for k, piece in enumerate(copies):
        term = ctx.call(aten.slice.Tensor, wide, 1, k * width, (k + 1) * width, like=layer)
        if piece.scale is not None:
            term = ctx.call(aten.mul.Tensor, term, _tower(ctx, layer, piece.scale), like=layer)
        terms.append(term)
    return ctx.added(terms, like=layer)


def _weight(ctx: Context, layer: Any, piece: _Piece) -> fx.Node:
    return ctx.call(aten.slice.Tensor, layer.args[1], 1, *piece.columns, like=layer)


def _tower(ctx: Context, layer: Any, tensor: fx.Node) -> fx.Node:
    """Returns the rows of a tensor for the tower of a layer, or the tensor itself if there are no towers."""
    rows = layer.args[0]
    if rows.target is not aten.select.int or value(tensor).dim() == 2:
        return tensor
    index = rows.args[2] if int(value(tensor).shape[1]) > 1 else 0
    return ctx.call(aten.select.int, tensor, 1, index, like=layer)
