"""Runs the calls of one compiled module or function: as captured graphs if possible, else as Python."""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from gnncompile import _compat
from gnncompile._compat import Setting
from gnncompile.capture.backend import Backend, prepare_torch
from gnncompile.capture.containers import empty_again, give_back, pass_on, write_back
from gnncompile.capture.edge_rows import edges_of_call
from gnncompile.capture.inputs import Checker, Derived, FlatInputs, join, leaves, minibatch_in, split
from gnncompile.capture.minibatches import Unpadded
from gnncompile.capture.parts import PartCheck, group_name
from gnncompile.capture.policy import ATTEMPTS, CapturePolicy, Outcome, warn
from gnncompile.cudagraphs import cuda_graph
from gnncompile.device import device_of
from gnncompile.exc import CaptureError, IndexOutOfRangeError, PartitionError, SecondDerivativeError
from gnncompile.layout.batch_metadata import Bucketed, padding_to
from gnncompile.options import resolve
from gnncompile.passes.log import PADDING, Skip
from gnncompile.substitutes.message_hooks import LayerWatch

MAX_NUMBER = 2**62

_next_entry = itertools.count().__next__


class Call(NamedTuple):
    """The arguments of one call, taken apart as the compiled code takes them.

    Attributes:
        args: Arguments by position.
        kwargs: Arguments by name.
        taken: The record of the tensors and objects that were taken apart.
        counts: The valid rows of each row type, int64 ``[kinds]``, if the call is padded; else None.
        given: The user's ``(args, kwargs)``, to be checked before a capture.
    """

    args: Any
    kwargs: Any
    taken: FlatInputs
    counts: Tensor | None = None
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class CompiledCallable:
    """Runs one module or function through Dynamo with gnncompile's backend."""

    def __init__(self, target: Callable[..., Any], settings: dict[str, Any]) -> None:
        prepare_torch()
        self.fullgraph = settings["fullgraph"] or settings.get("mesh") is not None
        self.target, self.settings = target, settings
        options, inductor = resolve(settings["mode"], settings["options"])
        backend = Backend(options, inductor, "masked" if options.mask_self_loops else "exact", attaches_sizes=True)
        backend.makes_matrices, backend.strict = True, self.fullgraph
        backend.watched = self.watch = LayerWatch(target)
        backend.modules = self.watch.modules
        # By a weak reference: the model may hold this object, which must not keep itself.
        weakref.finalize(self, _let_go, weakref.ref(self.watch)).atexit = False
        mesh = settings.get("mesh")
        backend.group = None if mesh is None else group_name(mesh, settings["dynamic"])
        self.check_parts = None if backend.group is None else PartCheck(backend.group)
        self.derived = Derived(options.structure_cache_entries, options.structure_cache_bytes)
        self.policy = CapturePolicy(backend, self.derived, self.watch, pads=bool(options.record))
        backend.tell = self.policy.tell
        self.check = Checker(target.forward if isinstance(target, nn.Module) else target)
        self.wanted_whole: set[Any] = set()
        self.may_be_lazy = True
        self.ready, self._first_call = False, threading.RLock()
        self._seen = 0, False
        self._start()

    @property
    def backend(self) -> Backend:
        """The backend that compiles captured graphs. It may be replaced between calls."""
        return self.policy.backend

    @property
    def pads(self) -> bool:
        """Whether padded mini-batches are captured with their padding."""
        return self.policy.pads

    @pads.setter
    def pads(self, pads: bool) -> None:
        self.policy.pads = pads

    @property
    def empty_is_special(self) -> bool:
        """Whether sizes of 0 and 1 get captures of their own."""
        return self.policy.empty_is_special

    def _start(self) -> None:
        target = self.target

        def entry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            joined: list[Any] = []
            result = target(*join(args, joined), **join(kwargs, joined))
            empty_again(joined)
            return result

        def padded(args: tuple[Any, ...], kwargs: dict[str, Any], counts: Tensor) -> Any:
            joined: list[Any] = []
            result = target(*join(args, joined, counts), **join(kwargs, joined, counts))
            empty_again(joined)
            return result

        def parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return target(*args, **kwargs)

        self.entry, self.compiled = self._compiled(entry, self.fullgraph)
        # A graph after a graph break would not know which tensors are padded.
        self.padded_entry, self.padded = self._compiled(padded, True)
        whole, self.in_parts = self._compiled(parts, False)
        _compat.run_in_parts(whole.__code__)
        self.policy.entries = {self.entry.__code__, self.padded_entry.__code__}
        self.forms, self.padded_forms = _compat.CompiledForms(self.entry), _compat.CompiledForms(self.padded_entry)
        self._captured_before = len(self.backend.captured)

    def _compiled(self, function: Any, fullgraph: bool) -> tuple[types.FunctionType, Callable[..., Any]]:
        # Dynamo counts recompiles per code object, so each function needs its own. By the name, the
        # code that torch made of it is found when it is freed.
        code = function.__code__.replace(co_name=f"{_compat.ENTRY}_{id(self):x}_{_next_entry()}")
        own = types.FunctionType(code, function.__globals__, "entry", None, function.__closure__)
        dynamic = self.settings["dynamic"]
        dynamic = True if dynamic is None else dynamic
        return own, _compat.compiled(own, self.backend, fullgraph, dynamic, _compat.kept_guards)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the target on a call's arguments, compiled if possible.

        Raises:
            IndexOutOfRangeError: A compiled kernel met an index out of range.
        """
        elsewhere = _compat.needs_eager()
        if elsewhere is not None:
            self._refuse_python(f"it is called inside {elsewhere}")
            self._say_uncompiled_in(elsewhere)
            return self.target(*args, **kwargs)
        self.may_be_lazy = self.may_be_lazy and is_lazy(self.target)
        if self.may_be_lazy:
            self._refuse_python("its lazy parameters have no shape. Run the original model once on part of a graph")
            self.check(args, kwargs)
            return self.target(*args, **kwargs)  # uncompiled: this call gives the lazy parameters their shapes
        hooked = self.watch()
        if hooked is not None:
            self._refuse_python(hooked[0])
            self._warn(*hooked)
            return self.target(*args, **kwargs)
        try:
            return self._run_first(args, kwargs) if not self.ready else self._run(args, kwargs)
        except RuntimeError as error:
            bounds = _compat.broken_bounds(error)
            if bounds is None:
                raise
            raise IndexOutOfRangeError(
                f"index out of range: a compiled kernel expected {bounds}. Check the indices."
            ) from error

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._first_call:  # else concurrent threads would each capture the same graph, up to Dynamo's limit
            result = self._run(args, kwargs)
            self.ready = self.watch() is None  # a call with hooked layers captured nothing
            return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        while True:
            try:
                call = self.take(args, kwargs)
            except _compat.Recapture as asked:
                self._refuse_python(asked.reason)
                self._say_uncompiled({asked.value}, asked.reason)
                return self.target(*args, **kwargs)
            except Exception:
                self.check(args, kwargs)  # may raise an error that names the wrong argument
                raise
            if self.wanted_whole & call.taken.kinds:
                self._refuse_python("an input is of a class that compiled code does not take")
                return self.target(*args, **kwargs)
            if self._is_left_to_python(call):
                return self.target(*args, **kwargs) if self.policy.limited else self._in_parts(args, kwargs)
            found = self._captured(call)
            if not isinstance(found, _compat.CaptureFailed):
                return found.result
            outcome = self.policy.adjust_call(found.error, padded=call.counts is not None)
            if outcome is Outcome.UNCHANGED:
                raise _for_the_user(found.error)
            if outcome is Outcome.EAGER:
                return self._as_python(call, found.error, args, kwargs)
            if outcome is Outcome.RETRY:
                return self(args, kwargs)
            self._start()

    def _refuse_python(self, why: str) -> None:
        """Raises PartitionError if the model runs over one part of a graph: only compiled code exchanges rows."""
        if self.backend.group is not None:
            raise PartitionError(f"the model can't run over a part of a graph: {why}.")

    def _captured(self, call: Call) -> _Done | _compat.CaptureFailed:
        """Runs a call as captured. Returns its result, or the error after which the call can run in another way."""
        try:
            return _Done(self._finished(call, self.run(call)))
        except _compat.CaptureFailed as failed:
            return failed
        except (_compat.Recapture, SecondDerivativeError) as error:
            return _compat.CaptureFailed(error)

    def _finished(self, call: Call, result: Any) -> Any:
        for value, copied in call.taken.objects:
            write_back(value, copied)
        for collection in call.taken.collections:
            pass_on(collection)
        return give_back(result, call.taken.objects) if call.taken.objects else result

    def _as_python(self, call: Call, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call that can't be captured as a whole, on the user's own arguments.

        The first such call runs uncompiled: if the error is the user's, eager raises it in its own words. Later calls
        run in parts.
        """
        kinds, why = call.taken.kinds, f"a capture failed ({_compat.reason_of(error)})"
        if isinstance(error, _compat.Recapture) and error.setting in (Setting.MADE_MATRICES, Setting.UNCOMPILED_INPUTS):
            kinds, why = kinds if error.setting is Setting.MADE_MATRICES else {error.value}, error.reason
        if kinds and not _compat.is_limit(error):
            result = self.target(*args, **kwargs)
            self._run_whole(kinds, why)
            return result
        if _compat.holds_nothing(error):
            self.policy.failed_calls = ATTEMPTS
            return self._in_parts(args, kwargs)
        if _compat.is_limit(error) or not self.policy.failed_calls:
            result = self.target(*args, **kwargs)
        else:
            result = self._in_parts(args, kwargs)
        self.policy.whole_call_ran(error)
        return result

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the target as Python; the functions and modules that it calls are captured if possible."""
        self.policy.call_begins()
        with _compat.one_call(), self._capturing():
            result = self.in_parts(args, kwargs)
        self.policy.call_ran()
        return result

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Takes a call's arguments apart for the compiled code; pads them if they hold a padded mini-batch.

        Raises:
            Recapture: The compiled code can't take an argument, such as a sparse matrix with a gradient.
        """
        batch = minibatch_in(args, kwargs) if self.pads else None
        if batch is not None and cuda_graph.supports_cuda_graphs(batch.on_device.device):
            try:
                return self._split(args, kwargs, batch)
            except Unpadded as reason:
                self.policy.note(Skip(PADDING, str(reason), "?"))
        return self._split(args, kwargs, None)

    def _split(self, args: Any, kwargs: Any, batch: Bucketed | None) -> Call:
        taken = FlatInputs(batch=batch, group=self.backend.group)
        if batch is not None:
            taken.largest = self._largest_number(batch)
        named = {k: split(v, ("kwargs", k), self.derived, taken) for k, v in kwargs.items()}
        parts = split(args, "args", self.derived, taken), named
        if self.check_parts is not None:
            self.check_parts(taken.plans, taken.rows)
        return Call(*parts, taken, None if batch is None else batch.on_device, (args, kwargs))

    def _largest_number(self, batch: Bucketed) -> int:
        """The largest integer argument that a call with a padded mini-batch may have.

        Raises:
            Unpadded: The mini-batch has another number of rows of a row type than the model takes.
        """
        limits = [*self.policy.limits, *(one for captured in self.backend.captured for one in captured.log.limits)]
        for one in limits:
            if not one.is_met(batch):
                raise Unpadded(f"the model takes {one}")
        unknown = [batch.counts[one.kind] for one in limits if one.number is None and one.is_of(batch)]
        return min(unknown, default=MAX_NUMBER)

    def run(self, call: Call) -> Any:
        """Runs the compiled code on a call that :meth:`take` made.

        Raises:
            CaptureFailed: The call can't be captured as a whole. No part of it has run.
            Recapture: The call must be captured in another way. No part of it has run.
        """
        with edges_of_call(call.taken.edges):
            return self._run_compiled(call)

    def _run_compiled(self, call: Call) -> Any:
        ready = self._ready(call)
        if ready is not None:
            if call.counts is None:
                return ready(call.args, call.kwargs)
            with padding_to(call.taken.batch):
                return ready(call.args, call.kwargs, call.counts)
        if call.given is not None:
            self.check(*call.given)  # ready captures skip this: they were made for arguments that passed the checks
        if not self.backend.captured and self.backend.options.inductor:
            found: list[Any] = []
            leaves((call.args, call.kwargs), found)
            devices = [device_of(value.device) for value in found if isinstance(value, Tensor)]
            for_gpu = any(device.has_streams and device.runs_triton for device in devices)
            _compat.prepare_inductor(any(device.is_cpp_in_inductor for device in devices), for_gpu)
        self.policy.call_begins()
        with _compat.one_call(), self._capturing():
            if call.counts is None:
                result = self.compiled(call.args, call.kwargs)
            else:
                with padding_to(call.taken.batch):
                    result = self.padded(call.args, call.kwargs, call.counts)
        self.policy.call_ran()
        return result

    def _capturing(self) -> _compat.symbolic_counts:
        return _compat.symbolic_counts(self.policy.empty_is_special, self.backend.options.selections, self.policy)

    def _is_left_to_python(self, call: Call) -> bool:
        """Whether earlier calls could not be captured, and no capture serves this one."""
        tried = self.policy.limited or self.policy.failed_calls >= ATTEMPTS
        return tried and self.capture_for(call) is None

    def _ready(self, call: Call) -> Callable[..., Any] | None:
        """The compiled code that serves a call, found without Dynamo; None unless every capture is of a whole call."""
        count = len(self.backend.captured)
        if self._seen[0] != count:
            whole = _compat.whole_captures(self.entry, self.padded_entry)
            self._seen = count, whole == count - self._captured_before
        return self._forms(call).find(self._frame(call)) if self._seen[1] else None

    def capture_for(self, call: Call) -> Any:
        """The capture that serves these arguments now; None if there is none."""
        return _compat.valid_capture(self._forms(call).fn, self._frame(call))

    def _forms(self, call: Call) -> _compat.CompiledForms:
        return self.forms if call.counts is None else self.padded_forms

    def _frame(self, call: Call) -> dict[str, Any]:
        """The arguments of the compiled entry function for a call, by name."""
        given = {"args": call.args, "kwargs": call.kwargs}
        return given if call.counts is None else {**given, "counts": call.counts}

    def _say_uncompiled_in(self, place: str) -> None:
        if place == _compat.GLOBAL_HOOKS:
            what, advice = f"there are {place}, which compiled code does not run; calls meanwhile", "Remove them."
        else:
            what = f"the model is called inside {place}, which needs every operation to be torch's own; such calls"
            advice = "Call the original model there, or take gradients with torch.autograd.grad, which runs compiled."
        self._warn(what, advice)

    def _run_whole(self, kinds: set[Any], why: str) -> None:
        """Makes later calls with inputs of these types or layouts run uncompiled, and warns."""
        self.wanted_whole |= kinds
        self._say_uncompiled(kinds, why)

    def _say_uncompiled(self, kinds: set[Any], why: str) -> None:
        names = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in kinds))
        what = f"{why} of an input that is a {names}; calls with such inputs"
        self._warn(what, "Pass a plain edge_index [2, num_edges].")

    def _warn(self, what: str, advice: str) -> None:
        """Warns once that calls run uncompiled."""
        if self.policy.note(Skip("the whole model", what.rpartition(";")[0], "?")):
            warn(f"gnncompile: {what} run uncompiled. {advice}")


def _let_go(watch: weakref.ref[LayerWatch]) -> None:
    found = watch()
    if found is not None:
        found.let_go()


def _for_the_user(error: BaseException) -> BaseException:
    """Returns an error of a capture that must succeed, as the user is to see it."""
    found = _compat.backend_error(error)
    if isinstance(found, PartitionError):
        return found
    if not isinstance(error, _compat.Recapture):
        return error
    place = "" if error.line == "?" else f"{error.line}: "
    return CaptureError(
        f"{place}the model can't be captured as one graph: {error.reason}. Without fullgraph=True it runs in parts."
    )


class _Done(NamedTuple):
    """The result of a call that ran."""

    result: Any


def is_lazy(target: Callable[..., Any]) -> bool:
    """Whether a module has uninitialised parameters or buffers, as ``SAGEConv(-1, 64)`` has before its first call."""
    if not isinstance(target, nn.Module):
        return False
    return any(map(nn.parameter.is_lazy, itertools.chain(target.parameters(), target.buffers())))
