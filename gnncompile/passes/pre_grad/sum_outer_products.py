"""Where a linear layer makes a matrix for each edge, messages are summed first, and the layer runs once per node.

With the weight of the layer as ``w: [K, C, M]`` and its bias as ``b: [K, C]``:

Before: ``m = matmul(x[src].unsqueeze(1), linear(h, w, b).view(-1, K, C)).squeeze(1); segment_reduce(m, dst, n, "sum")``
After:  ``s = segment_reduce(x[src].unsqueeze(1) * h.unsqueeze(2), dst, n, "sum")``;
        ``einsum("nmk,kcm->nc", s, w) + segment_reduce(x[src], dst, n, "sum") @ b``
Why it pays: the matrix of an edge has K * C elements, and the layer M * K * C multiplications for each edge. A region
        that sums outer products has M * K multiplications for an edge, and stores nothing for it. ``NNConv`` is such a
        convolution (Gilmer et al., https://arxiv.org/abs/1704.01212). An infinity in a row may become a NaN, since it
        is multiplied before the layer adds its features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import alike, aten, drop_unused, is_one, is_tensor, own, same_size, value
from gnncompile.passes.context import Context

_VIEWS = (aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""In float16 a sum of outer products may overflow where the messages do not."""

MOST_FEATURES = 2048
"""The largest outer product, in elements. A larger one does not stay in a cache."""

MOST_FEATURES_PER_CHANNEL = 4
"""The largest M for each element of C."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.options.regions:
        return
    of_layer: dict[fx.Node, list[_Message]] = defaultdict(list)
    for reduction in ctx.graph.find_nodes(op="call_function", target=own.segment_reduce.default):
        if (found := _message(ctx, reduction)) is not None:
            of_layer[found.layer].append(found)
    for layer, messages in of_layer.items():
        if set(_readers(layer)) == {one.product for one in messages} and all(map(_pays, messages)):
            for one in messages:
                with ctx.graph.inserting_before(one.reduction):
                    one.reduction.replace_all_uses_with(_rewritten(ctx, one))
    drop_unused(ctx.graph)


@dataclass(frozen=True)
class _Message:
    """The sum of messages that are a row times a matrix.

    Attributes:
        row: The row of each edge: ``[edges, K]``, ``[edges, 1, K]`` or ``[edges, K, 1]``.
        matrix: The matrix of each edge, ``[edges, K, C]`` or ``[edges, C, K]``.
        axis: The axis of K in the matrix.
        product: The operation that reads the matrix.
        layer: The linear layer that makes the matrix.
        reduction: The sum.
        factors: The operations (mul, div) that scale messages, each with its number, or numbers per edge.
    """

    row: fx.Node
    matrix: fx.Node
    axis: int
    product: fx.Node
    layer: Any
    reduction: Any
    factors: tuple[tuple[Any, Any], ...] = ()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """K, C and M."""
        shape = value(self.matrix).shape
        return shape[self.axis], shape[3 - self.axis], value(self.layer.args[1]).shape[1]


def _readers(layer: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read the matrices of a layer; those that read the layer in another way stand for themselves."""
    for user in layer.users:
        yield from user.users if user.target in _VIEWS[:2] else [user]


def _message(ctx: Context, reduction: Any) -> _Message | None:
    """Returns the message that a reduction sums; None if it is another one."""
    node, factors = reduction.args[0], []
    while _feeds_only(ctx, node, reduction):
        if (scaled := _without_factor(node)) is not None:
            factors.append((node.target, scaled[1]))
            node = scaled[0]
        elif node.target in _VIEWS and _keeps_rows(node):
            node = node.args[0]
        else:
            break
    read = _READ.get(node.target)
    found = read(ctx, node, reduction) if read is not None and _feeds_only(ctx, node, reduction) else None
    if found is None or value(node).dtype != value(reduction).dtype or not ctx.movable(reduction, reduction):
        return None
    return replace(found, factors=tuple(factors))


def _feeds_only(ctx: Context, node: Any, reduction: fx.Node) -> bool:
    """Whether one node alone reads the result of a call, and the call could run where the reduction does."""
    return node.op == "call_function" and len(node.users) == 1 and ctx.movable(node, reduction)


