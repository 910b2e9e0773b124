"""Maxima and minima over the rows of all parts."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from gnncompile.device import HALVES
from gnncompile.layout.halo import group_of
from gnncompile.passes.analysis import arguments, value
from gnncompile.passes.partitioned.graph import PartitionedGraph

EXTREMES = {"amax": 1, "max": 1, "amin": -1, "min": -1}
"""The names of operations that take an extreme, and the sign that makes a maximum of it."""


def wide(x: Tensor) -> Tensor:
    """Returns values of 16 bits as float32, and others as they are."""
    return x.float() if x.dtype in HALVES else x


def largest(x: Tensor, dim: int) -> Tensor:
    """Returns the maximum along `dim`, or minus infinity without rows: a part may be empty."""
    return _with_least(wide(x.detach()), dim).amax(dim, True)


def _with_least(x: Tensor, dim: int) -> Tensor:
    shape = [1 if d == dim else s for d, s in enumerate(x.shape)]
    return torch.cat([x, x.new_full(shape, -torch.inf)], dim)


def extreme(p: PartitionedGraph, node: fx.Node, name: str, dims: list[int]) -> None:
    """Replaces a maximum or minimum over rows. As in PyTorch, equal extremes take equal shares of the gradient."""
    source: Any = node.args[0]
    (row,), sign = p.dims(source), EXTREMES[name]
    if not value(source).is_floating_point():
        raise p.refuse("takes an extreme of numbers that are not floating-point")
    shape, dtype = value(node).shape, value(node).dtype
    first = p.ctx.inline(lambda x: largest(sign * x, row).amax(dims, True), source, like=node)
    top = p.all_reduced(first, "max")

    def reach(x: Tensor, t: Tensor) -> Tensor:
        return (sign * wide(x) == t).sum(dims, True)

    def shares(x: Tensor, t: Tensor, many: Tensor) -> Tensor:
        x = sign * wide(x)
        return torch.where((x == t) | x.isnan(), x / many.to(x.dtype), 0).sum(dims, True)

    many = p.all_reduced(p.ctx.inline(reach, source, top, like=node))
    total = p.all_reduced(p.ctx.inline(shares, source, top, many, like=node))
    p.replace(node, p.ctx.inline(lambda t, s: (sign * _exact(t, s)).reshape(shape).to(dtype), top, total, like=node))


def extreme_and_index(p: PartitionedGraph, node: fx.Node, name: str, dim: int) -> None:
    """Replaces a maximum or minimum along rows whose index is not used. The first process takes the gradient."""
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        raise p.refuse("gives the index of a row, which other parts number differently")
    source: Any = node.args[0]
    sign, keep = EXTREMES[name], bool(arguments(node).get("keepdim", False))
    if not value(source).is_floating_point():
        raise p.refuse("takes an extreme of numbers that are not floating-point")
    dtype, place = value(source).dtype, p.parts.size - dist.get_rank(group_of(p.parts.group))

    def local(x: Tensor) -> Tensor:
        return _with_least(sign * wide(x), dim).max(dim, True).values

    mine = p.ctx.inline(local, source, like=node)
    top = p.all_reduced(p.ctx.inline(lambda m: m.detach().clone(), mine, like=node), "max")
    rank = p.ctx.inline(lambda m, t: torch.where(m == t, place, 0), mine, top, like=node)
    owner = p.all_reduced(rank, "max")
    share = p.ctx.inline(lambda m, o: torch.where((o == place) | m.isnan(), m, 0), mine, owner, like=node)
    total = p.all_reduced(share)

    def finished(t: Tensor, s: Tensor) -> Tensor:
        out = (sign * _exact(t, s)).to(dtype)
        return out if keep else out.squeeze(dim)

    new = p.ctx.inline(finished, top, total, like=node)
    for user in list(node.users):
        user.replace_all_uses_with(new)


def _exact(top: Tensor, total: Tensor) -> Tensor:
    """Returns `top` with the gradient of `total`, which differs by rounding; NaN if any row is NaN."""
    return torch.where(total.isnan(), total, top + (total - total.detach()).nan_to_num())
