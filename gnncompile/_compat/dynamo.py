"""Reads the state of the running Dynamo trace, and finds the code that Dynamo has compiled."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._compile import _disable_dynamo
from torch._dynamo import eval_frame
from torch._dynamo.bytecode_transformation import create_call_function, create_instruction
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.base import AttributeMutationExisting
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import DeletedVariable
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from gnncompile._compat.compiles import compiling


def is_in_dispatch_mode() -> bool:
    """Whether a ``TorchDispatchMode`` sees each operation of this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def traced_here() -> bool:
    """Whether this thread is tracing, for Dynamo, an export, ``make_fx`` or ``torch.jit.trace``.

    ``torch.compiler.is_compiling()`` is also true in the other threads of the process.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if is_fx_symbolic_tracing() or torch._C._is_tracing():
        return True
    return torch.compiler.is_compiling() and (is_in_dispatch_mode() or torch._C._len_torch_function_stack() > 0)


ENTRY = "entry_of_gnncompile"
"""The name prefix of functions that take the arguments of a call. Frames that Dynamo resumes have other names."""


def takes_arguments() -> bool:
    """Whether Dynamo is tracing a frame that takes the arguments of a call, not one after a graph break."""
    try:
        tx: Any = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return False
    return tx is not None and bool(tx.output.root_tx.f_code.co_name.startswith(ENTRY))


def is_whole(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph ends with its frame, and not at a graph break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break


def copy_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns another function object with the same code.

    Dynamo finds substitutes by function object, so the copy is traced as written.
    """
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def patch_codegen_update_mutated() -> None:
    """Makes Dynamo's code delete an attribute only if the object has it, in gnncompile's compiles.

    A frame that sets an attribute and deletes it again is replayed as the deletion alone. An object that had the
    attribute at the capture no longer has it at the next call.
    """
    write: Any = SideEffects.codegen_update_mutated

    @functools.wraps(write)
    def codegen_update_mutated(self: Any, cg: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling.patches is None:
            return write(self, cg, *args, **kwargs)
        deleted = list(_deleted_attributes(self))
        for holder, name in deleted:
            del self.store_attr_mutations[holder][name]
        found = write(self, cg, *args, **kwargs)
        for holder, name in deleted:
            cg.add_push_null(lambda: cg.load_import_from(__name__, delete_attribute.__name__))
            cg(holder.source)
            cg(ConstantVariable.create(name))
            cg.extend_output([*create_call_function(2, False), create_instruction("POP_TOP")])
        return found or bool(deleted)

    SideEffects.codegen_update_mutated = codegen_update_mutated  # type: ignore[method-assign]


def _deleted_attributes(effects: Any) -> Iterator[tuple[Any, str]]:
    """Yields ``(variable, name)`` of attributes that a frame deletes from objects made outside of the frame.

    Only attributes that the object has are yielded.
    """
    for holder, stored in effects.store_attr_mutations.items():
        for name, value in stored.items():
            outside = isinstance(holder.mutation_type, AttributeMutationExisting)
            if isinstance(value, DeletedVariable) and outside and hasattr(getattr(holder, "value", None), name):
                yield holder, name


def delete_attribute(holder: Any, name: str) -> None:
    """Deletes an attribute of an object, if the object has it."""
    with suppress(AttributeError):
        delattr(holder, name)


def calling_file(skip: str) -> str:
    """Returns the file of the innermost function that Dynamo is tracing. Functions in the file `skip` are left out."""
    frame: Any = sys._getframe()
    while frame is not None:
        translator = frame.f_locals.get("self")
        if isinstance(translator, InstructionTranslatorBase) and translator.f_code.co_filename != skip:
            return translator.f_code.co_filename
        frame = frame.f_back
    return ""


def tracked_input_name(fake: Tensor) -> str | None:
    """Returns the source (``L['args'][0]``) of a fake tensor that is an input of the running Dynamo trace, or None."""
    try:
        tx: Any = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return None
    for tracked in [] if tx is None else tx.output.tracked_fakes:
        if tracked.fake is fake:
            return source_name(tracked.source)
    return None


def source_name(source: Any) -> str:
    """Returns a Dynamo source as Python text. ``source.name`` is a method up to torch 2.12, and a property later."""
    name = source.name
    return str(name() if callable(name) else name)


def input_source(node: fx.Node) -> str:
    """Returns the source of a Dynamo graph's input as Python text (``L['args'][0]``).

    Returns the input's name if its source is unknown.
    """
    source = getattr(node, "_dynamo_source", None)
    return node.name if source is None else source_name(source)


def attribute_at(source: str, target: Any) -> Any:
    """Returns what an attribute of a captured model is now; None if there is no such attribute any more.

    Args:
        source: The attribute, from :func:`input_source`.
        target: The captured model.
    """
    with suppress(AttributeError, LookupError):
        return eval(source, {"__builtins__": {}}, {"L": {"target": target}})
    return None


def placeholders_as_fakes(gm: fx.GraphModule) -> list[Any]:
    """Returns the fake tensors and symbolic sizes that Dynamo traced a graph's inputs with."""
    return [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]


def run_uncompiled(fn: Callable[..., Any]) -> None:
    """Makes Dynamo leave a function, and all functions that it calls, to Python from now on.

    Dynamo may still inline the function.
    """
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def run_in_parts(code: types.CodeType) -> None:
    """Makes Dynamo leave a function, but not the functions that it calls, to Python from now on.

    Dynamo may still inline the function.
    """
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def valid_capture(fn: types.FunctionType, arguments: Mapping[str, Any]) -> Any:
    """Returns the guard manager of the compiled form that is valid for these arguments, or None if no form is valid.

    The guard manager identifies the compiled form.
    """
    found = _valid_entry(fn, {**arguments, **_cells(fn)})
    return None if found is None else found.guard_manager


def whole_captures(*functions: types.FunctionType) -> int:
    """Returns the number of compiled forms of these functions that call one graph. Invalid forms count as well."""
    codes = [code for fn in functions for code in _codes(fn)]
    graphs = (1 if code is None else sum(name.startswith("__compiled_fn") for name in code.co_names) for code in codes)
    return sum(count == 1 for count in graphs)


class CompiledForms:
    """The compiled forms of a function, to be called directly and not through the result of ``torch.compile``.

    ``torch.compile`` sets Dynamo up for captures, and suspends this setup around each call that leaves the compiled
    code. Without graph breaks there is nothing to capture.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        self.fn, self.cells = fn, _cells(fn)
        self.known: dict[int, types.FunctionType] = {}  # by the address of the code: hashing the code takes longer

    def find(self, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Returns the form for these arguments; None if there is none, or if torch must do more than call it."""
        if eval_frame._stance.stance not in _RUN_WHAT_IS_CAPTURED or get_eval_frame_callback() is not None:
            return None
        found = _valid_entry(self.fn, {**arguments, **self.cells})
        if found is None:
            return None
        code = found.code
        form = self.known.get(id(code))
        if form is None:
            left = {id(code) for code in _codes(self.fn)}
            self.known = {key: known for key, known in self.known.items() if key in left}
            form = self.known[id(code)] = _called_at_once(code, self.fn)
        return form


_RUN_WHAT_IS_CAPTURED = ("default", "eager_on_recompile", "fail_on_recompile")


def _codes(fn: types.FunctionType) -> list[Any]:
    entries: list[Any] = _debug_get_cache_entry_list(fn.__code__)
    return [entry.code for entry in entries]


def _called_at_once(code: types.CodeType, fn: types.FunctionType) -> types.FunctionType:
    """Returns a function with the code that Dynamo wrote in place of `fn`'s code.

    The functions that the code calls lose torch's wrappers that turn Dynamo off.
    """
    names = {name for part in _with_inner(code) for name in part.co_names}
    used = {name: _plain(fn.__globals__[name]) for name in names if name in fn.__globals__}
    return types.FunctionType(code, used, fn.__name__, None, fn.__closure__)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def _plain(value: Any) -> Any:
    """Returns a value that Dynamo's code uses, without torch's wrappers that turn Dynamo off."""
    if value is torch._dynamo.utils:
        return _plain_utils()
    if getattr(value, "__code__", None) is _KEPT_FROM_DYNAMO:
        return value.__wrapped__
    return value._torchdynamo_orig_callable if getattr(value, "_torchdynamo_disable", False) else value


_KEPT_FROM_DYNAMO = _disable_dynamo(lambda: None).__code__


@functools.cache
def _plain_utils() -> types.SimpleNamespace:
    utils = vars(torch._dynamo.utils)
    return types.SimpleNamespace(**{name: _plain(utils[name]) for name in utils if not name.startswith("__")})


def _cells(fn: types.FunctionType) -> dict[str, Any]:
    """Returns the free variables of a function by name.

    The functions around it have returned, so the values no longer change.
    """
    return {name: cell.cell_contents for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)}


def _valid_entry(fn: types.FunctionType, frame: dict[str, Any]) -> Any:
    entries: list[Any] = _debug_get_cache_entry_list(fn.__code__)
    # With skip_guard_eval_unsafe of torch.compiler.set_stance, the user wants only the guards that tell captures apart.
    few = eval_frame._stance.skip_guard_eval_unsafe
    for entry in entries:
        # An entry that was guarded by a freed object has lost its code, and its guards always hold.
        if entry.code is not None and _guards(entry.guard_manager, few).check(frame):
            return entry
    return None


def _guards(manager: Any, few: bool) -> Any:
    return manager.diff_guard_root or manager if few else manager


def graph_breaks() -> int:
    """Returns the number of graph breaks that Dynamo has counted."""
    return sum(counters()["graph_break"].values())


def counters() -> Any:
    """Returns Dynamo's counters of graph breaks and captured graphs."""
    return torch._dynamo.utils.counters
