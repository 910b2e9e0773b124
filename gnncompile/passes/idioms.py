"""Every spelling of a gather and of a reduction by index becomes the same two operations.

Before: ``x[idx]``, ``index_select(x, -2, idx)``, ``gather(x, 0, idx.expand_as(x))``; ``x[mask]``, ``e[:, mask]``;
        ``zeros.scatter_add_(0, idx.expand_as(m), m)``, ``zeros.index_add_(0, idx, m)``, ``scatter_reduce``,
        ``zeros.index_put_([idx], m, accumulate=True)``
After:  ``index_select(x, 0, idx)``, where ``idx`` may be ``nonzero(mask)``; ``segment_reduce(m, idx, n, reduce)``
Why it pays: region forming has one thing to look for, and the device is asked once how many a mask selects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes.context import Context, aten, drop_unused, is_tensor, origins, own, same_size, value

_REDUCE = {"sum": "sum", "amax": "max", "amin": "min", "mean": "mean"}


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        with ctx.graph.inserting_before(node):
            new = _gather(ctx, node) or _selection(ctx, node) or _repetition(ctx, node) or _reduction(ctx, node)
        if new is not None:
            node.replace_all_uses_with(new)
    for node in list(ctx.graph.nodes):
        if node.target is aten.index_select.default:
            _known_rows(node)
    for node in list(ctx.graph.find_nodes(op="call_function", target=own.chosen_rows.default)):
        node.replace_all_uses_with(node.args[0])
    drop_unused(ctx.graph)


def _known_rows(node: fx.Node) -> None:
    """The graphs of pooled nodes are known from those of all nodes, whichever were chosen."""
    table, dim, index = node.args
    known = isinstance(index, fx.Node) and index.target is own.chosen_rows.default
    if known and dim == 0 and index.args[1] is table:  # type: ignore[union-attr]
        node.replace_all_uses_with(index.args[2])  # type: ignore[union-attr,arg-type]


def _gather(ctx: Context, node: fx.Node) -> fx.Node | None:
    index: Any = None
    if node.target is aten.index_select.default:
        args: Any = node.args
        dim = args[1] % max(value(args[0]).dim(), 1)
        index = node.args[2] if dim == 0 and node.args[1] != 0 else None
    elif node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        index = node.args[1][0]  # type: ignore[index]
    elif node.target is aten.gather.default and node.args[1] == 0:
        index = _expanded_index(node.args[2], value(node.args[0]).shape[1:])  # type: ignore[arg-type]
    if index is None or not _is_index(index) or value(node.args[0]).dim() == 0:  # type: ignore[arg-type]
        return None
    return ctx.call(aten.index_select.default, node.args[0], 0, index, like=node)


def _selection(ctx: Context, node: fx.Node) -> fx.Node | None:
    """The rows of a tensor, or its columns, that a mask says; a write to these gets their places, not the mask."""
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
        if value(node.args[2]).dim() > 0:  # type: ignore[arg-type]  # one number for all needs no places
            place = _places(ctx, mask, None)
            node.args = (source, [*indices[:-1], place], *node.args[2:])  # type: ignore[index,misc]
        return None
    place = _places(ctx, mask, value(node).shape[dim], node)
    new = ctx.graph.call_function(aten.index_select.default, (source, dim, place))
    new.meta.update(_meta(node))
    return new


def _selection_by_table(ctx: Context, node: fx.Node, mask: fx.Node) -> fx.Node | None:
    """Likewise by a mask over several axes, the first ones: ``dense[mask]``."""
    source, indices = node.args[:2]
    if node.target is not aten.index.Tensor or len(indices) > 1:  # type: ignore[arg-type]
        return None
    rows = _places(ctx, mask, value(node).shape[0], node)
    places = [ctx.call(aten.select.int, rows, 1, axis) for axis in range(value(mask).dim())]
    new = ctx.graph.call_function(aten.index.Tensor, (source, places))
    new.meta.update(_meta(node))
    return new


def _repetition(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Rows, each as often as a tensor says: ``repeat_interleave(x, repeats, dim)``."""
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


