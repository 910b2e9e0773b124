"""Torch's settings while it compiles for gnncompile, in the compiling thread only."""

from __future__ import annotations

import functools
import re
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """The state of one thread: whether a compile that starts now is gnncompile's, and with which settings.

    `patches` holds the active settings while such a compile runs; otherwise it is None.
    """

    calls = 0
    empty_is_special = False
    captures_selections = True
    recovery: Any = None
    patches: ExitStack | None = None


compiling = _Thread()


_PATCHES: tuple[Callable[[], Any], ...] = (
    # Sizes that were equal once are not assumed equal. A size of 0 or 1 is not special, unless the caller asks for it.
    lambda: shape_config.patch(use_duck_shape=False, backed_size_oblivious=not compiling.empty_is_special),
    # dynamic=True would otherwise turn dropout rates and slopes into tensors. Attributes of recurrent layers may be
    # read; to run such a layer breaks the graph (gnncompile.substitutes.nn.layers.uncaptured). The cache of fake
    # results compares sizes with 1, and the comparison would become a guard. Hooks may be added and removed later, so
    # they are guarded.
    lambda: dynamo_config.patch(
        specialize_float=True, allow_rnn=True, fake_tensor_cache_enabled=False, skip_nnmodule_hook_guards=False
    ),
    # Up to torch 2.12, parameters are not checked while the dict that holds them is unchanged. A parameter that was
    # frozen at the capture would silently stay frozen.
    lambda: dynamo_config.patch(skip_tensor_guards_with_matching_dict_tags=torch.__version__ >= "2.13"),
    # To record the overhead for the profiler takes longer than the recorded work.
    lambda: dynamo_config.patch(record_runtime_overhead=False),
    # Data-dependent sizes are symbols, and calls that read such a size (``int(k.sum())``) are captured as well.
    lambda: dynamo_config.patch(
        capture_scalar_outputs=compiling.captures_selections,
        capture_dynamic_output_shape_ops=compiling.captures_selections,
    ),
    # With data-dependent sizes, the backward is compiled with the forward, while another way of capture is still
    # possible.
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


def empty_is_special() -> bool:
    """Whether the compile that runs now takes symbolic sizes for larger than 1, without a guard."""
    return compiling.empty_is_special


class symbolic_counts:  # noqa: N801  (used as a function)
    """A context manager: compiles inside it see the numbers of nodes, edges and graphs as symbols.

    Settings change only while Dynamo compiles, and only in this thread. Entering the block costs nothing in calls
    without a compile.

    Args:
        empty_is_special: Whether sizes of 0 and 1 are constants, each captured on its own.
        selections: Whether data-dependent sizes are captured.
        recovery: How frames that can't be captured are handled (:mod:`gnncompile._compat.recovery`).
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


@contextmanager
def symbolic_trace() -> Iterator[None]:
    """Traces and compiles without Dynamo, inside the block, see sizes as gnncompile's compiles do."""
    with symbolic_counts():
        _compile_starts(None)
        try:
            yield
        finally:
            _compile_ends()


MODULE_CALL = nn.Module.__call__


def kept_guards(guards: Sequence[Any]) -> list[bool]:
    """Returns for each of Dynamo's guards whether it is kept. Every kept guard is checked in each call.

    Dropped are guards on how a module is called, guards on the parts of libraries, and guards that others imply.

    Tracing replaces ``nn.Module.__call__`` for a moment, for all threads. If another thread calls a compiled model
    meanwhile, its guards would fail and it would recompile. PyG's aggregations make such guards, by
    ``super().__call__``.

    Half of all guards check that names in a library's modules still stand for the same classes and functions. Names in
    a model's own modules stay guarded, and so do a library's numbers and flags.
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
    if not found[1]:  # asks whether a class has an attribute of a certain name
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
    """Whether other guards imply this guard.

    Where a module has no hooks, a guard on which hooks take keyword arguments is implied. So is a guard that there are
    no global hooks: with these, compiled code is never called (:func:`gnncompile._compat.transforms.needs_eager`).
    """
    hooks, suffix, _ = guard.name.rpartition("_with_kwargs")
    if suffix and guard.guard_type == _NO_HOOKS:
        return hooks in unhooked
    return guard.is_global and _OF_ALL_MODULES.search(guard.name) is not None


def patch_remove_tensorify_graphargs() -> None:
    """Makes compiles inside :class:`symbolic_counts` keep writes to float64 scalars on a CPU.

    Torch takes such a scalar for a Python number and traces the frame a second time. It then drops nodes if only the
    number is read. These are inputs, but also the result of an ``add_``, which may have no reader.
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
