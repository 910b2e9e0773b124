"""Products of many rows run in kernels of our own. Runs after differentiation, on each graph.

Before: ``addmm(bias, x, w)``; ``add_product(total, x, w)``; ``mm(dy.t(), x)``, with rows of nodes
After:  ``product(x, w, bias)``; ``product(x, w, total)``, in place; ``product_over_rows(dy, x)``
Why it pays: the library computes float32 products outside the tensor cores, at a fifteenth of their rate, and dense
layers take half of the time of most models' steps. The kernels split each number into parts of 16 bits. Three to six
products on tensor cores then have smaller errors than one in float32, in half of its time
(:mod:`gnncompile.codegen.gemm.scaled`, :mod:`gnncompile.codegen.gemm.parts`). In 16 bits, narrow products are bound by
memory, and the library launches two kernels where the gradient of a bias takes another two; ours shares launches
between products and sums. On CPUs of AMD, Intel's library uses half of each vector
(:mod:`gnncompile.codegen.cpp.matrix`).
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile import tuning
from gnncompile.device import device_of
from gnncompile.passes.analysis import (
    alike,
    aten,
    is_packed,
    is_tensor,
    known_size,
    makes_new_tensor,
    own,
    same_size,
    sums_rows,
    value,
)

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten._addmm_activation.default, own.add_product.default)


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for target in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            _by_rows(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        _over_rows(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        _take_in(graph, node, node.args[0], relu=True)
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        gate = _gate(node)
        if gate is not None:
            _take_in(graph, node, node.args[2], gate=gate)
    for node in graph.find_nodes(op="call_function", target=own.product_over_rows.default):
        _take_in_sums(graph, node)


def _by_rows(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    left, right = args[-2:]
    added = args[0] if len(args) == 3 else None
    if node.kwargs or not _fits(left, right, tuning.HALF_PRODUCTS.widest) or not _is_weight(right):
        return
    if not _has_rows(left, value(right).shape[1]):
        return
    if added is not None and not (_is_row(added, node) or alike(added, node)):
        return
    relu = node.target is aten._addmm_activation.default
    in_place = node.target is own.add_product.default and _is_written_by_us(added)
    _replace(graph, node, own.product.default, left, right, added, None, relu, in_place)


def _over_rows(graph: fx.Graph, node: fx.Node) -> None:
    right: Any = node.args[1]
    left = _before_transposing(graph, node)
    if left is None or not _fits(left, right, tuning.HALF_PRODUCTS.widest_over_rows) or not is_packed(value(right)):
        return
    if not _has_rows(left, value(right).shape[1]):
        return
    if node.users and all(_transposes(user) and not _has_views(user) for user in node.users):
        # The product is made as it is read.
        for user in list(node.users):
            user.meta = {**user.meta, "val": value(user).new_empty(value(user).shape)}  # its rows lie together now
            _replace(graph, user, own.product_over_rows.default, right, left)
        graph.erase_node(node)
    else:
        _replace(graph, node, own.product_over_rows.default, left, right)


def _take_in(graph: fx.Graph, node: fx.Node, product: Any, *, relu: bool = False, gate: fx.Node | None = None) -> None:
    """Makes a node the epilogue of a product, if only that node reads the product."""
    if product.target is own.product.default and len(product.users) == 1 and product.args[3] is None:
        left, right, added, _, clamped, in_place = product.args
        _replace(graph, node, own.product.default, left, right, added, gate, relu or clamped, in_place)
        graph.erase_node(product)


def _gate(node: fx.Node) -> fx.Node | None:
    """Returns the output of a ReLU if `node` is its gradient (zero where the output is not positive), else None."""
    condition, zeros, product = node.args
    if not isinstance(condition, fx.Node) or condition.target is not aten.le.Scalar or condition.args[1] != 0:
        return None
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.full.default or zeros.args != ([], 0):
        return None
    gate: Any = condition.args[0]
    return gate if alike(gate, product) and alike(gate, node) and is_packed(value(gate)) else None


def _take_in_sums(graph: fx.Graph, node: fx.Node) -> None:
    """Makes a product over rows also sum the rows of its left matrix, which it reads anyway."""
    left, right = node.all_input_nodes[0], node.all_input_nodes[-1]
    sums = [user for user in left.users if sums_rows(user)]
    if not sums:
        return
    place = max(left, right).next
    while place.op == "placeholder":
        place = place.next
    with graph.inserting_before(place):
        both = graph.call_function(own.product_and_sums_over_rows.default, (left, right))
        product, total = (graph.call_function(operator.getitem, (both, at)) for at in (0, 1))
    made = value(node), value(sums[0]).reshape(-1)
    both.meta["val"], product.meta["val"], total.meta["val"] = made, *made
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    for one in sums:
        with graph.inserting_before(one):
            shaped = graph.call_function(aten.reshape.default, (total, list(value(one).shape)))
        shaped.meta = one.meta
        one.replace_all_uses_with(shaped)
        graph.erase_node(one)


def _replace(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> None:
    with graph.inserting_before(node):
        made = graph.call_function(target, args)
    made.meta = node.meta
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _fits(left: Any, right: Any, widest: int) -> bool:
    """Whether two matrices have the dtypes and widths that the kernels take. The number of rows is not checked.

    In 16 bits, `widest` is the most columns of both.
    """
    if not is_tensor(left) or not is_tensor(right):
        return False
    one, other = value(left), value(right)
    if one.dim() != 2 or one.dtype != other.dtype or not is_packed(one):
        return False
    widths = one.shape[1], other.shape[1]
    known = all(isinstance(width, int) for width in widths)
    return known and device_of(one.device).multiplies_widths(one.dtype, widths, widest)


def _has_rows(left: fx.Node, columns: int) -> bool:
    """Whether a matrix has enough rows for the kernels, or an unknown number of rows."""
    rows, depth = value(left).shape
    return device_of(value(left).device).has_enough_rows(known_size(rows), depth, columns)


def _is_weight(right: fx.Node) -> bool:
    """Whether a matrix has a known, large enough size. Its strides do not matter: a weight may be a view."""
    weight = value(right)
    if not all(isinstance(width, int) for width in weight.shape):
        return False
    return device_of(weight.device).computes_product(weight.dtype, *weight.shape)


def _is_row(added: fx.Node, node: fx.Node) -> bool:
    row, result = value(added), value(node)
    return row.dim() == 1 and same_size(row.shape[0], result.shape[1]) and row.dtype == result.dtype


def _is_written_by_us(matrix: Any) -> bool:
    """Whether a matrix is made by a product or a region, and so is contiguous whatever Inductor does.

    Gradients that are returned to their owners are added in the memory of own rows, and stay there.
    """
    made_by: Any = matrix.args[0] if matrix.target is operator.getitem else matrix
    if made_by.target is own.halo_return.default:
        return _is_written_by_us(made_by.args[0])
    return made_by.target in (own.product.default, own.region.default)


def _before_transposing(graph: fx.Graph, product: fx.Node) -> fx.Node | None:
    """Returns the matrix whose transpose a product multiplies from the left; None if it multiplies no transpose.

    A placeholder may be a transpose. The partitioner keeps one view of a matrix for the backward, and that may be the
    transposed one. The matrix is then a view of the placeholder, made once, where the graph begins.
    """
    left: Any = product.args[0]
    if not is_tensor(left):
        return None
    if left.op == "placeholder" and is_packed(value(left).t()):
        made: fx.Node | None = next((user for user in left.users if user < product and _transposes(user)), None)
        if made is not None:
            return made
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            matrix = graph.call_function(aten.permute.default, (left, [1, 0]))
        matrix.meta["val"] = value(left).t()
        return matrix
    transposed: fx.Node | None = left.args[0] if _transposes(left) else None
    return transposed


def _has_views(node: fx.Node) -> bool:
    """Whether views are taken of a node. What they say of their strides holds for the node as it lies in memory now."""
    return any(user.op == "call_function" and not makes_new_tensor(user) for user in node.users)


def _transposes(node: Any) -> bool:
    """Whether a node is the transpose of a matrix."""
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0]
    return node.target is aten.t.default
