"""Settings that hold while torch compiles something of ours, in that thread only."""

from __future__ import annotations

import functools
import re
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as shape_config_module
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.output_graph import OutputGraph

shape_config: Any = shape_config_module


class _Thread(threading.local):
    """Whether a compile that starts now in this thread is ours, and the patches it runs under."""

    calls = 0
    empty_is_special = False
    captures_selections = True
    recovery: Any = None
    patches: ExitStack | None = None


compiling = _Thread()


_PATCHES: tuple[Callable[[], Any], ...] = (
    # No two sizes are assumed equal because they once were, none special because it was 0 or 1 (unless that is asked).
    lambda: shape_config.patch(use_duck_shape=False, backed_size_oblivious=not compiling.empty_is_special),
    # dynamic=True would otherwise turn dropout rates and slopes into tensors.
    # Recurrent layers may be looked at; to run one breaks the graph (gnncompile.substitutes.nn.layers.uncaptured).
    # The cache of fake results compares sizes with 1, which would become a guard. Hooks may come and go.
    lambda: dynamo_config.patch(
        specialize_float=True, allow_rnn=True, fake_tensor_cache_enabled=False, skip_nnmodule_hook_guards=False
    ),
    # Up to torch 2.12 a parameter is not looked at while the dict it stands in is the same: one that was frozen at the
    # capture would stay frozen, in silence.
    lambda: dynamo_config.patch(skip_tensor_guards_with_matching_dict_tags=torch.__version__ >= "2.13"),
    # A note for the profiler takes longer than what it notes.
    lambda: dynamo_config.patch(record_runtime_overhead=False),
    # Sizes that only the data knows are symbols, and what reads one (``int(k.sum())``) is captured as well.
    lambda: dynamo_config.patch(
        capture_scalar_outputs=compiling.captures_selections,
        capture_dynamic_output_shape_ops=compiling.captures_selections,
    ),
    # Their backward is compiled with the forward, when there is still a way back.
    lambda: functorch_config.patch(force_non_lazy_backward_lowering=compiling.captures_selections),
)


def _compile_starts(_: Any) -> None:
    if compiling.calls and compiling.patches is None:
        compiling.patches = ExitStack()
        for patch in _PATCHES:
            compiling.patches.enter_context(patch())


def _compile_ends(_: Any = None) -> None:
    if compiling.patches is not None:
        patches, compiling.patches = compiling.patches, None
        patches.close()


def _watch_compiles() -> None:
    if _compile_starts not in callback_handler.start_callbacks:  # torch._dynamo.reset() forgets them
        callback_handler.register_start_callback(_compile_starts)
        callback_handler.register_end_callback(_compile_ends)


class symbolic_counts:  # noqa: N801  (used as a function)
    """Compiles inside this block see numbers of nodes, edges and graphs as symbols.

    Settings change only while Dynamo compiles and only in this thread: entering costs nothing on the calls between.

    Args:
        empty_is_special: Whether sizes of 0 and 1 are numbers, each captured on its own.
        selections: Whether sizes that only the data knows are captured.
        recovery: What to do where a frame can't be captured (:mod:`gnncompile._compat.recovery`).
    """

    __slots__ = ("before", "here")

    def __init__(self, empty_is_special: bool = False, selections: bool = True, recovery: Any = None) -> None:
        self.here = empty_is_special, selections, recovery

    def __enter__(self) -> None:
        _watch_compiles()
        compiling.calls += 1
        self.before = compiling.empty_is_special, compiling.captures_selections, compiling.recovery
        compiling.empty_is_special, compiling.captures_selections, compiling.recovery = self.here

    def __exit__(self, *_: object) -> None:
        compiling.calls -= 1
        compiling.empty_is_special, compiling.captures_selections, compiling.recovery = self.before
        if not compiling.calls:
            _compile_ends()  # another thread may have ended the last compile


MODULE_CALL = nn.Module.__call__


