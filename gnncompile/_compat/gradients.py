"""``torch.autograd.grad`` and ``requires_grad_()`` inside code that Dynamo traces."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from gnncompile._compat.compiles import compiling
from gnncompile._compat.recapture import Recapture, Setting

__all__ = [
    "bound_gradient",
    "drop_leaf_marks",
    "get_decompositions",
    "gradient_calls",
    "gradient_not_captured",
    "patch_autograd_grad",
]


def gradient_not_captured(reason: str) -> Recapture:
    """Returns what to raise if a model's ``torch.autograd.grad`` can't be part of a captured graph."""
    return Recapture(Setting.GRADIENTS, False, reason, "torch.autograd.grad in the model")


def patch_autograd_grad(wanted: Callable[[], bool]) -> None:
    """Makes gnncompile's compiles put ``torch.autograd.grad`` into the graph, if `wanted` returns True.

    Gnncompile's passes write the gradient out (:mod:`gnncompile.passes.pre_grad.expand_gradients`) and free no graph.
    So torch's checks that no result belongs to a freed graph are not needed.

    Raises:
        Recapture: While Dynamo traces a gradient that it can't put into the graph.
    """
    if hasattr(dynamo_config, "trace_autograd_ops"):
        _trace_calls(wanted)
        _let_results_pass(wanted)


def _trace_calls(wanted: Callable[[], bool]) -> None:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    handler = handlers.get(torch.autograd.grad)
    if handler is None:
        return

    @functools.wraps(handler)
    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling.patches is None or not wanted():
            return handler(self, tx, *args, **kwargs)
        tx.output._validate_outputs_safe_for_autograd_nodes = _frees_nothing  # of this capture alone
        try:
            with dynamo_config.patch(trace_autograd_ops=True):
                return handler(self, tx, *args, **kwargs)
        except Unsupported as error:
            raise gradient_not_captured(str(error).strip().splitlines()[0]) from None

    handlers[torch.autograd.grad] = handle


def _frees_nothing(results: Any, tx: Any) -> None:
    """Replaces torch's check that no result of a capture belongs to a graph that ``torch.autograd.grad`` freed."""


def _let_results_pass(wanted: Callable[[], bool]) -> None:
    graph: Any = OutputGraph
    leaked: Any = getattr(graph, "_check_requires_grad_intermediate_outputs", None)

    def check_leaked(self: Any, results: Any, tx: Any) -> None:
        if compiling.patches is not None and wanted():
            leaves = {v.as_proxy().node for v in self.leaf_var_creation_order if isinstance(v, TensorVariable)}
            others = _with_gradient(self.graph) - leaves
            results = [v for v in results if not isinstance(v, TensorVariable) or v.as_proxy().node not in others]
        leaked(self, results, tx)

    if leaked is not None:
        graph._check_requires_grad_intermediate_outputs = check_leaked


def _with_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that require a gradient even without ``requires_grad_()`` on a value in the graph."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            wants = isinstance(value, Tensor) and value.requires_grad
        else:
            tensors = value if isinstance(value, (tuple, list)) else [value]
            wants = any(n in found for n in node.all_input_nodes)
            wants = wants and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        if wants:
            found.add(node)
    return found


def gradient_calls(gm: fx.GraphModule) -> list[fx.Node]:
    """Returns the calls of ``torch.autograd.grad`` in a Dynamo graph."""
    return list(gm.graph.find_nodes(op="call_function", target=torch.autograd.grad))


def bound_gradient(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call of ``torch.autograd.grad`` by name, defaults included."""
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


_SIGNATURE = inspect.signature(torch.autograd.grad)


def drop_leaf_marks(gm: fx.GraphModule) -> None:
    """Removes ``requires_grad_()`` calls on values in a Dynamo graph.

    A marker op names the inputs of a gradient instead. Nodes that read the value before the call have no part in the
    gradient. If there are any, nodes after the call read a detached value.
    """
    switch = torch._C._functorch.set_inplace_requires_grad_allowed
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target != "requires_grad_":
            continue
        leaf, around = node.args[0], (node.prev, node.next)
        if any(user < node for user in leaf.users):
            with gm.graph.inserting_before(node):
                detached = gm.graph.call_method("detach", (leaf,))
            detached.meta.update(leaf.meta)
            leaf.replace_all_uses_with(detached, lambda user, mark=node: mark < user)
            leaf = detached
        node.replace_all_uses_with(leaf)
        for near in around:
            if near.op == "call_function" and near.target is switch:
                gm.graph.erase_node(near)
        gm.graph.erase_node(node)
    gm.recompile()
