"""Writes messages with linear layers of any width: the edges of such a region are walked in tiles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gnncompile import tuning
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import LAYERS, Space, behind
from gnncompile.passes.analysis import aten, is_tensor, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.pointwise import NotFusable, Slots
from gnncompile.passes.pre_grad import edge_linears
from gnncompile.passes.pre_grad.message import Message, region_shape


class TiledMessage(Message):
    """Messages of several reductions over the same edges, with their layers.

    Args:
        ctx: The context of the passes.
        at: The last reduction. What the region needs is placed in front of it.
        stored: Values per edge that are computed outside of the region.

    Attributes:
        skipped: What is not part of the region, and why. Nothing is logged, since the region may not be formed.
    """

    def __init__(self, ctx: Context, at: fx.Node, stored: frozenset[fx.Node]) -> None:
        super().__init__(ctx, at, at.args[1], at.args[2])  # type: ignore[arg-type]
        self.builder.tiled, self.stored = True, stored
        self.skipped: list[tuple[str, str, fx.Node]] = []

    def skip(self, what: str, reason: str, node: fx.Node) -> None:
        """Keeps the reason for later."""
        self.skipped.append((what, reason, node))

    def depth(self) -> int:
        """Returns the most layers one behind the other. Narrow ones do not count: their rows cost little to store."""
        depths: list[int] = []
        for node in self.builder.nodes:
            counts = node.op in LAYERS and math.prod(node.shape) >= tuning.TILES.layer_width
            depths.append(max((depths[a] for a in node.args), default=0) + counts)
        return max(depths, default=0)

    def has_layer(self, at: int) -> bool:
        """Whether a region node is computed from a linear layer."""
        return any(self.builder.nodes[k].op in LAYERS for k in behind(self.builder.nodes, [at]))

    def factor(self, otherwise: torch.dtype) -> torch.dtype:
        """Returns the dtype of the layers' weights, or `otherwise` if they have several."""
        nodes = self.builder.nodes
        types = {node.dtype for node in nodes if node.op == "input" and node.space is Space.FEATURE}
        return tensor_type(types.pop()) if len(types) == 1 else otherwise

    def _operation(self, node: fx.Node, slots: Slots, strict: bool) -> int:
        if node in self.stored:
            raise NotFusable("it is computed outside of the region")
        if node.target is own.segment_softmax.default:
            raise NotFusable("a softmax over edges is not computed in tiles")
        if node.target is aten.layer_norm.default and self.visible(node) and node not in self.ctx.written:
            return self._norm(node, slots)
        return super()._operation(node, slots, strict)

    def _layer(self, layer: fx.Node, node: fx.Node, slots: Slots) -> int:
        rows, weight, *bias = layer.args
        if layer is not node or not isinstance(rows, fx.Node) or value(rows).dim() != 2 or len(slots) != 1:
            raise NotFusable("its rows have several axes")
        if not isinstance(weight, fx.Node) or {rows, weight, layer} & self.ctx.written:
            raise NotFusable("it reads a tensor that is written to in place")
        if not self.visible(layer):
            raise NotFusable("it computes in another mode")
        # Under autocast the dtypes may differ. Products round rows to the dtype of weights, as autocast does.
        weight = edge_linears.converted(self.ctx, weight, value(layer).dtype, self.at)
        features = self.builder.on_edges(self.lower(rows, (1,)))
        if self.builder.nodes[features].shape != (1, int(value(rows).shape[1])):
            raise NotFusable("its rows are expanded")
        product = self.product(features, weight, region_shape(value(node).shape[1:], slots))
        if not bias or bias[0] is None:
            return product
        return self.builder.op("add", product, self.operand(bias[0], node, slots, False))

    def _norm(self, node: fx.Node, slots: Slots) -> int:
        """Lowers a layer norm over channels: https://arxiv.org/abs/1607.06450."""
        given: list[Any] = list(node.args)
        rows, shape, weight, bias, eps = [*given, *[None, None, 1e-5][len(given) - 2 :]][:5]
        if len(shape) != 1 or value(rows).dim() != 2 or slots != (1,):
            raise NotFusable("it normalises several axes")
        b, channels = self.builder, int(shape[0])
        x = self.lower(rows, slots)
        if b.nodes[x].shape != (1, channels):
            raise NotFusable("its rows are expanded")
        count = b.const(channels)
        away = b.op("sub", x, b.op("div", b.sum_axis(x, 1), count))
        variance = b.op("div", b.sum_axis(b.op("mul", away, away), 1), count)
        out = b.op("div", away, b.op("sqrt", b.op("add", variance, b.const(float(eps)))))
        for name, other in (("mul", weight), ("add", bias)):
            if is_tensor(other):
                out = b.op(name, out, self.operand(other, node, slots, False))
        return out
