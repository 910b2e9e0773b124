"""Leaves the numbers that a model draws from Python's generators to Python."""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import misc, user_defined

from gnncompile._compat.compiles import compiling


def patch_call_random_fn() -> None:
    """Makes Dynamo break the graph where a number is drawn from Python's ``random``, in gnncompile's compiles.

    Dynamo takes the number into the graph as a tensor without axes. It traces a float32 tensor and passes a float64
    one, so code made for the first reads the bytes of the second. The tensor also computes and promotes as tensors do:
    ``randint(0, 7) / 7`` has 32 bits, where Python's number has 64.
    """
    call: Any = user_defined.call_random_fn

    @functools.wraps(call)
    def call_random_fn(*args: Any, **kwargs: Any) -> Any:
        if compiling.patches is None:
            return call(*args, **kwargs)
        unimplemented(
            gb_type="number of Python's random",
            context="call_random_fn",
            explanation="A number drawn from Python's random is drawn and computed with in Python, in 64 bits.",
            hints=["Draw the number before the call and pass it in, or draw a tensor with torch.rand."],
        )

    for module in (user_defined, misc):
        setattr(module, call.__name__, call_random_fn)
