"""Decides how the frames of a compiled model are captured, and how a frame runs that can't be captured."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gnncompile import _compat
from gnncompile._compat import Recapture, Setting
from gnncompile.capture.backend import Backend
from gnncompile.capture.inputs import Derived
from gnncompile.exc import SecondDerivativeError
from gnncompile.layout.batch_metadata import RowLimit
from gnncompile.passes.log import Skip, not_padded
from gnncompile.substitutes.message_hooks import LayerWatch

ATTEMPTS = 2
"""Failed captures, each in another call, after which a frame runs as Python for good."""

_OF_WHOLE_CALLS = {Setting.GRADIENTS, Setting.ROWS, Setting.WATCHED_LAYERS, Setting.UNCOMPILED_INPUTS}
"""Settings that change only between calls. A frame on its own that asks for one runs as Python."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Outcome(Enum):
    """What follows after a capture failed, or asked for another setting."""

    RESTART = "restart"
    """A setting of captures has changed. The call begins again, and is captured with new entries."""

    RETRY = "retry"
    """A check before the call has changed. The call begins again, with the captures that there are."""

    EAGER = "eager"
    """The call runs as Python."""

    UNCHANGED = "unchanged"
    """No setting can change."""


@dataclass
class CapturePolicy:
    """The capture policy of one compiled model.

    Attributes:
        backend: The backend, which also keeps the notes for ``explain``.
        derived: The cache of rows and sizes of integer inputs.
        watch: The layers whose hooks are checked before each call.
        empty_is_special: Whether sizes of 0 and 1 get captures of their own.
        pads: Whether padded mini-batches are captured with their padding.
        limits: The numbers of valid rows with which calls run padded, as far as captures that failed have asked.
        entries: The code objects of the frames that run a whole call.
        failed_calls: The number of calls that could not be captured as a whole, but ran.
        limited: Whether torch's recompile limit was reached.
    """

    backend: Backend
    derived: Derived
    watch: LayerWatch
    empty_is_special: bool = False
    pads: bool = False
    limits: set[RowLimit] = field(default_factory=set)
    entries: set[types.CodeType] = field(default_factory=set)
    failed_calls: int = 0
    limited: bool = False
    _failed_frames: Counter[types.CodeType] = field(default_factory=Counter)
    _told: set[str] = field(default_factory=set)
    _given_up: list[tuple[types.CodeType, BaseException]] = field(default_factory=list)

    def owns(self, code: types.CodeType) -> bool:
        """Whether a frame is one of :attr:`entries`."""
        return code in self.entries

    def adjust_call(self, error: BaseException, padded: bool) -> Outcome:
        """Decides what follows after a call could not be captured as a whole, and changes the setting that this needs.

        Args:
            error: The error of the capture, or a :class:`Recapture`.
            padded: Whether the call was padded.

        Returns:
            The outcome. If it is :attr:`Outcome.UNCHANGED`, the error is for the user.
        """
        is_second = isinstance(error, SecondDerivativeError)
        asked = _compat.gradient_not_captured(str(error)) if is_second else error
        outcome = self.adjust(asked) if isinstance(asked, Recapture) else Outcome.UNCHANGED
        if outcome in (Outcome.RESTART, Outcome.RETRY):
            return outcome
        if self.backend.strict or is_second:
            return Outcome.UNCHANGED
        if padded:
            self.adjust(not_padded(_compat.reason_of(error), _compat.place_of(error)))
            return Outcome.RESTART
        return Outcome.EAGER

    def adjust_frame(self, asked: Recapture) -> bool:
        """Changes how frames are captured from now on. Returns False if this helps no single frame."""
        return asked.setting not in _OF_WHOLE_CALLS and self.adjust(asked) is Outcome.RESTART

    def adjust(self, asked: Recapture) -> Outcome:
        """Changes the setting that a capture asked for, and notes it for ``explain``."""
        if asked.setting is Setting.UNCOMPILED_INPUTS:
            return Outcome.EAGER
        if asked.setting is Setting.WATCHED_LAYERS:
            self.watch.add(asked.value)
            return Outcome.RETRY
        if asked.setting is Setting.ROWS:
            if asked.value in self.limits:
                return Outcome.UNCHANGED
            self.limits.add(asked.value)
            return Outcome.RETRY
        before = self._settings()
        self._change(asked.setting, asked.value)
        if self._settings() == before:
            return Outcome.UNCHANGED
        if asked.what:
            self.note(Skip(asked.what, asked.reason, asked.line))
        return Outcome.RESTART

    def _change(self, setting: Setting, value: Any) -> None:
        if setting is Setting.SIZES:
            source, longest = value
            source = source.removeprefix("L['").replace("']", "", 1)
            self.derived.wanted.add(source)
            if longest:
                self.derived.lengths.add(source)
        elif setting is Setting.PADDING:
            self.pads = value
        elif setting is Setting.SELF_LOOPS:
            if value == "off" or self.backend.self_loops == "masked":
                self.backend.self_loops = value
        elif setting is Setting.EMPTY_SIZES:
            self.empty_is_special = value
        elif setting is Setting.MADE_MATRICES:
            self.backend.makes_matrices = value
        elif setting is Setting.SPLIT_EDGE_LISTS:
            self.derived.splits = value
        elif setting is Setting.GRADIENTS and self.backend.captures_gradients:
            self._leave_gradients_to_torch()

    def _leave_gradients_to_torch(self) -> None:
        """Makes later captures break the graph at ``torch.autograd.grad``, which then runs in torch's autograd."""
        # A new backend, because graphs that the old one captured after a graph break must not be used any more.
        options = dataclasses.replace(self.backend.options, double_backward=True, record=False)
        self.backend = dataclasses.replace(self.backend, options=options, captures_gradients=False)
        self.pads = False

    def _settings(self) -> tuple[Any, ...]:
        backend, derived = self.backend, self.derived
        ours = self.empty_is_special, self.pads, backend.self_loops, backend.makes_matrices, backend.captures_gradients
        return *ours, derived.splits, len(derived.wanted), len(derived.lengths)

    def attempt(self) -> Callable[[], None]:
        """Called before a frame is captured. Returns a function that forgets the graphs captured since, on failure."""
        count = len(self.backend.captured)

        def forget() -> None:
            del self.backend.captured[count:]

        return forget

    def gave_up(self, code: types.CodeType, error: BaseException) -> None:
        """Notes that a frame runs as Python in the current call."""
        self._given_up.append((code, error))

    def call_begins(self) -> None:
        """Forgets the frames of an earlier call that raised an error: the error may have been the user's."""
        self._given_up.clear()

    def call_ran(self) -> None:
        """Warns of the frames that ran as Python in a completed call. After two such calls a frame stays Python."""
        for code, error in self._given_up:
            self._failed_frames[code] += 1
            if self._failed_frames[code] >= ATTEMPTS:
                _compat.run_in_parts(code)
            self.tell(f"`{code.co_name}`", "runs as Python, and what it calls is captured part by part", error)
        self._given_up.clear()

    def whole_call_ran(self, error: BaseException) -> None:
        """Notes a completed call that could not be captured as a whole, and warns."""
        self.failed_calls += 1
        how = "run as Python"
        if _compat.is_limit(error):
            self.limited = True
            how += ", since there were more kinds of calls than torch._dynamo.config.recompile_limit allows"
        self.tell("the whole model", f"calls like this one {how}", error)

    def tell(self, what: str, how: str, error: BaseException, raised: bool = True) -> None:
        """Warns once per reason that `what` was not captured and runs as `how` says; notes it for ``explain``.

        `raised` says whether ``fullgraph=True`` raises the error.
        """
        reason = f"a capture failed ({_compat.reason_of(error)})"
        skip = Skip(what, f"{reason}; {how}", _compat.place_of(error))
        if self.note(skip) and reason not in self._told:
            self._told.add(reason)
            at = "" if skip.line == "?" else f" at {skip.line}"
            remedy = " fullgraph=True raises the error." if raised else ""
            warn(f"gnncompile: {what}: {reason}{at}; {how}.{remedy}")

    def note(self, skip: Skip) -> bool:
        """Keeps a note for ``explain``. Returns False if the same note is already there."""
        if skip in self.backend.notes:
            return False
        self.backend.notes.append(skip)
        return True


def warn(message: str) -> None:
    """Issues a warning at the innermost running line outside gnncompile."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
