"""Notices changes of an optimizer that a recorded step would miss: of its settings, its state and its parameters."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.device import device_of
from gnncompile.exc import ArgumentTypeError

NUMBERS = (int, float, str, tuple, type(None))
"""Settings of these types are compared by value; all others are compared by identity."""


class Changes:
    """Counts calls whose objects differ from those of the previous call.

    Attributes:
        number: The number of such calls.
        in_a_row: The number of such calls since the last call without a change.
    """

    def __init__(self) -> None:
        self.number = self.in_a_row = 0
        self._held: list[Any] = []

    def __call__(self, held: list[Any]) -> int:
        """Compares the objects with those of the previous call, and returns the number of changes so far."""
        if _are_the_same(held, self._held):
            self.in_a_row = 0
        else:
            self._held, self.number, self.in_a_row = held, self.number + 1, self.in_a_row + 1
        return self.number


class OptimizerSettings:
    """Watches an optimizer's settings, its state tensors and its parameters.

    Args:
        optimizer: The optimizer.

    Attributes:
        changes: Counts changes of the parameters, the state, and the settings that are compared by identity.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: dict[int, Tensor] = {}  # learning rates, by the index of their parameter group
        self.changes = Changes()
        self._trained: list[Tensor] = []
        self._settings: list[Any] = []
        self._inner = True  # whether some settings are lists or dicts, whose entries may change
        self._numbers: list[Any] = []
        self._objects: list[Any] = []

    def keep_on(self, device: torch.device) -> None:
        """Moves the optimizer's step counts and learning rates to a GPU, where recorded updates read them."""
        # Torch allows capturable optimizers on GPUs only.
        known = device_of(device)
        if not known.can_be_recorded or known.is_capturing:
            return
        self._keep_rates()
        groups = self._optimizer.param_groups
        numbers = [k for k, group in enumerate(groups) if not isinstance(group.get("lr"), Tensor)]
        _compat.make_capturable(self._optimizer, device)
        self._rates.update({k: groups[k]["lr"] for k in numbers if isinstance(groups[k].get("lr"), Tensor)})

    def facts(self) -> tuple[Any, ...]:
        """Returns a tuple to compare: while it stays equal, a recorded update does what the optimizer would do."""
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
        """Returns the gradients of those parameters that the optimizer did not train at the last :meth:`facts`.

        The optimizer does not clear these gradients.
        """
        trained = set(map(id, self._trained))
        return [parameter.grad for parameter in parameters if id(parameter) not in trained]

    def trains_the_same(self) -> bool:
        """Whether the optimizer still trains exactly the parameters of the last :meth:`facts`. If so, it clears the
        gradients of no others.
        """
        return _are_the_same(self.parameters(), self._trained)

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that the optimizer trains now."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _keep_rates(self) -> None:
        """Writes each learning rate that was set to a number into the tensor that recorded updates read."""
        if not self._rates:
            return
        for k, group in enumerate(self._optimizer.param_groups):
            rate = self._rates.get(k)
            if rate is not None and not isinstance(group["lr"], Tensor):
                group["lr"] = rate.fill_(group["lr"])


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's ``step`` needs a closure that evaluates the loss, as ``LBFGS`` does."""
    return bool(_required(optimizer.step))


def needs_metric(scheduler: Any) -> bool:
    """Whether a scheduler's ``step`` needs a metric, as ``ReduceLROnPlateau`` does.

    Raises:
        TypeError: The scheduler's ``step`` needs more than one argument.
    """
    required = [] if scheduler is None else _required(scheduler.step)
    if len(required) > 1:
        raise ArgumentTypeError(
            f"scheduler: found a {type(scheduler).__name__}, whose step takes {', '.join(required)}; expected one that "
            "takes nothing, or a metric. Call it yourself, after the step."
        )
    return bool(required)


def _required(step: Any) -> list[str]:
    """Returns the names of a method's required arguments, without ``self``, which torch's wrappers may list."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in several and p.name != "self"
    ]


def _apart(groups: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Returns the settings to compare by value, and the settings to compare by identity."""
    settings = [setting for group in groups for name, setting in group.items() if name != "params"]
    parts = [part for setting in settings for part in _parts(setting)]
    numbers = [part for part in parts if isinstance(part, NUMBERS)]
    return numbers, [part for part in parts if not isinstance(part, NUMBERS)]


def _parts(setting: Any) -> Iterable[Any]:
    """Returns the parts of a setting that may change while the setting stays the same object."""
    if isinstance(setting, dict):
        return setting.items()
    return setting if isinstance(setting, list) else (setting,)


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
