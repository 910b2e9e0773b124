"""A ReLU behind a dense layer is left to the matrix product. Runs after differentiation, on each graph.

Before: ``relu(addmm(bias, x, w))``
After:  ``_addmm_activation(bias, x, w)``
Why it pays: on a GPU the library adds the bias and clamps before it writes a row; Inductor would take the bias out of
the product to add it in a kernel of its own, one launch and one pass over the rows more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.context import aten, value


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        product: Any = node.args[0]
        if _fits(product):
            node.target, node.args = aten._addmm_activation.default, product.args
            graph.erase_node(product)


def _fits(product: Any) -> bool:
    if not isinstance(product, fx.Node) or product.target is not aten.addmm.default or len(product.users) != 1:
        return False
    bias, left = (value(n) for n in product.args[:2])  # type: ignore[arg-type]
    # The library's product of a matrix without columns would leave the ReLU out.
    is_plain = not product.kwargs and bias.dim() == 1 and isinstance(left.shape[1], int) and left.shape[1] > 0
    return is_plain and left.device.type == "cuda" and left.dtype in (torch.float32, torch.bfloat16, torch.float16)
