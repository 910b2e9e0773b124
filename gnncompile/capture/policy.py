"""How a compiled model's frames are captured, and what becomes of frames that can't be."""

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
"""Calls in which a frame may fail to be captured before it is left to Python for good."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass
class CapturePolicy:
    """The policy of one compiled model.

    Attributes:
        backend: What captured graphs are compiled by, and where notes for ``explain`` are kept.
        derived: What is made from integer inputs before the compiled code runs.
        empty_is_special: Whether sizes of 0 and 1 are captured on their own.
        pads: Whether padded mini-batches are captured as such.
        entries: The codes of the frames that stand for a whole call.
        failed_calls: Calls that could not be captured as a whole, but ran.
        limited: Whether torch's limit of captures was reached.
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
        """Changes how frames are captured from now on; False where that can't help."""
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
            self.backend.makes_matrices = False  # it may be of a matrix that the model made
        elif isinstance(error, WrittenInput):
            self.derived.splits = False
        return self._settings() != before

    def _settings(self) -> tuple[Any, ...]:
        ours = self.backend.self_loops, self.backend.makes_matrices, self.empty_is_special, self.pads
        return *ours, self.derived.splits, len(self.derived.wanted), len(self.derived.lengths)

    def attempt(self) -> Callable[[], None]:
        """A frame is about to be captured: what forgets the graphs that were captured since, if that fails."""
        count = len(self.backend.captured)

        def forget() -> None:
            del self.backend.captured[count:]

        return forget

    def gave_up(self, code: types.CodeType, error: BaseException) -> None:
        """Notes that a frame runs as Python in the current call."""
        self._given_up.append((code, error))

    def call_begins(self) -> None:
        """Forgets frames of an earlier call that ended with an error: the error may have been the user's."""
        self._given_up.clear()

    def call_ran(self) -> None:
        """Tells of frames that ran as Python in a call that came to its end. After two such calls a frame stays so."""
        for code, error in self._given_up:
            self._failed_frames[code] += 1
            if self._failed_frames[code] >= ATTEMPTS:
                _compat.run_in_parts(code)
            self.tell(f"`{code.co_name}`", "runs as Python, and what it calls is captured part by part", error)
        self._given_up.clear()

    def whole_call_ran(self, error: BaseException) -> None:
        """Notes that a call ran which could not be captured as a whole."""
        self.failed_calls += 1
        how = "run as Python"
        if _compat.is_limit(error):
            self.limited = True
            how += ", since there were more kinds of calls than torch._dynamo.config.recompile_limit allows"
        self.tell("the whole model", f"calls like this one {how}", error)

    def tell(self, what: str, how: str, error: BaseException) -> None:
        """Warns once, and keeps a note for ``explain``."""
        reason = f"a capture failed ({_compat.reason_of(error)})"
        skip = Skip(what, f"{reason}; {how}", _compat.place_of(error))
        if self.note(skip) and reason not in self._told:
            self._told.add(reason)
            at = "" if skip.line == "?" else f" at {skip.line}"
            warn(f"gnncompile: {what}: {reason}{at}; {how}. fullgraph=True raises the error.")

    def note(self, skip: Skip) -> bool:
        """Keeps a note for ``explain``; False if it is there already."""
        if skip in self.backend.notes:
            return False
        self.backend.notes.append(skip)
        return True


def warn(message: str) -> None:
    """Warns at the line of the user's code that is running."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
