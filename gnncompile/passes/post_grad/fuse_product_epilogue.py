"""Arithmetic on the result of a product becomes its epilogue. Runs after differentiation, on each graph.

Before: ``p = product(dy, w); s = sigmoid(h); dh = p * s * (1 + h * (1 - s))``
After:  ``dh = product_with_epilogue(dy, w, ..., [h], program)[0]``, where the program is a region without edges
Why it pays: the product is in registers when the arithmetic needs it. Inductor would write the product, and read it
again in a kernel of its own. Where others need the product as well, both are written, which still saves one reading.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from gnncompile.codegen.gemm import MOST_READ, MOST_WRITTEN
from gnncompile.device import device_of
from gnncompile.passes.analysis import alike, drop_unused, own, same_shape, value
from gnncompile.passes.matrix_arithmetic import MatrixArithmetic, is_stored
from gnncompile.passes.pointwise import NotFusable

_MOST_OPERATIONS = 32
"""Most operations that follow a product."""


class _Choice(NamedTuple):
    """What a product computes.

    Attributes:
        saved: How many matrices less are written or read.
        taken: The operations.
        outs: Those whose results are written, after the product itself if others read it.
    """

    saved: int
    taken: list[fx.Node]
    outs: list[fx.Node]


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for target in (own.product.default, own.sum_of_products.default):
        for product in graph.find_nodes(op="call_function", target=target):
            if device_of(value(product).device).runs_triton and product.args[-3] is None:
                _extend(graph, product)


def _extend(graph: fx.Graph, product: fx.Node) -> None:
    reach = _reach(product)
    choices = [_choice(product, reach[: k + 1]) for k in range(len(reach))]
    best = max((one for one in choices if one is not None), key=lambda one: (one.saved, len(one.taken)), default=None)
    if best is None or best.saved <= 0:
        return
    rows = _arithmetic(product)
    for node in best.taken:
        rows.values[node] = rows.compute(node)
    region = rows.finish(best.outs)
    if region is not None:
        _replace(graph, product, best, rows.tensors[1:], region.spec)


def _arithmetic(product: fx.Node) -> MatrixArithmetic:
    rows = MatrixArithmetic(value(product), 1 + MOST_READ, product)
    rows.read_first(product)
    return rows


def _reach(product: fx.Node) -> list[fx.Node]:
    """Returns the operations that can be computed from a product and from tensors before it, in order."""
    rows = _arithmetic(product)
    found: list[fx.Node] = []
    waiting = sorted(product.users)
    while waiting and len(found) < _MOST_OPERATIONS:
        node = waiting.pop(0)
        if node in found or not rows.computable(node) or not same_shape(node, product):
            continue
        try:
            rows.values[node] = rows.compute(node)
        except NotFusable:
            continue
        found.append(node)
        waiting = sorted({*waiting, *node.users})
    return found


def _choice(product: fx.Node, taken: list[fx.Node]) -> _Choice | None:
    """Returns what is saved if a product computes these operations; None if it can't."""
    is_read = _is_read_outside(product, taken)
    outs = [node for node in taken if _is_read_outside(node, taken)]
    if not outs or len(outs) + is_read > MOST_WRITTEN or any(value(node).dtype is torch.bool for node in outs):
        return None
    added = sum(not is_stored(node) for node in outs)
    return _Choice(2 - is_read - added, taken, [product, *outs] if is_read else outs)


def _is_read_outside(node: fx.Node, taken: Sequence[fx.Node]) -> bool:
    return any(user not in taken for user in node.users)


def _replace(graph: fx.Graph, product: fx.Node, best: _Choice, read: list[fx.Node], spec: str) -> None:
    args: Any = product.args
    *factors, added, _, relu, in_place = args
    factors += [None] * (4 - len(factors))
    in_place = in_place and alike(added, best.outs[0])
    with graph.inserting_before(product):
        given = (*factors, added, relu, in_place, read, spec)
        call = graph.call_function(own.product_with_epilogue.default, given)
        call.meta["val"] = [value(out) for out in best.outs]
        for k, out in enumerate(best.outs):
            made = graph.call_function(operator.getitem, (call, k))
            made.meta = out.meta
            out.replace_all_uses_with(made, delete_user_cb=lambda user: user not in best.taken)
    drop_unused(graph)
