"""Launches a step's forward and backward before it is known that they are the right ones.

The device then works while the host takes the arguments apart and asks the guards, which takes about as long as the
kernels of a small step. Nothing comes of a forward and backward that were not: only the update writes to what is kept,
and that waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gnncompile.cudagraphs.pool import Begun
from gnncompile.steps.plan import Plan


class SpeculativeLaunch:
    """What the next step is expected to do: the same as the last two, if both did the same."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._again = False
        self._given: tuple[int, ...] = ()
        self._leaves: list[Any] = []

    def begin_again(self, given: tuple[Any, dict[str, Any], Any]) -> Begun | None:
        """Begins a step with the arguments of the last one, if they came as the same objects.

        Args:
            given: Arguments by position and by name, and the target, as they came.
        """
        if not self._again or _identities(given) != self._given:
            return None
        found: list[Any] = []
        for value in self._leaves:
            if isinstance(value, weakref.ref):
                value = value()
                if value is None:
                    return None
            found.append(value)
        return self.begin(found)

    def begin(self, found: Sequence[Any]) -> Begun | None:
        """Begins a step with arguments of these leaves."""
        plan = self._plan if self._again else None
        return plan.recordings.begin([*found, *plan.state()]) if plan is not None and plan.repeatable else None

    def learn(self, given: tuple[Any, dict[str, Any], Any], found: Sequence[Any], plan: Plan | None) -> bool:
        """Notes what a step did.

        Args:
            given: Its arguments, as they came.
            found: Their leaves, taken apart.
            plan: How it is recorded.

        Returns:
            Whether it was expected.
        """
        same = self._plan is plan
        expected = same and self._again
        self._plan, self._again = plan, same and plan is not None
        self._given = _identities(given)
        self._leaves = [weakref.ref(value) if isinstance(value, Tensor) else value for value in found]
        return expected


def _identities(given: tuple[Any, dict[str, Any], Any]) -> tuple[int, ...]:
    args, named, target = given
    return *map(id, args), *map(id, named.values()), id(target)
