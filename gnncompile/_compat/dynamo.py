"""What the running Dynamo trace knows, and what came of traces."""

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


def traced_here() -> bool:
    """Whether this thread is tracing, for Dynamo, an export, ``make_fx`` or ``torch.jit.trace``;
    ``torch.compiler.is_compiling()`` is also true in the other threads of the process.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if is_fx_symbolic_tracing() or torch._C._is_tracing():
        return True
    return torch.compiler.is_compiling() and (
        torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    )


def current_backend() -> Any:
    """The backend that the running Dynamo trace compiles for, without torch's wrappers around it."""
    found = InstructionTranslator.current_tx().output.compiler_fn
    while True:
        inner = getattr(found, "_torchdynamo_orig_backend", None) or getattr(found, "compiler_fn", None)
        if inner is None or inner is found:
            return found
        found = inner


ENTRY = "entry_of_gnncompile"
"""How the functions are called that take the arguments of calls; a frame that Dynamo resumes is called otherwise."""


def takes_arguments() -> bool:
    """Whether the frame that Dynamo traces is one that takes the arguments of a call, not one behind a graph break."""
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
    """The same code as another function object: Dynamo substitutes by object, so this one is traced as written."""
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def patch_codegen_update_mutated() -> None:
    """Makes code that Dynamo writes, in compiles of ours, delete an attribute only where there is one.

    A frame that sets an attribute and deletes it again is replayed as the deletion alone. An object that had the
    attribute at the capture has it no more at the next call.
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
    """The variables of objects from outside, and the names of attributes that these have and that are deleted."""
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
    """The file of the innermost function that Dynamo is tracing, the file `skip` left out."""
    frame: Any = sys._getframe()
    while frame is not None:
        translator = frame.f_locals.get("self")
        if isinstance(translator, InstructionTranslatorBase) and translator.f_code.co_filename != skip:
            return translator.f_code.co_filename
        frame = frame.f_back
    return ""


def tracked_input_name(fake: Tensor) -> str | None:
    """The source (``L['args'][0]``) of a fake tensor that is an input of the running Dynamo trace."""
    try:
        tx: Any = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return None
    for tracked in [] if tx is None else tx.output.tracked_fakes:
        if tracked.fake is fake:
            return source_name(tracked.source)
    return None


def source_name(source: Any) -> str:
    """A Dynamo source as Python text; a method up to torch 2.12, a property later."""
    name = source.name
    return str(name() if callable(name) else name)


def input_source(node: fx.Node) -> str:
    """Where an input of a Dynamo graph comes from, as Python text: ``L['args'][0]``; its name where that is unknown."""
    source = getattr(node, "_dynamo_source", None)
    return node.name if source is None else source_name(source)


def placeholders_as_fakes(gm: fx.GraphModule) -> list[Any]:
    """The fake tensors and symbolic sizes that Dynamo traced a graph's inputs with."""
    return [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]


def run_uncompiled(fn: Callable[..., Any]) -> None:
    """Dynamo leaves a function, and all that it calls, to Python from now on, where it does not inline it."""
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def run_in_parts(code: types.CodeType) -> None:
    """Dynamo leaves a function to Python from now on, where it does not inline it, but not what the function calls."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def valid_capture(fn: types.FunctionType, arguments: Mapping[str, Any]) -> Any:
    """What stands for the compiled form of a function whose guards hold for these arguments; None if there is none."""
    found = _valid_entry(fn, {**arguments, **_cells(fn)})
    return None if found is None else found.guard_manager


def whole_captures(*functions: types.FunctionType) -> int:
    """How many compiled forms of these functions call one graph; those that are not valid any more count as well."""
    codes = [code for fn in functions for code in _codes(fn)]
    graphs = (1 if code is None else sum(name.startswith("__compiled_fn") for name in code.co_names) for code in codes)
    return sum(count == 1 for count in graphs)


class CompiledForms:
    """What was captured of a function, to be called at once in place of what ``torch.compile`` returned.

    Dynamo sets itself up for whatever may have to be captured, and puts that away around each call that goes out of its
    code; where there are no graph breaks nothing can be.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        self.fn, self.cells = fn, _cells(fn)
        self.known: dict[int, types.FunctionType] = {}  # by the address of its code: to hash that takes longer

    def find(self, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
        """The form for these arguments; None where there is none, or where torch has more to do than to call it."""
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
    """A function of this code, which Dynamo wrote in place of that of another one; nothing that it calls is told to
    be left alone by Dynamo.
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
    """What Dynamo's code calls, or takes it from, without torch's wrappers that keep Dynamo from it."""
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
    """What a function refers to of those around it; these are done, and change nothing any more."""
    return {name: cell.cell_contents for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)}


def _valid_entry(fn: types.FunctionType, frame: dict[str, Any]) -> Any:
    entries: list[Any] = _debug_get_cache_entry_list(fn.__code__)
    # Whose user says so (torch.compiler.set_stance) wants only the guards that tell captures from each other.
    few = eval_frame._stance.skip_guard_eval_unsafe
    for entry in entries:
        # The code of one that was guarded by an object that is gone is gone too, and its guards always hold.
        if entry.code is not None and _guards(entry.guard_manager, few).check(frame):
            return entry
    return None


def _guards(manager: Any, few: bool) -> Any:
    return manager.diff_guard_root or manager if few else manager


def graph_breaks() -> int:
    """How many graph breaks Dynamo has counted."""
    return sum(counters()["graph_break"].values())


def counters() -> Any:
    """Dynamo's counters of graph breaks and captured graphs."""
    return torch._dynamo.utils.counters
