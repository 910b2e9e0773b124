"""Every spelling of a gather, or of a reduction by index, becomes one of two operations.

Before: ``x[idx]``, ``index_select(x, -2, idx)``, ``gather(x, 0, idx.expand_as(x))``; ``x[edge_index][0]``; ``x[mask]``,
        ``e[:, mask]``; ``zeros.scatter_add_(0, idx.expand_as(m), m)``, ``x.index_add_(0, idx, m)``, ``scatter_reduce``,
        ``index_reduce``, ``zeros.index_put_([idx], m, accumulate=True)``; ``x.std(0, correction=0)``
After:  ``index_select(x, 0, idx)``, where ``idx`` may be ``nonzero(mask)``; ``segment_reduce(m, idx, n, reduce)``;
        ``x.std(0, unbiased=False)``
Why it pays: region forming has one pattern to match, and the host waits only once for the size that a mask selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import aten, drop_unused, guarded_same, is_tensor, origins, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.pointwise import POINTWISE
from gnncompile.passes.pre_grad import wrap_negative_indices
from gnncompile.passes.pre_grad.indices import fits, index_along, is_index, uncopied
from gnncompile.passes.pre_grad.normalize_sizes import size_node
from gnncompile.passes.pre_grad.resolve_edge_lists import row_of

_REDUCE = {"sum": "sum", "amax": "max", "amin": "min", "mean": "mean"}


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    wrap_negative_indices.note_markers(ctx)
    for node in list(ctx.graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        with ctx.graph.inserting_before(node):
            new = next((new for rule in _RULES if (new := rule(ctx, node)) is not None), None)
        if new is not None:
            node.replace_all_uses_with(new)
    for node in list(ctx.graph.nodes):
        if node.target is aten.index_select.default:
            _known_rows(node)
    for node in list(ctx.graph.find_nodes(op="call_function", target=own.chosen_rows.default)):
        node.replace_all_uses_with(node.args[0])
    drop_unused(ctx.graph)


def _known_rows(node: fx.Node) -> None:
    """Replaces a gather of the batch vector by chosen rows: the graphs of pooled nodes are already known."""
    table, dim, index = node.args
    known = isinstance(index, fx.Node) and index.target is own.chosen_rows.default
    if known and dim == 0 and index.args[1] is table:  # type: ignore[union-attr]
        node.replace_all_uses_with(index.args[2])  # type: ignore[union-attr,arg-type]


def _gather(ctx: Context, node: fx.Node) -> fx.Node | None:
    args: Any = node.args
    if node.target is aten.select.int and args[1] == 0:
        return _gather_by_pair(ctx, node)
    gather = gather_of(ctx, node)
    if gather is not None:
        wrap_negative_indices.note(node, gather.index)
    if gather is None or gather.dim != 0:
        return None
    if node.target is aten.index_select.default and args[1] == 0 and args[2] is gather.index:
        return None
    return ctx.call(aten.index_select.default, gather.table, 0, gather.index, like=node)


@dataclass(frozen=True)
class Gather:
    """A gather of slices of a table along a dimension, one for each entry of an index ``[num_items]``."""

    table: fx.Node
    dim: int
    index: fx.Node


def gather_of(ctx: Context, node: fx.Node) -> Gather | None:
    """Returns the gather that a node spells, or None if it is no gather."""
    args: Any = node.args
    if node.target is aten.index_select.default:
        table, dim, index = args
    elif node.target is aten.index.Tensor and args[1] and all(i is None for i in args[1][:-1]):
        table, dim, index = args[0], len(args[1]) - 1, args[1][-1]
    elif node.target in (aten.gather.default, aten.take_along_dim.default) and len(args) > 2:
        table, dim, index = (args[0], args[1], args[2]) if node.target is aten.gather.default else (*args[::2], args[1])
    else:
        return None
    if not is_tensor(index) or value(table).dim() == 0 or not isinstance(dim, int):
        return None
    dim %= value(table).dim()
    if node.target is aten.gather.default and not _covers(index, table, dim):
        return None
    if node.target is aten.take_along_dim.default and value(index).dim() != value(table).dim():
        return None
    along = 0 if value(index).dim() == 1 else dim
    if value(index).dim() > 1 and node.target in (aten.index_select.default, aten.index.Tensor):
        return None
    found = index_along(ctx, index, along)
    return None if found is None else Gather(table, dim, found)


def _gather_by_pair(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Returns a gather by one row of an edge list: ``x[edge_index][0]``. Else None."""
    rows, _, position = node.args
    args: Any = rows.args  # type: ignore[union-attr]
    if rows.target is not aten.index.Tensor or rows in ctx.written or len(args[1]) != 1:  # type: ignore[union-attr]
        return None
    pair = args[1][0]
    if not is_tensor(pair) or value(pair).dim() != 2 or value(pair).dtype not in (torch.int64, torch.int32):
        return None
    if args[0] in ctx.written or pair in ctx.written or not isinstance(position, int):
        return None
    index = row_of(ctx, pair, position % 2, node) if value(pair).shape[0] == 2 else None
    index = index if index is not None else ctx.call(aten.select.int, pair, 0, position, like=node)
    index = uncopied(ctx, index)
    wrap_negative_indices.note_indexing(index)
    return ctx.call(aten.index_select.default, args[0], 0, index, like=node)


