"""Everything gnncompile needs of torch that is not public API, in one place."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as shape_config_module
from torch import Tensor, fx
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import InternalTorchDynamoError, SkipFrame, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx
from torch._library.fake_impl import allocate_size
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

__all__ = [
    "AsksForEmptiness",
    "StorageWeakRef",
    "assumed_sizes",
    "backend_fake_mode",
    "calling_file",
    "compare_saved_strides",
    "compile_inductor",
    "copy_of",
    "counters",
    "current_backend",
    "fresh_sizes",
    "inductor_mode_options",
    "inductor_option_names",
    "notice_emptiness_questions",
    "own_symbol",
    "placeholders_as_fakes",
    "plain_sizes",
    "run_op_by_op",
    "size_now",
    "source_name",
    "static_cuda_launch",
    "substitute_construction",
    "substitute_largest",
    "substitute_methods",
    "symbolic_counts",
    "take_over_size",
    "trace_aten",
    "tracked_input_name",
    "try_frames_again",
    "unknown_number",
    "unknown_size",
]

logger = logging.getLogger(__name__)

shape_config: Any = shape_config_module


class _Thread(threading.local):
    """Whether a compile that starts now in this thread is ours, and the patches it runs under."""

    calls = 0
    empty_is_special = False
    captures_selections = True
    patches: ExitStack | None = None


_thread = _Thread()


_PATCHES: tuple[Callable[[], Any], ...] = (
    # No two sizes are assumed equal because they once were, none special because it was 0 or 1 (unless that is asked).
    lambda: shape_config.patch(use_duck_shape=False, backed_size_oblivious=not _thread.empty_is_special),
    # dynamic=True would otherwise turn dropout rates and slopes into tensors.
    # Recurrent layers may be looked at; to run one breaks the graph (gnncompile.capture.layers.uncaptured).
    # The cache of fake results compares sizes with 1, which would become a guard. Hooks may come and go.
    lambda: dynamo_config.patch(
        specialize_float=True, allow_rnn=True, fake_tensor_cache_enabled=False, skip_nnmodule_hook_guards=False
    ),
    # Sizes that only the data knows are symbols, and what reads one (``int(k.sum())``) is captured as well.
    lambda: dynamo_config.patch(
        capture_scalar_outputs=_thread.captures_selections, capture_dynamic_output_shape_ops=_thread.captures_selections
    ),
    # Their backward is compiled with the forward, when there is still a way back.
    lambda: functorch_config.patch(force_non_lazy_backward_lowering=_thread.captures_selections),
)


def _compile_starts(_: Any) -> None:
    if _thread.calls and _thread.patches is None:
        _thread.patches = ExitStack()
        for patch in _PATCHES:
            _thread.patches.enter_context(patch())


def _compile_ends(_: Any = None) -> None:
    if _thread.patches is not None:
        patches, _thread.patches = _thread.patches, None
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
    """

    __slots__ = ("before", "here")

    def __init__(self, empty_is_special: bool = False, selections: bool = True) -> None:
        self.here = empty_is_special, selections

    def __enter__(self) -> None:
        _watch_compiles()
        _thread.calls += 1
        self.before = _thread.empty_is_special, _thread.captures_selections
        _thread.empty_is_special, _thread.captures_selections = self.here

    def __exit__(self, *_: object) -> None:
        _thread.calls -= 1
        _thread.empty_is_special, _thread.captures_selections = self.before
        if not _thread.calls:
            _compile_ends()  # another thread may have ended the last compile


def compare_saved_strides() -> None:
    """Makes compiles inside :class:`symbolic_counts` compare the strides of tensors saved for the backward by the sizes
    at hand.

    AOTAutograd asks whether the forward gave such a tensor other strides than traced and then takes the numbers of the
    first call for them. Where no size is compared with a number (``backed_size_oblivious``), it would always think so,
    and the backward would read all later calls' tensors with the strides of the first.
    """
    differs = getattr(graph_compile, "guard_or_true", None)
    if differs is None:
        return

    def guard_or_true(condition: Any) -> bool:
        known = condition.node.hint if _thread.calls and isinstance(condition, torch.SymBool) else None
        return bool(differs(condition)) if known is None else bool(known)

    cast(Any, graph_compile).guard_or_true = guard_or_true


