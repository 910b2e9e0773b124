"""Messages that are multiplied by a matrix of their edge, which a linear layer makes, are multiplied after the sum.

With the weight of the layer as ``w: [K, C, M]`` and its bias as ``b: [K, C]``:

Before: ``m = matmul(x[src].unsqueeze(1), linear(h, w, b).view(-1, K, C)).squeeze(1); segment_reduce(m, dst, n, "sum")``
After:  ``s = segment_reduce(x[src].unsqueeze(1) * h.unsqueeze(2), dst, n, "sum")``;
        ``einsum("nmk,kcm->nc", s, w) + segment_reduce(x[src], dst, n, "sum") @ b``
Why it pays: the matrix of an edge has K * C elements, and the layer M * K * C multiplications for each edge. Afterwards
        an edge has M * K multiplications, none of its matrix is stored, and the layer runs once per node. ``NNConv``
        is such a convolution (Gilmer et al., https://arxiv.org/abs/1704.01212). Only on CPUs: it was measured there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from gnncompile import _compat
from gnncompile.device import device_of
from gnncompile.passes.analysis import alike, aten, drop_unused, is_one, is_tensor, own, same_size, value
from gnncompile.passes.context import Context

_VIEWS = (aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default)

MOST_FEATURES = 2048
"""Most elements of an outer product."""

MOST_WIDER = 4
"""The features of a layer by the width of a message, at most."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for reduction in ctx.graph.find_nodes(op="call_function", target=own.segment_reduce.default):
        found = _message(ctx, reduction)
        if found is not None and _pays(found, reduction):
            with ctx.graph.inserting_before(reduction):
                reduction.replace_all_uses_with(_rewritten(ctx, found, reduction))
    drop_unused(ctx.graph)


@dataclass(frozen=True)
class _Message:
    """A row per edge times a matrix per edge.

    Attributes:
        row: The row, ``[edges, K]`` with axes of size 1.
        matrix: The matrix, ``[edges, K, C]`` or ``[edges, C, K]``.
        axis: The axis of K in the matrix.
        layer: The linear layer that makes the matrix.
        factors: The operations (mul, div) that scale the message by numbers per edge, or for all edges, with these.
    """

    row: fx.Node
    matrix: fx.Node
    axis: int
    layer: Any
    factors: tuple[tuple[Any, Any], ...] = ()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """K, C, and the features of the layer."""
        shape = value(self.matrix).shape
        return shape[self.axis], shape[3 - self.axis], value(self.layer.args[1]).shape[1]


def _message(ctx: Context, reduction: Any) -> _Message | None:
    """Returns the message that a reduction sums; None if it is another one."""
    node, factors = reduction.args[0], []
    while _only_read_once(ctx, node, reduction):
        if (split := _factor(node)) is not None:
            factors.append((node.target, split[1]))
            node = split[0]
        elif node.target in _VIEWS and _keeps_rows(node):
            node = node.args[0]
        else:
            break
    if not _only_read_once(ctx, node, reduction):
        return None
    read = _READERS.get(node.target)
    found = None if read is None else read(ctx, node)
    return None if found is None else replace(found, factors=tuple(factors))


def _factor(node: Any) -> tuple[fx.Node, Any] | None:
    """Returns the message and its factor, if an operation scales a message by a number for each edge."""
    orders = {aten.mul.Tensor: (node.args, node.args[::-1]), aten.div.Tensor: (node.args,)}
    for at, other in orders.get(node.target, ()) if not node.kwargs else ():
        is_number = not isinstance(other, fx.Node) or (other is not at and _is_column(other))
        if is_number and alike(at, node):
            return at, other
    return None


def _is_column(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).dim() == 2 and all(map(is_one, value(node).shape[1:]))


def _product(ctx: Context, node: Any) -> _Message | None:
    """Returns the message of a product of matrices."""
    left, right = node.args
    if any(value(one).dim() != 3 for one in (left, right)):
        return None
    if is_one(value(left).shape[1]):
        return _of(ctx, left, right, 1)
    return _of(ctx, right, left, 2) if is_one(value(right).shape[2]) else None


def _einsum(ctx: Context, node: Any) -> _Message | None:
    """Returns the message of a call such as ``einsum("ek,ekc->ec", row, matrix)``."""
    equation, operands = node.args[:2]
    letters, _, result = equation.replace(" ", "").partition("->")
    pairs = list(zip(letters.split(","), operands, strict=False))
    for (row, one), (matrix, other) in (pairs, pairs[::-1]) if len(pairs) == 2 else ():
        if [len(row), len(matrix), len(result)] != [2, 3, 2] or row[0] != matrix[0] or row[1] not in matrix[1:]:
            continue
        axis = matrix.index(row[1])
        if len(set(matrix)) == 3 and result == matrix[0] + matrix[3 - axis]:
            return _of(ctx, one, other, axis)
    return None


