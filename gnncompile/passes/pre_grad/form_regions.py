"""The largest fusable message around each reduction becomes one region.

Before: ``segment_reduce(index_select(x, 0, src) * w.view(-1, 1), dst, n, "sum")``
After:  ``region([x, w], csr(dst, src) + csr(src, dst), "<program>")[0]``
Why it pays: nothing of size [num_edges, features] is written, and no atomic is needed.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from gnncompile.ir.bits import storage_type
from gnncompile.ir.region import Output
from gnncompile.passes.analysis import aten, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import RegionRecord, user_line
from gnncompile.passes.pointwise import POINTWISE, NotFusable
from gnncompile.passes.pre_grad import dropout, rematerialize, tiled_regions
from gnncompile.passes.pre_grad.layouts import Layouts
from gnncompile.passes.pre_grad.message import FLOATS, ONE_OTHER_END, Message
from gnncompile.passes.pre_grad.narrow_values import narrow_values
from gnncompile.passes.pre_grad.normalize_sizes import size_node
from gnncompile.passes.pre_grad.resolve_edge_lists import alive_of
from gnncompile.passes.pre_grad.slice_messages import SPLITS
from gnncompile.passes.pre_grad.stored_rows import residual_streams


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    layouts = Layouts(ctx)
    ctx.stored |= narrow_values(ctx)
    tiled_regions.form(ctx, layouts)
    dropout.settle(ctx)
    layouts.forget_erased()
    forming = _Forming(ctx, layouts)
    for node in list(ctx.graph.nodes):
        if node.target is own.segment_reduce.default:
            forming.reduction(node)
    dropout.settle(ctx)
    for node in list(ctx.graph.nodes):
        if node.target is own.segment_softmax.default:
            forming.softmax(node)
    dropout.settle(ctx)
    for node in list(ctx.graph.nodes):
        if _reads_rows(node):
            forming.arithmetic(node.args[0])
    dropout.settle(ctx)
    for node in list(ctx.graph.nodes):
        if node.target is aten.index_select.default and forming.feeds_regions(node):
            forming.gather(node)


_PARTS = (*SPLITS, aten.slice.Tensor)


def _reads_rows(node: fx.Node) -> bool:
    """Whether a node is a linear layer of arithmetic, or takes columns of it. No region takes such a node in."""
    if node.target in _PARTS:
        dim = node.args[1:2] if node.target is aten.slice.Tensor else node.args[2:3]
        columns = bool(dim) and dim[0] in (1, -1)
    else:
        columns = node.target is aten.linear.default
    return columns and bool(node.users) and node.args[0].target in POINTWISE  # type: ignore[union-attr]


class _Forming:
    """Replaces nodes by regions, with one layout for all regions over the same edges."""

    def __init__(self, ctx: Context, layouts: Layouts) -> None:
        self.ctx, self.layouts = ctx, layouts

    def reduction(self, node: fx.Node) -> None:
        """Replaces a ``segment_reduce`` by a region, or records why that is not possible."""
        src, index, size, kind = node.args
        try:
            if kind == "mul":
                raise NotFusable("the reduction 'mul' has no kernel yet")
            message = self._message(node, src, index, size)  # type: ignore[arg-type]
            root = message.root(src)  # type: ignore[arg-type]
            if streams := residual_streams(message, src):  # type: ignore[arg-type]
                self.ctx.stored |= streams
                message = self._message(node, src, index, size)  # type: ignore[arg-type]
                root = message.root(src)  # type: ignore[arg-type]
            new = self._emit(node, message, message.reduced(str(kind), root))
        except NotFusable as reason:
            self.ctx.skip(f"{kind} aggregation", str(reason), node)
            return
        node.replace_all_uses_with(new)

    def softmax(self, node: fx.Node) -> None:
        """Replaces a softmax that no reduction has taken in by a region with one value per edge."""
        src, index, size = node.args
        try:
            message = self._message(node, src, index, size)  # type: ignore[arg-type]
            new = self._emit(node, message, message.builder.softmax(message.root(src)))  # type: ignore[arg-type]
        except NotFusable as reason:
            self.ctx.skip("softmax over edges", str(reason), node)
            return
        node.replace_all_uses_with(new)

    def arithmetic(self, node: fx.Node) -> None:
        """Replaces arithmetic on gathered rows, which is stored for what reads it, by a region that stores its rows.

        The gradient becomes a walk by each end of the edges instead of additions with atomics.
        """
        if node not in self.ctx.needs_grad or node in self.ctx.written or value(node).dim() != 2:
            return
        for (index, other, num_rows, _), layout in list(self.layouts.made.items()):
            if max(layout) > node or any(alive_of(self.ctx, end) is not None for end in (index, other)):
                continue  # the layout comes later, or an edge that is dead in it may be alive where the rows are read
            try:
                message = self._message(node, node, index, num_rows)
                result = message.builder.on_edges(message.lower(node, (1,), strict=True))
                gathers = message.source is not None and other in (index, message.source)
                if not gathers or message.builder.nodes[result].op == "input":
                    continue  # nothing is gathered, or the rows belong to as many other edges by chance
                new = self._emit(node, message, result)
            except NotFusable:
                continue
            node.replace_all_uses_with(new)
            return

    def feeds_regions(self, node: fx.Node) -> bool:
        """Whether a gather outside regions has rows that need a gradient and is read by regions only."""
        if node.args[1] != 0 or node.args[0] not in self.ctx.needs_grad or node in self.ctx.written:
            return False
        return all(user.target is own.region.default for user in node.users)

    def gather(self, node: fx.Node) -> None:
        """Turns a gather by an index that is neither end of a region's edges into a region that stores its rows.

        The gradient becomes a walk instead of an addition with atomics.
        """
        table, index = node.args[0], node.args[2]
        with self.ctx.graph.inserting_before(node):
            if alive_of(self.ctx, index) is not None:  # type: ignore[arg-type]
                return  # an edge that is dead here may be alive where the rows are read
            size = size_node(self.ctx, table, node)  # type: ignore[arg-type]
        try:
            message = self._message(node, node, index, size)  # type: ignore[arg-type]
            new = self._emit(node, message, message.rows_per_edge(node))
        except NotFusable:
            return  # the region that reads the rows has recorded the skip
        node.replace_all_uses_with(new)
        wide = math.prod(value(node).shape[1:]) >= rematerialize.WIDE  # otherwise the backward may keep the rows
        if wide and self.ctx.runs_post_grad and self.ctx.is_plain:
            self.ctx.unskip("index_select stored per edge", ONE_OTHER_END, node)

    def _message(self, node: fx.Node, src: fx.Node, index: fx.Node, size: Any) -> Message:
        if value(src).dtype not in FLOATS:
            raise NotFusable(f"messages of type {value(src).dtype} have no kernel")
        if not same_size(value(src).shape[0], value(index).shape[0]):
            raise NotFusable("the index has another length than the messages")
        if index in self.ctx.written:
            raise NotFusable("its index is written to in place")
        return Message(self.ctx, node, index, size)

    def _emit(self, node: fx.Node, message: Message, result: int) -> fx.Node:
        fake, graph = value(node), self.ctx.graph
        full = tuple(int(s) for s in fake.shape[1:])
        made = message.builder.nodes[result].shape
        # The reduction of an expanded message is expanded after the region.
        trailing = full if math.prod(full) == math.prod(made) else made[-len(full) :]
        region = message.builder.finish([Output(result, storage_type(fake.dtype), trailing)])
        with graph.inserting_before(node):
            region, out = self.layouts.call(message, region, like=node)
            first = self.ctx.call(operator.getitem, out, 0, like=node)
            if trailing != full:
                first = self.ctx.call(aten.expand.default, first, [-1, *full], like=node)
                first = self.ctx.call(aten.clone.default, first, like=node, memory_format=torch.contiguous_format)
        shape = f"{(fake.shape[0], *trailing)}"
        self.ctx.log.regions.append(RegionRecord(region.spec, user_line(message.at), shape))
        return first
