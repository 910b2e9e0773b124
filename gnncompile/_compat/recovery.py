"""What happens where Dynamo can't capture a frame: another try, or the frame runs as Python.

Dynamo raises while it captures. Nothing of the frame has run by then, but frames before a graph break have. They must
not run again. So every frame is captured again, or left to Python, where it stands.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch._dynamo import convert_frame
from torch._dynamo.exc import FailOnRecompileLimitHit, RestartAnalysis, SkipFrame, Unsupported
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import NumpyTensorSource
from torch._guards import Guard

from gnncompile._compat.compiles import compiling

logger = logging.getLogger(__name__)


class Recapture(BaseException):
    """A capture has to begin again in another way.

    Not an Exception: Dynamo must neither wrap it nor turn it into a graph break.
    """


class CaptureFailed(BaseException):
    """A frame that :meth:`Recovery.owns` can't be captured. Nothing of it has run.

    Args:
        error: What Dynamo, a pass or a compiler raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Recovery(Protocol):
    """What a compiled model does about frames that can't be captured."""

    def owns(self, code: types.CodeType) -> bool:
        """Whether a frame is the one that stands for a whole call. Its errors are raised as :class:`CaptureFailed`."""

    def adjust(self, error: Recapture) -> bool:
        """Changes how frames are captured from now on; False where that has been tried."""

    def attempt(self) -> Callable[[], None]:
        """A frame is about to be captured: what forgets the graphs that were captured since, if that fails."""

    def gave_up(self, code: types.CodeType, error: BaseException) -> None:
        """Notes that a frame runs as Python this time, and why."""


def patch_compile_frame() -> None:
    """Makes compiles inside :class:`symbolic_counts` that have a :class:`Recovery` never raise to the user."""
    once: Any = convert_frame._compile
    signature = inspect.signature(once)

    @functools.wraps(once)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        recovery: Recovery | None = compiling.recovery if compiling.calls else None
        if recovery is None:
            return once(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments

        def attempt() -> Any:
            forget = recovery.attempt()
            try:
                return once(*args, **kwargs)
            except BaseException:
                forget()
                raise

        return _capture(attempt, recovery, given["code"], bool(given["one_graph"]))

    convert_frame._compile = compile_frame


def _capture(once: Callable[[], Any], recovery: Recovery, code: types.CodeType, one_graph: bool) -> Any:
    while True:
        error = _tried(once)
        if not isinstance(error, BaseException):
            return error
        graph_break = isinstance(error, (SkipFrame, Unsupported)) and not one_graph and not is_limit(error)
        if isinstance(error, Recapture) if recovery.owns(code) else graph_break:
            raise error  # the whole call begins again; Dynamo leaves the frame to Python, and captures what it calls
        if isinstance(error, Recapture) and recovery.adjust(error):
            continue
        if recovery.owns(code):
            raise CaptureFailed(error)
        if one_graph or is_limit(error):
            raise error
        recovery.gave_up(code, error)
        return cast(Any, convert_frame).ConvertFrameReturn(apply_to_code=False)


def _tried(once: Callable[[], Any]) -> Any:
    """What a capture gives, or the error that it ends with.

    A frame is tried in less general ways where the first one fails: with sizes of 0 and 1 as numbers, and with graph
    breaks at sizes that only the data knows. Torch takes a row for as many as another tensor has where both numbers are
    symbols; code may ask a size for its value, as ``range(int(k))`` does, where Dynamo has no graph break.
    """
    try:
        return once()
    except (SkipFrame, Unsupported, Recapture) as error:
        return error
    except Exception as error:
        if isinstance(error, FailOnRecompileLimitHit):
            return error
        first = error
    usual = compiling.empty_is_special, compiling.captures_selections
    others = [(special, selections) for selections in (True, False) for special in (False, True)]
    for way in others[others.index(usual) + 1 :]:
        logger.info("captured again with %s: %s", way, first)
        compiling.empty_is_special, compiling.captures_selections = way
        try:
            return once()
        except (SkipFrame, Unsupported, Recapture) as error:
            return error
        except Exception as error:
            logger.info("not captured either: %s", error)
        finally:
            compiling.empty_is_special, compiling.captures_selections = usual
    return first


def holds_nothing(error: BaseException) -> bool:
    """Whether a frame was not captured because there is nothing in it to capture."""
    return isinstance(error, SkipFrame)


def steers_dynamo(error: BaseException) -> bool:
    """Whether an exception tells Dynamo to trace a frame again, or not at all: it is no failure."""
    return isinstance(error, (RestartAnalysis, SkipFrame))


def is_limit(error: BaseException) -> bool:
    """Whether a frame was captured as often as torch allows (``torch._dynamo.config.recompile_limit``)."""
    return isinstance(error, FailOnRecompileLimitHit) or getattr(error, "frame_exec_strategy", None) is not None


def place_of(error: BaseException) -> str:
    """``file:line: code`` of the user's code that was traced when an error was raised; "?" where that is unknown."""
    found: Any = None
    seen: BaseException | None = error
    while seen is not None and not found:
        found = getattr(seen, "real_stack", None)
        seen = seen.__cause__
    frames = [frame for frame in found or () if not _is_of_a_library(frame)]
    if not frames:
        return "?"
    last = frames[-1]
    return f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno}: {(last.line or '').strip()}"


def _is_of_a_library(frame: traceback.FrameSummary) -> bool:
    return any(part in frame.filename for part in ("site-packages", "/torch_geometric/", "/gnncompile/", "<string>"))


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name


def patch_guard_create() -> None:
    """Makes compiles of ours guard an object by its identity where code of the object raises while Dynamo guards it.

    An example is a tuple whose ``len`` raises, as the irreducible representations of e3nn have it. An array of NumPy is
    guarded by its type as well: torch looks at the tensor that it makes of whatever comes, so that a capture for an
    array would serve a tensor.
    """
    create: Any = Guard.create

    @functools.wraps(create)
    def create_guard(self: Any, builder: Any) -> Any:
        if compiling.patches is None:
            return create(self, builder)
        # Torch compares the object of an earlier guard with the new one: of arrays of NumPy, tensors made of them.
        self.obj_weakref = None
        if isinstance(self.originating_source, NumpyTensorSource):
            create(self.originating_source.base.make_guard(GuardBuilder.TYPE_MATCH), builder)
        try:
            with _unlogged():
                return create(self, builder)
        except Exception as error:
            if not _is_raised_elsewhere(error):
                raise
            logger.info("%s is guarded by identity: %s", self.name, reason_of(error))
            return builder.ID_MATCH(self)

    Guard.create = create_guard  # type: ignore[method-assign]


def _is_raised_elsewhere(error: BaseException) -> bool:
    """Whether the code that raised an error is no code of torch."""
    last = list(traceback.walk_tb(error.__traceback__))[-1:]
    inside = torch.__path__[0]
    return any(not frame.f_code.co_filename.startswith(inside) for frame, _ in last)


@contextmanager
def _unlogged() -> Iterator[None]:
    """A block in which torch does not log why a guard can't be made."""
    log = logging.getLogger("torch._guards")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
