"""Answers questions about sizes that Inductor asks while it lowers, without guards, in gnncompile's compiles."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir, utils
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import ModularIndexing

from gnncompile._compat.inductor import ours

_ORDINARY = 64
"""The number used in place of a size of 0 or 1, or of a data-dependent size."""


def patch_get_fill_order() -> None:
    """Makes Inductor order strides as if no size were 0 or 1, in gnncompile's compiles.

    Inductor orders strides by guards, though the order is only a preference. Attention asks for an order of its mask,
    and a graph of one node would be captured on its own.
    """
    ordinary: Any = ir.get_fill_order

    @functools.wraps(ordinary)
    def get_fill_order(seq: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        numbers = [_number(stride) for stride in seq] if ours() else [None]
        return ordinary(seq, *args, **kwargs) if None in numbers else utils.argsort(numbers)

    ir.get_fill_order = get_fill_order


def _number(stride: Any) -> int | None:
    """Returns a stride as a number, with ordinary sizes in place of 0 and 1.

    Returns None if the stride also depends on other values.
    """
    if isinstance(stride, int):
        return stride
    expr = stride.node.expr if isinstance(stride, torch.SymInt) else stride
    env = V.graph.sizevars.shape_env
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val
    sizes = {s: int(values.get(s, 0)) for s in expr.free_symbols}
    found = expr.xreplace({s: sympy.Integer(size if size > 1 else _ORDINARY) for s, size in sizes.items()})
    return int(found) if found.is_Integer else None


class _Thread(threading.local):
    """Whether a reshape in this thread may only use known facts about sizes."""

    strict = False


_thread = _Thread()


def patch_dynamic_reshape_indexer() -> None:
    """Makes Inductor reshape by known facts about sizes, not by sizes of the first call, in gnncompile's compiles.

    Inductor compares the dimensions of both shapes. If two happen to be equal, as when a batch holds one graph, it
    guards on this. If they are not equal, it reshapes to one dimension and from there to the new shape. This works
    unless a size is 0, or all happen to be 1: each index is then computed on its own, from the position in memory.
    """
    reshape: Any = ir.View.dynamic_reshape_indexer.__func__  # type: ignore[attr-defined]

    @functools.wraps(reshape)
    def dynamic_reshape_indexer(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours():
            return reshape(cls, *args, **kwargs)
        outer, _thread.strict = _thread.strict, True
        try:
            return reshape(cls, *args, **kwargs)
        except (AssertionError, IndexError):
            old, new = args[:2]
            sizes = utils.sympy_product(old), utils.sympy_product(new)
            if V.graph.sizevars.statically_known_equals(*sizes):  # dimensions of 0 or 1 happen to be equal
                return _by_position(old, new)
            _thread.strict = False  # that the shapes fit is asserted but not known
            return _reshaped(functools.partial(reshape, cls), *args, **kwargs)
        finally:
            _thread.strict = outer

    ir.View.dynamic_reshape_indexer = classmethod(dynamic_reshape_indexer)  # type: ignore[method-assign,assignment]


class _Sizes(SizeVarAllocator):
    """The sizes of a graph that Inductor lowers for gnncompile."""

    def check_equals(self, left: Any, right: Any) -> Any:
        asked = sys._getframe(1).f_code.co_name
        if _thread.strict and asked == "_dynamic_reshape_indexer" and not self.statically_known_equals(left, right):
            raise AssertionError(f"{left} == {right} is not known")
        return super().check_equals(left, right)


def lower_prepare_sizes() -> None:
    """The lowering of a node at the beginning of a graph: makes the graph's sizes ours.

    Inductor puts the sizes of the first call in place of symbols to find the loop index that goes along memory, and to
    choose tiles. Indices into an axis of size 0 can't be computed. So Inductor plans kernels for some rows where the
    first call has none. Guards still use the true sizes.
    """
    sizes = V.graph.sizevars
    sizes.__class__ = _Sizes
    sizes.backed_var_to_val = {
        symbol: sympy.Integer(_ORDINARY) if size == 0 else size for symbol, size in sizes.backed_var_to_val.items()
    }


_Indices = Callable[[Sequence[Any]], Sequence[Any]]


def _reshaped(reshape: Callable[..., _Indices], old: Sequence[Any], new: Sequence[Any], *args: Any) -> _Indices:
    """Returns the function from indices of a reshaped tensor to indices of the original tensor.

    `reshape` fails where a size is 0. The function then goes through the position in memory.
    """
    try:
        return reshape(old, new, *args)
    except (AssertionError, IndexError):
        return _by_position(old, new)


def _by_position(old: Sequence[Any], new: Sequence[Any]) -> _Indices:
    return lambda indices: _indices_at(_position(indices, new), old)


def _position(indices: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Returns the position of an element in a contiguous tensor."""
    position = sympy.S.Zero
    for index, size in zip(indices, sizes, strict=True):
        position = position * size + index
    return position


def _indices_at(position: Any, sizes: Sequence[Any]) -> list[Any]:
    """Returns the indices of the element at a position of a contiguous tensor."""
    found, stride = [], sympy.S.One
    for size in reversed(sizes):
        found.append(ModularIndexing(position, stride, size if size != 0 else sympy.S.One))
        stride = stride * size
    return found[::-1]
