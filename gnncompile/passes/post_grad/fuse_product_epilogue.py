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
from gnncompile.ops.gemm import only_follows
from gnncompile.passes.analysis import alike, drop_with_operands, own, same_shape, value
from gnncompile.passes.matrix_arithmetic import MatrixArithmetic
from gnncompile.passes.pointwise import NotFusable
from gnncompile.passes.stored_arithmetic import is_stored

_MOST_OPERATIONS = 32
"""Most operations that follow a product."""


class _Choice(NamedTuple):
    """What a product computes.

    Attributes:
        saved: How many matrices less are written or read. Inductor's kernel would read the product: that is one. If
            nobody else reads it, it is not written either. A result that Inductor would not write is one more.
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
            if device_of(value(product).device).runs_triton and _ends(product)[1] is None:
                _extend(graph, product)


def _ends(product: fx.Node) -> tuple[Any, Any, bool, bool]:
    """Returns what a product adds, its gate, whether it has a ReLU, and whether it is written to what it adds."""
    added, gate, relu, in_place = product.args[-4:]
    return added, gate, relu, in_place  # type: ignore[return-value]


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
    return any(user not in taken and not only_follows(user, node) for user in node.users)


def _replace(graph: fx.Graph, product: fx.Node, best: _Choice, read: list[fx.Node], spec: str) -> None:
    factors: list[Any] = [*product.args[:-4], *[None] * (8 - len(product.args))]
    added, _, relu, in_place = _ends(product)
    in_place = in_place and alike(added, best.outs[0]) and added not in read
    with graph.inserting_before(product):
        given = (*factors, added, relu, in_place, read, spec)
        call = graph.call_function(own.product_with_epilogue.default, given)
        call.meta["val"] = [value(out) for out in best.outs]
        made = [graph.call_function(operator.getitem, (call, k)) for k in range(len(best.outs))]
    for one, out in zip(made, best.outs, strict=True):
        one.meta = out.meta
        out.replace_all_uses_with(one, delete_user_cb=lambda user: user not in best.taken)
    for user in [user for user in product.users if only_follows(user, product)]:
        user.replace_input_with(product, made[0])
    drop_with_operands(graph, best.taken)
