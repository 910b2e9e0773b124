"""One training-like step: forward, and the gradients of all parameters and inputs that require one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.nested import tensors

Weights = Tensor | Callable[[Tensor], Tensor]


@dataclass
class Step:
    r"""Calls a model and back-propagates :math:`\sum \mathbf{w} \odot \mathbf{y}` with the given weights.

    Calling the object runs one step from cleared gradients. The sum itself is not computed. Its gradient, which is
    :math:`\mathbf{w}`, is passed to `backward`, so that only the model is timed.

    Attributes:
        runner: the model as it is run.
        model: the module with the parameters that `runner` uses.
        inputs: the arguments.
        weights: the weights, of the shape of the output; or a function that draws them for the first output, if no
            output is known before the first step.
    """

    runner: Callable[..., Any]
    model: nn.Module
    inputs: tuple[Any, ...]
    weights: Weights
    output: Tensor | None = None

    def __call__(self) -> None:
        """Runs one step; gradients are left in the parameters' and inputs' `.grad`."""
        self.forward()
        self.backward()

    def forward(self) -> None:
        """Runs the first half of a step, from cleared gradients."""
        self.clear()
        if isinstance(self.weights, Tensor) and self.weights.is_cuda:
            # CUDA graphs of torch.compile reuse the last step's memory: tell them that it is no longer needed.
            torch.compiler.cudagraph_mark_step_begin()
        self.output = self.runner(*self.inputs)

    def backward(self) -> None:
        """Runs the second half of a step."""
        if self.output is None:
            raise RuntimeError("backward: no forward was run yet; call forward first")
        if not isinstance(self.weights, Tensor):
            self.weights = self.weights(self.output)
        torch.autograd.backward(self.output, self.weights)
        self.output = self.output.detach()

    def results(self) -> dict[str, Tensor | None]:
        """Returns copies of the output and of all gradients, by name."""
        if self.output is None:
            raise RuntimeError("results: no step was run yet; call the step first")
        results: dict[str, Tensor | None] = {"output": self.output.clone()}
        for name, tensor in self._leaves.items():
            results[f"grad {name}"] = None if tensor.grad is None else tensor.grad.clone()
        return results

    def clear(self) -> None:
        """Drops the output and the gradients, so that their memory is free between steps."""
        self.output = None
        for tensor in self._leaves.values():
            tensor.grad = None

    @cached_property
    def _leaves(self) -> dict[str, Tensor]:
        """Parameters and inputs that get gradients, by name. They are collected once, as in an optimizer."""
        leaves: dict[str, Tensor] = dict(self.model.named_parameters())
        for position, value in enumerate(self.inputs):
            leaves.update(
                (name, tensor) for name, tensor in tensors(value, f"input {position}") if tensor.requires_grad
            )
        return leaves
