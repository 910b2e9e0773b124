"""Computes operations of weights alone when a model is packaged, not in each call.

Before: ``aten.clone(aten.permute(weight, [1, 0]))``
After:  a buffer with the transposed weight
Why: each of these operations is a launch in each call. Regions take contiguous weights, and weights in parts.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten, _own = torch.ops.aten, torch.ops.gnncompile

_EMPTY = (aten.empty.memory_format, aten.new_empty.default)
"""The operations whose results are written later."""

_FOLDED = {
    *_EMPTY,
    operator.getitem,
    aten._to_copy.default,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.view.default,
    _own.launch.default,
}
"""The operations that are computed. Each of them returns the same bits when it is called and when it is compiled."""


def run(module: fx.GraphModule) -> None:
    """Rewrites the graph of a model in place.

    Args:
        module: The traced model, whose weights are attributes.
    """
    known: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(module)
            if isinstance(value, Tensor):
                known[node] = value.detach()
        elif node.op == "call_function" and node.target in _FOLDED and known.keys() >= set(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    weights = {_memory(value) for node, value in known.items() if node.op == "get_attr"}
    for node, value in known.items():
        is_read = node.target not in _EMPTY and any(user not in known for user in node.users)
        if not is_read or not isinstance(value, Tensor) or not value.is_contiguous():
            continue
        if _memory(value) not in weights or _would_be_copied(node, value):
            _replace(module, node, value)
    _keep_few(module)
    module.graph.eliminate_dead_code()
    module.recompile()


def _would_be_copied(node: fx.Node, value: Tensor) -> bool:
    """Whether a part of a weight would be copied in each call: kernels read addresses that are multiples of 16."""
    return value.storage_offset() != 0 and any(user.target is _own.launch.default for user in node.users)


def _memory(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


def _keep_few(module: fx.GraphModule) -> None:
    """Gives vectors of few numbers a second axis, where calls of kernels read them.

    Inductor makes such a vector a part of its code, and would write it to memory in each call.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        readers = [user for user in node.users if user.target in _KERNELS]
        if not readers or value.dim() != 1 or value.size(0) > _FEW:
            continue
        name = f"few_{node.name}"
        module.register_buffer(name, value.detach().view(1, -1).clone())
        with module.graph.inserting_before(node):
            row = module.graph.get_attr(name)
            made = module.graph.call_function(aten.view.default, (row, list(value.shape)))
        for one in (row, made):
            one.meta = dict(node.meta)
        for user in readers:
            user.replace_input_with(node, made)


_KERNELS = (
    aten.addmm.default,
    aten._addmm_activation.default,
    _own.launch.default,
)
"""The operations that read a vector from memory."""

_FEW = 8
"""The most numbers of such a vector in Inductor."""


def _replace(module: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    name = f"folded_{node.name}"
    module.register_buffer(name, value.clone())
    with module.graph.inserting_before(node):
        made = module.graph.get_attr(name)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
