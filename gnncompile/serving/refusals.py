"""Says what a package can't hold, with the user's line, before anything is compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx, nn

from gnncompile._compat.aoti import Condition
from gnncompile.exc import ArgumentError, CaptureError
from gnncompile.passes.analysis import depends_on_chance, mutates
from gnncompile.passes.log import line_of

_PLAIN = {"aten", "prims", "prim", "higher_order", "_operator"}
"""The namespaces of operations that torch itself brings to a server."""


def refuse_training(model: nn.Module) -> None:
    """Raises ArgumentError if a part of the model is in training mode."""
    for name, module in model.named_modules():
        if module.training:
            where = f"its module {name!r} ({type(module).__name__}) is" if name else "it is"
            raise ArgumentError(
                f"model: {where} in training mode, expected evaluation mode. A package has no dropout and updates no "
                "statistics: call model.eval() first."
            )


def refuse_operations(graphs: Iterable[fx.Graph], held: Collection[Any]) -> None:
    """Raises CaptureError if a captured graph draws random numbers, writes to an input, or needs another library.

    Args:
        graphs: The graphs.
        held: Our ops that a package can hold.
    """
    for graph in graphs:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            reason = _reason(node, held)
            if reason is not None:
                line = line_of(node.meta.get("stack_trace") or "")
                raise CaptureError(f"model: can't be packaged at {line}: {node.target} {reason}")


def refuse_conditions(conditions: Iterable[Condition]) -> None:
    """Raises CaptureError if the model decided something by sizes: a package has the code of one decision."""
    for one in conditions:
        raise CaptureError(
            f"model: can't be packaged at {one.line}: it decides by a size of the example ({one.text}), but a package "
            "serves all sizes. Compute the same for every size, or make the decision outside of the packaged model."
        )


def _reason(node: fx.Node, held: Collection[Any]) -> str | None:
    target: Any = node.target
    if depends_on_chance(node):
        return (
            "draws random numbers, which a server would draw anew in each call. Pass them as an input, or leave the "
            "sampling and the dropout out of the packaged model."
        )
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace == "gnncompile":
        return None if target in held else "has no form in a package. Move what needs it out of the packaged model."
    if target.namespace not in _PLAIN:
        return "belongs to another library, which a server does not have. Write it with torch's operations."
    if mutates(node) and any(one.op == "placeholder" for one in node.all_input_nodes):
        return "writes to an input or a buffer. Clone the tensor first, or return the new value."
    return None
