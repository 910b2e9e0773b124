"""Launches a step's forward and backward before it is known that they are the right ones.

Meanwhile the host flattens the arguments and checks the guards, which takes about as long as the kernels of a small
step. A wrong guess does no harm: only the update writes to parameters and to the optimizer's state, and it waits for
the check. What forward and backward write to buffers, as to the statistics of batch norms, is undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gnncompile.cudagraphs.pool import Begun
from gnncompile.steps.plan import Plan


class SpeculativeLaunch:
    """Expects the next step to be the same as the last two, if those two used the same plan.

    Attributes:
        begun: The replay that was begun in this step, if any.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._again = False
        self._given: tuple[int, ...] = ()
        self._leaves: list[Any] = []
        self.begun: Begun | None = None

    def begin_again(self, given: tuple[Any, dict[str, Any], Any]) -> None:
        """Begins a step with the arguments of the previous step, if they are the same objects.

        Args:
            given: Positional arguments, keyword arguments and target, as the user passed them.
        """
        if not self._again or _identities(given) != self._given:
            return
        found: list[Any] = []
        for value in self._leaves:
            if isinstance(value, weakref.ref):
                value = value()
                if value is None:
                    return
            found.append(value)
        self.begin(found)

    def begin(self, found: Sequence[Any]) -> None:
        """Begins a step with arguments that have these leaves, if such a step is expected and none was begun."""
        plan = self._plan if self._again and self.begun is None else None
        if plan is not None and plan.undone is not None:
            self.begun = plan.recordings.begin([*found, *plan.state()])

    def undo(self) -> None:
        """Undoes the replay that was begun, if there is one and it was not ended."""
        begun, self.begun = self.begun, None
        if begun is not None:
            begun.undo()

    def learn(self, given: tuple[Any, dict[str, Any], Any], found: Sequence[Any], plan: Plan | None) -> bool:
        """Notes what a step did.

        Args:
            given: The arguments, as the user passed them.
            found: The leaves of the arguments.
            plan: The plan by which the step is recorded; None if it is not recorded.

        Returns:
            Whether the step was expected.
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
