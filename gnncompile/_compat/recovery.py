"""Handles frames that Dynamo can't capture: another attempt, or the frame runs as Python.

Dynamo raises during the capture, before any part of the frame has run. Frames before a graph break have run already,
and must not run again. So each frame on its own is captured again, or left to Python.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch._dynamo.config as dynamo_config
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.decorators import _nonrecursive_disable_wrapper_code
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    RestartAnalysis,
    SkipFrame,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
)
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import NumpyTensorSource
from torch._dynamo.utils import CleanupManager, get_optimize_ddp_mode
from torch._guards import Guard

from gnncompile._compat.compiles import compiling
from gnncompile._compat.recapture import Recapture

logger = logging.getLogger(__name__)


class CaptureFailed(BaseException):
    """A frame for which :meth:`Recovery.owns` is true can't be captured. No part of the frame has run.

    Args:
        error: The error that Dynamo, a pass or a compiler raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Recovery(Protocol):
    """How a compiled model handles frames that can't be captured."""

    def owns(self, code: types.CodeType) -> bool:
        """Whether a frame stands for a whole call. Errors of its capture are raised as :class:`CaptureFailed`."""

    def adjust_frame(self, asked: Recapture) -> bool:
        """Changes how frames are captured from now on. Returns False if this helps no single frame."""

    def attempt(self) -> Callable[[], None]:
        """Called before a frame is captured.

        Returns a function that forgets the graphs captured since, in case of failure.
        """

    def gave_up(self, code: types.CodeType, error: BaseException) -> None:
        """Notes that a frame runs as Python this time, and why."""


