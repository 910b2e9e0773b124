"""The layouts of a graph's regions: regions over the same edges share one."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gnncompile.device import device_of
from gnncompile.ir.region import Region
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import ONCE, aten, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad import wrap_negative_indices
from gnncompile.passes.pre_grad.message import Message
from gnncompile.passes.pre_grad.resolve_edge_lists import alive_of


class Layouts:
    """Adds the layouts that regions walk, and the calls of regions, to the graph.

    Attributes:
        made: rowptr, col and edge of each layout, by its index, the index of the other end, and the numbers of rows.
        masked: Whether a layout leaves edges out, by the node that makes it.
        alive: The mask of the edges that a layout keeps, by its index; None for all edges.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.made: dict[tuple[Any, ...], list[fx.Node]] = {}
        self.masked: dict[fx.Node, bool] = {}
        self.alive: dict[fx.Node, fx.Node | None] = {}

    def of(self, message: Message) -> list[fx.Node]:
        """Returns rowptr, col and edge by destination, and also by source where a gradient will need them."""
        source = message.source if message.source is not None else message.index
        sizes = (message.num_rows, message.num_columns if message.source is not None else message.num_rows)
        layout = self._csr(message.index, source, *sizes)
        if message.source is not None and message.source_needs_grad:
            layout = layout + self._csr(source, message.index, sizes[1], sizes[0])
        return layout

    def call(self, message: Message, region: Region, like: fx.Node) -> tuple[Region, fx.Node]:
        """Adds the call of a message's region, and returns the region with its residuals, and the call."""
        layout = self.of(message)
        region, tensors = message.bind(replace(region, unmasked=self.is_unmasked(layout)), layout)
        wanted = tuple(t in self.ctx.needs_grad for t in tensors)
        region = with_residuals(region, wanted, device_of(value(like).device).stored_layers)
        verify(region)
        if message.stores_rows and region.unmasked and self.ctx.runs_post_grad and self.ctx.is_plain:
            tensors.append(self._row_of_edge(message.index, message.num_rows))
        return region, self.ctx.call(own.region.default, tensors, layout, region.spec, like=like)

    def forget_erased(self) -> None:
        """Forgets layouts that are no longer in the graph, because no region walks them."""
        self.ctx.forget_erased()
        left = set(self.ctx.graph.nodes)
        self.made = {key: parts for key, parts in self.made.items() if left.issuperset(parts)}
        self.alive = {index: mask for index, mask in self.alive.items() if mask is None or mask in left}

    def is_unmasked(self, layout: list[fx.Node]) -> bool:
        """Whether the layout leaves no edge out."""
        made: Any = layout[0].args[0]
        return not self.masked[made]

    def _csr(self, index: fx.Node, other: fx.Node, num_rows: Any, num_columns: Any) -> list[fx.Node]:
        key = (index, other, num_rows, num_columns)
        if key not in self.made:
            alive = self._alive_of(index) or self._alive_of(other)
            # All regions of the graph share the layout, so it is placed right after its last input.
            with self.ctx.after([index, other, num_rows, num_columns, alive]):
                counted = [wrap_negative_indices.counts(self.ctx, end) for end in (index, other)]
                args = [num_rows, num_columns, alive, *(counted if any(counted) else ())]
                made = self.ctx.call(own.csr.default, index, other, *args, like=index)
                self.masked[made] = alive is not None
                self.made[key] = [self.ctx.call(operator.getitem, made, k) for k in range(3)]
        return list(self.made[key])

    def _alive_of(self, index: fx.Node) -> fx.Node | None:
        if index not in self.alive:
            with self.ctx.after([index]):
                self.alive[index] = alive_of(self.ctx, index)
        return self.alive[index]

    def _row_of_edge(self, index: fx.Node, num_rows: Any) -> fx.Node:
        """Returns the row of each edge in the order of the edge list, int32; -1 for all edges if there is no row.

        The layout by the same index reports entries that are out of range. Here they become rows that exist.
        """
        ctx, key = self.ctx, f"row of {index.name} among {num_rows}"
        if key not in ctx.shared_nodes:
            with ctx.after([index, num_rows]):
                counts = wrap_negative_indices.counts(ctx, index)
                row = wrap_negative_indices.wrapped(ctx, index, num_rows) if counts else index
                end = ctx.call(operator.sub, num_rows, 1) if isinstance(num_rows, fx.Node) else num_rows - 1
                row = ctx.call(aten.clamp.default, row, 0, end, like=index)
                made = ctx.shared_nodes[key] = ctx.call(aten._to_copy.default, row, like=index, dtype=torch.int32)
                made.meta[ONCE] = True
        return ctx.shared_nodes[key]
