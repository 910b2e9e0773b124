"""Products of many small matrices become multiplications and sums. Runs after differentiation, on each graph.

Before: ``bmm(a, b)``, with `a` ``[batch, m, k]`` and `b` ``[batch, k, n]``
After:  ``(a.unsqueeze(3) * b.unsqueeze(1)).sum(2)``
Why it pays: the library multiplies tiles of at least 32 rows and columns, and some of its kernels take at most 65,535
matrices at once. Written out, both factors are read once, and the sums share a kernel with what reads them. Such are
the 3 x 3 products of equivariant layers, and the matrix of each edge in ``NNConv``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gnncompile.device import HALVES, device_of
from gnncompile.passes.analysis import aten, known_size, own, value

_CONVERT = torch.ops.prims.convert_element_type.default


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    stored: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        if _is_small(node):
            _expand(graph, node, stored)


def _is_small(product: fx.Node) -> bool:
    """Whether the sizes of the matrices are known, and few numbers are multiplied per matrix."""
    left, right = _factors(product)
    sizes = [known_size(size) for size in (*value(left).shape[1:], value(right).shape[2])]
    if product.kwargs or not value(left).is_floating_point() or not all(sizes):
        return False
    return math.prod(size or 0 for size in sizes) <= device_of(value(left).device).small_product


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    left, right = product.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def _expand(graph: fx.Graph, product: fx.Node, stored: dict[fx.Node, fx.Node]) -> None:
    left, right = _factors(product)
    batch, rows, inner = value(left).shape
    columns, dtype = value(right).shape[2], value(product).dtype
    wide = torch.float32 if dtype in HALVES else dtype

    def call(target: Any, shape: tuple[Any, ...], *args: Any, dtype: torch.dtype = wide) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta["val"] = value(product).new_empty(shape, dtype=dtype)
        return made

    with graph.inserting_before(product):
        for factor in (left, right):
            if factor not in stored:
                stored[factor] = call(own.stored.default, tuple(value(factor).shape), factor, dtype=dtype)
        one, other = stored[left], stored[right]
        if wide is not dtype:
            one, other = (call(_CONVERT, tuple(value(n).shape), n, wide) for n in (one, other))
        one = call(aten.unsqueeze.default, (batch, rows, inner, 1), one, 3)
        other = call(aten.unsqueeze.default, (batch, 1, inner, columns), other, 1)
        terms = call(aten.mul.Tensor, (batch, rows, inner, columns), one, other)
        made = call(aten.sum.dim_IntList, (batch, rows, columns), terms, [2])
        if wide is not dtype:
            made = call(_CONVERT, (batch, rows, columns), made, dtype, dtype=dtype)
    made.meta = {**product.meta, "val": value(made)}
    product.replace_all_uses_with(made)
    graph.erase_node(product)
