"""Questions about sizes that Inductor asks while it lowers, answered without a guard in compiles of ours."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir, tiling_utils, utils
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import ModularIndexing

from gnncompile._compat.inductor import ours

_ORDINARY = 64
"""What stands for a size of 0 or 1 where strides are ordered, and for one that only the data knows."""


def patch_get_fill_order() -> None:
    """Makes Inductor order strides as they are ordered where no size is 0 or 1, in compiles of ours.

    Inductor orders strides by guards, though the order is but a wish: attention asks for it of its mask, and a graph of
    one node would be captured on its own.
    """
    ordinary: Any = ir.get_fill_order

    @functools.wraps(ordinary)
    def get_fill_order(seq: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        numbers = [_number(stride) for stride in seq] if ours() else [None]
        return ordinary(seq, *args, **kwargs) if None in numbers else utils.argsort(numbers)

    ir.get_fill_order = get_fill_order


def _number(stride: Any) -> int | None:
    """A stride where every size is ordinary; None if it depends on what is no size."""
    if isinstance(stride, int):
        return stride
    expr = stride.node.expr if isinstance(stride, torch.SymInt) else stride
    env = V.graph.sizevars.shape_env
    values = getattr(env, "backed_var_to_val", None) or env.var_to_val
    sizes = {s: int(values.get(s, 0)) for s in expr.free_symbols}
    found = expr.xreplace({s: sympy.Integer(size if size > 1 else _ORDINARY) for s, size in sizes.items()})
    return int(found) if found.is_Integer else None


def patch_tiling_get_hint() -> None:
    """Makes Inductor choose tiles for a GPU by sizes that are not 0, in compiles of ours.

    It asks which index of a loop goes along memory by numbers in place of symbols; indices into rows of which there are
    none yet can't be worked out.
    """
    hint: Any = tiling_utils.get_hint

    @functools.wraps(hint)
    def get_hint(size: Any) -> Any:
        found = hint(size)
        return _ORDINARY if found == 0 and isinstance(size, sympy.Symbol) and ours() else found

    tiling_utils.get_hint = get_hint  # type: ignore[assignment]


class _Thread(threading.local):
    """Whether a reshape of this thread may only use what is known of sizes."""

    strict = False


_thread = _Thread()


def patch_dynamic_reshape_indexer() -> None:
    """Makes Inductor reshape by what it knows of sizes, not by what they are in the first call, in compiles of ours.

    It goes through the dimensions of both shapes, and where two happen to be equal makes this a guard, as where a batch
    holds one graph. Where they are not equal it reshapes to one dimension and from there, which works unless a size
    is 0: each index is then worked out by itself.
    """
    reshape: Any = ir.View.dynamic_reshape_indexer.__func__  # type: ignore[attr-defined]
    check: Any = SizeVarAllocator.check_equals

    @functools.wraps(reshape)
    def dynamic_reshape_indexer(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours():
            return reshape(cls, *args, **kwargs)
        outer, _thread.strict = _thread.strict, True
        try:
            return reshape(cls, *args, **kwargs)
        except (AssertionError, IndexError):  # what makes the shapes fit is not known, only asserted, or a size is 0
            _thread.strict = False
            return _reshaped(functools.partial(reshape, cls), *args, **kwargs)
        finally:
            _thread.strict = outer

    @functools.wraps(check)
    def check_equals(self: Any, left: Any, right: Any) -> Any:
        asked = sys._getframe(1).f_code.co_name
        if _thread.strict and asked == "_dynamic_reshape_indexer" and not self.statically_known_equals(left, right):
            raise AssertionError(f"{left} == {right} is not known")
        return check(self, left, right)

    ir.View.dynamic_reshape_indexer = classmethod(dynamic_reshape_indexer)  # type: ignore[method-assign,assignment]
    SizeVarAllocator.check_equals = check_equals  # type: ignore[method-assign]


_Indices = Callable[[Sequence[Any]], Sequence[Any]]


def _reshaped(reshape: Callable[..., _Indices], old: Sequence[Any], new: Sequence[Any], *args: Any) -> _Indices:
    """How the indices of a reshaped tensor are those of the tensor before; `reshape` has no way where a size is 0."""
    try:
        return reshape(old, new, *args)
    except (AssertionError, IndexError):
        return lambda indices: _indices_at(_position(indices, new), old)


def _position(indices: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Where an element stands in a contiguous tensor."""
    position = sympy.S.Zero
    for index, size in zip(indices, sizes, strict=True):
        position = position * size + index
    return position


def _indices_at(position: Any, sizes: Sequence[Any]) -> list[Any]:
    """Which element of a contiguous tensor stands there."""
    found, stride = [], sympy.S.One
    for size in reversed(sizes):
        found.append(ModularIndexing(position, stride, size if size != 0 else sympy.S.One))
        stride = stride * size
    return found[::-1]
