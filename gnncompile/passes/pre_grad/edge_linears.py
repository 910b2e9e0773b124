"""Decides which linear layers of edge features a region computes itself, if only messages read them.

Before: ``region([x, linear(edge_attr, w)], ..., "sum of relu(x + e)")``
After:  ``region([x, edge_attr, w.t()], ..., "sum of relu(x + linear(e, w))")``
Why it pays: the layer's rows are as wide as a message. They are written once and read by every walk, and their gradient
is written and read as well. The few features of an edge are a fraction of that width, and their product takes less time
than reading the rows from memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile import tuning
from gnncompile.device import HALVES, device_of
from gnncompile.passes.analysis import aten, value
from gnncompile.passes.context import Context

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def layer_of(node: fx.Node) -> fx.Node:
    """Returns the linear layer whose features a view splits into heads, or else the node itself."""
    inner: Any = node.args[0] if node.target in VIEWS else node
    return inner if inner.target is aten.linear.default and value(node).dim() == 3 else node


def refusal(ctx: Context, layer: fx.Node, components: int = 1) -> str:
    """Returns the reason why a region cannot compute a layer, or an empty string if it can.

    Args:
        ctx: The context of the passes.
        layer: The layer.
        components: How many components of a vector read each row of the layer.
    """
    args: Any = layer.args
    rows, weight, *bias = args
    features, weights = int(value(weight).shape[1]), int(value(weight).numel())
    if value(rows).dim() != 2 or (bias and bias[0] is not None):
        return "it has a bias and heads, or its rows have several axes"
    most, most_weights = tuning.TILES.layer_features, tuning.TILES.layer_weights
    if not 0 < features <= most or weights > most_weights:
        return f"it has {features} features and {weights} weights, a kernel takes {most} and {most_weights}"
    few = tuning.TILES.layer_features_of_vectors
    stored_pays = device_of(value(layer).device).runs_triton or value(layer).dtype in HALVES
    if components > 1 and features > few and stored_pays:
        return f"it has {features} features, and a walk of vectors computes a layer of at most {few}"
    if weights <= features**2:
        return "its rows are no wider than its features"
    if not value(rows).dtype.is_floating_point or {rows, weight, layer} & ctx.written:
        return "its features are no floats, or written to in place"
    if rows in ctx.needs_grad:
        return "its features need a gradient, which is a layer per edge of its own"
    return ""


def transposed(ctx: Context, weight: fx.Node, at: fx.Node) -> fx.Node:
    """Returns the transposed weight, placed before `at`. All regions under the same modes share one node."""
    return _shared(ctx, f"{weight.name} transposed", at, aten.t.default, weight)


def converted(ctx: Context, weight: fx.Node, dtype: torch.dtype, at: fx.Node) -> fx.Node:
    """Returns the weight in a dtype, placed before `at` as in :func:`transposed`."""
    if value(weight).dtype == dtype:
        return weight
    return _shared(ctx, f"{weight.name} in {dtype}", at, aten._to_copy.default, weight, dtype=dtype)


def _shared(ctx: Context, what: str, at: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    key = f"{what} under {ctx.switches.get(at)}"
    known = ctx.shared_nodes.get(key)
    if known is None or at < known:
        with ctx.graph.inserting_before(at):
            ctx.shared_nodes[key] = known = ctx.call(target, *args, **kwargs)
    return known
