"""A bias, ReLU or sum after a matrix product becomes its epilogue. Runs after differentiation, on each graph.

Before: ``relu(addmm(bias, x, w))``; ``mm(x, w) + mm(y, v)``
After:  ``_addmm_activation(bias, x, w)``; ``add_product(mm(x, w), y, v)``, in place
Why it pays: on a GPU the library adds the bias and clamps before it writes a row. Inductor would add the bias in a
separate kernel, with one more launch and one more pass over the rows. Inductor leaves sums to the library, but
through an operation that first copies one of the two matrices.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile.device import device_of
from gnncompile.passes.analysis import alike, aten, own, value


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        product: Any = node.args[0]
        if _fits(product):
            node.target, node.args = aten._addmm_activation.default, product.args
            graph.erase_node(product)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _add_in_place(graph, node)


def _add_in_place(graph: fx.Graph, node: fx.Node) -> None:
    """Turns a sum of two matrices into a product that is added to the other matrix, if only the sum reads them."""
    pair: Any = node.args
    if len(pair) != 2 or node.kwargs or not all(isinstance(n, fx.Node) for n in pair) or pair[0] is pair[1]:
        return
    if value(node).dim() != 2 or not all(alike(n, node) for n in pair):
        return
    earlier, later = sorted(pair)
    for total, product in ((earlier, later), (later, earlier)):
        if _is_term(product) and (_owned(total) or _goes_on(node)):
            # If several sums follow a matrix that must not be written, the first sum makes the copy for all of them.
            target = own.add_product.default if _owned(total) else aten.addmm.default
            with graph.inserting_after(later):
                made = graph.call_function(target, (total, *product.args))
            made.meta = node.meta
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            graph.erase_node(product)
            return


def _is_term(node: fx.Node) -> bool:
    """Whether a matrix is a product with one reader."""
    return node.target is aten.mm.default and len(node.users) == 1


def _goes_on(node: fx.Node) -> bool:
    """Whether a sum has one reader, which adds another product to it."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return False
    others = [n for n in users[0].args if n is not node]
    return len(others) == 1 and isinstance(others[0], fx.Node) and _is_term(others[0])


_FRESH = {
    aten.mm.default,
    aten.addmm.default,
    own.add_product.default,
    own.region.default,
    own.halo_return.default,
}
"""Operations whose results have memory of their own."""


def _owned(matrix: fx.Node) -> bool:
    """Whether a matrix has memory of its own and one reader, the sum."""
    made_by: Any = matrix.args[0] if matrix.target is operator.getitem else matrix
    return made_by.target in _FRESH and len(matrix.users) == 1


def _fits(product: Any) -> bool:
    if not isinstance(product, fx.Node) or product.target is not aten.addmm.default or len(product.users) != 1:
        return False
    bias, left = (value(n) for n in product.args[:2])  # type: ignore[arg-type]
    # For a matrix without columns the library's product omits the ReLU.
    is_plain = not product.kwargs and bias.dim() == 1 and isinstance(left.shape[1], int) and left.shape[1] > 0
    is_fast = device_of(left.device).fuses_bias
    return is_plain and is_fast and left.dtype in (torch.float32, torch.bfloat16, torch.float16)
