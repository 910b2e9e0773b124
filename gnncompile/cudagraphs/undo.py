"""Undoes what the first part of a recording left behind, if it was launched in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.device import device_of


class Undone(NamedTuple):
    """What must be undone.

    Attributes:
        inputs: Indices of the inputs of a graph to which it writes.
        draws_on: The device whose default generator a graph draws from; None if it draws no random numbers.
    """

    inputs: frozenset[int] = frozenset()
    draws_on: torch.device | None = None


class Undo:
    """What small tensors, such as the running statistics of batch norms, and a random generator were before a replay.

    Args:
        written: The tensors that a replay writes to.
        draws_on: As for :class:`Undone`.
    """

    def __init__(self, written: Sequence[Tensor], draws_on: torch.device | None) -> None:
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in written:
            groups.setdefault(tensor.dtype, []).append(tensor.detach())
        self._groups = [(group, [torch.empty_like(tensor) for tensor in group]) for group in groups.values()]
        self._draws = None if draws_on is None else _Draws(draws_on)

    def copy(self) -> None:
        """Copies the tensors. A recording does this first."""
        for tensors, copies in self._groups:
            _compat.copy_each(copies, tensors)

    def begin(self) -> None:
        """Notes the state of the generator, before a replay that may have to be undone."""
        if self._draws is not None:
            self._draws.note()

    def __call__(self) -> None:
        """Writes the copies back. The versions of the tensors stay, as the replay has not raised them."""
        for tensors, copies in self._groups:
            with torch.no_grad(), _compat.keep_versions(tensors):
                _compat.copy_each(tensors, copies)
        if self._draws is not None:
            self._draws.undo()


class _Draws:
    """The state of a device's default generator. That of a GPU is an offset on the host, which a replay moves on."""

    def __init__(self, device: torch.device) -> None:
        self._has_offset = device_of(device).has_streams
        self._generator = torch.cuda.default_generators[device.index] if self._has_offset else torch.default_generator
        self._state: int | Tensor = 0

    def note(self) -> None:
        self._state = self._generator.get_offset() if self._has_offset else self._generator.get_state()

    def undo(self) -> None:
        if isinstance(self._state, Tensor):
            self._generator.set_state(self._state)
        else:
            self._generator.set_offset(self._state)
