"""Makes Dynamo trace substitutes in place of methods, constructors and attributes."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from gnncompile._compat.capture_settings import current_settings
from gnncompile._compat.recapture import Recapture, Setting


def substitute_methods(methods: Mapping[Callable[..., Any], Callable[..., Any]], active: Callable[[], bool]) -> None:
    """Makes Dynamo trace ``methods[f](self, ...)`` in place of ``self.f(...)``, if `active` returns True.

    ``torch.compiler.substitute_in_graph`` is for functions: Dynamo does not consult it for methods.
    """
    for kind in (UserFunctionVariable, UserMethodVariable):  # up to torch 2.14, the second is a subclass of the first
        _substitute_in_calls(kind, methods, active)


def _substitute_in_calls(
    kind: Any, methods: Mapping[Callable[..., Any], Callable[..., Any]], active: Callable[[], bool]
) -> None:
    call = kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        fn: Any = getattr(getattr(self, "im_func", self), "fn", None)  # from torch 2.15 on, a method holds its function
        if fn in _WHILE_TRACING:
            return _WHILE_TRACING[fn](*(arg.realize() for arg in args))
        ours = methods.get(fn)
        if ours is None or not active():
            return call(self, tx, args, kwargs)
        traced = UserFunctionVariable(cast(types.FunctionType, ours))
        return traced.call_function(tx, [*self.self_args(), *args], kwargs)

    kind.call_function = call_function


_READ = "var_getattr" if hasattr(TensorVariable, "var_getattr") else "tp_getattro_impl"
"""The name of the method that reads an attribute of a variable while Dynamo traces. It changes after torch 2.13."""


EDGE_INDEX, ADJACENCY = "gnncompile_edge_index", "gnncompile_adjacency"
"""The kinds of values that :func:`keep_with` attaches to a tensor in a captured graph."""


def keep_with(value: Tensor, others: Any, kind: str) -> None:
    """While Dynamo traces: attaches the value `others` to a tensor, for :func:`kept_with`. Otherwise does nothing."""


def kept_with(value: Any, kind: str) -> Any:
    """While Dynamo traces: returns the value that :func:`keep_with` attached to a tensor, or None."""


def identified(value: Any) -> int:
    """While Dynamo traces: returns a number by which :func:`object_of` finds this object later.

    No other object has the number. The object is guarded by identity, so another object in its place is captured anew.
    """
    return id(value)


def _identified(value: Any) -> Any:
    install_guard(value.source.make_guard(GuardBuilder.ID_MATCH))
    _objects[id(value.value)] = value.value
    return ConstantVariable.create(id(value.value))


_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def object_of(number: int) -> Any:
    """Returns the object for which :func:`identified` returned this number."""
    return _objects[number]


def break_at(layer: Any, name: str, why: str) -> None:
    """While Dynamo traces: from now on, the graph breaks where this attribute of a module is read."""


def _break_at(layer: Any, name: Any, why: Any) -> Any:
    layer.__class__ = _breaking(layer.__class__, name.as_python_constant(), why)
    return ConstantVariable.create(None)


def _breaking(theirs: Any, name: str, why: Any) -> Any:
    """Returns the class of Dynamo's variables whose attribute `name` breaks the graph."""

    def read(self: Any, tx: Any, asked: str) -> Any:
        if asked == name:
            return UserFunctionVariable(cast(types.FunctionType, _broken)).call_function(tx, [why], {})
        return getattr(theirs, _READ)(self, tx, asked)

    return type(theirs)(theirs.__name__, (theirs,), {_READ: read, "__module__": __name__})


def _broken(why: str) -> None:
    torch._dynamo.graph_break(msg=why)


def use_original(name: str) -> None:
    """While Dynamo traces: raises what :func:`needs_original` returns."""


def is_watched(layer: Any) -> bool:
    """While Dynamo traces: whether the backend's `watched` contains this module."""
    return False


def refuse_layer(layer: Any) -> None:
    """While Dynamo traces: asks for the hooks of a layer to be checked before each call. Raises :class:`Recapture`."""


