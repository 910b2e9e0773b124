"""One rule for each operation on rows of a part: leave it, sum it over all parts, or refuse it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile.passes.analysis import arguments, aten, own, value
from gnncompile.passes.padded import masked_reductions, ops
from gnncompile.passes.partitioned.extremes import EXTREMES, extreme, extreme_and_index, largest, wide
from gnncompile.passes.partitioned.graph import PartitionedGraph
from gnncompile.passes.partitioned.parts import Space

COMPARED = {aten.eq.Tensor, aten.ne.Tensor}
"""Comparisons of two ends of edges: an own row has the same index as a source and as a destination."""

OF_INDICES = "calculates with indices of nodes, which differ from those of the whole graph"


def pointwise(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a pointwise operation, unless it calculates with indices of nodes."""
    if value(node).dtype != torch.bool and p.parts.space(node) is not None:
        return  # an index of this part, computed from other indices and numbers of this part
    indices = [is_index(p, argument) for argument in node.all_input_nodes]
    if any(indices) and not (all(indices) and node.target in COMPARED):
        raise p.refuse(OF_INDICES)
    ops.pointwise(p, node)


def is_index(p: PartitionedGraph, node: Any) -> bool:
    """Whether a tensor holds indices of nodes, which other parts number differently."""
    return p.parts.space(node) not in (None, Space.SELECTED)


