"""Everything gnncompile needs of torch that is not public API, in one place."""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import operator
import os
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as shape_config_module
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import InternalTorchDynamoError, SkipFrame, Unsupported
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.compile_fx import compile_fx
from torch._library.fake_impl import allocate_size
from torch._subclasses import fake_impls
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

__all__ = [
    "ADJACENCY",
    "CAPTURE_ERRORS",
    "EDGE_INDEX",
    "AsksForEmptiness",
    "NeedsOriginal",
    "StorageWeakRef",
    "assumed_sizes",
    "backend_fake_mode",
    "calling_file",
    "compile_inductor",
    "copy_of",
    "counters",
    "current_backend",
    "current_device",
    "current_stream",
    "decide_slices",
    "decompose",
    "extras_of_replica",
    "fresh_sizes",
    "graph_breaks",
    "guards_on",
    "has_hooks",
    "identified",
    "inductor_mode_options",
    "inductor_option_names",
    "input_source",
    "inside_an_op_with_autograd",
    "keep_graphs_whole",
    "keep_strides_symbolic",
    "keep_versions",
    "keep_with",
    "keeps_graph",
    "kept_with",
    "leave_layouts_open",
    "make_capturable",
    "notice_emptiness_questions",
    "notice_use_as",
    "object_of",
    "own_symbol",
    "placeholders_as_fakes",
    "plain_sizes",
    "prepare_inductor",
    "run_op_by_op",
    "run_uncompiled",
    "saved_tensors",
    "size_now",
    "source_name",
    "static_cuda_launch",
    "substitute_attribute",
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
    "use_original",
    "valid_capture",
    "wait_for_vectors",
    "without_base",
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


def leave_layouts_open() -> None:
    """Keeps torch from guarding on sizes of 1 in order to know strides, in compiles of ours.

    Whether a tensor is contiguous its C++ code works out with a guard per dimension if all sizes have a hint, which
    ``backed_size_oblivious`` was not made part of; without hints it asks only for what is certain. Whether a reshape is
    a view Inductor asks likewise, of a function that knows how to do without.
    """
    has_hint = SymNode.has_hint

    def asked(self: SymNode) -> bool:
        ours = _thread.patches is not None and not _thread.empty_is_special
        if ours and "has_hint" not in sys._getframe(1).f_code.co_names:  # by C++, not by a function of Python
            return False
        return has_hint(self)

    SymNode.has_hint = asked  # type: ignore[method-assign]
    compute = getattr(fake_impls, "_compute_stride", None)
    if compute is None:
        return

    def strides(shape: Any, stride: Any, wanted: Any, size_oblivious: bool = False) -> Any:
        found = None
        if _thread.patches is not None and not _thread.empty_is_special:
            found = compute(shape, stride, wanted, size_oblivious=True)
        return compute(shape, stride, wanted, size_oblivious=size_oblivious) if found is None else found

    fake_impls._compute_stride = strides  # type: ignore[assignment]


def decompose(op: torch._ops.OpOverload, ours: Callable[..., Any]) -> None:
    """Composite ops are traced as ``ours(ordinary, *args)`` in compiles of ours; `ordinary` is what torch does."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def ordinary(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(key, *args, **kwargs)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return ordinary(*args, **kwargs) if _thread.patches is None else ours(ordinary, *args, **kwargs)

    op.py_impl(key)(traced)


def decide_slices(active: Callable[[], bool]) -> None:
    """Where `active`, a slice that ends behind the last row or not is a guard, and its size is no secret of the data.

    With ``backed_size_oblivious`` it can't be told of any symbol.
    """
    original = fake_impls._compute_slice_index

    def decided(size: Any, index: Any) -> Any:
        now = size_now(index) if active() and size_now(size) is not None else None
        if now is None or now < 0:
            return original(size, index)
        # Both are guards, from which the environment learns what is asked next.
        return index if bool(index >= 0) and bool(index <= size) else size

    fake_impls._compute_slice_index = decided


def keep_strides_symbolic() -> None:
    """Makes Inductor report the strides of a forward's results as symbols, in compiles of ours.

    It would report those of the first call. The backward is compiled for them wherever it can't be told that they are
    what it expects, which with ``backed_size_oblivious`` it can't of any symbol: wrong gradients for other sizes.
    """
    evaluate = ShapeEnv.evaluate_symexpr

    def stride(self: ShapeEnv, code: str) -> Any:
        return evaluate(self, code) if _thread.patches is None else self.deserialize_symexpr(code)

    ShapeEnv.evaluate_symexpr = stride  # type: ignore[method-assign]


def keep_graphs_whole() -> None:
    """Keeps Dynamo from cutting the graph of a ``DistributedDataParallel``'s module in compiles of ours.

    It would be cut where a bucket of gradients ends, which is after 25 MiB; a region can't be cut.
    """
    active = DistributedDataParallel._get_active_ddp_module

    def module(cls: type[DistributedDataParallel]) -> DistributedDataParallel | None:
        return None if _thread.calls else cast(Any, active)()

    DistributedDataParallel._get_active_ddp_module = classmethod(module)  # type: ignore[assignment]


def extras_of_replica(replica: DistributedDataParallel) -> list[str]:
    """What a ``DistributedDataParallel`` was told to do beside averaging gradients and sending buffers."""
    found = {
        "register_comm_hook()": getattr(replica, "_comm_hooks", None),
        "a hook for buffers": hasattr(replica, "buffer_hook"),
        "mixed_precision": getattr(replica, "mixed_precision", None),
        "delay_all_reduce_named_params": getattr(replica, "_delay_all_reduce_params", None),
        "compiled autograd's reducer": getattr(replica, "_use_python_reducer", False),
        "register_post_accumulate_grad_hook()": any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in replica.parameters()
        ),
        "join()": replica._join_config.enable,
        "no_sync()": not replica.require_backward_grad_sync,
    }
    return [name for name, there in found.items() if there]


def has_hooks(tensor: Tensor) -> bool:
    """Whether functions of the user's are called with a tensor's gradient."""
    return bool(tensor._backward_hooks)


def keep_versions(tensors: Sequence[Tensor]) -> Any:
    """A block in which writing to these tensors goes unnoticed by autograd and by caches."""
    return cast(Any, torch.autograd)._unsafe_preserve_version_counter(tuple(tensors))


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
        if self.fn in _WHILE_TRACING:
            return _WHILE_TRACING[self.fn](*(arg.realize() for arg in args))
        ours = methods.get(self.fn)
        if ours is None or not active():
            return call(self, tx, args, kwargs)
        return call(UserFunctionVariable(cast(types.FunctionType, ours)), tx, [*self.self_args(), *args], kwargs)

    UserFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def substitute_attribute(kind: type, name: str, ours: Callable[..., Any], active: Callable[[], bool]) -> None:
    """Dynamo traces ``ours()`` in place of reading an attribute of a class of modules, where `active` says so."""
    getattr_ = UnspecializedNNModuleVariable.var_getattr

    def var_getattr(self: Any, tx: Any, asked: str) -> Any:
        if asked == name and isinstance(self.value, kind) and active():
            return UserFunctionVariable(cast(types.FunctionType, ours)).call_function(tx, [], {})
        return getattr_(self, tx, asked)

    UnspecializedNNModuleVariable.var_getattr = var_getattr  # type: ignore[method-assign,assignment]


EDGE_INDEX, ADJACENCY = "gnncompile_edge_index", "gnncompile_adjacency"
"""What may be kept with a tensor in a captured graph."""


def keep_with(value: Tensor, others: Any, kind: str) -> None:
    """While Dynamo traces: :func:`kept_with` of this tensor will be `others`. Otherwise nothing."""


def kept_with(value: Any, kind: str) -> Any:
    """While Dynamo traces: what was kept with a tensor, or None."""


def identified(value: Any) -> int:
    """While Dynamo traces: the number by which :func:`object_of` finds this object later, the same for this one only;
    another one in its place is captured anew.
    """
    return id(value)


def _identified(value: Any) -> Any:
    install_guard(value.source.make_guard(GuardBuilder.ID_MATCH))
    _objects[id(value.value)] = value.value
    return ConstantVariable.create(id(value.value))


_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def object_of(number: int) -> Any:
    """The object that :func:`identified` gave this number."""
    return _objects[number]


def use_original(name: str) -> None:
    """While Dynamo traces: raises :class:`NeedsOriginal`."""


def _keep_with(value: Any, others: Any, kind: Any) -> Any:
    value.as_proxy().node.meta[kind.as_python_constant()] = others
    return ConstantVariable.create(None)


def _kept_with(value: Any, kind: Any) -> Any:
    kept = _kept(value, kind.as_python_constant())
    return ConstantVariable.create(None) if kept is None else kept


def _kept(value: Any, kind: str) -> Any:
    return value.as_proxy().node.meta.get(kind) if isinstance(value, TensorVariable) else None


def _use_original(name: Any) -> Any:
    raise NeedsOriginal(None, name.as_python_constant())


_WHILE_TRACING: dict[Callable[..., Any], Callable[..., Any]] = {
    keep_with: _keep_with,
    kept_with: _kept_with,
    identified: _identified,
    use_original: _use_original,
}
"""Functions that Dynamo does not trace: they are called with its variables."""


class NeedsOriginal(BaseException):
    """A model asks a tensor for what only the subclass or layout has that the caller passed (`kind`; None is any).

    Not an Exception: Dynamo must not turn it into a graph break.
    """

    def __init__(self, kind: Any, name: str) -> None:
        super().__init__(kind, name)
        self.kind, self.name = kind, name


_SHAPE = {"size", "dim", "shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "numel", "get_device"}
_SPARSE = {"layout": torch.sparse_coo, "is_sparse": True, "is_sparse_csr": False}


def notice_use_as(kind: type, sparse_methods: Mapping[str, Callable[..., Any]]) -> None:
    """Makes a model raise :class:`NeedsOriginal` that uses what plain tensors in a captured graph can't stand for.

    Args:
        kind: A subclass of tensors whose names beyond a tensor's are noticed, on a tensor kept as an edge list.
        sparse_methods: What is traced as methods of a tensor kept as a sparse matrix, which has no others.
    """
    names = {name for name in dir(kind) if not name.startswith("_") and not hasattr(Tensor, name)}
    getattr_, method = TensorVariable.var_getattr, TensorVariable.call_method

    def ask(value: Any, name: str) -> bool:
        """Whether a tensor is a matrix."""
        if name in names and _kept(value, EDGE_INDEX) is not None:
            raise NeedsOriginal(kind, name)
        return _kept(value, ADJACENCY) is not None

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if ask(self, name):
            if name in _SPARSE:
                return ConstantVariable.create(_SPARSE[name])
            if name not in _SHAPE and name not in sparse_methods:
                raise NeedsOriginal(None, name)
        return getattr_(self, tx, name)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if ask(self, name) and name not in _SHAPE:
            if name not in sparse_methods or args or kwargs:
                raise NeedsOriginal(None, name)
            traced = UserFunctionVariable(cast(types.FunctionType, sparse_methods[name]))
            return traced.call_function(tx, [self], {})
        return method(self, tx, name, args, kwargs)

    TensorVariable.var_getattr, TensorVariable.call_method = var_getattr, call_method  # type: ignore[method-assign]


def substitute_construction(kind: type, ours: Callable[..., Any], active: Callable[[], bool]) -> None:
    """Dynamo traces ``ours(cls, ...)`` in place of ``cls(...)``, for a class and those below it, where `active`
    says so.
    """
    call = UserDefinedClassVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if issubclass(self.value, kind) and active():
            return UserFunctionVariable(cast(types.FunctionType, ours)).call_function(tx, [self, *args], kwargs)
        return call(self, tx, args, kwargs)

    UserDefinedClassVariable.call_function = call_function  # type: ignore[method-assign]


def substitute_largest(segments: Any, sized: Any, active: Callable[[], bool]) -> None:
    """Dynamo traces ``segments(index) - 1`` in place of ``int(index.max())`` of an input, where `active` says so; of an
    edge list, what is largest of both rows.

    Args:
        segments: An op from an index to the number of its segments, a size.
        sized: An op that returns its first argument, an input.
        active: Whether to.
    """
    item = TensorVariable.method_item

    def method_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        rows = _maximum_of(self.as_proxy().node) if active() else []
        if not rows or any(row.op != "placeholder" and row.target is not sized for row in rows):
            return item(self, tx, *args, **kwargs)

        def call(target: Callable[..., Any], *values: Any) -> Any:
            return tx.output.create_proxy("call_function", target, values, {})

        proxies = [call(segments, fx.Proxy(row, self.as_proxy().tracer)) for row in rows]
        counts = [wrap_fx_proxy(tx, proxy).as_proxy() for proxy in proxies]
        most = functools.reduce(
            lambda one, other: wrap_fx_proxy(tx, call(torch.sym_max, one, other)).as_proxy(), counts
        )
        return SymNodeVariable.create(tx, call(operator.sub, most, 1))

    TensorVariable.method_item = method_item  # type: ignore[method-assign]


def _maximum_of(node: fx.Node) -> list[fx.Node]:
    """The integers whose largest a node is, row by row where these were just put together; none if it is none."""
    if node.target not in ("max", torch.max, torch.amax) or len(node.args) != 1 or node.kwargs:
        return []
    index: Any = node.args[0]
    if _is_row(index):
        index = index.args[0].args[0][index.args[1]]
    rows = list(index.args[0]) if _is_stack(index) else [index]
    return rows if all(_is_whole(row.meta.get("example_value")) for row in rows) else []


def _is_whole(found: Any) -> bool:
    """Whether a value is a tensor of integers."""
    whole = isinstance(found, Tensor) and not found.is_floating_point() and not found.is_complex()
    return whole and found.dtype != torch.bool


def _is_row(node: fx.Node) -> bool:
    """Whether a node takes one of the tensors again that were just put together."""
    return node.target is operator.getitem and isinstance(node.args[1], int) and _is_stack(node.args[0])


def _is_stack(node: Any) -> bool:
    return node.target is torch.stack and len(node.args) == 1 and not node.kwargs


class AsksForEmptiness(BaseException):
    """A model asks whether one of its tensors is empty.

    Not an Exception: Dynamo must not turn it into a graph break.
    """


def notice_emptiness_questions(libraries: tuple[str, ...]) -> None:
    """Makes compiles inside :class:`symbolic_counts` raise :class:`AsksForEmptiness` unless empty sizes are special.

    Torch takes symbols of sizes for positive, even where it is told that 0 is nothing special: it would answer
    ``n > 0`` and ``if n`` without a guard, and take ``max(n, 1)`` for ``n``.

    Args:
        libraries: Folders of code whose questions are left alone: they save work on what is empty, or look for a
            maximum, for which gnncompile has other ways.
    """
    start, create = SymNodeVariable.__init__, SymNodeVariable.create.__func__  # type: ignore[attr-defined]

    def notice(node: fx.Node, result: Any, file: Callable[[], str]) -> None:
        if not _thread.calls or _thread.empty_is_special or not _is_wrong_for_empty(node, result):
            return
        if not (isinstance(result, (bool, torch.SymBool)) and left_alone(file())):
            raise AsksForEmptiness

    def left_alone(file: str) -> bool:
        return file.startswith(libraries) and "polyfills" not in file  # these are what users' built-ins are traced as

    def watched_start(self: Any, proxy: Any, sym_num: Any, **kwargs: Any) -> None:
        start(self, proxy, sym_num, **kwargs)
        notice(proxy.node, sym_num, lambda: calling_file(skip=""))

    def watched_create(cls: Any, tx: Any, proxy: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(cls, tx, proxy, *args, **kwargs)
        if made.is_python_constant():
            notice(proxy.node, made.as_python_constant(), lambda: tx.f_code.co_filename)
        return made

    def watched_bool(size: Any) -> bool:
        tested: Any = sys._getframe(1).f_locals
        number = getattr(tested.get("value"), "sym_num", None)
        watching = _thread.calls and not _thread.empty_is_special
        asks = watching and isinstance(number, torch.SymInt) and _may_be_empty(number)
        if asks and not left_alone(tested["self"].f_code.co_filename):
            raise AsksForEmptiness
        return bool(guard(size))

    def watched_evaluation(self: Any, expr: Any, *args: Any, **kwargs: Any) -> Any:
        found = evaluate(self, expr, *args, **kwargs)
        watching = _thread.calls and not _thread.empty_is_special
        if watching and isinstance(expr, sympy.Expr) and expr.free_symbols and sympy.Eq(expr, found) == sympy.false:
            raise AsksForEmptiness  # the guard would never hold: a number of positive sizes is not what it is for 0
        return found

    evaluate = ShapeEnv.evaluate_expr
    ShapeEnv.evaluate_expr = watched_evaluation  # type: ignore[method-assign,assignment]
    SymNodeVariable.__init__ = watched_start  # type: ignore[method-assign]
    SymNodeVariable.create = classmethod(watched_create)  # type: ignore[method-assign,assignment]
    guard: Any = getattr(symbolic_convert, "guard_bool", None)  # what an `if` asks of a size
    if guard is not None:
        symbolic_convert.guard_bool = watched_bool  # type: ignore[attr-defined,assignment]


_SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)


def _symbols(number: Any) -> set[Any]:
    """The sizes in a symbolic number: torch takes them for positive."""
    if not isinstance(number, _SYMBOLIC):
        return set()
    return {s for s in getattr(number.node.expr, "free_symbols", ()) if s.is_positive}


def _may_be_empty(number: torch.SymInt) -> bool:
    """Whether a size that counts as positive is 0 where all the sizes in it are."""
    symbols = _symbols(number)
    try:
        return bool(symbols) and _at(number, dict.fromkeys(symbols, 0)) == 0
    except (ArithmeticError, TypeError, ValueError):
        return True


def _at(number: Any, sizes: Mapping[Any, int]) -> Any:
    """What a number is where sizes are these."""
    if not isinstance(number, _SYMBOLIC):
        return number
    found = number.node.expr.xreplace({s: sympy.Integer(n) for s, n in sizes.items()})
    kind: Any = number.node.pytype
    return kind(found)


def _is_wrong_for_empty(node: fx.Node, result: Any) -> bool:
    """Whether an operation on sizes gave what it would not give if some were 0."""
    if node.op not in ("call_function", "call_method") or node.kwargs:
        return False
    args = fx.map_arg(node.args, lambda n: n.meta.get("example_value"))
    if not all(isinstance(a, (bool, int, float, torch.SymInt, torch.SymFloat)) for a in args):
        return False
    symbols = set().union(*map(_symbols, args))
    target: Any = node.target if node.op == "call_function" else getattr(operator, str(node.target), None)
    if not symbols or target is None:
        return False
    for empty in [{s} for s in symbols] + [symbols]:
        sizes = {s: 0 if s in empty else _ORDINARY for s in _all_symbols([*args, result])}
        try:
            if target(*(_at(a, sizes) for a in args)) != _at(result, sizes):
                return True
        except (ArithmeticError, TypeError, ValueError):  # an error for empty sizes, in eager too
            continue
    return False


_ORDINARY = 7
"""Some size that is not special."""


def _all_symbols(numbers: Sequence[Any]) -> set[Any]:
    symbolic = [n.node.expr for n in numbers if isinstance(n, _SYMBOLIC)]
    return set().union(*(getattr(expr, "free_symbols", ()) for expr in symbolic))


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


def guards_on(mode: Any, symbols: Collection[Any]) -> list[Any]:
    """What was asked about sizes so far, as far as it is about these symbols, as expressions.

    In terms of what sizes turned out to be the same as, but for comparisons with numbers that are no sizes.
    """
    env, found = mode.shape_env, []
    for guard in env.guards:
        replaced = env.replace(guard.expr)
        about = {s for symbol in guard.expr.free_symbols for s in env.replace(symbol).free_symbols}
        if not about.isdisjoint(symbols):
            found.append(replaced if all(_is_size(env, s) for s in guard.expr.free_symbols) else guard.expr)
    return found


def _is_size(env: ShapeEnv, symbol: Any) -> bool:
    """Whether a symbol stands for a size of a tensor, and not for a number among the arguments."""
    sources = env.var_to_sources.get(symbol, ())
    return any(isinstance(source, TensorPropertySource) for source in sources)


def unknown_size() -> Any:
    """A size that an op makes of data, in its fake implementation.

    ``get_ctx().new_dynamic_size()`` breaks the graph, unless all of torch's own ops may have such sizes.
    """
    return allocate_size(torch.library.get_ctx()._shape_env)


def without_base(tensor: Tensor) -> Tensor:
    """The same memory as no view: Dynamo guards the sizes of what a view is one of."""
    return tensor.detach() if tensor._is_view() else tensor


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


def input_source(node: fx.Node) -> str:
    """Where an input of a Dynamo graph comes from, as Python text: ``L['args'][0]``; its name where that is unknown."""
    source = getattr(node, "_dynamo_source", None)
    return node.name if source is None else source_name(source)


def placeholders_as_fakes(gm: fx.GraphModule) -> list[Any]:
    """The fake tensors and symbolic sizes that Dynamo traced a graph's inputs with."""
    return [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]


@contextmanager
def inside_an_op_with_autograd() -> Iterator[None]:
    """Lets autograd watch what an op's own kernel does: by then dispatch is below autograd."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        exclude = exclude.remove(torch._C._dispatch_key_parse(key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


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


def prepare_inductor(for_cpu: bool) -> None:
    """Starts, beside the capture of a graph, what Inductor will wait for once in every process.

    These are hashes of torch's and Triton's files, for the keys of its caches, and a trial of which vector instructions
    the C++ compiler knows: it builds four files in an empty cache folder, and loads each in a process of its own.

    Args:
        for_cpu: Whether there is anything to compile for the CPU.
    """
    _begin("keys", _keys)
    if for_cpu:
        _begin("vectors", lambda: cpu_vec_isa.valid_vec_isa_list())


_preparing: dict[str, threading.Thread] = {}


def _begin(name: str, task: Callable[[], Any]) -> None:
    if name not in _preparing:
        context = contextvars.copy_context()  # settings of torch belong to a thread
        _preparing[name] = threading.Thread(target=context.run, args=(_quietly, task), daemon=True)
        _preparing[name].start()


def _quietly(task: Callable[[], Any]) -> None:
    with suppress(Exception):  # whoever needs the result will run into the same error
        task()


def _keys() -> None:
    codecache.torch_key()
    getattr(codecache, "triton_key", lambda: None)()  # some releases of torch have it elsewhere


def wait_for_vectors() -> None:
    """Makes all compiles in this process wait for a trial that runs already: it must not run twice at once."""
    find: Any = cpu_vec_isa.valid_vec_isa_list

    @functools.wraps(find)
    def found() -> Any:
        thread = _preparing.get("vectors")
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        return find()

    found.cache_clear = find.cache_clear  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list = found  # type: ignore[assignment]


def run_op_by_op(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Differentiates a graph as Inductor would be given it, and runs it uncompiled."""

    def as_traced(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=as_traced, bw_compiler=as_traced)(gm, inputs)


def run_uncompiled(fn: Callable[..., Any]) -> None:
    """Dynamo leaves a function, and all that it calls, to Python from now on, where it does not inline it."""
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def inductor_mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor settings behind ``torch.compile(mode=...)``."""
    return dict(torch._inductor.list_mode_options(mode, True)) if mode not in (None, "default") else {}


def inductor_option_names() -> set[str]:
    """Names of Inductor's own settings."""
    return set(torch._inductor.config.get_config_copy())


def current_device() -> int:
    """The index of the current GPU; torch's public way asks first whether CUDA is initialised."""
    return int(torch._C._cuda_getDevice())


def current_stream(device: int) -> int:
    """The handle of a GPU's current stream: the public way makes an object of it first."""
    return torch._C._cuda_getCurrentRawStream(device)


def keeps_graph() -> bool:
    """Whether the running backward was asked to leave its graph for another one (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Lets an optimizer of parameters on a GPU keep there what changes from step to step: learning rates, counts.

    Where the user has not chosen how it is computed, it is by fused kernels, if there are any. Changes nothing of an
    optimizer that can do neither.
    """
    for group in optimizer.param_groups:
        fused = type(optimizer) in _FUSED and _fuse(group, optimizer)
        if not fused and "capturable" not in group:
            continue
        if "capturable" in group:
            group["capturable"] = True
        double = any(p.dtype == torch.float64 for p in group["params"])
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64 if double else torch.float32, device=device)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0})
    # Steps that are not recorded are meant to be.
    optimizer._warned_capturable_if_run_uncaptured = True


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _fuse(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    # Fused kernels take the learning rate in float32.
    fit = all(p.dtype != torch.float64 and (p.grad is None or not p.grad.is_sparse) for p in group["params"])
    if fit and group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
        group["fused"] = True
        setattr(optimizer, "_step_supports_amp_scaling", True)  # noqa: B010  (torch does not declare it)
    return bool(group["fused"])


def saved_tensors(results: Sequence[Tensor]) -> list[Tensor]:
    """What compiled code keeps for the backward of its results."""
    kept: list[Tensor] = []
    for node in {r.grad_fn for r in results}:
        reached: list[Any] = [node]
        while reached:
            node = reached.pop()
            kept += [*getattr(node, "saved_tensors", ()), *getattr(node, "_tensors_no_vc_check", ())]
            reached += [n for n, _ in getattr(node, "next_functions", ()) if n is not None]
    return kept


def valid_capture(fn: types.FunctionType, arguments: Mapping[str, Any]) -> Any:
    """The compiled form of a function whose guards hold for these arguments."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    frame = {**arguments, **{name: cell.cell_contents for name, cell in cells}}
    for found in _debug_get_cache_entry_list(fn.__code__):
        if found.guard_manager.check(frame):
            return found.guard_manager
    return None


def static_cuda_launch() -> Callable[..., None] | None:
    """How Inductor launches a compiled Triton kernel: ``(function, grid x, y, z, warps, shared memory, types of the
    arguments, arguments, stream)``; None in a torch without CUDA.
    """
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    return getattr(launcher, "_launch_kernel", None)


CAPTURE_ERRORS = (
    torch._dynamo.exc.Unsupported,
    torch._dynamo.exc.UserError,
    torch._dynamo.exc.TorchRuntimeError,
    torch._dynamo.exc.FailOnRecompileLimitHit,
)
"""What Dynamo raises where a whole graph is wanted and it can't capture one."""


def graph_breaks() -> int:
    """How many graph breaks Dynamo has counted."""
    return sum(counters()["graph_break"].values())


def counters() -> Any:
    """Dynamo's counters of graph breaks and captured graphs."""
    return torch._dynamo.utils.counters


def shared_bytes(length: int) -> Tensor:
    """Memory that goes to another process as it is, uint8 ``[length]``; ``share_memory_`` would copy it."""
    storage = torch.UntypedStorage._new_shared(length, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)