def _sum(ctx: Context, node: Any) -> _Message | None:
    """Returns the message of a product of elements and its sum over an axis."""
    if node.kwargs.get("dtype") is not None:
        return None
    product, axes = node.args[:2]
    if product.target is not aten.mul.Tensor or value(product).dim() != 3 or not _only_read_once(ctx, product, node):
        return None
    (axis, *more) = [one % 3 for one in axes]
    if more or axis == 0 or any(not is_tensor(one) or value(one).dim() != 3 for one in product.args):
        return None
    for row, matrix in (product.args, product.args[::-1]):
        if is_one(value(row).shape[3 - axis]):
            return _of(ctx, row, matrix, axis)
    return None


_READERS = {
    aten.matmul.default: _product,
    aten.bmm.default: _product,
    aten.einsum.default: _einsum,
    aten.sum.dim_IntList: _sum,
}


def _of(ctx: Context, row: Any, matrix: Any, axis: int) -> _Message | None:
    """Returns a message, if a layer makes its matrix and nothing else reads it."""
    layer = matrix.args[0] if matrix.target in _VIEWS[:2] else None
    if layer is None or layer.target is not aten.linear.default or value(layer).dim() != 2:
        return None
    if not all(_only_read_once(ctx, one, matrix) for one in (matrix, layer)):
        return None
    rows, weight = layer.args[:2]
    dtypes = {value(one).dtype for one in (row, rows, weight, layer)}
    is_whole = same_size(value(matrix).shape[0], value(layer).shape[0]) and len(dtypes) == 1
    found = _Message(row, matrix, axis, layer)
    same_rows = same_size(value(row).shape[0], value(matrix).shape[0])
    return found if is_whole and same_rows and value(layer).dtype.is_floating_point else None


def _only_read_once(ctx: Context, node: Any, other: fx.Node) -> bool:
    """Whether one node alone reads the result of a call, which runs in the mode of another call."""
    return (
        node.op == "call_function" and len(node.users) == 1 and node not in ctx.written and ctx.same_mode(node, other)
    )


def _keeps_rows(node: Any) -> bool:
    """Whether a view keeps all axes but those of size 1."""
    shapes = value(node).shape, value(node.args[0]).shape
    one, other = ([size for size in shape[1:] if not is_one(size)] for shape in shapes)
    return same_size(shapes[0][0], shapes[1][0]) and len(one) == len(other) and all(map(same_size, one, other))


def _pays(found: _Message, reduction: Any) -> bool:
    """Whether the layer does less work after the sum. A wide outer product would not stay in a cache."""
    wide, narrow, features = found.sizes
    fits = all(isinstance(size, int) and size > 0 for size in (wide, narrow, features))
    edges, rows = (_compat.size_now(value(one).shape[0]) for one in (found.matrix, reduction))
    if not fits or edges is None or rows is None or reduction.args[3] not in ("sum", "mean"):
        return False
    narrows = wide > 1 and wide * features <= MOST_FEATURES and features <= MOST_WIDER * narrow
    return narrows and edges >= 2 * rows and not device_of(value(reduction).device).runs_triton


def _rewritten(ctx: Context, found: _Message, reduction: Any) -> fx.Node:
    """Returns the sums, with the layer applied after them."""
    wide, narrow, features = found.sizes
    rows, weight, *bias = found.layer.args
    row = _scaled(ctx, ctx.call(aten.reshape.default, found.row, [-1, 1, wide], like=reduction), found, reduction)
    column = ctx.call(aten.unsqueeze.default, rows, 2, like=found.layer)
    outer = ctx.call(aten.mul.Tensor, row, column, like=reduction)
    outer = ctx.call(own.segment_reduce.default, outer, *reduction.args[1:], like=reduction)
    outer = ctx.call(aten.reshape.default, outer, [-1, features * wide], like=reduction)
    sizes = [wide, narrow, features] if found.axis == 1 else [narrow, wide, features]
    axes = [2, 0, 1] if found.axis == 1 else [2, 1, 0]
    matrix = ctx.call(aten.reshape.default, weight, sizes, like=found.layer)
    matrix = ctx.call(aten.permute.default, matrix, axes, like=found.layer)
    matrix = ctx.call(aten.reshape.default, matrix, [features * wide, narrow], like=found.layer)
    total = ctx.call(aten.mm.default, outer, matrix, like=reduction)
    if bias and bias[0] is not None:
        matrix = ctx.call(aten.reshape.default, bias[0], sizes[:2], like=found.layer)
        matrix = matrix if found.axis == 1 else ctx.call(aten.t.default, matrix, like=found.layer)
        plain = ctx.call(aten.squeeze.dim, row, 1, like=reduction)
        plain = ctx.call(own.segment_reduce.default, plain, *reduction.args[1:], like=reduction)
        total = ctx.added([total, ctx.call(aten.mm.default, plain, matrix, like=reduction)], reduction)
    if value(reduction).dim() == 2:
        return total
    return ctx.call(aten.reshape.default, total, [-1, *value(reduction).shape[1:]], like=reduction)


def _scaled(ctx: Context, row: fx.Node, found: _Message, reduction: fx.Node) -> fx.Node:
    """Returns a row per edge, ``[edges, 1, K]``, times the factors of the message."""
    for scale, factor in reversed(found.factors):
        if isinstance(factor, fx.Node):
            factor = ctx.call(aten.reshape.default, factor, [-1, 1, 1], like=reduction)
        row = ctx.call(scale, row, factor, like=reduction)
    return row