def _without_factor(node: Any) -> tuple[fx.Node, Any] | None:
    """Returns a message and its factor, if an operation scales the message by a number, or by a number per edge."""
    orders = {aten.mul.Tensor: (node.args, node.args[::-1]), aten.div.Tensor: (node.args,)}
    for message, factor in orders.get(node.target, ()) if not node.kwargs else ():
        if factor is not message and alike(message, node) and _is_factor(factor, message):
            return message, factor
    return None


def _is_factor(factor: Any, message: fx.Node) -> bool:
    """Whether a factor is one number, or one number for each edge."""
    if not isinstance(factor, fx.Node):
        return True
    if not is_tensor(factor):
        return False
    shape, of_message = value(factor).shape, value(message).shape
    if all(map(is_one, shape)):
        return True
    return len(shape) == len(of_message) and same_size(shape[0], of_message[0]) and all(map(is_one, shape[1:]))


def _product(ctx: Context, node: Any, reduction: fx.Node) -> _Message | None:
    """Returns the message of a product of matrices."""
    left, right = node.args
    if any(value(one).dim() != 3 for one in (left, right)):
        return None
    if is_one(value(left).shape[1]):
        return _of_layer(ctx, left, right, 1, node, reduction)
    return _of_layer(ctx, right, left, 2, node, reduction) if is_one(value(right).shape[2]) else None


def _einsum(ctx: Context, node: Any, reduction: fx.Node) -> _Message | None:
    """Returns the message of a call such as ``einsum("ek,ekc->ec", row, matrix)``."""
    equation, operands = node.args[:2]
    letters, _, result = equation.replace(" ", "").partition("->")
    pairs = list(zip(letters.split(","), operands, strict=False))
    for (row, rows), (matrix, matrices) in (pairs, pairs[::-1]) if len(pairs) == 2 else ():
        if [len(row), len(matrix), len(result)] != [2, 3, 2] or row[0] != matrix[0] or row[1] not in matrix[1:]:
            continue
        axis = matrix.index(row[1])
        if len(set(matrix)) == 3 and result == matrix[0] + matrix[3 - axis]:
            return _of_layer(ctx, rows, matrices, axis, node, reduction)
    return None


def _sum(ctx: Context, node: Any, reduction: fx.Node) -> _Message | None:
    """Returns the message of a product of elements and its sum over an axis."""
    product, axes = (*node.args, None)[:2]
    if node.kwargs.get("dtype") is not None or not isinstance(axes, (list, tuple)) or len(axes) != 1:
        return None
    if product.target is not aten.mul.Tensor or value(product).dim() != 3 or axes[0] % 3 == 0:
        return None
    axis = axes[0] % 3
    if not _feeds_only(ctx, product, reduction) or any(not is_tensor(a) or value(a).dim() != 3 for a in product.args):
        return None
    for row, matrix in (product.args, product.args[::-1]):
        if is_one(value(row).shape[3 - axis]):
            return _of_layer(ctx, row, matrix, axis, product, reduction)
    return None


_READ = {
    aten.matmul.default: _product,
    aten.bmm.default: _product,
    aten.einsum.default: _einsum,
    aten.sum.dim_IntList: _sum,
}


def _of_layer(ctx: Context, row: Any, matrix: Any, axis: int, product: fx.Node, reduction: fx.Node) -> _Message | None:
    """Returns a message, if a linear layer of rows of edges makes its matrix."""
    layer = matrix.args[0] if matrix.target in _VIEWS[:2] else None
    if layer is None or layer.target is not aten.linear.default or value(layer).dim() != 2:
        return None
    if not all(ctx.movable(one, reduction) for one in (matrix, layer)):
        return None
    rows, weight, *bias = layer.args
    dtypes = {value(one).dtype for one in (row, rows, weight, layer)}
    if len(dtypes) > 1 or value(layer).dtype not in _DTYPES:
        return None
    edges, *axes = value(row).shape
    wide = [size for size in axes if not is_one(size)]
    has_whole_rows = len(wide) == 1 and same_size(wide[0], value(matrix).shape[axis])
    is_of_edges = all(same_size(edges, value(one).shape[0]) for one in (matrix, layer))
    # A bias may also be one number for all elements, or another row for each edge.
    has_plain_bias = not bias or bias[0] is None or _is_vector(bias[0], value(layer).shape[1])
    if not (has_whole_rows and is_of_edges and has_plain_bias):
        return None
    return _Message(row, matrix, axis, product, layer, reduction)