def kept_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards are kept: all but those on how a module is called, on what libraries are made of, and
    those that others imply. Each is looked at in each call.

    Tracing replaces ``nn.Module.__call__`` for a moment, for all threads: one that calls a compiled model meanwhile
    would find its guards broken and capture again. PyG's aggregations make such guards, by ``super().__call__``.

    That the names of a library's modules still stand for the same classes and functions makes up half of the guards.
    What a model's own modules name is looked at, and so are a library's numbers and flags.
    """
    unhooked = {guard.name for guard in guards if guard.guard_type == _NO_HOOKS}
    dropped = _is_how_modules_are_called, _is_part_of_a_library, functools.partial(_is_implied, unhooked=unhooked)
    return [not any(drop(guard) for drop in dropped) for guard in guards]


_OF_A_CLASS = re.compile(r"\)\.__mro__\[\d+\]\.__dict__\)(.*)")
_CALLS = ("_call_impl", "_compiled_call_impl")


def _is_how_modules_are_called(guard: Any) -> bool:
    found = _OF_A_CLASS.search(guard.name)
    if found is None:
        return guard.value is MODULE_CALL
    if not found[1]:  # whether a class has something by a name
        return getattr(guard.orig_guard.create_fn, "keywords", {}).get("key") in _CALLS
    if found[1].startswith("['__call__']"):
        return isinstance(guard.value, types.FunctionType) and _PACKAGE.match(guard.value.__module__) is not None
    return found[1] == "['_compiled_call_impl']" and guard.value is None


_LIBRARIES = r"(?:torch|torch_geometric|gnncompile)"
_PACKAGE = re.compile(rf"{_LIBRARIES}(?:\.|$)")
_OF_A_LIBRARY = re.compile(rf"\bG\['(?:__import_{_LIBRARIES}(?:_dot_\w+)?|__builtins_dict__\w+)'\]")
_OF_OURS = re.compile(r"\bG\['(?:__import_gnncompile(?:_dot_\w+)?|join|empty_again)'\]")
_PARTS = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.layout, torch._ops.OpOverloadPacket),
)


def _is_part_of_a_library(guard: Any) -> bool:
    if not guard.is_global:
        return False
    if _OF_OURS.search(guard.name):
        return isinstance(guard.value, (*_PARTS, str, tuple))
    return isinstance(guard.value, _PARTS) and _OF_A_LIBRARY.search(guard.name) is not None


_NO_HOOKS = "EMPTY_NN_MODULE_HOOKS_DICT"
_OF_ALL_MODULES = re.compile(r"\._global_(?:forward|backward)_(?:pre_)?hooks$")


def _is_implied(guard: Any, unhooked: set[str]) -> bool:
    """Whether it says which hooks take arguments by name, where there are no hooks; or that there are no hooks on all
    modules, with which nothing compiled is called (:func:`gnncompile._compat.transforms.needs_eager`).
    """
    hooks, suffix, _ = guard.name.rpartition("_with_kwargs")
    if suffix and guard.guard_type == _NO_HOOKS:
        return hooks in unhooked
    return guard.is_global and _OF_ALL_MODULES.search(guard.name) is not None


def patch_remove_tensorify_graphargs() -> None:
    """Makes compiles inside :class:`symbolic_counts` keep what writes to a scalar of float64 on a CPU.

    Torch takes such a scalar for a Python number, traces the frame a second time, and then drops nodes of which nothing
    but the number is read: inputs, but also the result of an ``add_``, which nobody need read.
    """
    drop: Any = OutputGraph.remove_tensorify_specialized_graphargs

    @functools.wraps(drop)
    def drop_inputs(self: Any) -> None:
        calls = [n for n in self.graph.nodes if n.op != "placeholder" and not n.users] if compiling.calls else []
        values = [node.meta.pop("example_value", None) for node in calls]
        drop(self)
        for node, value in zip(calls, values, strict=True):
            if value is not None:
                node.meta["example_value"] = value

    setattr(OutputGraph, drop.__name__, drop_inputs)
