"""``gnncompile.compile``, and the classes of the compiled modules that it returns."""

from __future__ import annotations

import copy
import functools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gnncompile import _compat
from gnncompile.capture.compiled_callable import CompiledCallable
from gnncompile.capture.rehearsal import run_ahead
from gnncompile.exc import ArgumentTypeError
from gnncompile.options import resolve

F = TypeVar("F", bound=Callable[..., Any])

_programs: weakref.WeakKeyDictionary[Callable[..., Any], weakref.ref[CompiledCallable]] = weakref.WeakKeyDictionary()
"""The program of each compiled function. An attribute would be copied to a wrapper by ``functools.wraps``.

The function itself keeps its program alive. The program refers to the original, which may refer to the function.
"""


class CompiledModule:
    """The methods that a compiled module adds to the original's class. Both modules share one state."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled forward, hooks included."""
        if _compat.traced_here():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # an outer capture traces the original
        program: CompiledCallable = object.__getattribute__(self, "_gnncompile_program")
        return program(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled forward, as calling the module does."""
        if _compat.traced_here():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return CompiledModule.__call__(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        program: CompiledCallable = object.__getattribute__(self, "_gnncompile_program")
        return compile(copy.deepcopy(program.target, memo), **program.settings)

    def __copy__(self) -> Any:
        program: CompiledCallable = object.__getattribute__(self, "_gnncompile_program")
        return compile(copy.copy(program.target), **program.settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        program: CompiledCallable = object.__getattribute__(self, "_gnncompile_program")
        return _rebuild, (program.target, program.settings)

    def __prepare_scriptable__(self) -> Any:
        """Returns the original module, which ``torch.jit.script`` then scripts."""
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
    """The method ``warmup``: compiles and records for such arguments (:func:`gnncompile.warmup`). Returns `self`."""
    program = callable_of(self)
    assert program is not None
    run_ahead(program, args, kwargs)
    return self


def _is_ours(warmup: Any) -> bool:
    """Whether a function's `warmup` is that of a compiled function, from which ``functools.wraps`` copied it."""
    return isinstance(warmup, functools.partial) and warmup.func is _warmup


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
    # Both modules share one state: parameters, buffers, hooks, training flag.
    object.__setattr__(compiled, "__dict__", target.__dict__)
    object.__setattr__(compiled, "_gnncompile_program", CompiledCallable(target, settings))
    return compiled  # type: ignore[no-any-return]


def _with_signature(ours: Any, original: Callable[..., Any]) -> types.FunctionType:
    """A copy of `ours` with the signature of `original`, for callers that read it, such as ``torch.export``."""
    told = types.FunctionType(ours.__code__, ours.__globals__, ours.__name__, None, ours.__closure__)
    return functools.update_wrapper(told, original)  # type: ignore[return-value]


class CompiledReplica:
    """The methods that a compiled ``DistributedDataParallel`` adds to its class: its module is a compiled one.

    The synchronisation is not compiled: it reads the state of the process, not tensors. Both objects share one state.
    """

    @property
    def module(self) -> nn.Module:
        """The compiled form of the wrapped module."""
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
    for slot, value in zip(slots, (callable_of(module), module, original, settings), strict=True):
        object.__setattr__(compiled, slot, value)
    return compiled  # type: ignore[no-any-return]


def _original(replica: Any) -> Any:
    """The original ``DistributedDataParallel`` of a compiled one; an uncompiled one as it is."""
    return object.__getattribute__(replica, "_gnncompile_original") if isinstance(replica, CompiledReplica) else replica


def trained(model: Any) -> Any:
    """The module that a ``DistributedDataParallel`` wraps; any other model as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def callable_of(compiled: Any) -> CompiledCallable | None:
    """The :class:`CompiledCallable` of a compiled module or function; None if it is not compiled."""
    if isinstance(compiled, types.FunctionType):
        found = _programs.get(compiled)
        return None if found is None else found()
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
    mesh: DeviceMesh | None = ...,
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
    mesh: DeviceMesh | None = ...,
) -> Callable[[F], F]: ...
def compile(
    model: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Compiles a PyG model: the same numbers and gradients, fused message passing, any graph size.

    Args:
        model: An ``nn.Module`` or a function; None to use this as a decorator with arguments. For a
            ``DistributedDataParallel``, the module in it is compiled.
        fullgraph: Raise an error instead of breaking the graph.
        dynamic: Whether sizes are symbolic; None is True, False compiles for one size. The width of features becomes
            symbolic only after it has changed.
        mode: As in :func:`torch.compile`. On a GPU ``"reduce-overhead"`` and ``"max-autotune"`` replay forward and
            backward as one CUDA graph each. The other settings of a mode are passed on to Inductor. With a `mesh`, this
            needs NCCL and ``NCCL_GRAPH_REGISTER=0`` in the environment; all processes record and replay together.
        options: gnncompile's own (:class:`gnncompile.options.Options`) and Inductor's settings.
        disable: Return the model as it is.
        mesh: A mesh of one dimension, whose processes hold the parts of one graph (:func:`gnncompile.partition`). The
            model then gives over the parts what it gives over the whole graph. Parameters must be the same in all
            processes; their gradients are summed. The loss of a process counts its own rows only, as
            :func:`gnncompile.mean_over_parts` does.

    Returns:
        For a module: a module of a subclass of its class that shares all state with it (same ``state_dict`` keys).
        For a function: a function. Both have a method ``warmup``, unless the original had one: see
        :func:`gnncompile.warmup`.

    Raises:
        TypeError: `model` is neither a module nor callable.
        ValueError: An unknown mode or option, or a mesh of several dimensions.
        PartitionError: At a call with a `mesh`: an operation has no form over parts, the parts do not belong together,
            or an exchange failed.
    """
    settings: dict[str, Any] = {
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": options,
        "disable": disable,
    }
    settings["mesh"] = mesh
    resolve(mode, options)
    if dynamic not in (None, True, False):
        raise ArgumentTypeError(f"dynamic: found {dynamic!r}, expected True, False or None.")
    if model is None:
        return functools.partial(compile, **settings)
    if not callable(model):
        raise ArgumentTypeError(
            f"model: found {type(model).__name__}, expected an nn.Module or a function. Pass the model itself."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            "model: found a TorchScript module, expected one whose forward is Python. Compile what it was made of."
        )
    if disable:
        return model
    if mesh is not None and isinstance(model, DistributedDataParallel):
        raise ArgumentTypeError(
            "model: found a DistributedDataParallel, expected the module itself with a mesh: gradients of parameters "
            "are summed over parts."
        )
    if isinstance(model, DistributedDataParallel):
        return _replica(model, settings)
    known = callable_of(model)
    if known is not None:
        model = known.target
    if isinstance(model, nn.Module):
        return _module(model, settings)
    program = CompiledCallable(model, settings)

    @functools.wraps(model)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compat.traced_here():
            return model(*args, **kwargs)
        return program(args, kwargs)

    _programs[call] = weakref.ref(program)
    if not hasattr(call, "warmup") or _is_ours(call.warmup):
        call.warmup = functools.partial(_warmup, call)  # type: ignore[attr-defined]
    return call
