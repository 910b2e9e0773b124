"""Ways to use a model. Each returns, by name, all values that must be equal for compiled and eager models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gnncompile
from tests.fuzz.graphs import Size, inputs
from tests.harness import UnderAutocast

WAYS = ("training", "inference", "reduce-overhead", "TrainStep")
STEPS = 4
"""The number of calls per size in ways that record: the third call records, and the fourth replays."""

Observed = dict[str, Tensor]


@dataclass(frozen=True)
class Use:
    """How a model is used.

    Attributes:
        names: The names of the model's inputs.
        sizes: The sizes of the graphs that the model is called with, one after the other.
        seed: The seed of inputs and parameters.
        dtype: The dtype of all floats.
        way: One of :data:`WAYS`.
        frozen: Names of inputs without a gradient.
        device: The device that the model runs on.
        autocast: "around" the calls of the model, "within" its forward, or "" for no autocast.
    """

    names: tuple[str, ...]
    sizes: tuple[Size, ...]
    seed: int
    dtype: torch.dtype
    way: str
    frozen: frozenset[str]
    device: str
    autocast: str = ""

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Returns a new model with the same parameters in every call, in training or evaluation mode."""
        torch.manual_seed(self.seed)
        model = make().to(self.device, self.dtype).train(self.way != "inference")
        return UnderAutocast(model) if self.autocast == "within" else model

    def around(self) -> torch.autocast:
        """Returns a new context for calls of the model."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.autocast == "around")

    def arguments(self, size: Size) -> list[Tensor]:
        found = []
        for name, value in inputs(self.names, size, self.seed).items():
            if value.is_floating_point():
                value = value.to(self.dtype).to(self.device, copy=True)
                value.requires_grad_(name not in self.frozen and self.way in ("training", "reduce-overhead"))
            found.append(value.to(self.device))
        return found

    def observe(self, make: Callable[[], nn.Module], compiles: bool, options: dict[str, Any]) -> Observed:
        """Runs a new model, compiled or eager; returns its results, gradients and buffers by name."""
        model = self.model(make)
        if self.way == "TrainStep":
            return self._train_steps(model, compiles, options)
        mode = "reduce-overhead" if self.way == "reduce-overhead" else None
        run = gnncompile.compile(model, mode=mode, options=options) if compiles else model
        found: Observed = {}
        for at, size in enumerate(self.sizes):
            args = self.arguments(size)
            for call in range(STEPS if mode else 1):
                where = f"size {at}{f', call {call}' if mode else ''}: "
                found.update({where + name: value for name, value in self._call(run, model, args).items()})
        found.update({f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()})
        return found

    def _call(self, run: Callable[..., Any], model: nn.Module, args: Sequence[Tensor]) -> Observed:
        if self.way == "inference":
            with torch.no_grad(), self.around():
                return _results(run(*args))
        leaves = {f"gradient of {name}": arg for name, arg in zip(self.names, args, strict=True) if arg.requires_grad}
        leaves.update({f"gradient of {name}": p for name, p in model.named_parameters()})
        for leaf in leaves.values():
            leaf.grad = None
        with self.around():
            made = run(*args)
        loss = objective(made)
        if loss.requires_grad:
            loss.backward()
        # A gradient that is None equals one of zeros.
        gradients = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for name, leaf in leaves.items()
        }
        return {**_results(made), **gradients}

    def _train_steps(self, model: nn.Module, compiles: bool, options: dict[str, Any]) -> Observed:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step: Callable[..., Tensor] = (
            gnncompile.TrainStep(model, _loss, optimizer, options=options)
            if compiles
            else lambda *args, target: _plain_step(model, optimizer, args, target)
        )
        found: Observed = {}
        for at, size in enumerate(self.sizes):
            args = self.arguments(size)
            target = torch.tensor(0.0, dtype=self.dtype, device=self.device)
            for call in range(STEPS):
                found[f"size {at}, call {call}: loss"] = step(*args, target=target).detach().clone()
            found.update({f"size {at}: {k}": v.clone() for k, v in copy.deepcopy(model.state_dict()).items()})
        return found


def _plain_step(model: nn.Module, optimizer: Any, args: Sequence[Tensor], target: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = _loss(model(*args), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _loss(made: Any, target: Tensor) -> Tensor:
    return objective(made) - target


def _results(made: Any) -> Observed:
    results = made if isinstance(made, tuple) else (made,)
    return {f"result {k}": value.detach().clone() for k, value in enumerate(results)}


def objective(made: Any) -> Tensor:
    """Returns the sum of all results, with fixed weights in the dtype of each result."""
    total = 0.0
    for value in made if isinstance(made, tuple) else (made,):
        weight = torch.cos(torch.arange(value.numel(), dtype=torch.float64, device=value.device))
        total = total + (value * weight.view_as(value).to(value.dtype)).sum()
    return total  # type: ignore[return-value]
