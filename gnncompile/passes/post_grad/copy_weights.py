"""Views of weights that kernels read are copied by one launch. Runs after differentiation, on each graph.

Before: ``region([permute(w1, [1, 0]), permute(slice(w2, 1, 64, 128), [1, 0]), ...])``
After:  ``copies = matrix_copies([w1, w2], ...); region([copies[0], copies[1], ...])``
Why it pays: a region's kernel reads contiguous weights, and products in 16 bits read weights without gaps. Inductor
copies each view by a launch of its own, in which the host takes longer than the GPU. Conversions to the dtype of
autocast are copies as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile._compat import aoti
from gnncompile.codegen.matrix_view import View
from gnncompile.device import HALVES, device_of
from gnncompile.passes.analysis import aten, is_packed, own, value
from gnncompile.passes.matrix_copies import LARGEST, Copy, insert

_CONVERT = torch.ops.prims.convert_element_type.default
_PRODUCTS: dict[Any, int] = {own.product.default: 2, own.sum_of_products.default: 4}
"""Products with weights, and how many of their arguments are matrices; every other one is a weight."""
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    if aoti.current_build() is not None:  # the weights of a package are constants
        return
    regions = graph.find_nodes(op="call_function", target=own.region.default)
    products = [node for op in _PRODUCTS for node in graph.find_nodes(op="call_function", target=op)]
    read = dict.fromkeys(node for region in regions for node in region.args[0])
    read |= dict.fromkeys(weight for node in products for weight in _with_gaps(node))
    copies = {node: copy for node in read if (copy := _copy(node)) is not None}
    made = insert(graph, copies.values(), next(node for node in graph.nodes if node.op != "placeholder"))
    replaced = {node: made[copy] for node, copy in copies.items() if copy in made}
    for region in regions:
        region.args = ([replaced.get(node, node) for node in region.args[0]], *region.args[1:])
    for node in products:
        weights = dict.fromkeys(_with_gaps(node))
        node.args = tuple(replaced.get(arg, arg) if arg in weights else arg for arg in node.args)


def _with_gaps(product: fx.Node) -> list[fx.Node]:
    """Returns the weights of a product in 16 bits in which neither rows nor columns lie in memory without gaps."""
    weights: Any = product.args[1 : _PRODUCTS[product.target] : 2]
    fakes = [(weight, value(weight)) for weight in weights]
    return [w for w, fake in fakes if fake.dtype in HALVES and not is_packed(fake) and not is_packed(fake.t())]


def _copy(node: fx.Node) -> Copy | None:
    """Returns the copy that Inductor would make of a tensor, if that is a small view of an input."""
    chain: list[fx.Node] = []
    root = node
    while root.op == "call_function" and _keeps_elements(root):
        chain.append(root)
        root = root.all_input_nodes[0]
    if root.op != "placeholder" or not _is_small(value(root)) or value(node).dim() != 2:
        return None
    dtype = value(node).dtype
    if dtype not in _TYPES or sum(one.target is _CONVERT for one in chain) > 1:  # a second conversion rounds again
        return None
    view = _view(value(root), chain)
    if view is None or (dtype == value(root).dtype and view.row_stride == view.columns and view.column_stride == 1):
        return None
    return Copy(root, view, dtype)


def _keeps_elements(node: fx.Node) -> bool:
    """Whether a node's elements are elements of its only tensor, perhaps in another dtype."""
    if len(node.all_input_nodes) != 1 or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is _CONVERT:
        return value(node).dtype in _TYPES
    views = any(r.alias_info is not None for r in node.target._schema.returns)
    return node.target in (aten.reshape.default, aten.clone.default) or views


def _is_small(fake: Any) -> bool:
    """Whether a tensor is a floating-point tensor of a known size, whose copies pay for a shared launch."""
    if not isinstance(fake, torch.Tensor) or fake.dtype not in _TYPES:
        return False
    if not all(isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        return False
    return device_of(fake.device).runs_triton and math.prod(fake.shape) > 0 and _reach(fake) <= LARGEST


def _reach(fake: torch.Tensor) -> int:
    """Returns the number of elements of memory from the first element of a tensor to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))


def _view(base: torch.Tensor, chain: list[fx.Node]) -> View | None:
    """Returns the view of a tensor that the operations make, the last one first; None if there is no such view."""
    with _compat.real_tensors():
        places: Any = torch.arange(_reach(base)).as_strided(base.shape, base.stride())
        for node in reversed(chain):
            if node.target is not _CONVERT:
                places = node.target(places, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        rows, columns = places.shape
        if not rows or not columns:
            return None
        offset = int(places[0, 0])
        row_stride = int(places[1, 0]) - offset if rows > 1 else columns
        column_stride = int(places[0, 1]) - offset if columns > 1 else 1
        view = offset + row_stride * torch.arange(rows)[:, None] + column_stride * torch.arange(columns)
        return View(rows, columns, row_stride, column_stride, offset) if torch.equal(places, view) else None