def _is_watched(layer: Any) -> Any:
    return ConstantVariable.create(getattr(layer, "value", None) in current_settings().watched)


def _refuse_layer(layer: Any) -> Any:
    found = getattr(layer, "value", None)
    reason = f"{type(found).__name__} has hooks of PyG's, or is being explained: call it uncompiled"
    raise Recapture(Setting.WATCHED_LAYERS, found, reason)


def _keep_with(value: Any, others: Any, kind: Any) -> Any:
    value.as_proxy().node.meta[kind.as_python_constant()] = others
    return ConstantVariable.create(None)


def _kept_with(value: Any, kind: Any) -> Any:
    kept = _kept(value, kind.as_python_constant())
    return ConstantVariable.create(None) if kept is None else kept


def _kept(value: Any, kind: str) -> Any:
    return value.as_proxy().node.meta.get(kind) if isinstance(value, TensorVariable) else None


def _use_original(name: Any) -> Any:
    raise needs_original(name.as_python_constant())


_WHILE_TRACING: dict[Callable[..., Any], Callable[..., Any]] = {
    keep_with: _keep_with,
    kept_with: _kept_with,
    identified: _identified,
    break_at: _break_at,
    use_original: _use_original,
    is_watched: _is_watched,
    refuse_layer: _refuse_layer,
}
"""Functions that Dynamo does not trace. It calls the values of this dict with its variables instead."""


def needs_original(name: str, kind: Any = None) -> Recapture:
    """Returns what to raise if a model uses a name of a tensor that only the user's own tensor has.

    Args:
        name: The name of a method, an attribute or a function.
        kind: The class or layout of the user's tensor, which is an input. None stands for a sparse matrix, which may
            be one that the model made.
    """
    reason = f"the model uses `{name}`"
    if kind is None:
        return Recapture(Setting.MADE_MATRICES, False, reason)
    return Recapture(Setting.UNCOMPILED_INPUTS, kind, reason)


