"""Decides how the frames of a compiled model are captured, and how a frame runs that can't be captured."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gnncompile import _compat
from gnncompile.capture.backend import Backend
from gnncompile.capture.inputs import Derived
from gnncompile.ops.segment import SizeNeeded
from gnncompile.passes.log import Masked, Nested, NotPadded, Skip, WrittenInput

ATTEMPTS = 2
"""Failed captures, each in another call, after which a frame runs as Python for good."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass
class CapturePolicy:
    """The capture policy of one compiled model.

    Attributes:
        backend: The backend, which also keeps the notes for ``explain``.
        derived: The cache of rows and sizes of integer inputs.
        empty_is_special: Whether sizes of 0 and 1 get captures of their own.
        pads: Whether padded mini-batches are captured with their padding.
        entries: The code objects of the frames that run a whole call.
        failed_calls: The number of calls that could not be captured as a whole, but ran.
        limited: Whether torch's recompile limit was reached.
    """

    backend: Backend
    derived: Derived
    empty_is_special: bool = False
    pads: bool = False
    entries: set[types.CodeType] = field(default_factory=set)
    failed_calls: int = 0
    limited: bool = False
    _failed_frames: Counter[types.CodeType] = field(default_factory=Counter)
    _told: set[str] = field(default_factory=set)
    _given_up: list[tuple[types.CodeType, BaseException]] = field(default_factory=list)

    def owns(self, code: types.CodeType) -> bool:
        """Whether a frame is one of :attr:`entries`."""
        return code in self.entries

    def adjust(self, error: _compat.Recapture) -> bool:
        """Changes how frames are captured from now on. Returns False if the error changes no setting."""
        before = self._settings()
        if isinstance(error, SizeNeeded):
            source = error.source.removeprefix("L['").replace("']", "", 1)
            self.derived.wanted.add(source)
            if error.longest:
                self.derived.lengths.add(source)
        elif isinstance(error, NotPadded):
            self.note(error.skip)
            self.pads = False
        elif isinstance(error, Masked) and self.backend.self_loops == "masked":
            self.backend.self_loops = "exact"
        elif isinstance(error, Nested):
            self.backend.self_loops = "off"
        elif isinstance(error, _compat.AsksForEmptiness):
            self.empty_is_special = True
        elif isinstance(error, _compat.NeedsOriginal) and error.kind is None:
            self.backend.makes_matrices = False  # the error may be of a matrix that the model made
        elif isinstance(error, WrittenInput):
            self.derived.splits = False
        return self._settings() != before

    def _settings(self) -> tuple[Any, ...]:
        ours = self.backend.self_loops, self.backend.makes_matrices, self.empty_is_special, self.pads
        return *ours, self.derived.splits, len(self.derived.wanted), len(self.derived.lengths)

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