def try_frames_again() -> None:
    """Makes compiles inside :class:`symbolic_counts` try a frame that can't be captured in less general ways.

    These are: sizes of 0 and 1 as numbers, and graph breaks at sizes that only the data knows.

    Torch takes a row for as many as another tensor has where both numbers are symbols; code may ask a size for its
    value, as ``range(int(k))`` does, where Dynamo has no graph break.
    """
    once: Any = convert_frame._compile
    signature = inspect.signature(once)

    @functools.wraps(once)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        try:
            return once(*args, **kwargs)
        except (SkipFrame, Unsupported):
            raise
        except Exception as error:
            if not _thread.calls:
                raise
            first = error
        usual = _thread.empty_is_special, _thread.captures_selections
        others = [(special, selections) for selections in (True, False) for special in (False, True)]
        for way in others[others.index(usual) + 1 :]:
            logger.info("captured again with %s: %s", way, first)
            _thread.empty_is_special, _thread.captures_selections = way
            try:
                return once(*args, **kwargs)
            except (SkipFrame, Unsupported):
                raise
            except Exception as error:
                logger.info("not captured either: %s", error)
            finally:
                _thread.empty_is_special, _thread.captures_selections = usual
        if _is_of_dynamo(first) and not signature.bind(*args, **kwargs).arguments["one_graph"]:
            logger.warning("a part of the model runs uncompiled, since Dynamo fails in it: %s", first)
            return cast(Any, convert_frame).ConvertFrameReturn()
        raise first

    convert_frame._compile = compile_frame


def _is_of_dynamo(error: BaseException) -> bool:
    """Whether an error is one inside Dynamo, not of the code that it traces."""
    last = list(traceback.walk_tb(error.__traceback__))[-1:]
    inside = os.path.join("torch", "_dynamo") + os.sep
    return isinstance(error, (InternalTorchDynamoError, LookupError)) and any(
        inside in frame.f_code.co_filename for frame, _ in last
    )


def current_backend() -> Any:
    """The backend that the running Dynamo trace compiles for, without torch's wrappers around it."""
    found = InstructionTranslator.current_tx().output.compiler_fn
    while True:
        inner = getattr(found, "_torchdynamo_orig_backend", None) or getattr(found, "compiler_fn", None)
        if inner is None or inner is found:
            return found
        found = inner


def copy_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same code as another function object: Dynamo substitutes by object, so this one is traced as written."""
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def substitute_methods(methods: Mapping[Callable[..., Any], Callable[..., Any]], active: Callable[[], bool]) -> None:
    """Dynamo traces ``methods[f](self, ...)`` in place of ``self.f(...)`` where `active` says so.

    ``torch.compiler.substitute_in_graph`` is for functions: Dynamo looks up methods without asking it.
    """
    call = UserFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = methods.get(self.fn)
        if ours is None or not active():
            return call(self, tx, args, kwargs)
        return call(UserFunctionVariable(cast(types.FunctionType, ours)), tx, [*self.self_args(), *args], kwargs)

    UserFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def substitute_construction(kind: type, ours: Callable[..., Any], active: Callable[[], bool]) -> None:
    """Dynamo traces ``ours()`` in place of making an object of a class or of one below it, where `active` says so."""
    call = UserDefinedClassVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if issubclass(self.value, kind) and active():
            return UserFunctionVariable(cast(types.FunctionType, ours)).call_function(tx, [], {})
        return call(self, tx, args, kwargs)

    UserDefinedClassVariable.call_function = call_function  # type: ignore[method-assign]


def substitute_largest(segments: Any, sized: Any, active: Callable[[], bool]) -> None:
    """Dynamo traces ``segments(index) - 1`` in place of ``int(index.max())`` of an input, where `active` says so.

    Args:
        segments: An op from an index to the number of its segments, a size.
        sized: An op that returns its first argument, an input.
        active: Whether to.
    """
    item = TensorVariable.method_item

    def method_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        index = _maximum_of(self.as_proxy().node) if active() else None
        if index is None or (index.op != "placeholder" and index.target is not sized):
            return item(self, tx, *args, **kwargs)
        proxy = fx.Proxy(index, self.as_proxy().tracer)
        count = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", segments, (proxy,), {}))
        largest = tx.output.create_proxy("call_function", operator.sub, (count.as_proxy(), 1), {})
        return SymNodeVariable.create(tx, largest)

    TensorVariable.method_item = method_item  # type: ignore[method-assign]


def _maximum_of(node: fx.Node) -> fx.Node | None:
    """The integers whose largest a node is."""
    if node.target not in ("max", torch.max, torch.amax) or len(node.args) != 1 or node.kwargs:
        return None
    index: Any = node.args[0]
    rows = index.args[0].args[0] if _is_row(index) else None
    index = rows[index.args[1]] if rows is not None else index
    found = index.meta.get("example_value")
    whole = isinstance(found, Tensor) and not found.is_floating_point() and not found.is_complex()
    return index if whole and found.dtype != torch.bool else None


def _is_row(node: fx.Node) -> bool:
    """Whether a node takes one of the tensors again that were just put together."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    stacked: Any = node.args[0]
    return stacked.target is torch.stack and len(stacked.args) == 1 and not stacked.kwargs