def _is_vector(node: fx.Node, size: Any) -> bool:
    return value(node).dim() == 1 and same_size(value(node).shape[0], size)


def _keeps_rows(node: Any) -> bool:
    """Whether a view keeps all axes but those of size 1."""
    shapes = value(node).shape, value(node.args[0]).shape
    if not all(shapes):
        return False
    one, other = ([size for size in shape[1:] if not is_one(size)] for shape in shapes)
    return same_size(shapes[0][0], shapes[1][0]) and len(one) == len(other) and all(map(same_size, one, other))


def _pays(message: _Message) -> bool:
    """Whether the layer does less work after the sum, and less is stored."""
    k, c, m = message.sizes
    if not all(isinstance(size, int) and size > 0 for size in (k, c, m)):
        return False
    if message.reduction.args[3] not in ("sum", "mean"):
        return False
    edges, rows = (_compat.size_now(value(one).shape[0]) for one in (message.matrix, message.reduction))
    if edges is None or rows is None or edges < 2 * rows:
        return False
    is_narrow = k > 1 and k * m <= MOST_FEATURES and m <= MOST_FEATURES_PER_CHANNEL * c
    return bool(is_narrow and rows * m <= edges * c)


def _rewritten(ctx: Context, message: _Message) -> fx.Node:
    """Returns the sums, with the layer applied after them."""
    k, c, m = message.sizes
    layer, reduction = message.layer, message.reduction
    rows, weight, *bias = layer.args
    row = _scaled(ctx, message)
    outer = ctx.call(aten.mul.Tensor, row, ctx.call(aten.unsqueeze.default, rows, 2, like=layer), like=reduction)
    outer = ctx.call(own.segment_reduce.default, outer, *reduction.args[1:], like=reduction)
    outer = ctx.call(aten.reshape.default, outer, [-1, m * k], like=reduction)
    sizes, axes = ([k, c, m], [2, 0, 1]) if message.axis == 1 else ([c, k, m], [2, 1, 0])
    matrix = ctx.call(aten.reshape.default, weight, sizes, like=layer)
    matrix = ctx.call(aten.permute.default, matrix, axes, like=layer)
    matrix = ctx.call(aten.reshape.default, matrix, [m * k, c], like=layer)
    total = ctx.call(aten.mm.default, outer, matrix, like=reduction)
    if bias and bias[0] is not None:
        matrix = ctx.call(aten.reshape.default, bias[0], sizes[:2], like=layer)
        matrix = matrix if message.axis == 1 else ctx.call(aten.t.default, matrix, like=layer)
        plain = ctx.call(aten.squeeze.dim, row, 1, like=reduction)
        plain = ctx.call(own.segment_reduce.default, plain, *reduction.args[1:], like=reduction)
        total = ctx.added([total, ctx.call(aten.mm.default, plain, matrix, like=reduction)], reduction)
    if value(reduction).dim() == 2:
        return total
    return ctx.call(aten.reshape.default, total, [-1, *value(reduction).shape[1:]], like=reduction)


def _scaled(ctx: Context, message: _Message) -> fx.Node:
    """Returns the row of each edge, ``[edges, 1, K]``, times the factors of the message."""
    reduction = message.reduction
    row = ctx.call(aten.reshape.default, message.row, [-1, 1, message.sizes[0]], like=reduction)
    for scale, factor in reversed(message.factors):
        if isinstance(factor, fx.Node):
            factor = ctx.call(aten.reshape.default, factor, [-1, 1, 1], like=reduction)
        row = ctx.call(scale, row, factor, like=reduction)
    return row
