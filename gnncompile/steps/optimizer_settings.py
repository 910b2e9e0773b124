"""What an optimizer does that no input of a recorded step says."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.exc import ArgumentTypeError

NUMBERS = (int, float, str, tuple, type(None))
"""What settings of an optimizer are compared by value; all else is compared as an object."""


class Changes:
    """Counts how often objects were others than the time before.

    Attributes:
        number: So often.
        in_a_row: So often now without a time between when they were not.
    """

    def __init__(self) -> None:
        self.number = self.in_a_row = 0
        self._held: list[Any] = []

    def __call__(self, held: list[Any]) -> int:
        """The number; these are the objects."""
        if _are_the_same(held, self._held):
            self.in_a_row = 0
        else:
            self._held, self.number, self.in_a_row = held, self.number + 1, self.in_a_row + 1
        return self.number


class OptimizerSettings:
    """The settings of an optimizer, and which tensors are its state.

    Args:
        optimizer: The optimizer.

    Attributes:
        changes: Of its state and its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: dict[int, Tensor] = {}  # of parameter groups, by position
        self.changes = Changes()
        self._trained: list[Tensor] = []
        self._settings: list[Any] = []
        self._inner = True  # whether some of these are lists or dicts, which may change inside
        self._numbers: list[Any] = []
        self._objects: list[Any] = []

    def keep_on(self, device: torch.device) -> None:
        """Keeps on a GPU what changes from step to step, learning rates too."""
        # Torch allows it on GPUs only.
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._keep_rates()
        groups = self._optimizer.param_groups
        numbers = [k for k, group in enumerate(groups) if not isinstance(group.get("lr"), Tensor)]
        _compat.make_capturable(self._optimizer, device)
        self._rates.update({k: groups[k]["lr"] for k in numbers if isinstance(groups[k].get("lr"), Tensor)})

    def facts(self) -> tuple[Any, ...]:
        """What is equal to what it was for as long as a recorded update does what the optimizer would do."""
        self._keep_rates()
        groups = self._optimizer.param_groups
        self._trained = self.parameters()
        settings = [*chain.from_iterable([group.values() for group in groups])]
        if not _are_the_same(settings, self._settings) or self._inner:
            self._settings = settings
            self._inner = any(isinstance(s, (dict, list)) for g in groups for n, s in g.items() if n != "params")
            self._numbers, self._objects = _apart(groups)
        states: Iterable[Any] = self._optimizer.state.values()
        held = chain.from_iterable([state.values() if isinstance(state, dict) else (state,) for state in states])
        return (self.changes([*self._trained, *self._objects, *held]), *self._numbers)

    def gradients_of_others(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients that it does not clear, of those of a model's parameters that it did not train at the last
        :meth:`facts`.
        """
        trained = set(map(id, self._trained))
        return [parameter.grad for parameter in parameters if id(parameter) not in trained]

    def trains_the_same(self) -> bool:
        """Whether the parameters are those of the last :meth:`facts`: no others have gradients that it clears."""
        return _are_the_same(self.parameters(), self._trained)

    def parameters(self) -> list[Tensor]:
        """What it trains now."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _keep_rates(self) -> None:
        """Where a learning rate was set to a number, puts that into the tensor that recorded updates read."""
        if not self._rates:
            return
        for k, group in enumerate(self._optimizer.param_groups):
            rate = self._rates.get(k)
            if rate is not None and not isinstance(group["lr"], Tensor):
                group["lr"] = rate.fill_(group["lr"])


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step can't do without a function that evaluates the loss, as that of ``LBFGS``."""
    return bool(_required(optimizer.step))


def needs_metric(scheduler: Any) -> bool:
    """Whether a scheduler's step takes a metric, as that of ``ReduceLROnPlateau``.

    Raises:
        TypeError: It takes more than that.
    """
    required = [] if scheduler is None else _required(scheduler.step)
    if len(required) > 1:
        raise ArgumentTypeError(
            f"scheduler: found a {type(scheduler).__name__}, whose step takes {', '.join(required)}; expected one that "
            "takes nothing, or a metric. Call it yourself, after the step."
        )
    return bool(required)


def _required(step: Any) -> list[str]:
    """The arguments without which a method can't be called; wrappers of torch's may name the object among them."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # no function of Python's
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in several and p.name != "self"
    ]


def _apart(groups: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Settings that are compared by value, and those that are compared as objects."""
    settings = [setting for group in groups for name, setting in group.items() if name != "params"]
    parts = [part for setting in settings for part in _parts(setting)]
    numbers = [part for part in parts if isinstance(part, NUMBERS)]
    return numbers, [part for part in parts if not isinstance(part, NUMBERS)]


def _parts(setting: Any) -> Iterable[Any]:
    """What may change in a setting that stays the same object."""
    if isinstance(setting, dict):
        return setting.items()
    return setting if isinstance(setting, list) else (setting,)


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
