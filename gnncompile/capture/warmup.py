"""``gnncompile.warmup``: compiles, and records, before the first step counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gnncompile.capture.compile import callable_of
from gnncompile.capture.rehearsal import run_ahead
from gnncompile.exc import ArgumentTypeError

F = TypeVar("F", bound=Callable[..., Any])


def warmup(compiled: F, batches: Iterable[Any], *, fresh: bool = False) -> F:
    """Runs a compiled model forward and backward on examples, so that calls with their like compile nothing.

    With ``mode="reduce-overhead"`` each is run until its sizes are recorded, and the host's code in C++ is built, which
    takes half a minute once on a machine. The calls are made as the model stands, in
    training or evaluation, with or without ``torch.no_grad()`` or ``torch.autocast`` around: warm up in each way that
    is to come. Afterwards all is as before: gradients, which are not accumulated; parameters and buffers, such as the
    running statistics of a batch norm; the modules' attributes, and what lists and dicts among them hold; the examples;
    the random numbers to come, of torch, NumPy and Python. That takes memory for a copy of parameters, buffers and the
    largest example. Of a function, the modules are cared for that it refers to by a name.

    A compiled module has this as a method for one example, unless its class has another ``warmup``::

        model = gnncompile.compile(model).warmup(x, edge_index)

    Args:
        compiled: What :func:`gnncompile.compile` returned.
        batches: Each the arguments of one call as a tuple, or its only argument.
        fresh: Whether training brings new tensors for each step, as a loader does. Recordings then copy their inputs.
            Otherwise they are for the very tensors given here.

    Returns:
        `compiled`.

    Raises:
        TypeError: `compiled` is not compiled.
        RuntimeError: It has parameters without a shape, which the first call is to give them.
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