def _selection(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Returns a gather of the rows or columns that a mask selects. A write by a mask gets indices instead."""
    if node.target not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return None
    source, indices = node.args[:2]
    mask: Any = indices[-1]  # type: ignore[index]
    dim = len(indices) - 1  # type: ignore[arg-type]
    whole = all(i is None for i in indices[:-1])  # type: ignore[index,union-attr]
    if not whole or not is_tensor(mask) or value(mask).dtype != torch.bool or value(mask).dim() == 0:
        return None
    if value(mask).dim() > 1:
        return _selection_by_table(ctx, node, mask)
    if node.target is not aten.index.Tensor:
        if value(node.args[2]).dim() > 0:  # type: ignore[arg-type]  # a write of one number needs no indices
            place = _places(ctx, mask, None)
            node.args = (source, [*indices[:-1], place], *node.args[2:])  # type: ignore[index,misc]
        return None
    place = _places(ctx, mask, value(node).shape[dim], node)
    new = ctx.graph.call_function(aten.index_select.default, (source, dim, place))
    new.meta.update(_meta(node))
    return new


def _selection_by_table(ctx: Context, node: fx.Node, mask: fx.Node) -> fx.Node | None:
    """Returns a gather by a mask over the first several axes: ``dense[mask]``. Else None."""
    source, indices = node.args[:2]
    if node.target is not aten.index.Tensor or len(indices) > 1:  # type: ignore[arg-type]
        return None
    rows = _places(ctx, mask, value(node).shape[0], node)
    places = [ctx.call(aten.select.int, rows, 1, axis) for axis in range(value(mask).dim())]
    new = ctx.graph.call_function(aten.index.Tensor, (source, places))
    new.meta.update(_meta(node))
    return new


def _repetition(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Returns a gather for ``repeat_interleave(x, repeats, dim)`` with a tensor of repeats. Else None."""
    if node.target is not aten.repeat_interleave.self_Tensor or len(node.args) != 3 or node.args[2] is None:
        return None
    source, repeats, dim = node.args
    if value(repeats).numel() != value(source).shape[dim] or node.kwargs.get("output_size") is not None:  # type: ignore[arg-type]
        return None
    place = ctx.graph.call_function(aten.repeat_interleave.Tensor, (repeats,))
    with ctx.fake_mode:
        size = value(node).shape[dim]
        place.meta["val"] = torch.empty(size, dtype=value(repeats).dtype, device=value(repeats).device)  # type: ignore[arg-type]
    _compat.take_over_size(place, node)
    new = ctx.graph.call_function(aten.index_select.default, (source, dim, place))
    new.meta.update(_meta(node))
    return new


def _variance(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Returns a variance or its root with a correction of 0 or 1 as the operation that torch composes. Else None."""
    if node.target not in (aten.var.correction, aten.std.correction):
        return None
    correction = node.kwargs.get("correction")
    correction = 1 if correction is None else correction
    if correction not in (0, 1):
        return None
    of_dims = aten.var.dim if node.target is aten.var.correction else aten.std.dim
    source, dims = (*node.args, None)[:2]
    return ctx.call(of_dims, source, dims, correction == 1, node.kwargs.get("keepdim", False), like=node)


def _meta(node: fx.Node) -> dict[str, Any]:
    kept: dict[str, Any] = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
    return {**kept, "origins": origins(node)}


def _places(ctx: Context, mask: fx.Node, count: Any, reader: fx.Node | None = None) -> fx.Node:
    """Returns the indices where a mask is True, ``[count]``, or ``[count, axes]`` for a mask over several axes.

    There is one node per mask, so all selections by the mask have the same size.

    Args:
        ctx: The context of the graph.
        mask: The mask.
        count: The symbol of the number of selected entries; None for a new symbol.
        reader: The node that introduced the symbol.
    """
    key = f"selected by {mask.name}"
    if key not in ctx.shared_nodes:
        if count is None:
            with _compat.fresh_sizes(ctx.fake_mode):
                found = ctx.call(aten.nonzero.default, mask)
        else:
            found = ctx.graph.call_function(aten.nonzero.default, (mask,))
            with ctx.fake_mode:
                size = (count, value(mask).dim())
                found.meta["val"] = torch.empty(size, dtype=torch.int64, device=value(mask).device)
            _compat.take_over_size(found, reader)
        ctx.shared_nodes[key] = ctx.call(aten.select.int, found, 1, 0) if value(mask).dim() == 1 else found
    return ctx.shared_nodes[key]


def _reduction(ctx: Context, node: fx.Node) -> fx.Node | None:
    found = reduction_of(ctx, node)
    if found is not None:
        wrap_negative_indices.note(node, found.index)
    if found is None or found.dim != 0:
        return None
    if not _is_zero(found.base) and not _gathers(found.src):
        return None  # the sum may add few rows to a large base
    size: Any = found.base.args[0][0] if _is_zero(found.base) else size_node(ctx, found.base, node)  # type: ignore[index]
    reduced = ctx.call(own.segment_reduce.default, found.src, found.index, size, found.reduce, like=node)
    return found.onto_base(ctx, reduced)


def _gathers(message: fx.Node) -> bool:
    """Whether a message gathers rows."""
    seen, todo = {message}, [message]
    while todo:
        node = todo.pop()
        if node.target is aten.index_select.default:
            return True
        inner = [n for n in node.all_input_nodes if n not in seen] if node.target in POINTWISE else []
        seen.update(inner)
        todo += inner
    return False


@dataclass(frozen=True)
class Reduction:
    """A reduction of slices of `src` along a dimension, by an index, into a tensor of the shape of `base`."""

    node: fx.Node
    base: fx.Node
    dim: int
    index: fx.Node
    src: fx.Node
    reduce: str
    scale: float = 1.0

    def onto_base(self, ctx: Context, reduced: fx.Node) -> fx.Node:
        """Returns the reduced rows, scaled and added to the base."""
        if self.scale != 1:
            reduced = ctx.call(aten.mul.Tensor, reduced, self.scale, like=self.node)
        return reduced if _is_zero(self.base) else ctx.call(aten.add.Tensor, self.base, reduced, like=self.node)


def reduction_of(ctx: Context, node: fx.Node) -> Reduction | None:
    """Returns the reduction that a node spells, or None. A reduction onto a nonzero base must be a sum."""
    found = _scatter_arguments(node)
    if found is None:
        return None
    base, dim, index, src, reduce, include_self = found
    if not (is_tensor(src) and is_tensor(index) and value(src).is_floating_point() and isinstance(dim, int)):
        return None
    rank = value(base).dim()
    # index_put may broadcast its values, and scatter_add may skip some. Then rows and indices do not match one to one.
    if rank == 0 or value(src).dim() != rank or value(src).dtype != value(base).dtype:
        return None
    dim %= rank
    full = node.target in (aten.scatter_add.default, aten.scatter_reduce.two)
    if full and not _covers(index, src, dim):
        return None
    place = index_along(ctx, index, dim if full else 0) if full or value(index).dim() == 1 else None
    if place is None or not guarded_same(value(src).shape[dim], value(place).shape[0]):
        return None
    # A segment without rows keeps the base, so the base must be zero.
    if (reduce != "sum" and (include_self or not _is_zero(base))) or base in ctx.written or node in ctx.written:
        return None
    others = [k for k in range(rank) if k != dim]
    if not fits([value(base).shape[k] for k in others], [value(src).shape[k] for k in others]):
        return None
    scale = node.kwargs.get("alpha", 1)
    return Reduction(node, base, dim, place, src, reduce, scale) if isinstance(scale, (int, float)) else None


def _covers(index: Any, src: Any, dim: int) -> bool:
    """Whether a full index has the size of the indexed tensor on all axes but `dim`."""
    if not is_tensor(index) or value(index).dim() != value(src).dim():
        return False
    others = [k for k in range(value(src).dim()) if k != dim]
    return fits([value(index).shape[k] for k in others], [value(src).shape[k] for k in others])


def _scatter_arguments(node: fx.Node) -> tuple[Any, Any, Any, Any, str, bool] | None:
    """Returns (base, dim, index, src, reduce, include_self) of a node that scatters, or None."""
    args: Any = node.args
    kwargs = node.kwargs
    if node.target is aten.index_add.default:
        return args[0], args[1], args[2], args[3], "sum", True
    if node.target is aten.index_put.default and len(args) > 3 and args[3]:
        dim = len(args[1]) - 1
        return (args[0], dim, args[1][-1], args[2], "sum", True) if all(i is None for i in args[1][:-1]) else None
    if node.target is aten.scatter_add.default:
        return args[0], args[1], args[2], args[3], "sum", True
    if node.target in (aten.scatter_reduce.two, aten.index_reduce.default) and args[4] in _REDUCE:
        include = bool(kwargs.get("include_self", args[5] if len(args) > 5 else True))
        return args[0], args[1], args[2], args[3], _REDUCE[str(args[4])], include
    return None


def _segments(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Returns a segment reduction for ``torch.segment_reduce`` by lengths or offsets, for sums and means. Else None.

    For ties, the gradient of torch's maximum differs between positive and negative cotangents, so it is left alone.
    """
    if node.target is not aten.segment_reduce.default or node.kwargs.get("indices") is not None:
        return None
    src, kind = node.args
    kwargs: Any = node.kwargs
    bounds = kwargs.get("lengths") if kwargs.get("lengths") is not None else kwargs.get("offsets")
    starts = {"sum": (0, None), "mean": (0,)}.get(str(kind), ())
    known = kwargs.get("initial") in starts and kwargs.get("axis", 0) == 0 and is_index(bounds)
    if not known or not value(src).is_floating_point() or {src, bounds, node} & ctx.written:  # type: ignore[arg-type]
        return None
    key = f"segments of {bounds.name} over {value(src).shape[0]} rows"  # type: ignore[arg-type]
    if key not in ctx.shared_nodes:
        rows = size_node(ctx, src, node)  # type: ignore[arg-type]
        ctx.shared_nodes[key] = _segment_of_rows(ctx, bounds, rows, kwargs.get("lengths") is None)
    index = ctx.shared_nodes[key]
    count = size_node(ctx, index.args[0], node)  # type: ignore[arg-type]
    return ctx.call(own.segment_reduce.default, src, index, count, kind, like=node)


def _segment_of_rows(ctx: Context, bounds: fx.Node, rows: Any, are_offsets: bool) -> fx.Node:
    """Returns the segment of each row: ``repeat_interleave(lengths)``."""
    if are_offsets:
        starts = ctx.call(aten.slice.Tensor, bounds, 0, 0, -1)
        bounds = ctx.call(aten.sub.Tensor, ctx.call(aten.slice.Tensor, bounds, 0, 1), starts)
    return ctx.call(aten.repeat_interleave.Tensor, bounds, output_size=rows)


def _is_zero(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and node.args[1] in (0, 0.0, False)


_RULES = (_gather, _selection, _repetition, _segments, _reduction, _variance)
