"""Leaves Python's random number generators to Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import misc, user_defined

from gnncompile._compat.compiles import compiling


def patch_random_draws() -> None:
    """Makes Dynamo break the graph where a model calls or makes a generator of Python's ``random``.

    Other compiles than gnncompile's stay as they are.

    Dynamo takes a drawn number into the graph as a tensor without axes. It traces a float32 tensor and passes a float64
    one, so code made for the first reads the bytes of the second. The tensor also computes and promotes as tensors do:
    ``randint(0, 7) / 7`` has 32 bits, where Python's number has 64. The state of a generator (``getstate``) is that of
    the capture in all later calls. A seed that is no constant is an error.
    """
    user_defined.call_random_fn = _breaks(user_defined.call_random_fn)
    misc.RandomVariable.call_method = _breaks(misc.RandomVariable.call_method)  # type: ignore[method-assign]
    misc.RandomClassVariable.call_function = _breaks(misc.RandomClassVariable.call_function)  # type: ignore[method-assign]


def _breaks(traces: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that breaks the graph in gnncompile's compiles, and otherwise traces a call as Dynamo does."""

    @functools.wraps(traces)
    def called(*args: Any, **kwargs: Any) -> Any:
        if compiling.patches is None:
            return traces(*args, **kwargs)
        unimplemented(
            gb_type="generator of Python's random",
            context=traces.__name__,
            explanation="A number that is drawn from Python's random is drawn and computed with in Python, in 64 bits.",
            hints=["Draw the number before the call and pass it in, or draw a tensor with torch.rand."],
        )

    return called