def compiled(
    fn: types.FunctionType, backend: Any, fullgraph: bool, dynamic: bool, guard_filter: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns ``torch.compile(fn)``, whose captures inside :class:`symbolic_counts` follow a :class:`Recovery`.

    Dynamo hands each new frame to an object that belongs to this one function. The object is of a class of ours.
    Errors of a capture do not reach the user directly.
    """
    context: Any = torch._dynamo.optimize(
        backend=backend, nopython=fullgraph, dynamic=dynamic, guard_filter_fn=guard_filter
    )
    # Torch would keep the backend, and through it the model and what is remembered of graphs. So would the code: what
    # was captured belongs to the code, and holds it, in a cycle that Python's collector does not see.
    eval_frame.cached_backends.pop(id(backend), None)
    weakref.finalize(fn, _free, fn.__code__).atexit = False
    frames = getattr(context, "callback", None)  # None where the user turned Dynamo off
    if frames is not None:
        convert = frames._torchdynamo_orig_backend
        frames.__class__ = _Frames
        getattr(convert, "_inner_convert", convert).__class__ = _Captures
    return context(fn)  # type: ignore[no-any-return]


def _free(code: types.CodeType) -> None:
    """Frees what was captured of a code that nobody runs any more.

    Torch frees it with the code that it made of it, which has the same name. Others may hold the code that torch made:
    `torch.distributed` remembers who called its last 2,000 collectives.
    """
    reset_code(code)
    made = CleanupManager.instance
    for key in list(made.refs):  # meanwhile a collection or another thread may free other codes
        known, hooks = made.refs.get(key), made.values.get(key, [])
        other = None if known is None else known()
        if other is not None and (other.co_name, other.co_filename) == (code.co_name, code.co_filename):
            while hooks:  # none may be left, since torch runs them too
                hooks.pop()()


_LEFT_TO_PYTHON: Any = cast(Any, convert_frame).ConvertFrameReturn(apply_to_code=False)
"""What Dynamo gets for a frame that runs as Python this time."""


class _Frames(convert_frame.CatchErrorsWrapper):
    """Receives each frame that a call of a compiled function runs into.

    Dynamo would cut the graph of a ``DistributedDataParallel``'s module where a bucket of gradients ends, which is
    after 25 MiB. A region can't be cut.
    """

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        if sys._getframe(1).f_code is _nonrecursive_disable_wrapper_code:
            return _LEFT_TO_PYTHON  # torch looks for its caller, as we do
        cuts = get_optimize_ddp_mode() == "ddp_optimizer"
        with dynamo_config.patch(optimize_ddp=False) if cuts else nullcontext():
            return super().__call__(frame, cache_entry, frame_state)


class _Captures(convert_frame.ConvertFrameAssert):
    """Captures a frame, once or in several ways."""

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        once = functools.partial(super().__call__, frame, *args, **kwargs)
        recovery: Recovery | None = compiling.recovery if compiling.calls else None
        if recovery is None:
            return once()

        def attempt() -> Any:
            forget = recovery.attempt()
            try:
                return once()
            except BaseException:
                forget()
                raise

        return _capture(attempt, recovery, frame.f_code, self._one_graph)


def _capture(once: Callable[[], Any], recovery: Recovery, code: types.CodeType, one_graph: bool) -> Any:
    while True:
        error = _tried(once)
        if not isinstance(error, BaseException):
            return error
        graph_break = isinstance(error, (SkipFrame, Unsupported)) and not one_graph and not is_limit(error)
        if isinstance(error, Recapture) if recovery.owns(code) else graph_break:
            raise error  # owned: the whole call begins again; else the frame runs as Python, its callees are captured
        if isinstance(error, Recapture) and recovery.adjust_frame(error):
            continue
        if recovery.owns(code):
            raise CaptureFailed(error)
        if one_graph or is_limit(error):
            raise error
        recovery.gave_up(code, error)
        return _LEFT_TO_PYTHON


def _tried(once: Callable[[], Any]) -> Any:
    """Returns the result of a capture, or the error that it ends with.

    If the first attempt fails, the frame is captured with less general settings. These are sizes of 0 and 1 as
    constants, and graph breaks at data-dependent sizes. If two row counts are symbols, torch takes a single row for as
    many rows as the other tensor has. Code may also ask for the value of a size, as ``range(int(k))`` does, where
    Dynamo has no graph break.
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
    """Whether a frame was not captured because it contains nothing to capture."""
    return isinstance(error, SkipFrame)


def steers_dynamo(error: BaseException) -> bool:
    """Whether an exception only tells Dynamo to trace a frame again, or not at all. It is no failure then."""
    return isinstance(error, (RestartAnalysis, SkipFrame))


def is_of_a_capture(error: BaseException) -> bool:
    """Whether Dynamo raised an error because it can't capture a model as one graph. Faults of Dynamo are others."""
    faults = (BackendCompilerFailed, InternalTorchDynamoError)
    return isinstance(error, TorchDynamoException) and not isinstance(error, faults)


def is_of_an_operation(error: BaseException) -> bool:
    """Whether an operation of the model failed in a capture, as it does for inputs of wrong shapes."""
    return isinstance(error, TorchRuntimeError)


def is_limit(error: BaseException) -> bool:
    """Whether a frame was captured as often as torch allows (``torch._dynamo.config.recompile_limit``)."""
    return isinstance(error, FailOnRecompileLimitHit) or getattr(error, "frame_exec_strategy", None) is not None


def place_of(error: BaseException) -> str:
    """Returns ``file:line: code`` of the user's code that was being traced when an error was raised.

    Returns "?" if that code is unknown.
    """
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


def backend_error(error: BaseException) -> BaseException:
    """Returns the error that a backend raised, without Dynamo's wrapper around it; other errors as they are."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def reason_of(error: BaseException) -> str:
    """Returns an error as one line."""
    if isinstance(error, Recapture):
        return error.reason
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name


def patch_guard_create() -> None:
    """Makes gnncompile's compiles guard an object by identity if its own code raises while Dynamo guards the object.

    An example is a tuple whose ``len`` raises, as e3nn's irreducible representations have it. A NumPy array is guarded
    by its type as well. Torch checks only the tensor that it makes of the argument, so a capture for an array would
    also serve a tensor.
    """
    create: Any = Guard.create

    @functools.wraps(create)
    def create_guard(self: Any, builder: Any) -> Any:
        if compiling.patches is None:
            return create(self, builder)
        # Torch compares the object of an earlier guard with the new object. For NumPy arrays, torch would compare
        # tensors made of them.
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
    """Whether an error was raised by code outside of torch."""
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
