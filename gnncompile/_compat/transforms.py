"""Derivatives that compiled code can't take part in: ``torch.func``, forward mode, second derivatives.

Compiled code knows only the first gradient of its results. A caller that asks for more must not silently get less.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from gnncompile._compat.donations import let_keep_graph
from gnncompile.exc import DerivativeError, SecondDerivativeError

_NAMES = {
    "Grad": "torch.func.grad (or vjp, jacrev, hessian)",
    "Jvp": "torch.func.jvp (or jacfwd, hessian, linearize)",
    "Vmap": "torch.func.vmap",
    "Functionalize": "torch.func.functionalize",
}

GLOBAL_HOOKS = "hooks on all modules (torch.nn.modules.module.register_module_...)"

_SECOND = (
    "create_graph=True, for the gradient of a gradient: found a compiled model, whose backward has none. Compile it "
    'with gnncompile.compile(model, options={"double_backward": True}), without recordings.'
)


def needs_eager() -> str | None:
    """Returns the name of an active feature that compiled code can't take part in, or None.

    Such features are transforms of ``torch.func``, forward-mode differentiation and hooks on all modules.
    """
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        return _NAMES.get(interpreter.key().name, "torch.func")
    if forward_ad._current_level >= 0:
        return "torch.autograd.forward_ad"
    return GLOBAL_HOOKS if _has_any_global_hook() else None


def applies(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns ``kind.apply`` for calls that are under no transform of ``torch.func``.

    The ordinary ``apply`` looks at each tensor for such transforms.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


def transform_traced() -> bool:
    """Whether the code that Dynamo traces is inside a transform of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def uses_transforms(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph holds transforms of ``torch.func``, or forward-mode differentiation."""
    rooms = ("torch._functorch.", "torch._C._functorch", "torch.autograd.forward_ad")
    return any((getattr(node.target, "__module__", None) or "").startswith(rooms) for node in gm.graph.nodes)


def refuse_tangents(values: Sequence[Any]) -> None:
    """Raises DerivativeError for dual tensors: their tangents would be lost. Costs little outside of forward mode."""
    if forward_ad._current_level < 0:
        return
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise DerivativeError(
                "forward-mode differentiation: found a dual tensor in compiled code, which would lose its tangent. "
                "Call the original model inside forward_ad.dual_level()."
            )


def refuse_in_backward(cotangents: Sequence[Any], second: bool = True) -> None:
    """Raises an error if a compiled backward is asked for more than gradients.

    The gradient of the backward would silently be left out. An error in its place would not be found: autograd skips
    paths that do not lead to the requested inputs.

    Args:
        cotangents: The cotangents of the results.
        second: Whether the backward has no gradient of its own.

    Raises:
        SecondDerivativeError: A gradient of the gradient was asked for.
        DerivativeError: A batch of gradients, or a tangent, was asked for.
    """
    if second and torch.is_grad_enabled():
        raise SecondDerivativeError(_SECOND)
    functorch = torch._C._functorch
    batched = any(isinstance(c, Tensor) and functorch.is_legacy_batchedtensor(c) for c in cotangents)
    if batched or functorch.peek_interpreter_stack() is not None:
        raise DerivativeError(
            "a batch of gradients at once: found a compiled backward, which takes one at a time. Leave out vmap, "
            "is_grads_batched=True or vectorize=True, or call the original model."
        )
    refuse_tangents(cotangents)


def mend_backward(compiled: Callable[..., Any]) -> None:
    """Lets the backward of code that AOTAutograd compiled keep its graph, and makes it refuse what it can't compute.

    The code calls a :class:`torch.autograd.Function` of its own if it has a backward. The functions around that call
    hold the class in their closures. From now on they call it by :func:`applies`.
    """
    for cell in _cells(compiled):
        kind = getattr(cell.cell_contents, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            _check_requests(kind)
            let_keep_graph(kind)
            cell.cell_contents = applies(kind)


def _cells(function: Any) -> Iterator[types.CellType]:
    """Yields the cells of a function's closure, and of the functions that these cells hold."""
    functions, seen = [function], {id(function)}
    while functions:
        for cell in getattr(functions.pop(), "__closure__", None) or ():
            with suppress(ValueError):  # the cell is empty
                held = cell.cell_contents
                yield cell
                inner = getattr(held, "compiled_fn", held)  # torch wraps code that its cache on disk may take
                if isinstance(inner, types.FunctionType) and id(inner) not in seen:
                    seen.add(id(inner))
                    functions.append(inner)


def _check_requests(kind: Any) -> None:
    original = kind.backward

    def backward(ctx: Any, *given: Any) -> Any:
        refuse_in_backward(given[0] if given and isinstance(given[0], list) else given)
        return original(ctx, *given)

    kind.backward = staticmethod(backward)
