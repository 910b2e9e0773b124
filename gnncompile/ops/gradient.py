"""The marker of ``torch.autograd.grad`` in a model: ``gradient(outputs, inputs, grad_outputs, create_graph)``.

The marker stays in a captured graph until :mod:`gnncompile.passes.pre_grad.expand_gradients` replaces it by the
operations of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.exc import InternalError
from gnncompile.ops.region import LIBRARY

LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor?[] grad_outputs, bool create_graph) -> Tensor[]")


def _fake(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor | None], again: bool) -> list[Tensor]:
    return [value.new_empty(value.shape) for value in inputs]


def _never(*_: Any) -> Any:
    raise InternalError("a marker of a gradient was run; the passes must write it out first, please report it")


def mark(gm: fx.GraphModule) -> None:
    """Replaces the calls of ``torch.autograd.grad`` in a Dynamo graph by markers."""
    calls = _compat.gradient_calls(gm)
    for node in calls:
        node.target = _marker(node.meta["example_value"], _compat.bound_gradient(node))
        node.args, node.kwargs = node.args[:2], {"grad_outputs": _compat.bound_gradient(node)["grad_outputs"]}
    if calls:
        gm.recompile()


def _marker(found: Sequence[Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    create_graph = bool(arguments["create_graph"])

    def marked(outputs: Any, inputs: Any, grad_outputs: Any = None) -> tuple[Tensor | None, ...]:
        results, wanted = _tuple(outputs), _tuple(inputs)
        cotangents = [None] * len(results) if grad_outputs is None else list(_tuple(grad_outputs))
        used = [value for value, one in zip(wanted, found, strict=True) if one is not None]
        made = iter(torch.ops.gnncompile.gradient(list(results), used, cotangents, create_graph))
        return tuple(None if one is None else next(made) for one in found)

    return marked


def _tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


LIBRARY.impl("gradient", _never, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::gradient", _fake, lib=LIBRARY)
torch.library.register_autograd("gnncompile::gradient", _never, lib=LIBRARY)
