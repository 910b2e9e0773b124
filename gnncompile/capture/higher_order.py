"""Hides higher-order ops from the passes, and inlines checkpoints into the graph around them.

Dynamo captures an ``autograd.Function``, a tensor's hook (``register_hook``) and ``torch.cond`` as higher-order ops,
whose arguments are graphs. The gradient of such an op is not the gradient of the operations in its graphs. So a marker
op takes its place while the passes run. A checkpoint only changes which tensors are kept for the backward, so its graph
is inlined.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile import _compat
from gnncompile.ops import higher_order
from gnncompile.ops.higher_order import NUMBER, TENSOR, Original

_FIRST_CHECKPOINT = 1_000_000
"""The first id of a checkpoint for torch's partitioner; the ids of recomputed regions are smaller."""


def inline_checkpoints(gm: fx.GraphModule) -> None:
    """Inlines the graphs of checkpoints into a Dynamo graph, and marks their operations for recomputation."""
    numbers = itertools.count(_FIRST_CHECKPOINT)
    node = next(_calls(gm, "tag_activation_checkpoint"), None)
    while node is not None:  # an inlined graph may hold another checkpoint
        _inline(gm, node, node.meta.get("ac_graph_id", next(numbers)))
        node = next(_calls(gm, "tag_activation_checkpoint"), None)
    _drop_unused(gm)


def _inline(gm: fx.GraphModule, node: fx.Node, number: int) -> None:
    body = _graph(gm, node.args[0])
    assert body is not None
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(inputs, node.args[1:], strict=True))
    results: Any = None
    for inner in body.graph.nodes:
        if inner.op == "output":
            results = fx.map_arg(inner.args[0], lambda n: env[n])
        elif inner.op != "placeholder":
            with gm.graph.inserting_before(node):
                copied = env[inner] = gm.graph.node_copy(inner, lambda n: env[n])
            if inner.op == "get_attr":
                copied.target = _adopt(gm, _attribute(body, str(inner.target)), str(inner.target))
            copied.meta["recompute"], copied.meta["ac_graph_id"] = CheckpointPolicy.PREFER_RECOMPUTE, number
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)


def unhidden(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph has a higher-order op that no marker can stand for."""
    graphs = {n for n in gm.graph.nodes if n.op == "get_attr" and _graph(gm, n) is not None}
    users = {user for node in graphs for user in node.users}
    return any(not _can_hide(gm, user) for user in users)


def bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The nested graphs of a Dynamo graph: the graphs that its higher-order ops take as arguments."""
    found = (_graph(gm, node) for node in gm.graph.nodes if node.op == "get_attr")
    return [graph for graph in found if graph is not None]


def hide(gm: fx.GraphModule) -> None:
    """Replaces the higher-order ops of a Dynamo graph by markers."""
    hooks = list(_calls(gm, "register_hook"))
    for node in hooks:
        _hook_first(gm, node)
    for node in [n for n in gm.graph.nodes if any(_graph(gm, a) is not None for a in n.all_input_nodes)]:
        leaves, spec = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
        kinds = tuple(_kind(gm, leaf) for leaf in leaves)
        results = node.meta["example_value"]
        which = higher_order.remember(Original(node.target, kinds, spec, results))
        tensors = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is TENSOR]
        numbers = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind is NUMBER]
        with gm.graph.inserting_before(node):
            marker = gm.graph.call_function(torch.ops.gnncompile.nested.default, (tensors, numbers, which))
            marker.meta.update(node.meta)
            made = gm.graph.call_function(operator.getitem, (marker, 0)) if isinstance(results, Tensor) else marker
        made.meta["example_value"] = results
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    _drop_unused(gm)


def show(gm: fx.GraphModule) -> None:
    """Replaces the markers by their higher-order ops again."""
    for marker in list(gm.graph.find_nodes(op="call_function", target=torch.ops.gnncompile.nested.default)):
        tensors, numbers, which = marker.args
        original = higher_order.known[which]

        def graph(body: fx.GraphModule, at: fx.Node = marker) -> fx.Node:
            with gm.graph.inserting_before(at):
                return gm.graph.get_attr(_adopt(gm, body, "nested_body"))

        args, kwargs = original.arguments(tensors, numbers, graph)
        with gm.graph.inserting_before(marker):
            node = gm.graph.call_function(original.target, args, kwargs)
        node.meta.update(marker.meta)
        for user in list(marker.users):
            if original.is_single:
                user.replace_all_uses_with(node)
                gm.graph.erase_node(user)
            else:
                user.replace_input_with(marker, node)
        gm.graph.erase_node(marker)
    gm.recompile()


def forget(gm: fx.GraphModule) -> None:
    """Forgets the originals of the markers in a Dynamo graph."""
    for marker in gm.graph.find_nodes(op="call_function", target=torch.ops.gnncompile.nested.default):
        higher_order.known.pop(marker.args[2], None)


def _calls(gm: fx.GraphModule, name: str) -> Iterator[fx.Node]:
    target = getattr(torch.ops.higher_order, name, None)
    return iter(gm.graph.find_nodes(op="call_function", target=target)) if target is not None else iter(())


def _can_hide(gm: fx.GraphModule, node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    if node.op != "call_function" or name not in ("autograd_function_apply", "register_hook", "cond"):
        return False
    if node.kwargs.get("dirty_idx"):
        return False  # the op writes to its arguments
    if name == "register_hook" and not _can_be_first(node):
        return False
    results = node.meta.get("example_value")
    found = [results] if isinstance(results, Tensor) else results
    if not isinstance(found, (tuple, list)) or not all(isinstance(r, Tensor) for r in found):
        return False
    return not any(map(_compat.has_unknown_size, found))


def _can_be_first(hook: fx.Node) -> bool:
    """Whether a hook can be registered before every reader of its tensor: all its inputs exist by then."""
    tensor: Any = hook.args[0]
    others = [node for node in hook.all_input_nodes if node is not tensor and node.op != "get_attr"]
    return all(node < user for node in others for user in tensor.users if user is not hook)


def _hook_first(gm: fx.GraphModule, hook: fx.Node) -> None:
    """Registers a hook before every reader of its tensor, so it is called with the sum of the readers' gradients."""
    tensor, body = hook.args[:2]
    assert isinstance(tensor, fx.Node) and isinstance(body, fx.Node)
    first = min((user for user in tensor.users if user is not hook), default=hook)
    if first < hook:
        first.prepend(hook)
        hook.prepend(body)
    tensor.replace_all_uses_with(hook, lambda user: user is not hook)


def _kind(gm: fx.GraphModule, leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    graph = _graph(gm, leaf)
    if graph is not None:
        return graph
    return TENSOR if isinstance(leaf.meta.get("example_value"), Tensor) else NUMBER


def _graph(gm: fx.GraphModule, node: Any) -> fx.GraphModule | None:
    """The nested graph that a ``get_attr`` node names; None for any other node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = _attribute(gm, str(node.target))
    return found if isinstance(found, fx.GraphModule) else None


def _attribute(gm: Any, name: str) -> Any:
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm


def _adopt(gm: fx.GraphModule, value: Any, name: str) -> str:
    """Makes a value an attribute of a graph's module, under a free name. Returns the name."""
    stem, count = name.replace(".", "_"), 0
    while hasattr(gm, f"{stem}_{count}"):
        count += 1
    setattr(gm, f"{stem}_{count}", value)
    return f"{stem}_{count}"


def _drop_unused(gm: fx.GraphModule) -> None:
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
