"""Markers that were not fused become plain torch operations, and readers of masked edges are checked.

Before: ``segment_reduce(m, mark_dead(dst, alive), n, "mul")``
After:  ``segment_reduce(m, where(alive, dst, n), n + 1, "mul")[:n]``: dead edges land in a row that is dropped
Why it pays: it does not; it keeps operations correct that the other passes left alone.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, cast

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.ir.region import parse
from gnncompile.ops.segment import WRITTEN_OUT
from gnncompile.passes.analysis import aten, drop_unused, is_one, mutates, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import user_line
from gnncompile.passes.pointwise import POINTWISE
from gnncompile.passes.pre_grad.masked_edges import MaskedEdges
from gnncompile.passes.pre_grad.resolve_edge_lists import alive_of

_MARKERS = (own.segment_reduce.default, own.segment_softmax.default)

_ROWWISE = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.expand_as.default,
    aten.dropout.default,
    aten.detach.default,
    aten.select.int,
    aten.sym_size.int,
    aten.layer_norm.default,
    own.edge_dropout.default,
    own.mark_dead.default,
    own.region.default,
    own.csr.default,
    own.inverse_degree.default,
    own.live_edges.default,
    *_MARKERS,
    operator.getitem,
    *POINTWISE,
}
"""Operations that treat the rows of an edge tensor one by one, or handle masks."""

_WITHOUT_DEAD = {
    own.segment_reduce.default,
    own.inverse_degree.default,
    own.live_edges.default,
    aten.sym_size.int,
}
"""Operations whose result has no row for a dead edge."""

_ALONG: dict[Any, tuple[int, ...]] = {
    aten.sum.dim_IntList: (1,),
    aten.mean.dim: (1,),
    aten.amax.default: (1,),
    aten.amin.default: (1,),
    aten.linalg_vector_norm.default: (2,),
    aten.norm.ScalarOpt_dim: (2,),
    aten.cross.default: (2,),
    aten.linalg_cross.default: (2,),
    aten.transpose.int: (1, 2),
    aten.chunk.default: (2,),
    aten.split.Tensor: (2,),
    aten.slice.Tensor: (1,),
    aten.unbind.int: (1,),
    aten.stack.default: (1,),
    aten.max.dim: (1,),
    aten.min.dim: (1,),
}
"""Operations that work along axes, with the indices of the arguments that name the axes."""

_FILLS = {aten.new_full.default, aten.full.default, aten.zeros_like.default, aten.ones_like.default}


def run(ctx: Context) -> None:
    """Rewrites the graph in place. Raises Recapture if an operation would count a dead edge."""
    for node in list(ctx.graph.nodes):
        if node.target in _MARKERS:
            with ctx.graph.inserting_before(node):
                _route_dead_edges(ctx, node)
        elif node.target is own.live_edges.default:
            with ctx.graph.inserting_before(node):
                _say_who_lives(ctx, node)
    _check_masks(ctx)
    for node in list(ctx.graph.nodes):
        if node.target is own.mark_dead.default:
            node.replace_all_uses_with(node.args[0])
        elif node.target in WRITTEN_OUT:
            _write_out(ctx, node)
        elif node.target is aten.linear.default:
            _write_column_out(ctx, node)
    drop_unused(ctx.graph)


def _write_column_out(ctx: Context, node: fx.Node) -> None:
    """Replaces a linear layer of a single feature that needs a gradient by a multiplication.

    Torch's gradient of the product compares strides, which would guard on whether there is one row.
    """
    rows, weight, bias = (*node.args, None)[:3]
    found = value(rows)  # type: ignore[arg-type]
    if rows not in ctx.needs_grad or found.dim() != 2 or not is_one(found.shape[1]):
        return
    with ctx.graph.inserting_before(node):
        rows, weight, bias = (n if n is None else ctx.in_dtype_of(n, node) for n in (rows, weight, bias))  # type: ignore[arg-type]
        out = ctx.call(aten.mul.Tensor, rows, ctx.call(aten.t.default, weight, like=node), like=node)
        out = out if bias is None else ctx.call(aten.add.Tensor, out, bias, like=node)
    node.replace_all_uses_with(out)
    ctx.graph.erase_node(node)


def _write_out(ctx: Context, node: fx.Node) -> None:
    """Replaces a marker by the torch operations that it stands for."""
    with ctx.graph.inserting_before(node):
        node.replace_all_uses_with(ctx.inline(WRITTEN_OUT[node.target], *node.args, like=node))
    ctx.graph.erase_node(node)


def _route_dead_edges(ctx: Context, node: fx.Node) -> None:
    index, size = node.args[1], node.args[2]
    alive = alive_of(ctx, index)  # type: ignore[arg-type]
    if alive is None:
        return
    spare = ctx.call(operator.add, size, 1)
    bin_ = ctx.call(aten.scalar_tensor.default, size, dtype=value(index).dtype, device=value(index).device)  # type: ignore[arg-type]
    routed = ctx.call(aten.where.self, alive, index, bin_)
    rows = ctx.call(node.target, node.args[0], routed, spare, *node.args[3:], like=node)  # type: ignore[arg-type]
    if node.target is own.segment_reduce.default:
        rows = ctx.call(aten.slice.Tensor, rows, 0, 0, size)
    node.replace_all_uses_with(rows)
    ctx.graph.erase_node(node)


def _say_who_lives(ctx: Context, node: fx.Node) -> None:
    """Gives ``live_edges`` its mask, or removes it if all edges are alive."""
    alive = alive_of(ctx, node.args[0])  # type: ignore[arg-type]
    if alive is None:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        ctx.graph.erase_node(node)
    else:
        node.args = (node.args[0], alive)


def _check_masks(ctx: Context) -> None:
    """Follows masked edge tensors, and takes the dead edges out of results.

    Raises Recapture at an operation that would mix dead edges with live ones.
    """
    masked = MaskedEdges(ctx)
    for node in ctx.graph.nodes:
        sources = [n for n in node.all_input_nodes if n in masked]
        counting = masked.counted(node) if node.op == "output" else None
        if counting is not None:
            raise _counted("a number of edges", counting)
        if node.target is own.mark_dead.default:
            masked.add(node)
        elif not sources:
            continue
        elif node.op == "output":
            _take_out_dead(ctx, node, masked)
        elif not _safe(node, masked):
            raise _counted(str(node.target), sources[0])
        elif not _ends_mask(node):
            masked.add(node)


def _take_out_dead(ctx: Context, output: fx.Node, masked: MaskedEdges) -> None:
    """Makes a graph return its masked edge tensors without their dead edges."""
    taken: dict[fx.Node, fx.Node] = {}
    with ctx.graph.inserting_before(output):
        for node in output.all_input_nodes:
            if node not in masked:
                continue
            live = None if ctx.padded is not None else masked.without_dead(node)
            if live is None:
                raise _counted("the output", node)
            taken[node] = live
    output.args = fx.map_arg(output.args, lambda n: taken.get(n, n))


def _counted(what: str, edges: fx.Node) -> _compat.Recapture:
    reason = "reads edges whose removed self loops are only masked; captured with exact sizes"
    return _compat.Recapture(_compat.Setting.SELF_LOOPS, "exact", reason, what, user_line(edges))


def _safe(node: fx.Node, masked: MaskedEdges) -> bool:
    if node.target is aten.cat.default:
        return True  # appending edges, or features to them, keeps a row per edge
    if node.target in (aten.linear.default, aten.mm.default):
        return not any(n in masked for n in node.all_input_nodes if n is not node.args[0])
    if node.target is aten.index_select.default:
        return node.args[0] not in masked
    if node.target in (aten.softmax.int, aten.log_softmax.int):
        axis: Any = node.args[1]
        return bool(axis % value(node).dim() != 0)
    if node.target in (aten.matmul.default, aten.bmm.default):
        second: Any = node.args[1]
        return _all_keep_rows(node, masked) and not (second in masked and value(second).dim() < 3)
    if node.target in _ALONG:
        return _leaves_first_axis(node)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) and not mutates(node):
        return _all_keep_rows(node, masked)
    return node.target in _ROWWISE or node.target in _FILLS


def _all_keep_rows(node: fx.Node, masked: MaskedEdges) -> bool:
    """Whether all masked arguments have the rows of the result: no argument is broadcast or reduced."""
    rows = value(node).shape
    found = [value(n).shape for n in node.all_input_nodes if n in masked]
    return all(len(f) == len(rows) > 0 and same_size(f[0], rows[0]) for f in found)


def _leaves_first_axis(node: fx.Node) -> bool:
    """Whether an operation along axes leaves the first axis alone."""
    places, first = _ALONG[node.target], cast(Any, node.args[0])
    rank = value(node).dim() if isinstance(first, (list, tuple)) else value(first).dim()
    if len(node.args) <= max(places):
        return False
    if node.target is aten.slice.Tensor and node.args[1:] == (0, 0, sys.maxsize):
        return True  # all rows, as in e[:, 0]
    named: list[Any] = [node.args[place] for place in places]
    axes = [axis for name in named for axis in (name if isinstance(name, (list, tuple)) else [name])]
    return bool(axes) and all(axis is not None and axis % rank != 0 for axis in axes)


def _ends_mask(node: fx.Node) -> bool:
    """Whether the result of a node has rows of nodes again, or no rows at all."""
    if node.target is operator.getitem and node.args[0].target is own.region.default:  # type: ignore[union-attr]
        region = parse(node.args[0].args[2])  # type: ignore[union-attr,arg-type]
        return not region.per_edge(region.outputs[node.args[1]])  # type: ignore[index]
    return node.target in _WITHOUT_DEAD