def _meta(node: fx.Node) -> dict[str, Any]:
    kept: dict[str, Any] = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
    return {**kept, "origins": origins(node)}


def _places(ctx: Context, mask: fx.Node, count: Any, reader: fx.Node | None = None) -> fx.Node:
    """Where a mask is True, ``[count]``, or ``[count, axes]`` of one over several; one node per mask, whose result has
    one size, whatever is selected by it.

    Args:
        ctx: The graph.
        mask: The mask.
        count: How many there are, a size in use already; None if it is not.
        reader: What made that size.
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
    found = _scatter_arguments(node)
    if found is None:
        return None
    base, index, src, reduce, include_self = found
    if not (is_tensor(src) and value(src).is_floating_point() and _is_index(index)):
        return None
    # index_put broadcasts its values and scatter_add may leave some out: then rows and indices do not pair up.
    if value(src).dim() != value(base).dim() or not same_size(value(src).shape[0], value(index).shape[0]):
        return None
    # A row without edges keeps the base, which must then read zero.
    if not _is_zero(base) or (include_self and reduce != "sum"):
        return None
    size = base.args[0][0]
    if not all(same_size(a, b) for a, b in zip(value(base).shape[1:], value(src).shape[1:], strict=True)):
        return None
    return ctx.call(own.segment_reduce.default, src, index, size, reduce, like=node)


def _scatter_arguments(node: fx.Node) -> tuple[Any, Any, Any, str, bool] | None:
    """(base, 1-D index, src, reduce, include_self) of a reduction along the first dimension."""
    args, kwargs = node.args, node.kwargs
    if node.target is aten.index_add.default and args[1] == 0 and kwargs.get("alpha", 1) == 1:
        return args[0], args[2], args[3], "sum", True
    if node.target is aten.index_put.default and len(args) > 3 and args[3] and len(args[1]) == 1:  # type: ignore[arg-type]
        return args[0], args[1][0], args[2], "sum", True  # type: ignore[index]
    if node.target is aten.scatter_add.default and args[1] == 0:
        return args[0], _full_index(args[2], args[3]), args[3], "sum", True
    if node.target is aten.scatter_reduce.two and args[1] == 0 and args[4] in _REDUCE:
        include = bool(kwargs.get("include_self", args[5] if len(args) > 5 else True))
        return args[0], _full_index(args[2], args[3]), args[3], _REDUCE[str(args[4])], include
    return None


def _full_index(index: Any, src: Any) -> Any:
    return _expanded_index(index, value(src).shape[1:])


def _expanded_index(index: Any, features: Any) -> fx.Node | None:
    """The 1-D index behind ``idx.view(-1, 1).expand_as(x)``, if `index` is one over all of `features`."""
    if not is_tensor(index) or value(index).dim() != len(features) + 1:
        return None
    if not all(same_size(a, b) for a, b in zip(value(index).shape[1:], features, strict=True)):
        return None
    node = index
    while value(node).dim() > 1 or node.target in (aten.expand.default, aten.expand_as.default):
        rowwise = node.target in (aten.expand.default, aten.expand_as.default, aten.view.default, aten.reshape.default)
        if node.op != "call_function" or not (rowwise or node.target is aten.unsqueeze.default):
            return None
        before = value(node.args[0])
        # Only axes of length one may be added or widened: the first axis stays the edges.
        if before.dim() == 0 or any(not (isinstance(s, int) and s == 1) for s in before.shape[1:]):
            return None
        if not same_size(before.shape[0], value(index).shape[0]):
            return None
        node = node.args[0]
    return node if value(node).dim() == 1 else None


def _is_index(node: Any) -> bool:
    return is_tensor(node) and value(node).dim() == 1 and value(node).dtype in (torch.int64, torch.int32)


def _is_zero(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and node.args[1] in (0, 0.0, False)
