"""Gradients that differentiation kept whole on a CPU are written out. Runs after differentiation, on each graph.

Before: ``threshold_backward(dy, y, 0)``; ``embedding_dense_backward(dy, index, ...)``
After:  ``where(y <= 0, 0, dy)``; ``embedding_gradient(dy, index, ...)``, which torch's own kernel computes
Why it pays: the gradients of ReLU and leaky ReLU read values. If they were decomposed earlier, they would read a mask
``y > 0``, which AOTAutograd would have the forward write, since a mask is smaller than the value. But vector code for a
CPU writes masks one element after the other, in more time than a product takes. The value is in memory anyway, for the
next layer's gradient. For embeddings, see :mod:`gnncompile.ops.embedding`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, own, value


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place. Where a device does not keep them, the graph has none of these gradients."""
    for node in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        node.target = own.embedding_gradient.default
    for node in graph.find_nodes(op="call_function", target=aten.threshold_backward.default):
        gradient, read, threshold = node.args
        _write_out(graph, node, (aten.le.Scalar, read, threshold), (0, gradient))
    for node in graph.find_nodes(op="call_function", target=aten.leaky_relu_backward.default):
        gradient, read, slope = node.args[:3]
        _write_out(graph, node, (aten.gt.Scalar, read, 0), (gradient, (aten.mul.Tensor, gradient, slope)))


def _write_out(graph: fx.Graph, node: fx.Node, asked: tuple[Any, ...], choices: tuple[Any, Any]) -> None:
    """Replaces a gradient by a choice between two values; a tuple stands for a call."""

    def made(given: Any, dtype: torch.dtype) -> Any:
        if not isinstance(given, tuple):
            return given
        call = graph.call_function(given[0], given[1:])
        call.meta["val"] = value(node).to(dtype, copy=True)
        return call

    with graph.inserting_before(node):
        dtype = value(node).dtype
        if choices[0] == 0:
            number = graph.call_function(aten.full.default, ([], 0), {"dtype": dtype, "device": value(node).device})
            number.meta["val"] = value(node).new_empty(())
            choices = number, choices[1]
        chosen = [made(choice, dtype) for choice in choices]
        found = graph.call_function(aten.where.self, (made(asked, torch.bool), *chosen))
    found.meta = {**node.meta}
    node.replace_all_uses_with(found)
    graph.erase_node(node)