_EMPTINESS = {
    (operator.eq, 0), (operator.ne, 0), (operator.gt, 0), (operator.le, 0), (operator.ge, 1), (operator.lt, 1),
}  # fmt: skip
"""Comparisons of a size with a number that ask whether it is 0."""


class AsksForEmptiness(BaseException):
    """A model asks whether one of its tensors is empty.

    Not an Exception: Dynamo must not turn it into a graph break.
    """


def notice_emptiness_questions(libraries: tuple[str, ...]) -> None:
    """Makes compiles inside :class:`symbolic_counts` raise :class:`AsksForEmptiness` unless empty sizes are special.

    Torch takes symbols of sizes for positive, even where it is told that 0 is nothing special, and would answer without
    a guard.

    Args:
        libraries: Folders of code whose questions are left alone: they save work on what is empty, or look for a
            maximum, for which gnncompile has other ways.
    """
    create = SymNodeVariable.create.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, tx: Any, proxy: Any, *args: Any, **kwargs: Any) -> Any:
        watching = _thread.calls and not _thread.empty_is_special
        if watching and _asks_for_emptiness(proxy.node) and not tx.f_code.co_filename.startswith(libraries):
            raise AsksForEmptiness
        return create(cls, tx, proxy, *args, **kwargs)

    SymNodeVariable.create = classmethod(watched)  # type: ignore[method-assign,assignment]


def _asks_for_emptiness(node: fx.Node) -> bool:
    if node.op != "call_function" or len(node.args) != 2 or isinstance(node.args[1], fx.Node):
        return False
    size: Any = node.args[0]
    asks = isinstance(node.args[1], int) and (node.target, node.args[1]) in _EMPTINESS
    return asks and isinstance(size, fx.Node) and isinstance(size.meta.get("example_value"), torch.SymInt)


def calling_file(skip: str) -> str:
    """The file of the innermost function that Dynamo is tracing, the file `skip` left out."""
    frame: Any = sys._getframe()
    while frame is not None:
        translator = frame.f_locals.get("self")
        if isinstance(translator, InstructionTranslatorBase) and translator.f_code.co_filename != skip:
            return translator.f_code.co_filename
        frame = frame.f_back
    return ""


