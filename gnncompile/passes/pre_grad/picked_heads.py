"""Heads of edge features that an index repeats: ``w[:, order]`` with more entries in `order` than `w` has heads.

Equivariant models have a weight per degree of spherical harmonics, and use it for all orders of that degree
(https://arxiv.org/abs/2206.07697). A region reads each head of `w` as a tensor of its own, and chooses among them by
masks of `order`. So the repeated rows are never written, and neither are their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, is_tensor, value
from gnncompile.passes.context import Context

MOST_HEADS = 8
"""The most heads to choose from. A region reads a tensor, and makes a choice, for each of them."""


@dataclass(frozen=True)
class Picked:
    """A choice of heads.

    Attributes:
        rows: Edge features, ``[num_edges, heads, ...]``.
        order: int64 ``[picked]``: for each head of the result, one of `rows`.
        wraps: Whether negative entries of `order` count from the last head.
    """

    rows: fx.Node
    order: fx.Node
    wraps: bool


def of(node: fx.Node) -> Picked | None:
    """Returns what a node picks, or None if it is no choice of heads that repeats them."""
    args: Any = node.args
    if node.target is aten.index_select.default and args[1] == 1:
        rows, order, wraps = args[0], args[2], False
    elif (
        node.target is aten.index.Tensor
        and len(args[1]) in (2, 3)
        and [i for i in args[1] if i is not None] == [args[1][1]]
    ):
        rows, order, wraps = args[0], args[1][1], True
    else:
        return None
    if not is_tensor(order) or value(order).dim() != 1 or value(order).dtype != torch.int64:
        return None
    if value(order).device != value(rows).device:  # torch moves such an index for each call
        return None
    heads, picked = value(rows).shape[1], value(order).shape[0]
    if not isinstance(heads, int) or not isinstance(picked, int) or not 0 < heads <= min(MOST_HEADS, picked - 1):
        return None
    return Picked(rows, order, wraps)


def parts(ctx: Context, picked: Picked, like: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Adds each head of the rows, and for each of them a mask: where `order` has it.

    Args:
        ctx: The context of the passes, whose insertion point is after `picked`.
        picked: The choice.
        like: The node whose line the new nodes get.

    Returns:
        The heads, ``[num_edges, ...]`` each; and the masks, bool ``[picked]`` each.
    """
    heads = value(picked.rows).shape[1]
    rows = [ctx.call(aten.select.int, picked.rows, 1, k, like=like) for k in range(heads)]
    # An entry out of range is found here, as it would be in the model.
    all_heads = ctx.call(aten.arange.default, heads, device=value(picked.order).device, like=like)
    if picked.wraps:
        found = ctx.call(aten.index.Tensor, all_heads, [picked.order], like=like)
    else:
        found = ctx.call(aten.index_select.default, all_heads, 0, picked.order, like=like)
    return rows, [ctx.call(aten.eq.Scalar, found, k, like=like) for k in range(heads)]
