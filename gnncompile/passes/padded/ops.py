"""One rule for each operation on padded tensors: leave it if it works row by row, mask its padding, or refuse it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from gnncompile import _compat
from gnncompile.layout import batch_metadata
from gnncompile.passes.analysis import arguments, aten, own, same_size, value
from gnncompile.passes.padded import masked_reductions
from gnncompile.passes.padded.graph import SELECTED, PaddedGraph, expression, single
from gnncompile.passes.padded.selections import selected


def pointwise(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a pointwise operation. A padded size among its numbers is replaced by the number of valid rows."""
    for place, argument in enumerate(node.args):
        if p.is_padded_number(argument):
            kinds = p.of(value(argument))  # type: ignore[arg-type]
            if kinds is None or node.target not in _WITH_NUMBERS or not value(node).is_floating_point():
                raise p.refuse("calculates with a size of the mini-batch")
            number = p.ctx.call(aten.to.dtype, p.count([kinds], [value(argument)]), value(node).dtype)  # type: ignore[arg-type]
            node.update_arg(place, number)
    if any(p.is_padded_number(argument) for argument in node.kwargs.values()):
        raise p.refuse("calculates with a size of the mini-batch")
    p.dims(node)


def row_by_row(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves an operation that works row by row. Refuses unknown padded sizes of the result."""
    p.dims(node)


def same_values(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves an operation that copies its first argument; indices in it keep their row type."""
    p.dims(node)
    p.numbers_as(node, node.args[0])


def view(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a view that keeps padded rows apart; indices in it keep their row type."""
    source: Any = node.args[0]
    before, after = value(source).shape, value(node).shape
    if node.target in _SQUEEZES:
        _stays(p, node)
    if [s for s in map(expression, before) if s in p.kinds] != [s for s in map(expression, after) if s in p.kinds]:
        _other_sizes(p, node, source)
    elif node.target in _RESHAPES and _in_front(p, before) != _in_front(p, after):
        raise p.refuse(f"{node.target} takes rows for columns")
    same_values(p, node)


def _stays(p: PaddedGraph, node: fx.Node) -> None:
    """Notes that a squeeze would remove the dimension of a single row. The capture keeps it, without a guard."""
    source: Any = node.args[0]
    dims = p.dims(source)
    named = range(value(source).dim()) if len(node.args) < 2 else [node.args[1] % value(source).dim()]
    for dim in named:
        kind = single(dims.get(dim))
        if kind is not None and expression(value(source).shape[dim]) not in p.repeats:
            p.limit(kind, 1, is_excluded=True)


def _in_front(p: PaddedGraph, shape: Sequence[Any]) -> list[sympy.Expr]:
    """Returns the number of elements in the dimensions before each padded dimension."""
    sizes = [expression(size) for size in shape]
    return [sympy.prod(sizes[:dim]) for dim, size in enumerate(sizes) if size in p.kinds]


def _other_sizes(p: PaddedGraph, node: fx.Node, source: fx.Node) -> None:
    """Allows a view that merges padded rows with their columns, or splits them again. Notes the new size."""
    before, after = value(source).shape, value(node).shape
    if node.target in _SWAPS:
        return  # expanded dimensions repeat one row, and the others only change places
    if node.target not in _RESHAPES or not before or not after or set(p.dims(source)) != {0}:
        raise p.refuse(f"{node.target} changes padded dimensions")
    ratio = sympy.cancel(expression(after[0]) / expression(before[0]))
    kinds = p.of(before[0])
    assert kinds is not None
    times = ratio * p.repeats.get(expression(before[0]), 1)
    if not times.is_Integer or len(kinds) != 1:
        raise p.refuse(f"{node.target} changes padded dimensions")
    p.kinds.setdefault(expression(after[0]), kinds)
    p.repeats.setdefault(expression(after[0]), int(times))
    if p.kinds[expression(after[0])] != kinds or p.repeats[expression(after[0])] != times:
        raise p.refuse("two dimensions of one size are padded in two ways")
    if set(p.dims(node)) != {0}:
        raise p.refuse(f"{node.target} changes padded dimensions")


def cat(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a concatenation: along a padded dimension each part keeps its padding."""
    parts: Any = node.args[0]
    p.dims(node)
    found = {p.values.get(part) for part in parts}
    if len(found) == 1 and None not in found:
        p.values[node] = found.pop()  # type: ignore[assignment]
    if all(part in p.given for part in parts):
        p.given.add(node)


def arange(p: PaddedGraph, node: fx.Node) -> None:
    """Allows indices of all rows of one type, as in the self loops of all nodes."""
    kind = single(p.of(value(node).shape[0]))
    starts = node.target is aten.arange.default or node.args[0] == 0
    if kind is None or not starts:
        raise p.refuse("counts rows of a mini-batch")
    p.values[node] = kind
    p.given.add(node)


def filled(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a constant tensor, if its value does not depend on a padded size."""
    if len(node.args) > 1 and p.is_padded_number(node.args[1]):
        raise p.refuse("calculates with a size of the mini-batch")
    p.dims(node)


def linear(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a layer of padded rows, if its weight, bias and feature axis are not padded."""
    if any(p.dims(n) for n in node.args[1:]) or value(node.args[0]).dim() - 1 in p.dims(node.args[0]):  # type: ignore[arg-type]
        raise p.refuse("multiplies over a padded dimension")


def matmul(p: PaddedGraph, node: fx.Node) -> None:
    """Fills the padding with zeros in products that sum over a padded dimension."""
    one, other = node.args[-2:] if node.target is aten.addmm.default else node.args[:2]
    if node.target is aten.addmm.default and p.dims(node.args[0]):
        raise p.refuse("multiplies over a padded dimension")
    for place, factor in ((value(one).dim() - 1, one), (max(value(other).dim() - 2, 0), other)):  # type: ignore[arg-type]
        if place in p.dims(factor):
            node.replace_input_with(factor, p.cleared(factor))  # type: ignore[arg-type]


def gather(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a gather by an index from the loader. Padded rows may gather any row that exists."""
    arguments: Any = node.args
    table, dim, index = arguments
    if dim != 0 and p.of(value(table).shape[dim]) is None:
        return
    if dim != 0 or any(d != 0 for d in p.dims(table)):
        raise p.refuse("gathers along another dimension than the first")
    if p.dims(index) and index not in p.given:
        raise p.refuse("gathers by an index that it calculates")
    if not p.dims(index) and p.dims(table):
        raise p.refuse("gathers by an index that is not of the mini-batch")
    rows, numbered = p.dims(table).get(0), p.values.get(index)
    if rows is not None and len(rows) != 1 and rows[0] != numbered:
        raise p.refuse("gathers from several tensors that are joined")
    # If the row type that the index refers to is unknown, its padded entries may index valid rows.
    if table in p.values and rows == (numbered,):
        p.values[node] = p.values[table]
        p.given.add(node)


def embedding(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a gather from a table of parameters, by an index from the loader."""
    if p.dims(node.args[0]) or node.args[1] not in p.given:
        raise p.refuse("gathers by an index that it calculates")


def segments(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a reduction by an index from the loader, which sends padded rows to padded segments."""
    arguments: Any = node.args
    source, index, size = arguments[:3]
    into = p.of(value(size) if isinstance(size, fx.Node) else size)
    repeated = expression(value(size) if isinstance(size, fx.Node) else size) in p.repeats
    if p.dims(index) and (into != (p.values.get(index),) or repeated):
        raise p.refuse("reduces by an index that the loader does not know")
    if any(d != 0 for d in p.dims(source)) or not same_size(value(source).shape[0], value(index).shape[0]):
        raise p.refuse("reduces along another dimension than the first")


def reduced_dims(node: fx.Node) -> list[int]:
    """Returns the dimensions over which a reduction goes, all of them if it names none."""
    axes, rank = arguments(node).get("dim"), value(node.args[0]).dim()  # type: ignore[arg-type]
    axes = axes if isinstance(axes, (list, tuple)) else [] if axes is None else [axes]
    return [axis % rank for axis in axes] or list(range(rank))


def reduction(p: PaddedGraph, node: fx.Node) -> None:
    """Replaces a reduction over padded dimensions by one over the valid rows."""
    source: Any = node.args[0]
    given = arguments(node)
    dims, padded = reduced_dims(node), p.dims(source)
    if not set(dims) & set(padded):
        p.dims(node)
        return
    new = _reduced(p, node, source, dims, given)
    p.replace(node, new)


def _reduced(p: PaddedGraph, node: fx.Node, source: fx.Node, dims: list[int], given: dict[str, Any]) -> fx.Node:
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    keep, dtype = bool(given.get("keepdim", False)), given.get("dtype")
    mask, ctx = p.mask(source), p.ctx
    if name == "sum":
        return ctx.inline(lambda x, m: masked_reductions.total(x, m, dims, keep, dtype), source, mask, like=node)
    if name in ("amax", "amin") and value(source).is_floating_point():
        fill = -math.inf if name == "amax" else math.inf
        _needs_a_row(p, source, dims)
        cleared = ctx.inline(masked_reductions.cleared, source, mask, fill, like=node)
        return ctx.call(node.target, cleared, dims, keep, like=node)  # type: ignore[arg-type]
    padded = {d: kinds for d, kinds in p.dims(source).items()}
    if not set(padded) <= set(dims):
        raise p.refuse(f"{name} of one padded dimension and not of another")
    number = p.count(list(padded.values()), [value(source).shape[d] for d in padded])
    if name == "mean" and dtype is None:
        return ctx.inline(lambda x, m, n: masked_reductions.mean(x, m, n, dims, keep), source, mask, number, like=node)
    if name in ("var", "std"):
        given_correction = given.get("correction", int(given.get("unbiased", True)))
        correction = 1 if given_correction is None else given_correction
        root = name == "std"
        return ctx.inline(
            lambda x, m, n: masked_reductions.variance(x, m, n, dims, keep, correction, root),
            source,
            mask,
            number,
            like=node,
        )
    raise p.refuse(f"{name} over a padded dimension has no masked form")


def _needs_a_row(p: PaddedGraph, source: fx.Node, dims: Sequence[int]) -> None:
    """Notes that a reduction over these dimensions has no value without a valid row."""
    for kinds in (p.dims(source)[dim] for dim in dims if dim in p.dims(source)):
        kind = single(kinds)
        if kind is not None:
            p.limit(kind, 1)


def along(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves an operation along an unpadded dimension. A softmax along a padded dimension gets -inf as padding."""
    source: Any = node.args[0]
    first = source[0] if isinstance(source, (list, tuple)) else source
    named = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if named is None or isinstance(named, fx.Node):
        raise p.refuse(f"{node.target} goes along all dimensions")
    axes = named if isinstance(named, (list, tuple)) else [named]
    if all(a % value(first).dim() not in p.dims(first) for a in axes):
        return
    if node.target not in (aten.softmax.int, aten.log_softmax.int):
        raise p.refuse(f"{node.target} goes along a padded dimension")
    _needs_a_row(p, first, [named % value(first).dim()])
    # The mask covers only that dimension: a padded row of -inf alone would give NaN, also in the gradients.
    mask = p.mask(first, [named % value(first).dim()])
    filled = p.ctx.inline(masked_reductions.cleared, first, mask, -math.inf, like=node)
    made = p.ctx.call(node.target, filled, *node.args[1:], like=node, **node.kwargs)
    if node.target is aten.log_softmax.int:
        made = p.ctx.inline(masked_reductions.cleared, made, mask, like=node)
    p.replace(node, made)


def repeat(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a repetition along unpadded dimensions."""
    arguments: Any = node.args
    source, times = arguments
    lead = len(times) - value(source).dim()
    if any(times[lead + dim] != 1 for dim in p.dims(source)):
        raise p.refuse("repeats padded rows")
    same_values(p, node)


def select(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a selection along an unpadded dimension, at an index that does not depend on a padded size."""
    arguments: Any = node.args
    source, dim, index = arguments
    if dim % value(source).dim() in p.dims(source) or p.is_padded_number(index):
        raise p.refuse("takes one row of a mini-batch, or of as many")
    same_values(p, node)


def cut(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a split along an unpadded dimension."""
    given = arguments(node)
    if given["dim"] % value(given["self"]).dim() in p.dims(given["self"]):
        raise p.refuse(f"{node.target} cuts padded rows")


def sliced(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a slice of columns, of all rows, or of the first valid rows (``out[:batch_size]``)."""
    source: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    if any(p.is_padded_number(place) for place in (*node.args[2:3], *node.args[4:])):
        raise p.refuse("calculates with a size of the mini-batch")
    if dim % value(source).dim() not in p.dims(source):
        return
    size, kept = value(source).shape[dim], value(node).shape[dim]
    if same_size(size, kept) or (p.known.kind(kept) is not None and p.known.kind(kept) == p.known.kind(size)):
        p.numbers_as(node, source)
        return
    kind, start = single(p.of(size)), node.args[2] if len(node.args) > 2 else 0
    whole_steps = len(node.args) < 5 or node.args[4] == 1
    fixed = not isinstance(kept, torch.SymInt) or kept.node.expr.is_Symbol
    if kind is None or kind >= SELECTED or start not in (0, None) or not whole_steps or not fixed:
        raise p.refuse("takes some of the padded rows")
    if p.is_padded_number(kept):
        if not p.known.is_hop_prefix(p.known.kind(kept), kind):
            raise p.refuse("takes some of the padded rows")
        p.numbers_as(node, source)
        return
    p.limit(kind, None if isinstance(kept, torch.SymInt) else int(kept))
    batch, now = batch_metadata.current(), _compat.size_now(kept)
    if batch is None or now is None or now > batch.counts[kind]:
        raise p.refuse("takes more rows than there are")


def normalised(p: PaddedGraph, node: fx.Node) -> None:
    """Leaves a normalisation over unpadded feature axes."""
    shape: Any = node.args[1]
    if any(p.is_padded_number(s) for s in shape):
        raise p.refuse("normalises over a padded dimension")


def batch_norm(p: PaddedGraph, node: fx.Node) -> None:
    """Replaces a batch norm in training by one with the statistics of the valid rows."""
    x, weight, bias, mean, var, training, momentum, eps = node.args[:8]
    if not training:
        return
    if set(p.dims(x)) != {0} or isinstance(momentum, fx.Node):
        raise p.refuse("normalises over a padded dimension")
    kinds = p.dims(x)[0]
    number = p.count([kinds], [value(x).shape[0]])  # type: ignore[arg-type]
    given = (x, weight, bias, mean, var, p.mask(x), number, momentum, eps)  # type: ignore[arg-type]
    p.replace(node, p.ctx.inline(masked_reductions.batch_norm, *given, like=node))


def loss(p: PaddedGraph, node: fx.Node) -> None:
    """Replaces a reduced loss by the sum or mean over the valid rows."""
    given = arguments(node)
    reduction, x, target = given["reduction"], given["self"], given["target"]
    if reduction == masked_reductions.NONE:
        return
    if set(p.dims(x)) != {0}:
        raise p.refuse("a loss over a padded dimension that is not the first")
    mask, whole = p.mask(target), value(target)
    if "ignore_index" in given and not whole.is_floating_point():
        ignored = p.ctx.inline(masked_reductions.ignored, target, mask, given["ignore_index"], like=node)
        node.replace_input_with(target, ignored)
        return
    given["reduction"] = masked_reductions.NONE
    kwargs = {a.name: given[a.name] for a in node.target._schema.arguments if a.kwarg_only}  # type: ignore[union-attr]
    losses = p.ctx.call(node.target, *[given[n] for n in given if n not in kwargs], like=node, **kwargs)  # type: ignore[arg-type]
    number = p.count([p.dims(losses)[0]], [value(losses).shape[0]])
    mask = p.mask(losses)
    new = p.ctx.inline(lambda v, m, n: masked_reductions.reduced(v, m, n, reduction), losses, mask, number, like=node)
    p.replace(node, new)


_WITH_NUMBERS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
"""Operations that take a tensor without dimensions in place of a number."""

_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints}
_SWAPS = {
    aten.expand.default,
    aten.expand_as.default,
    aten.movedim.int,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
}

_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim}

VIEWS = {
    *_RESHAPES,
    *_SWAPS,
    aten.detach.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
}
"""Views that :func:`view` handles."""

RULES: dict[Any, Callable[[PaddedGraph, fx.Node], None]] = {
    aten.sym_size.int: lambda padding, node: None,
    aten.cat.default: cat,
    aten.arange.default: arange,
    aten.arange.start: arange,
    aten.arange.start_step: arange,
    aten.full.default: filled,
    aten.full_like.default: filled,
    aten.linear.default: linear,
    **dict.fromkeys((aten.mm.default, aten.matmul.default, aten.bmm.default, aten.addmm.default), matmul),
    aten.index_select.default: gather,
    aten.embedding.default: embedding,
    own.segment_reduce.default: segments,
    own.segment_softmax.default: segments,
    aten.batch_norm.default: batch_norm,
    aten.layer_norm.default: normalised,
    aten.slice.Tensor: sliced,
    aten.nonzero.default: selected,
    aten.repeat.default: repeat,
    aten.select.int: select,
    **dict.fromkeys((aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int), cut),
    **dict.fromkeys((aten.stack.default, aten.gru_cell.default), row_by_row),
    **dict.fromkeys(
        (
            aten.broadcast_tensors.default,
            aten.dropout.default,
            aten.empty_like.default,
            aten.ones_like.default,
            aten.rand_like.default,
            aten.randn_like.default,
            aten.zeros_like.default,
            own.edge_dropout.default,
        ),
        row_by_row,
    ),
    **dict.fromkeys(
        (
            aten.clone.default,
            aten.contiguous.default,
            aten.detach.default,
            aten.to.dtype,
            aten.to.device,
            aten._to_copy.default,
            aten.alias.default,
            aten.lift_fresh.default,
            own.mark_dead.default,
            own.live_edges.default,
        ),
        same_values,
    ),
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.max.default,
            aten.min.default,
            aten.var.default,
            aten.var.dim,
            aten.var.correction,
            aten.std.default,
            aten.std.dim,
            aten.std.correction,
            aten.linalg_vector_norm.default,
            aten.norm.ScalarOpt_dim,
            aten.prod.dim_int,
            aten.logsumexp.default,
            aten.any.default,
            aten.any.dim,
            aten.all.default,
            aten.all.dim,
        ),
        reduction,
    ),
    **dict.fromkeys(
        (
            aten.softmax.int,
            aten.log_softmax.int,
            aten.argmax.default,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.cumsum.default,
            aten.glu.default,
        ),
        along,
    ),
    **dict.fromkeys(
        (
            aten.cross_entropy_loss.default,
            aten.nll_loss.default,
            aten.nll_loss_nd.default,
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.kl_div.default,
        ),
        loss,
    ),
}
"""The rule of each operation. Pointwise operations and `VIEWS` need no entry."""