def size_now(size: Any) -> int | None:
    """A size in the graph that is captured, without a guard; None where only the data knows it."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def unknown_size() -> Any:
    """A size that an op makes of data, in its fake implementation.

    ``get_ctx().new_dynamic_size()`` breaks the graph, unless all of torch's own ops may have such sizes.
    """
    return allocate_size(torch.library.get_ctx()._shape_env)


def take_over_size(node: fx.Node, maker: fx.Node | None) -> None:
    """Says that the first dimension of a new node is the size, known only to the data, that another one made so far."""
    bindings = maker.meta.get("unbacked_bindings") if maker is not None else None
    if bindings:
        taken: dict[Any, Any] = {symbol: (path[0], pytree.SequenceKey(0)) for symbol, path in bindings.items()}
        node.meta["unbacked_bindings"] = taken


def own_symbol(size: torch.SymInt) -> Any:
    """The symbol that a size which only the data knows was given when it was made, whatever it was taken for later.

    None for other sizes.
    """
    made = size.node._expr
    return made if made.is_Symbol and free_unbacked_symbols(made) else None


def fresh_sizes(mode: Any) -> Any:
    """A block in which operations may make sizes that only the data knows, in fake values of the mode."""
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def plain_sizes(fakes: Sequence[Any]) -> dict[Any, tuple[int, int | None]]:
    """Symbols, and where each is found: the position of a fake tensor and its dimension, or that of a number."""
    found: dict[Any, tuple[int, int | None]] = {}
    for where, size in _symbolic(fakes):
        if size.node._expr.is_Symbol:
            found.setdefault(size.node._expr, where)
    return found


def assumed_sizes(fakes: Sequence[Any]) -> list[tuple[tuple[int, int | None], Any]]:
    """Sizes that only the data knows but that the capture took for other ones, and the expression for these."""
    found = []
    for where, size in _symbolic(fakes):
        if free_unbacked_symbols(size.node._expr) and size.node._expr != size.node.expr:
            found.append((where, size.node.expr))
    return found


def _symbolic(fakes: Sequence[Any]) -> Iterator[tuple[tuple[int, int | None], torch.SymInt]]:
    for at, fake in enumerate(fakes):
        sizes = enumerate(fake.shape) if isinstance(fake, Tensor) else [(None, fake)]
        yield from (((at, dim), size) for dim, size in sizes if isinstance(size, torch.SymInt))


def unknown_number() -> Any:
    """An integer of any sign that an op makes of data, in its fake implementation."""
    environment = torch.library.get_ctx()._shape_env
    if environment is None or not environment.allow_dynamic_output_shape_ops:
        return torch.library.get_ctx().new_dynamic_size()  # raises what breaks the graph
    return environment.create_unbacked_symint()


def tracked_input_name(fake: Tensor) -> str | None:
    """The source (``L['args'][0]``) of a fake tensor that is an input of the running Dynamo trace."""
    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is traced in this thread
        return None
    for tracked in tx.output.tracked_fakes:
        if tracked.fake is fake:
            return source_name(tracked.source)
    return None


def source_name(source: Any) -> str:
    """A Dynamo source as Python text; a method up to torch 2.12, a property later."""
    name = source.name
    return str(name() if callable(name) else name)


def placeholders_as_fakes(gm: fx.GraphModule) -> list[Any]:
    """The fake tensors and symbolic sizes that Dynamo traced a graph's inputs with."""
    return [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]


def trace_aten(gm: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """Traces a Dynamo graph into aten ops, above autograd: composite ops such as batch norm stay whole."""
    mode = next((f.fake_mode for f in fakes if isinstance(f, torch._subclasses.FakeTensor)), None)

    def run(*args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(gm).run(*args)

    with mode or backend_fake_mode():
        return make_fx(run, pre_dispatch=True)(*fakes)


def backend_fake_mode() -> Any:
    """The fake mode that Inductor compiles the current graph under."""
    return TracingContext.get().fake_mode


def compile_inductor(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Hands a graph to Inductor. What comes back is called where Dynamo is off already."""
    compiled: Any = compile_fx(gm, list(inputs), config_patches=options)
    # Without the wrapper that turns Dynamo off: it costs as much as a launch.
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)  # type: ignore[no-any-return]


def run_op_by_op(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Differentiates a graph as Inductor would be given it, and runs it uncompiled."""

    def as_traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=as_traced, bw_compiler=as_traced)(gm, inputs)


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor settings behind ``torch.compile(mode=...)``."""
    return dict(torch._inductor.list_mode_options(mode, True)) if mode not in (None, "default") else {}


def inductor_option_names() -> set[str]:
    """Names of Inductor's own settings."""
    return set(torch._inductor.config.get_config_copy())


def static_cuda_launch() -> Callable[..., None] | None:
    """How Inductor launches a compiled Triton kernel: ``(function, grid x, y, z, warps, shared memory, types of the
    arguments, arguments, stream)``; None in a torch without CUDA.
    """
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    return getattr(launcher, "_launch_kernel", None)


def counters() -> Any:
    """Dynamo's counters of graph breaks and captured graphs."""
    return torch._dynamo.utils.counters
