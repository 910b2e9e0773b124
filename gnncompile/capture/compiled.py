"""``gnncompile.compile``: the compiled form of a module or function."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnncompile import _compat
from gnncompile.capture.backend import Backend
from gnncompile.capture.containers import empty_again, give_back, write_back
from gnncompile.capture.edge_rows import edges_of_call
from gnncompile.capture.hooks import LayerWatch
from gnncompile.capture.inputs import Checker, Derived, Taken, join, leaves, minibatch_in, split
from gnncompile.capture.minibatches import Unpadded
from gnncompile.capture.parts import modules_of
from gnncompile.options import resolve
from gnncompile.passes.context import PADDING, Masked, Nested, NotPadded, Skip, WrittenInput
from gnncompile.runtime import cuda_graph
from gnncompile.runtime.attached import Bucketed, padding_to
from gnncompile.runtime.segment_ops import SizeNeeded

F = TypeVar("F", bound=Callable[..., Any])


MAX_NUMBER = 2**62


class Call(NamedTuple):
    """The arguments of a call, taken apart.

    Attributes:
        args: By position.
        kwargs: By name.
        taken: What was taken apart.
        counts: The true numbers of things in a mini-batch, where the call is padded.
        given: The arguments as they came, if they are to be checked.
    """

    args: Any
    kwargs: Any
    taken: Taken
    counts: Tensor | None = None
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class Program:
    """Runs one module or function through Dynamo with gnncompile's backend."""

    def __init__(self, target: Callable[..., Any], settings: dict[str, Any]) -> None:
        self.target, self.settings = target, settings
        own, inductor = resolve(settings["mode"], settings["options"])
        self.backend = Backend(own, inductor, "masked" if own["mask_self_loops"] else "exact", attaches_sizes=True)
        self.backend.makes_matrices = True
        self.backend.modules = lambda: modules_of(target)
        self.derived = Derived(own["structure_cache_entries"], own["structure_cache_bytes"])
        self.check = Checker(target.forward if isinstance(target, nn.Module) else target)
        self.backend.watched = self.watch = LayerWatch(target)
        self.wanted_whole: set[Any] = set()
        self.may_be_lazy = True
        self.empty_is_special = False
        self.pads = bool(own["record"])
        self.ready, self._first_call = False, threading.RLock()
        self._seen = 0, False
        self._start()

    def _start(self) -> None:
        target = self.target

        def entry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            joined: list[Any] = []
            result = target(*join(args, joined), **join(kwargs, joined))
            empty_again(joined)
            return result

        def padded(args: tuple[Any, ...], kwargs: dict[str, Any], counts: Tensor) -> Any:
            joined: list[Any] = []
            return target(*join(args, joined, counts), **join(kwargs, joined, counts))

        self.entry, self.compiled = self._compiled(entry, self.settings["fullgraph"])
        # What comes behind a break of the graph would not know what is padded.
        self.padded_entry, self.padded = self._compiled(padded, True)
        self.forms, self.padded_forms = _compat.CompiledForms(self.entry), _compat.CompiledForms(self.padded_entry)
        self._captured_before = len(self.backend.captured)

    def _compiled(self, function: Any, fullgraph: bool) -> tuple[types.FunctionType, Callable[..., Any]]:
        # Dynamo counts recompiles per code object, so every program needs one of its own.
        code = function.__code__.replace(co_name=f"{_compat.ENTRY}_{id(self):x}")
        own = types.FunctionType(code, function.__globals__, "entry", None, function.__closure__)
        dynamic = self.settings["dynamic"]
        dynamic = True if dynamic is None else dynamic
        guards: dict[str, Any] = {"guard_filter_fn": _compat.kept_guards}
        return own, torch.compile(own, backend=self.backend, fullgraph=fullgraph, dynamic=dynamic, options=guards)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the target on a call's arguments."""
        elsewhere = _compat.needs_eager()
        if elsewhere is not None:
            self._say_uncompiled_in(elsewhere)
            return self.target(*args, **kwargs)
        self.may_be_lazy = self.may_be_lazy and is_lazy(self.target)
        if self.may_be_lazy:
            self.check(args, kwargs)
            return self.target(*args, **kwargs)  # uncompiled: this call gives parameters their shapes
        hooked = self.watch()
        if hooked is not None:
            self._warn(*hooked, stacklevel=4)
            return self.target(*args, **kwargs)
        try:
            return self._run_first(args, kwargs) if not self.ready else self._run(args, kwargs)
        except _compat.HookedLayer as found:  # a layer that belongs to none of the target's modules
            self.watch.add(found.layer)
        return self(args, kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._first_call:  # of threads that come at once each would capture the same, up to Dynamo's limit
            result = self._run(args, kwargs)
            self.ready = True
            return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for _ in range(16):
            try:
                call = self.take(args, kwargs)
            except _compat.NeedsOriginal as needed:
                self._say_uncompiled({needed.kind}, f"the model uses `{needed.name}`")
                return self.target(*args, **kwargs)
            except Exception:
                self.check(args, kwargs)  # it may know better what is wrong with them
                raise
            if self.wanted_whole & call.taken.kinds:
                return self.target(*args, **kwargs)
            try:
                result = self.run(call)
                for value, copied in call.taken.objects:
                    write_back(value, copied)
                return give_back(result, call.taken.objects) if call.taken.objects else result
            except NotPadded as refused:
                self._stop_padding(refused.skip)
            except _compat.CAPTURE_ERRORS as error:
                if call.counts is None and not call.taken.kinds:
                    raise
                line = str(error).strip().splitlines()[0]
                if call.counts is None:
                    self._run_whole(call.taken.kinds, f"a capture failed ({line})")
                else:
                    self._stop_padding(Skip(PADDING, line, "?"))
            except SizeNeeded as needed:
                source = needed.source.removeprefix("L['").replace("']", "", 1)
                self.derived.wanted.add(source)
                if needed.longest:
                    self.derived.lengths.add(source)
                self._start()
            except Masked:
                self.backend.self_loops = "exact"
                self._start()
            except Nested:
                self.backend.self_loops = "off"
                self._start()
            except (_compat.GradientNotCaptured, _compat.SecondDerivativeError) as refused:
                if not self._keep_gradients(str(refused)):
                    raise
            except _compat.AsksForEmptiness:
                self.empty_is_special = True
                self._start()
            except _compat.NeedsOriginal as needed:
                if needed.kind is None and self.backend.makes_matrices:
                    self.backend.makes_matrices = False  # it may be of a matrix that the model made
                    self._start()
                    continue
                kinds = call.taken.kinds if needed.kind is None else {needed.kind}
                self._run_whole(kinds, f"the model uses `{needed.name}`")
            except WrittenInput:
                self.derived.splits = False
                self._start()
        raise RuntimeError("the model asks for ever more sizes; please report it")

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call's arguments as the compiled code takes them.

        Raises:
            NeedsOriginal: The compiled code can't take them.
        """
        batch = minibatch_in(args, kwargs) if self.pads else None
        if batch is not None and cuda_graph.records(batch.on_device.device):
            try:
                return self._split(args, kwargs, batch)
            except Unpadded as reason:
                self._note(Skip(PADDING, str(reason), "?"))
        return self._split(args, kwargs, None)

    def _split(self, args: Any, kwargs: Any, batch: Bucketed | None) -> Call:
        taken = Taken(batch=batch)
        if batch is not None:
            taken.largest = self._largest_number(batch)
        parts = split(args, "args", self.derived, taken), split(kwargs, "kwargs", self.derived, taken)
        return Call(*parts, taken, None if batch is None else batch.on_device, (args, kwargs))

    def _largest_number(self, batch: Bucketed) -> int:
        """The largest number that may be among the arguments of a call with a padded mini-batch.

        Raises:
            Unpadded: There are fewer things than the model takes.
        """
        least = [one for captured in self.backend.captured for one in captured.record.least]
        for kind, number in least:
            if number is not None and batch.counts[kind] < number:
                raise Unpadded(f"the model takes {number} {batch.kinds[kind]} of {batch.counts[kind]}")
        return min((batch.counts[kind] for kind, number in least if number is None), default=MAX_NUMBER)

    def _stop_padding(self, why: Skip) -> None:
        """From now on calls have their true sizes."""
        self._note(why)
        self.pads = False
        self._start()

    def _keep_gradients(self, why: str) -> bool:
        """From now on the graph breaks at gradients that the model takes, which torch's autograd then takes op by op;
        returns False if it does already.
        """
        if not self.backend.captures_gradients:
            return False
        self._note(Skip("torch.autograd.grad in the model", why, "?"))
        # Another backend: what was captured behind a break for this one is not to be used any more.
        own = {**self.backend.own, "double_backward": True, "record": False}
        self.backend = dataclasses.replace(self.backend, own=own, captures_gradients=False)
        self.pads = False
        self._start()
        return True

    def _note(self, skip: Skip) -> None:
        if skip not in self.backend.notes:
            self.backend.notes.append(skip)

    def run(self, call: Call) -> Any:
        """Runs the compiled code; an exception that :meth:`__call__` knows asks for another capture."""
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
            self.check(*call.given)  # what is ready was captured for arguments like these, which were
        if not self.backend.captured and self.backend.own["inductor"]:
            found: list[Any] = []
            leaves((call.args, call.kwargs), found)
            _compat.prepare_inductor(any(isinstance(value, torch.Tensor) and value.is_cpu for value in found))
        with _compat.symbolic_counts(self.empty_is_special, self.backend.own["selections"]):
            if call.counts is None:
                return self.compiled(call.args, call.kwargs)
            with padding_to(call.taken.batch):
                return self.padded(call.args, call.kwargs, call.counts)

    def _ready(self, call: Call) -> Callable[..., Any] | None:
        """What was captured for such a call, where each graph is the whole of one."""
        count = len(self.backend.captured)
        if self._seen[0] != count:
            whole = _compat.whole_captures(self.entry, self.padded_entry)
            self._seen = count, whole == count - self._captured_before
        return self._forms(call).find(self._frame(call)) if self._seen[1] else None

    def capture_for(self, call: Call) -> Any:
        """What stands for the capture that serves these arguments now; None where there is none."""
        return _compat.valid_capture(self._forms(call).fn, self._frame(call))

    def _forms(self, call: Call) -> _compat.CompiledForms:
        return self.forms if call.counts is None else self.padded_forms

    def _frame(self, call: Call) -> dict[str, Any]:
        """The arguments of what is compiled for such a call, by name."""
        given = {"args": call.args, "kwargs": call.kwargs}
        return given if call.counts is None else {**given, "counts": call.counts}

    def _say_uncompiled_in(self, place: str) -> None:
        if place == _compat.GLOBAL_HOOKS:
            what, advice = f"there are {place}, which compiled code does not run; calls meanwhile", "Remove them."
        else:
            what = f"the model is called inside {place}, which needs every operation to be torch's own; such calls"
            advice = "Call the original model there, or take gradients with torch.autograd.grad, which runs compiled."
        self._warn(what, advice, stacklevel=5)

    def _run_whole(self, kinds: set[Any], why: str) -> None:
        """From now on calls with inputs of such kinds run uncompiled."""
        self.wanted_whole |= kinds
        self._say_uncompiled(kinds, why, stacklevel=7)

    def _say_uncompiled(self, kinds: set[Any], why: str, stacklevel: int = 6) -> None:
        names = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in kinds))
        what = f"{why} of an input that is a {names}; calls with such inputs"
        self._warn(what, "Pass a plain edge_index [2, num_edges].", stacklevel=stacklevel)

    def _warn(self, what: str, advice: str, stacklevel: int) -> None:
        """Says once that calls run uncompiled."""
        skip = Skip("the whole model", what.rpartition(";")[0], "?")
        if skip in self.backend.notes:
            return
        self._note(skip)
        warnings.warn(f"gnncompile: {what} run uncompiled. {advice}", stacklevel=stacklevel)


def is_lazy(target: Callable[..., Any]) -> bool:
    """Whether a module has parameters or buffers without a shape, as ``SAGEConv(-1, 64)`` has before its first call."""
    if not isinstance(target, nn.Module):
        return False
    return any(map(nn.parameter.is_lazy, itertools.chain(target.parameters(), target.buffers())))


class CompiledModule:
    """What a compiled module adds to the class of the original. State is shared with the original module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled forward, hooks included."""
        if _compat.traced_here():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # part of a larger capture: be transparent
        program: Program = object.__getattribute__(self, "_gnncompile_program")
        return program(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the module."""
        if _compat.traced_here():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return CompiledModule.__call__(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        program: Program = object.__getattribute__(self, "_gnncompile_program")
        return compile(copy.deepcopy(program.target, memo), **program.settings)

    def __copy__(self) -> Any:
        program: Program = object.__getattribute__(self, "_gnncompile_program")
        return compile(copy.copy(program.target), **program.settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        program: Program = object.__getattribute__(self, "_gnncompile_program")
        return _rebuild, (program.target, program.settings)

    def __prepare_scriptable__(self) -> Any:
        """What ``torch.jit.script`` takes in place of this module: the original."""
        return object.__getattribute__(self, "_gnncompile_program").target

    def _replicate_for_data_parallel(self) -> Any:
        warnings.warn(
            "gnncompile: nn.DataParallel copies the model in every step; the copies run uncompiled. Use "
            "torch.nn.parallel.DistributedDataParallel.",
            stacklevel=2,
        )
        return object.__getattribute__(self, "_gnncompile_program").target._replicate_for_data_parallel()


def _rebuild(target: nn.Module, settings: dict[str, Any]) -> Any:
    return compile(target, **settings)


def _warmup(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compiles, and records, for calls like this one: see :func:`gnncompile.warmup`. Returns the module or function."""
    from gnncompile.capture.warmup import run_ahead

    run_ahead(self._gnncompile_program, args, kwargs)
    return self


def _module(target: nn.Module, settings: dict[str, Any]) -> nn.Module:
    kind = type(target)
    body: dict[str, Any] = {
        "__slots__": ("_gnncompile_program",),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    if not hasattr(target, "warmup"):
        body["warmup"] = _warmup
    body["forward"] = _with_signature(CompiledModule.forward, kind.forward)
    compiled: Any = object.__new__(type(kind.__name__, (CompiledModule, kind), body))
    # One state for both: parameters, buffers, hooks, training flag.
    object.__setattr__(compiled, "__dict__", target.__dict__)
    object.__setattr__(compiled, "_gnncompile_program", Program(target, settings))
    return compiled  # type: ignore[no-any-return]


def _with_signature(ours: Any, original: Callable[..., Any]) -> types.FunctionType:
    """A copy of a function that tells the arguments of another to those who ask for names, as ``torch.export`` does."""
    told = types.FunctionType(ours.__code__, ours.__globals__, ours.__name__, None, ours.__closure__)
    return functools.update_wrapper(told, original)  # type: ignore[return-value]


class CompiledReplica:
    """What a compiled ``DistributedDataParallel`` adds to its class: its module is a compiled one.

    What synchronises is not compiled: it looks at the state of the process, not at tensors. All state is shared.
    """

    @property
    def module(self) -> nn.Module:
        """The module that it trains, compiled."""
        return object.__getattribute__(self, "_gnncompile_module")  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return compile(copy.deepcopy(_original(self), memo), **object.__getattribute__(self, "_gnncompile_settings"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_original(self), object.__getattribute__(self, "_gnncompile_settings"))


def _replica(target: DistributedDataParallel, settings: dict[str, Any]) -> nn.Module:
    original, kind = _original(target), type(_original(target))
    slots = ("_gnncompile_program", "_gnncompile_module", "_gnncompile_original", "_gnncompile_settings")
    body = {"__slots__": slots, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    compiled: Any = object.__new__(type(kind.__name__, (CompiledReplica, kind), body))
    object.__setattr__(compiled, "__dict__", original.__dict__)
    module = compile(original.module, **settings)
    for slot, value in zip(slots, (program_of(module), module, original, settings), strict=True):
        object.__setattr__(compiled, slot, value)
    return compiled  # type: ignore[no-any-return]


def _original(replica: Any) -> Any:
    """What was compiled to this, or is not compiled."""
    return object.__getattribute__(replica, "_gnncompile_original") if isinstance(replica, CompiledReplica) else replica


def trained(model: Any) -> Any:
    """The module that a ``DistributedDataParallel`` trains; any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def program_of(compiled: Any) -> Program | None:
    """The program behind a compiled module or function."""
    try:
        return object.__getattribute__(compiled, "_gnncompile_program")  # type: ignore[no-any-return]
    except AttributeError:
        return None


@overload
def compile(
    model: F,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: dict[str, Any] | None = ...,
    disable: bool = ...,
) -> F: ...
@overload
def compile(
    model: None = None,
    *,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: dict[str, Any] | None = ...,
    disable: bool = ...,
) -> Callable[[F], F]: ...
def compile(
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """Compiles a PyG model: the same numbers and gradients, fused message passing, any graph size.

    Args:
        model: An ``nn.Module`` or a function; None to use this as a decorator with arguments. Of a
            ``DistributedDataParallel`` the module in it is compiled.
        fullgraph: Raise an error instead of breaking the graph.
        dynamic: Whether sizes are symbolic; None is True, False compiles for one size.
        mode: As in :func:`torch.compile`. On a GPU ``"reduce-overhead"`` and ``"max-autotune"`` replay forward and
            backward as one CUDA graph each; all else that a mode sets is passed on to Inductor.
        options: gnncompile's own (:data:`gnncompile.options.DEFAULTS`) and Inductor's settings.
        disable: Return the model as it is.

    Returns:
        For a module: a module of a subclass of its class that shares all state with it (same ``state_dict`` keys).
        For a function: a function. Both have a method ``warmup``, unless the original had one: see
        :func:`gnncompile.warmup`.

    Raises:
        TypeError: `model` is neither a module nor callable.
        ValueError: An unknown mode or option.
    """
    settings = {"fullgraph": fullgraph, "dynamic": dynamic, "mode": mode, "options": options, "disable": disable}
    resolve(mode, options)
    if dynamic not in (None, True, False):
        raise TypeError(f"dynamic: found {dynamic!r}, expected True, False or None.")
    if model is None:
        return functools.partial(compile, **settings)
    if not callable(model):
        raise TypeError(
            f"model: found {type(model).__name__}, expected an nn.Module or a function. Pass the model itself."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "model: found a TorchScript module, expected one whose forward is Python. Compile what it was made of."
        )
    if disable:
        return model
    if isinstance(model, DistributedDataParallel):
        return _replica(model, settings)
    known = program_of(model)
    if known is not None:
        model = known.target
    if isinstance(model, nn.Module):
        return _module(model, settings)
    program = Program(model, settings)

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compat.traced_here():
            return model(*args, **kwargs)
        return program(args, kwargs)

    call._gnncompile_program = program  # type: ignore[attr-defined]
    if not hasattr(call, "warmup"):
        call.warmup = functools.partial(_warmup, call)  # type: ignore[attr-defined]
    return call
