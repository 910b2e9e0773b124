"""From which inputs of a captured graph each of its results is computed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx


def uneven_sources(gm: fx.GraphModule) -> list[frozenset[int]] | None:
    """For each result, the positions of the floating-point inputs that it is computed from.

    None where that is the same for all results that may have a gradient, or where the graph does not say it.
    """
    sources: dict[fx.Node, frozenset[int]] = {}
    position = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            sources[node] = frozenset([position] if _may_have_gradient(node) else [])
            position += 1
        elif node.op == "call_function":
            sources[node] = frozenset[int]().union(*(sources[n] for n in node.all_input_nodes))
            if sources[node] and not _writes_nothing(node.target):  # else it is a count of batches that it writes
                return None
        elif node.op == "get_attr":
            sources[node] = frozenset()
        elif node.op != "output":
            return None
    results = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args[0]
    if not isinstance(results, (tuple, list)):
        return None
    found = [sources[r] if isinstance(r, fx.Node) else frozenset[int]() for r in results]
    graded = {s for r, s in zip(results, found, strict=True) if isinstance(r, fx.Node) and _may_have_gradient(r)}
    return found if len(graded) > 1 else None


def _may_have_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, Tensor) and value.is_floating_point()


def _writes_nothing(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    return getattr(target, "__module__", None) in (operator.__name__, "_operator", "math", torch.__name__)
