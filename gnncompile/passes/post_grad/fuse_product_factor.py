"""A factor that only products over rows read is computed by them. Runs after differentiation, on each graph.

Before: ``a = h * sigmoid(h); dw = product_over_rows(dy, a)``
After:  ``dw = products_over_rows([dy], [h], [program], ...)[0]``, where the program is a region without edges
Why it pays: the activations of a layer are computed again for the gradient of the next layer's weights. Inductor would
write them, and the product would read them. Now the product reads what they are computed from.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile import tuning
from gnncompile.codegen.gemm import MOST_OF_FACTOR
from gnncompile.device import HALVES, device_of
from gnncompile.passes.analysis import drop_with_operands, own, value
from gnncompile.passes.matrix_arithmetic import MatrixArithmetic
from gnncompile.passes.pointwise import NotFusable

_PRODUCTS = (
    own.product_over_rows.default,
    own.product_and_sums_over_rows.default,
    own.two_products_over_rows.default,
)
_Product = tuple[fx.Node, fx.Node, bool]
"""The left matrix of a product over rows, the right matrix, and whether the left matrix is summed."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    found = [node for target in _PRODUCTS for node in graph.find_nodes(op="call_function", target=target)]
    for node in found:
        products = _products(node)
        computed = [_computed(right) for _, right, _ in products] if _is_ours(products) else []
        if any(one is not None for one in computed):
            _replace(graph, node, products, computed)


def _products(node: fx.Node) -> list[_Product]:
    args: Any = node.args
    if node.target is own.product_over_rows.default:
        return [(*args, False)]
    if node.target is own.product_and_sums_over_rows.default:
        return [(*args, True)]
    if node.target is own.two_products_over_rows.default:
        return [args[:3], args[3:]]
    return []


def _is_ours(products: list[_Product]) -> bool:
    """Whether our kernels compute products, and not the library, which is faster for some widths in 16 bits."""
    left, right, sums = products[0]
    if sums or len(products) > 1 or value(left).dtype not in HALVES:
        return True
    return tuning.HALF_PRODUCTS.pays_alone(value(left).shape[1], value(right).shape[1])


def _computed(right: fx.Node) -> tuple[list[fx.Node], str] | None:
    """Returns what a factor is computed from, and the region that does it; None if the factor is to be stored."""
    if not device_of(value(right).device).runs_triton or not all(_reads_as_right(user, right) for user in right.users):
        return None
    rows = MatrixArithmetic(value(right), MOST_OF_FACTOR if len(right.users) == 1 else 1)
    if not rows.computable(right):
        return None
    try:
        rows.values[right] = rows.compute(right)
    except NotFusable:
        return None
    region = rows.finish([right])
    return None if region is None or not rows.tensors else (rows.tensors, region.spec)


def _reads_as_right(user: fx.Node, right: fx.Node) -> bool:
    products = _products(user)
    return bool(products) and all(left is not right for left, _, _ in products)


def _replace(
    graph: fx.Graph, node: fx.Node, products: list[_Product], computed: list[tuple[list[fx.Node], str] | None]
) -> None:
    lefts, sums = [left for left, _, _ in products], [summed for _, _, summed in products]
    reads = [([right], "") if one is None else one for (_, right, _), one in zip(products, computed, strict=True)]
    tensors, specs = [one for given, _ in reads for one in given], [spec for _, spec in reads]
    with graph.inserting_before(node):
        call = graph.call_function(own.products_over_rows.default, (lefts, tensors, specs, sums))
        single = node.target is own.product_over_rows.default
        call.meta["val"] = [value(node)] if single else value(node)
        if single:
            made = graph.call_function(operator.getitem, (call, 0))
            made.meta = node.meta
    node.replace_all_uses_with(made if single else call)
    drop_with_operands(graph, [node])
