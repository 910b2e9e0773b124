"""Two products with the same number of rows share their launches. Runs after differentiation, on each graph.

Before: ``product(y, v, product(x, w, b))``, in place; ``product_over_rows(dy, x)`` and ``product_over_rows(dy, y)``
After:  ``sum_of_products(x, w, y, v, b)``; ``two_products_over_rows(dy, x, dy, y)``
Why it pays: a sum is written once. The gradients of weights are sums over all nodes. Each takes two launches: one for
partial sums, one for their total. On a small graph these leave most of the GPU idle. No tensor lives longer than
before, unless another tensor is freed earlier.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, own, same_size, value

_VIEWS = (aten.view.default, aten.reshape.default, operator.getitem)


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in graph.find_nodes(op="call_function", target=own.product.default):
        if _adds_to_product(node):
            _sum_up(graph, node.args[2], node)
    waiting: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target not in (own.product_over_rows.default, own.product_and_sums_over_rows.default):
            continue
        other = next((earlier for earlier in waiting if _may_meet(earlier, node)), None)
        if other is None:
            waiting.append(node)
        else:
            waiting.remove(other)
            _pair(graph, other, node)


def _adds_to_product(second: Any) -> bool:
    """Whether a product is added to another product, whose operands may stay alive until then."""
    first = second.args[2]
    if not second.args[-1] or first.target is not own.product.default:
        return False
    left, right, _, gate, relu, _ = first.args
    if gate is not None or relu or len(first.users) != 1:
        return False
    is_kept = second.args[0] < first or any(user >= second for user in left.users)
    depth, columns = value(right).shape
    return is_kept or depth <= columns


def _sum_up(graph: fx.Graph, first: Any, second: Any) -> None:
    left, right, added, _, _, in_place = first.args
    with graph.inserting_before(second):
        given = left, right, *second.args[:2], added, *second.args[3:5], in_place
        made = graph.call_function(own.sum_of_products.default, given)
    made.meta = second.meta
    second.replace_all_uses_with(made)
    graph.erase_node(second)
    graph.erase_node(first)


def _may_meet(first: fx.Node, second: fx.Node) -> bool:
    """Whether two products are over the same number of rows and can share a launch without keeping a matrix longer."""
    one, other = (value(product.all_input_nodes[0]) for product in (first, second))
    if (one.device, one.dtype) != (other.device, other.dtype) or not same_size(one.shape[0], other.shape[0]):
        return False
    if _is_ready(second, first):
        return True
    return _is_kept_for(first, second) and all(node.target in _VIEWS for node in _early(first, second))


def _is_ready(product: fx.Node, at: fx.Node) -> bool:
    """Whether all operands of a product are computed before the node `at`."""
    return all(operand < at for operand in product.all_input_nodes)


def _is_kept_for(first: fx.Node, second: fx.Node) -> bool:
    """Whether the operands of the first product stay alive until those of the second one are computed."""
    kept = set(second.all_input_nodes)
    for operand in second.all_input_nodes:
        made_by: Any = operand.args[0] if operand.target is operator.getitem else operand
        kept.update(made_by.all_input_nodes)
    return all(operand in kept or any(user > second for user in operand.users) for operand in first.all_input_nodes)


def _early(product: fx.Node, until: fx.Node) -> list[fx.Node]:
    """Returns the nodes before `until` that are computed from a product, in order."""
    users = [user for user in product.users if user < until]
    return sorted({*users, *(node for user in users for node in _early(user, until))})


def _pair(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    if not _is_ready(second, first):
        for node in (first, *_early(first, second)):
            second.prepend(node)
    products = [(node, node.target is own.product_and_sums_over_rows.default) for node in (first, second)]
    given: list[Any] = [part for node, sums in products for part in (*node.args, sums)]
    with graph.inserting_before(first):
        both = graph.call_function(own.two_products_over_rows.default, tuple(given))
    made: list[Any] = []
    for node, sums in products:
        _hand_over(graph, node, both, len(made))
        made += value(node) if sums else [value(node)]
    both.meta["val"] = made


def _hand_over(graph: fx.Graph, product: fx.Node, both: fx.Node, first: int) -> None:
    """Makes the readers of a product read the results of the pair, from index `first` on."""
    of_both = product.target is own.product_and_sums_over_rows.default
    users: list[tuple[Any, fx.Node]] = [(user.args[1], user) for user in product.users] if of_both else [(0, product)]
    for at, user in users:
        with graph.inserting_after(both):
            result = graph.call_function(operator.getitem, (both, first + at))
        result.meta = user.meta
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    if of_both:
        graph.erase_node(product)
