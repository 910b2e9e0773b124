"""Steps of training, Adam included, and the comparison of their losses with those of a plain loop in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.measuring.errors import first_line
from benchmarks.rows.variants import Runner

LEARNING_RATE = 1e-3

TOLERANCE = 1e-3
"""The largest relative difference of each loss; rounding errors grow from step to step."""

Loss = Callable[[Tensor, Any], Tensor]
Step = Callable[[tuple[Any, ...], Any], Tensor]
"""Takes the arguments of the model and the targets, and returns the loss."""

Make = Callable[[nn.Module, Loss], Step]
S = TypeVar("S")


def plain_loop(build: Callable[[nn.Module], Runner]) -> Make:
    """Returns a function that makes a training step in plain PyTorch; `build` returns the runner of a model."""

    def make(model: nn.Module, loss: Loss) -> Step:
        runner = build(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())

        def step(inputs: tuple[Any, ...], target: Any) -> Tensor:
            if on_gpu:
                # CUDA graphs of torch.compile reuse the last step's memory: tell them that it is no longer needed.
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            found = loss(runner(*inputs), target)
            found.backward()
            optimizer.step()
            return found.detach()

        return step

    return make


def whole_step(model: nn.Module, loss: Loss) -> Step:
    """Makes a training step that is compiled as a whole, a `gnncompile.TrainStep`."""
    import gnncompile

    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    step = gnncompile.TrainStep(model, loss, optimizer)
    return lambda inputs, target: step(*inputs, target=target)


@dataclass
class Outcome:
    """The outcome of checking a row; only rows whose `status` is `ok` are timed.

    Attributes:
        status: `ok`, WRONG or FAILED.
        error: the largest relative difference of a loss.
        tolerance: the largest that was allowed.
    """

    status: str = "ok"
    message: str = ""
    error: float | None = None
    tolerance: float | None = None


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest relative difference of losses, `[steps]`, from those in float64."""
    return float(((found - expected) / expected).abs().max())


def check(
    outcome: Outcome,
    build: Callable[[], S],
    losses: Callable[[S], Tensor],
    expected: Tensor,
    tolerance: float = TOLERANCE,
) -> S | None:
    """Builds and checks a row.

    Args:
        outcome: gets the status, message and error.
        build: makes the row's step.
        losses: runs the first steps and returns their losses, `[steps]`.
        expected: the losses in float64.
        tolerance: the largest relative difference of a loss.

    Returns:
        The step; None if it failed or is wrong.
    """
    try:
        step = build()
        found = losses(step)
    except Exception as error:
        outcome.status, outcome.message = "FAILED", first_line(error)
        return None
    outcome.error, outcome.tolerance = largest_error(found, expected), tolerance
    if not outcome.error <= tolerance:  # a NaN is wrong too
        outcome.status = "WRONG"
        outcome.message = f"losses differ by {outcome.error:.1e}, tolerance {tolerance:.0e}"
        return None
    return step