_SHAPE = {"size", "dim", "shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "numel", "get_device"}

_SPARSE = {"layout": torch.sparse_coo, "is_sparse": True, "is_sparse_csr": False}


def notice_use_as(kind: type, sparse_methods: Mapping[str, Callable[..., Any]]) -> None:
    """Makes Dynamo raise :class:`Recapture` if a model uses a name that a plain tensor can't stand for.

    Args:
        kind: A tensor subclass. Names that it has beyond a tensor's are noticed on a tensor kept as an edge list.
        sparse_methods: Substitutes for methods of a tensor kept as a sparse matrix, by name. Such a tensor has no other
            methods.
    """
    names = {name for name in dir(kind) if not name.startswith("_") and not hasattr(Tensor, name)}
    getattr_, method = getattr(TensorVariable, _READ), TensorVariable.call_method

    def ask(value: Any, name: str) -> bool:
        """Whether a tensor is kept as a sparse matrix."""
        if name in names and _kept(value, EDGE_INDEX) is not None:
            raise needs_original(name, kind)
        return _kept(value, ADJACENCY) is not None

    def read(self: Any, tx: Any, name: str) -> Any:
        if ask(self, name):
            if name in _SPARSE:
                return ConstantVariable.create(_SPARSE[name])
            if name not in _SHAPE and name not in sparse_methods:
                raise needs_original(name)
        return getattr_(self, tx, name)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if ask(self, name) and name not in _SHAPE:
            if name not in sparse_methods or args or kwargs:
                raise needs_original(name)
            traced = UserFunctionVariable(cast(types.FunctionType, sparse_methods[name]))
            return traced.call_function(tx, [self], {})
        return method(self, tx, name, args, kwargs)

    setattr(TensorVariable, _READ, read)
    TensorVariable.call_method = call_method  # type: ignore[method-assign]


def substitute_construction(kind: type, ours: Callable[..., Any], active: Callable[[], bool]) -> None:
    """Makes Dynamo trace ``ours(cls, ...)`` in place of ``cls(...)``, for a class and its subclasses.

    The substitute is traced if `active` returns True.
    """
    call = UserDefinedClassVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if issubclass(self.value, kind) and active():
            return UserFunctionVariable(cast(types.FunctionType, ours)).call_function(tx, [self, *args], kwargs)
        return call(self, tx, args, kwargs)

    UserDefinedClassVariable.call_function = call_function  # type: ignore[method-assign]


def substitute_largest(segments: Any, markers: Collection[Any], active: Callable[[], bool]) -> None:
    """Makes Dynamo trace ``segments(index) - 1`` in place of ``int(index.max())`` of an input.

    This holds if `active` returns True. For an edge list, the largest of both rows is taken.

    Args:
        segments: An op from an index to the number of its segments, a size.
        markers: Ops that return one input or several inputs.
        active: Whether to substitute.
    """
    method = TensorVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        rows = _maximum_of(self.as_proxy().node) if name == "item" and active() else []
        if not rows or not all(_is_input(row, markers) for row in rows):
            return method(self, tx, name, args, kwargs)

        def call(target: Callable[..., Any], *values: Any) -> Any:
            return tx.output.create_proxy("call_function", target, values, {})

        proxies = [call(segments, fx.Proxy(row, self.as_proxy().tracer)) for row in rows]
        counts = [wrap_fx_proxy(tx, proxy).as_proxy() for proxy in proxies]
        most = functools.reduce(
            lambda one, other: wrap_fx_proxy(tx, call(torch.sym_max, one, other)).as_proxy(), counts
        )
        return SymNodeVariable.create(tx, call(operator.sub, most, 1))

    TensorVariable.call_method = call_method  # type: ignore[method-assign]


def _is_input(node: fx.Node, markers: Collection[Any]) -> bool:
    made = node.args[0] if node.target is operator.getitem else node
    return isinstance(made, fx.Node) and (made.op == "placeholder" or made.target in markers)


def _maximum_of(node: fx.Node) -> list[fx.Node]:
    """Returns the integer tensors of which a node is the maximum, or an empty list.

    If the tensors were just stacked, the list holds each of them.
    """
    if node.target not in ("max", torch.max, torch.amax) or len(node.args) != 1 or node.kwargs:
        return []
    index: Any = _unrepeated(node.args[0])
    if _is_row(index):
        index = index.args[0].args[0][index.args[1]]
    rows = list(index.args[0]) if _is_stack(index) else [index]
    return rows if all(_is_whole(row.meta.get("example_value")) for row in rows) else []


_SAME_NUMBERS = {
    *("view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "clone", "detach", "long"),
    *("expand", "expand_as", "broadcast_to", "repeat", "t", "transpose", "permute"),
}
"""Methods and functions of tensors whose results hold the same integers as their first argument, repeated or not."""


def _unrepeated(node: Any) -> Any:
    """Returns the tensor that an integer tensor repeats or shows in another shape."""
    while isinstance(node, fx.Node) and node.args and isinstance(node.args[0], fx.Node):
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op not in ("call_method", "call_function") or not (name in _SAME_NUMBERS or _adds_axes(node)):
            break
        if not _is_whole(node.args[0].meta.get("example_value")):
            break
        node = node.args[0]
    return node


def _adds_axes(node: fx.Node) -> bool:
    """Whether a node takes a full tensor and adds axes: ``index[:, None]``."""
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    return all(part is None or part is Ellipsis or part == slice(None) for part in node.args[1])


def _is_whole(found: Any) -> bool:
    """Whether a value is a tensor of integers."""
    whole = isinstance(found, Tensor) and not found.is_floating_point() and not found.is_complex()
    return whole and found.dtype != torch.bool


def _is_row(node: fx.Node) -> bool:
    """Whether a node takes a tensor back out of a stack of tensors."""
    return node.target is operator.getitem and isinstance(node.args[1], int) and _is_stack(node.args[0])


def _is_stack(node: Any) -> bool:
    return node.target is torch.stack and len(node.args) == 1 and not node.kwargs
