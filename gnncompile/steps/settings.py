"""What an optimizer does that no input of a recorded step says."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat


class Settings:
    """The settings of an optimizer, and which tensors are its state.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: dict[int, Tensor] = {}  # of parameter groups, by position
        self._held: list[Any] = []
        self._trained: list[Tensor] = []
        self._changes = 0

    def keep_on(self, device: torch.device) -> None:
        """Keeps on a GPU what changes from step to step, learning rates too."""
        # Torch allows it on GPUs only.
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._keep_rates()
        groups = self._optimizer.param_groups
        numbers = [k for k, group in enumerate(groups) if not isinstance(group["lr"], Tensor)]
        _compat.make_capturable(self._optimizer, device)
        self._rates.update({k: groups[k]["lr"] for k in numbers if isinstance(groups[k]["lr"], Tensor)})

    def facts(self) -> tuple[Any, ...]:
        """What is equal to what it was for as long as a recorded update does what the optimizer would do."""
        self._keep_rates()
        self._trained = self._parameters()
        held: list[Any] = [*self._trained]
        numbers: list[Any] = []
        for state in self._optimizer.state.values():
            held += state.values() if isinstance(state, dict) else [state]
        for group in self._optimizer.param_groups:
            for value in group.values():
                if not isinstance(value, list):
                    (held if isinstance(value, Tensor) else numbers).append(value)
        if not _are_the_same(held, self._held):
            self._held, self._changes = held, self._changes + 1
        return (self._changes, *numbers)

    def trains_the_same(self) -> bool:
        """Whether the parameters are those of the last :meth:`facts`: no others have gradients that it clears."""
        return _are_the_same(self._parameters(), self._trained)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _keep_rates(self) -> None:
        """Where a learning rate was set to a number, puts that into the tensor that recorded updates read."""
        if not self._rates:
            return
        for k, group in enumerate(self._optimizer.param_groups):
            rate = self._rates.get(k)
            if rate is not None and not isinstance(group["lr"], Tensor):
                group["lr"] = rate.fill_(group["lr"])


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
