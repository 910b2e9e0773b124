"""Operations that Inductor computes with other numbers than torch are written out. Runs after differentiation.

Before: ``sum(x, 1)``; for code in C++ also ``expm1(x)``
After:  ``sum(x + 0.0, 1)``; ``where(abs(x) < 0.5, x * (1 + x / 2 * (1 + x / 3 * ...)), exp(x) - 1)``
Why it pays: it does not; signed zeros decide the results of ``atan2``, ``copysign`` or a division. In torch, sums begin
with a positive zero, so a sum of negative zeros is positive. Inductor's sums begin with zero in C++ loops. They do not
if the sum of few elements is written out, or if a GPU program folds its lanes. Inductor's vectors in C++ compute
``expm1`` as ``exp(x) - 1``, which loses the digits and the sign of small numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.device import device_of
from gnncompile.passes.analysis import aten, known_size, value

_SUMS = (
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.var.correction, aten.var_mean.correction),
)


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for op in _SUMS:
        for node in graph.find_nodes(op="call_function", target=op):
            if _may_lose_zero(node):
                _begin_with_zero(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.expm1.default):
        if device_of(value(node).device).is_cpp_in_inductor and value(node).is_floating_point():
            _write_out(graph, node)


def _may_lose_zero(node: fx.Node) -> bool:
    """Whether Inductor's code for a sum may begin with the first element."""
    summed = value(node.all_input_nodes[0])
    if not summed.is_floating_point():
        return False
    if not device_of(summed.device).is_cpp_in_inductor:
        return True
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    sizes = [known_size(summed.shape[dim]) for dim in dims or range(summed.dim())]
    return all(size is not None for size in sizes) and math.prod(size or 0 for size in sizes) <= _compat.most_unrolled()


def _begin_with_zero(graph: fx.Graph, node: fx.Node) -> None:
    (summed,) = node.all_input_nodes[:1]
    with graph.inserting_before(node):
        added = graph.call_function(aten.add.Tensor, (summed, 0.0))  # changes only negative zeros
    added.meta["val"] = value(summed).clone()
    node.replace_input_with(summed, added)


_TERMS = {torch.float64: 15}
"""The number of terms of the series of ``expm1`` for numbers below 0.5. Other types are computed in float32."""


def _write_out(graph: fx.Graph, node: fx.Node) -> None:
    (x,) = node.all_input_nodes

    def call(op: Any, *args: Any, dtype: torch.dtype | None = None) -> fx.Node:
        made = graph.call_function(op, args)
        made.meta["val"] = value(x).to(dtype, copy=True)
        return made

    with graph.inserting_before(node):
        series: Any = 1.0
        for k in range(_TERMS.get(value(x).dtype, 8), 1, -1):
            series = call(aten.add.Tensor, call(aten.mul.Tensor, call(aten.mul.Tensor, x, 1 / k), series), 1.0)
        small = call(aten.lt.Scalar, call(aten.abs.default, x), 0.5, dtype=torch.bool)
        near, far = call(aten.mul.Tensor, x, series), call(aten.sub.Tensor, call(aten.exp.default, x), 1.0)
        made = call(aten.where.self, small, near, far)
    made.meta = {**node.meta}
    node.replace_all_uses_with(made)
    graph.erase_node(node)