def same_values(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a copy, unless it makes floats of indices."""
    if value(node).is_floating_point() and p.parts.space(node.args[0]) is not None:
        raise p.refuse(OF_INDICES)
    p.dims(node)


def arange(p: PartitionedGraph, node: fx.Node) -> None:
    """Allows indices of all own rows, as in the self loops of all nodes."""
    if p.parts.space(node) is None:
        raise p.refuse("counts some of the rows")
    p.dims(node)


def gather(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a gather of own rows or halo rows. Halo rows are exchanged by a later pass."""
    table, dim, index = node.args
    space, rows = p.parts.space(index), p.dims(table)
    if dim not in rows:
        if space is not None and p.dims(index) and dim == 0 and space is not Space.SELECTED:
            raise p.refuse("takes rows of a tensor without rows of nodes by indices of nodes")
        return
    if dim != 0 or space is None:
        raise p.refuse("takes rows by an index that is no end of a part's edges")


def embedding(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a table of parameters that is read by attributes of nodes or edges, not by their indices."""
    if p.dims(node.args[0]) or p.parts.space(node.args[1]) is not None:
        raise p.refuse("reads a table by indices of nodes, which differ from those of the whole graph")


def segments(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a reduction to own rows; sums over all parts what goes to rows that all parts share."""
    arguments: Any = node.args
    source, index, size = arguments[:3]
    if is_index(p, source):
        raise p.refuse(OF_INDICES)
    into = p.of(value(size) if isinstance(size, fx.Node) else size)
    if into is not None:
        if p.parts.space(index) not in (Space.OWN, Space.SEVERAL):
            raise p.refuse("reduces to rows by an index that is no destination of a part's edges")
        return
    if node.target is not own.segment_reduce.default or arguments[3] not in ("sum", "mean"):
        raise p.refuse("reduces rows of all parts to groups")
    if arguments[3] == "sum":
        _after(p, node, lambda made: p.all_reduced(made))
        return
    # A mean over rows of all parts: their sum by their number, of which a group without rows counts one.
    dtype = value(node).dtype
    rows = p.ctx.inline(lambda x: wide(x), source, like=node)
    ones = p.ctx.inline(lambda x: torch.ones_like(x[:, :1] if x.dim() > 1 else x), rows, like=node)
    total, many = (p.all_reduced(p.ctx.call(node.target, one, index, size, "sum", like=node)) for one in (rows, ones))
    p.replace(node, p.ctx.inline(lambda t, n: (t / n.clamp(min=1)).to(dtype), total, many, like=node))


def nonzero(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a selection by a mask of own rows or own edges. Its number of rows differs between parts."""
    mask: Any = node.args[0]
    if value(mask).dim() != 1 or value(mask).dtype != torch.bool:
        raise p.refuse("selects rows by something else than a mask of them")
    p.select(value(node).shape[0])


def reduction(p: PartitionedGraph, node: fx.Node) -> None:
    """Replaces a reduction over rows by one over the rows of all parts."""
    source: Any = node.args[0]
    given = arguments(node)
    dims, rows = ops.reduced_dims(node), p.dims(source)
    if not set(dims) & set(rows):
        p.dims(node)
        return
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    known = name in ("sum", "mean", "var", "std") or (name in EXTREMES and len(rows) == 1)
    if not set(rows) <= set(dims) or not known or given.get("dtype") is not None:
        raise p.refuse("goes over rows of all parts")
    if name in EXTREMES:
        extreme(p, node, name, dims)
        return
    keep = bool(given.get("keepdim", False))
    if name == "sum":
        _after(p, node, lambda made: p.all_reduced(made))
        return
    number, others = _number(p, source, dims), math.prod(value(source).shape[d] for d in dims if d not in rows)
    mean = _mean(p, source, number, dims, others)
    if name == "mean":
        shape, dtype = value(node).shape, value(node).dtype
        p.replace(node, p.ctx.inline(lambda m: m.reshape(shape).to(dtype), mean, like=node))
        return
    correction = given.get("correction", int(given.get("unbiased", True)))
    correction = 1 if correction is None else correction
    spread = p.ctx.inline(lambda x, m: (wide(x) - m).square().sum(dims, keep), source, mean, like=node)
    spread = p.all_reduced(spread)

    def finished(total: Tensor, many: Tensor) -> Tensor:
        found = total / (many.to(total.dtype) * others - correction).clamp(min=0)
        out: Tensor = (found.sqrt() if name == "std" else found).to(value(node).dtype)
        return out

    p.replace(node, p.ctx.inline(finished, spread, number, like=node))


def _number(p: PartitionedGraph, source: fx.Node, dims: Sequence[int]) -> fx.Node:
    rows = {d: kinds for d, kinds in p.dims(source).items() if d in dims}
    return p.count(list(rows.values()), [value(source).shape[d] for d in rows])


def _mean(p: PartitionedGraph, source: fx.Node, number: fx.Node, dims: list[int], others: int) -> fx.Node:
    """Returns the mean over rows of all parts, in float32 or better, with the reduced dimensions kept."""
    total = p.all_reduced(p.ctx.inline(lambda x: wide(x).sum(dims, True), source, like=p.at))
    return p.ctx.inline(lambda t, n: t / (n.to(t.dtype) * others), total, number, like=p.at)


def along(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves an operation along features. A softmax along rows takes the maximum and the sum of all parts."""
    source: Any = node.args[0]
    named = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if named is None or isinstance(named, fx.Node) or isinstance(source, (list, tuple)):
        raise p.refuse("goes along all dimensions")
    axes = named if isinstance(named, (list, tuple)) else [named]
    if all(a % value(source).dim() not in p.dims(source) for a in axes):
        return
    if node.target in (aten.max.dim, aten.min.dim):
        extreme_and_index(p, node, node.target._schema.name.split("::")[1], axes[0] % value(source).dim())
        return
    if node.target not in (aten.softmax.int, aten.log_softmax.int) or (len(node.args) > 2 and node.args[2] is not None):
        raise p.refuse("goes along rows of all parts")
    dim, logs = axes[0] % value(source).dim(), node.target is aten.log_softmax.int
    top = p.all_reduced(p.ctx.inline(lambda x: largest(x, dim), source, like=node), "max")
    shifted = p.ctx.inline(lambda x, m: wide(x) - m, source, top, like=node)
    total = p.all_reduced(p.ctx.inline(lambda s: s.exp().sum(dim, True), shifted, like=node))
    dtype = value(node).dtype
    new = p.ctx.inline(lambda s, t: (s - t.log() if logs else s.exp() / t).to(dtype), shifted, total, like=node)
    p.replace(node, new)


def matmul(p: PartitionedGraph, node: fx.Node) -> None:
    """Sums products over rows over all parts."""
    one, other = node.args[-2:] if node.target is aten.addmm.default else node.args[:2]
    over = [value(one).dim() - 1 in p.dims(one), max(value(other).dim() - 2, 0) in p.dims(other)]  # type: ignore[arg-type]
    if not any(over):
        if p.dims(other):
            raise p.refuse("multiplies rows by rows")
        return
    if not all(over) or node.target is aten.addmm.default or p.dims(node):
        raise p.refuse("multiplies over rows of all parts")
    _after(p, node, lambda made: p.all_reduced(made))


def batch_norm(p: PartitionedGraph, node: fx.Node) -> None:
    """Replaces a batch norm in training by one with the statistics of all parts."""
    x, weight, bias, mean, var, training, momentum, eps = node.args[:8]
    if not training:
        return
    if set(p.dims(x)) != {0} or isinstance(momentum, fx.Node):
        raise p.refuse("normalises over rows of all parts")
    fake: Any = value(x)  # type: ignore[arg-type]
    dims, others = [0, *range(2, fake.dim())], math.prod(fake.shape[2:])
    number = _number(p, x, dims)  # type: ignore[arg-type]
    centre = _mean(p, x, number, dims, others)  # type: ignore[arg-type]
    centred = p.ctx.inline(lambda a, c: wide(a) - c, x, centre, like=node)
    total = p.all_reduced(p.ctx.inline(lambda c: c.square().sum(dims, True), centred, like=node))
    given = (centred, centre, total, number, weight, bias, mean, var)

    def normalised(*values: Any) -> Tensor:
        return _normalised(*values, others=others, momentum=momentum, eps=eps).to(fake.dtype)

    p.replace(node, p.ctx.inline(normalised, *given, like=node))


def _normalised(
    centred: Tensor,
    centre: Tensor,
    total: Tensor,
    number: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    others: int,
    momentum: Any,
    eps: Any,
) -> Tensor:
    """Returns the normalised rows, and updates running statistics as :func:`torch.nn.functional.batch_norm` does."""
    many = number.to(total.dtype) * others
    spread = total / many
    if running_mean is not None and running_var is not None:
        unbiased = total.detach() / (many - 1)
        for running, new in ((running_mean, centre.detach()), (running_var, unbiased)):
            running.copy_(running * (1 - momentum) + new.flatten().to(running.dtype) * momentum)
    shape = [1, centred.shape[1]] + [1] * (centred.dim() - 2)
    out = centred * torch.rsqrt(spread + eps)
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def loss(p: PartitionedGraph, node: fx.Node) -> None:
    """Replaces a reduced loss by the sum or mean over the rows of all parts."""
    given = arguments(node)
    reduction_, x, target = given["reduction"], given["self"], given["target"]
    if reduction_ == masked_reductions.NONE:
        return
    if set(p.dims(x)) != {0} or given.get("weight") is not None:
        raise p.refuse("is a loss with weights of classes, or over something else than rows")
    given["reduction"] = masked_reductions.NONE
    kwargs = {a.name: given[a.name] for a in node.target._schema.arguments if a.kwarg_only}  # type: ignore[union-attr]
    losses = p.ctx.call(node.target, *[given[n] for n in given if n not in kwargs], like=node, **kwargs)  # type: ignore[arg-type]
    dtype, others = value(node).dtype, 1
    total = p.all_reduced(p.ctx.inline(lambda v: wide(v).sum(), losses, like=node))
    if reduction_ != masked_reductions.MEAN:
        p.replace(node, p.ctx.inline(lambda t: t.to(dtype), total, like=node))
        return
    if "ignore_index" in given and not value(target).is_floating_point():
        ignored = given["ignore_index"]
        number = p.all_reduced(p.ctx.inline(lambda t: (t != ignored).sum(), target, like=node))
    else:
        number = _number(p, losses, range(value(losses).dim()))
        others = math.prod(s for d, s in enumerate(value(losses).shape) if d not in p.dims(losses))
    p.replace(node, p.ctx.inline(lambda t, n: (t / (n.to(t.dtype) * others)).to(dtype), total, number, like=node))


def sliced(p: PartitionedGraph, node: fx.Node) -> None:
    """Leaves a slice of columns. Refuses some of the rows: the first rows of a part are not those of the graph."""
    source: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if dim % value(source).dim() in p.dims(source) and value(source).shape[dim] != value(node).shape[dim]:
        raise p.refuse("takes some of the rows by their place")


def _after(p: PartitionedGraph, node: fx.Node, make: Callable[[fx.Node], fx.Node]) -> None:
    """Makes the users of a node read what `make` makes of it."""
    users = list(node.users)
    with p.ctx.graph.inserting_after(node):
        made = make(node)
    for user in users:
        user.replace_input_with(node, made)


_OWN_RULES: dict[Any, Callable[..., None]] = {
    aten.index_select.default: gather,
    aten.embedding.default: embedding,
    own.segment_reduce.default: segments,
    own.segment_softmax.default: segments,
    aten.nonzero.default: nonzero,
    aten.batch_norm.default: batch_norm,
    aten.slice.Tensor: sliced,
    own.partitioned.default: lambda p, node: None,
}
_REPLACED: dict[Callable[..., None], Callable[..., None]] = {
    ops.same_values: same_values,
    ops.arange: arange,
    ops.reduction: reduction,
    ops.along: along,
    ops.matmul: matmul,
    ops.loss: loss,
}

RULES: dict[Any, Callable[..., None]] = {
    **{target: _REPLACED.get(rule, rule) for target, rule in ops.RULES.items()},
    **_OWN_RULES,
}
"""The rule of each operation. Pointwise operations and views need no entry."""

TAKE_INDICES = {
    pointwise,
    same_values,
    arange,
    gather,
    segments,
    ops.cat,
    ops.view,
    ops.repeat,
    ops.select,
    sliced,
    ops.cut,
}
"""The rules of operations that may take indices of nodes as their first argument; these rules check them."""
