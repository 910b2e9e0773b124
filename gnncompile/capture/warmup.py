"""``gnncompile.warmup``: compiles and records a model before the first real step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gnncompile.capture.compile import callable_of
from gnncompile.capture.rehearsal import run_ahead
from gnncompile.exc import ArgumentTypeError

F = TypeVar("F", bound=Callable[..., Any])


def warmup(compiled: F, batches: Iterable[Any], *, fresh: bool = False) -> F:
    """Runs a compiled model forward and backward on examples, so that later calls like these compile nothing.

    With ``mode="reduce-overhead"`` each example runs until its sizes are recorded. The C++ extension is built as well,
    which takes half a minute once per machine. The calls run in the model's current state: training or evaluation, with
    or without ``torch.no_grad()`` or ``torch.autocast`` around. Warm up in each state that will be used.

    Afterwards the state is as before: parameters and buffers, such as the running statistics of a batch norm; the
    modules' attributes, and the contents of lists and dicts among them; the examples; the random number generators of
    torch, NumPy and Python. Gradients are not accumulated. Restoring takes memory for a copy of parameters, buffers and
    the largest example. For a function, this covers the modules that the function refers to by a name.

    A compiled module has this as a method for one example, unless its class has another ``warmup``::

        model = gnncompile.compile(model).warmup(x, edge_index)

    Args:
        compiled: A module or function that :func:`gnncompile.compile` returned.
        batches: Examples; each is a tuple of the arguments of one call, or its only argument.
        fresh: Whether training uses new tensors in each step, as with a loader. Recordings then copy their inputs.
            Otherwise recordings serve only the tensors given here.

    Returns:
        `compiled`.

    Raises:
        TypeError: `compiled` is not compiled.
        RuntimeError: `compiled` has uninitialised parameters, which get their shapes in the first call.
    """
    program = callable_of(compiled)
    if program is None:
        found = type(compiled).__name__
        raise ArgumentTypeError(
            f"compiled: found an uncompiled {found}, expected what gnncompile.compile returned. Compile it."
        )
    for batch in batches:
        run_ahead(program, batch if isinstance(batch, tuple) else (batch,), {}, fresh)
    return compiled
