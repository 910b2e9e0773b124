"""Conversions of parameters and of their gradients share launches. Runs after differentiation, on each graph.

Before: ``mm(x, convert(w)); mm(y, convert(v))``; ``return convert(dw), convert(dv)``
After:  ``copies = matrix_copies([w, v], ...)``, where the graph begins; ``return matrix_copies([dw, dv], ...)``
Why it pays: under autocast each layer converts its weight and its bias, and each gradient is converted back. Inductor
makes a kernel of each conversion that no arithmetic follows. The host takes longer to launch it than the GPU to run it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from gnncompile._compat import aoti
from gnncompile.codegen.matrix_view import View
from gnncompile.device import device_of
from gnncompile.passes.analysis import aten, is_packed, own, value
from gnncompile.passes.matrix_copies import LARGEST, Copy, insert

_CONVERT = torch.ops.prims.convert_element_type.default
_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_VIEWS = (aten.permute.default, aten.t.default, aten.view.default, aten.reshape.default)
_OURS = (
    own.product.default,
    own.sum_of_products.default,
    own.product_over_rows.default,
    own.product_and_sums_over_rows.default,
    own.two_products_over_rows.default,
    own.region.default,
)
_KERNELS = (
    aten.mm.default,
    aten.addmm.default,
    aten._addmm_activation.default,
    aten.bmm.default,
    own.add_product.default,
    *_OURS,
)
"""Operations that Inductor does not fuse with a conversion before or behind them; the kernels of some are ours."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    if aoti.current_build() is not None:  # the parameters of a package are constants
        return
    conversions = graph.find_nodes(op="call_function", target=_CONVERT)
    small = [node for node in conversions if _is_small(node)]
    parameters = [node for node in small if node.args[0].op == "placeholder" and _is_stored(node)]
    gradients = [node for node in small if _is_gradient(node)]
    first = next(node for node in graph.nodes if node.op != "placeholder" and node not in parameters)
    (output,) = graph.find_nodes(op="output")
    _share(graph, parameters, first)
    _share(graph, gradients, output)


def _is_small(node: Any) -> bool:
    """Whether a node converts a small vector or matrix of a known size, which lies in memory row after row.

    The conversion of another one has its strides, and views of it have been told so.
    """
    source = value(node.args[0])
    if {source.dtype, value(node).dtype} - set(_TYPES) or source.dim() not in (1, 2):
        return False
    if not all(isinstance(size, int) for size in source.shape) or not 0 < math.prod(source.shape) <= LARGEST:
        return False
    return is_packed(source) and device_of(source.device).runs_triton


def _is_stored(node: fx.Node) -> bool:
    """Whether a kernel that is not Inductor's reads a tensor or its views, or the graph returns it."""
    return any(
        user.op == "output" or user.target in _KERNELS or (user.target in _VIEWS and _is_stored(user))
        for user in node.users
    )


def _is_gradient(node: fx.Node) -> bool:
    """Whether the graph returns the conversion of what a kernel of ours made: its memory is laid out for certain."""
    made_by: Any = node.args[0]
    while made_by.target in _VIEWS or made_by.target is operator.getitem:
        made_by = made_by.args[0]
    return made_by.target in _OURS and all(user.op == "output" for user in node.users)


def _share(graph: fx.Graph, conversions: list[Any], place: fx.Node) -> None:
    """Replaces conversions by copies that are made before the node `place`."""
    copies = {node: Copy(node.args[0], _view(value(node)), value(node).dtype) for node in conversions}
    made = insert(graph, copies.values(), place)
    for node in (node for node, copy in copies.items() if copy in made):
        result, shape = made[copies[node]], value(node).shape
        with graph.inserting_after(result):
            if len(shape) == 1:
                result = graph.call_function(aten.reshape.default, (result, [shape[0]]))
        result.meta = {**node.meta, "val": value(node).new_empty(shape)}
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _view(packed: torch.Tensor) -> View:
    """Returns a matrix as it lies in memory, and a vector as a row."""
    rows, columns = packed.shape if packed.dim() == 2 else (1, packed.size(0))
    return View(rows, columns, columns, 1, 0)
