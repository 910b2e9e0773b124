"""Symbolic sizes: what torch may assume about them, and what torch has learned about them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._dynamo.source import TensorPropertySource
from torch._dynamo.variables import builder
from torch._library.fake_impl import allocate_size
from torch._subclasses import fake_impls
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from gnncompile._compat.compiles import compiling


def patch_has_hint() -> None:
    """Keeps torch from guarding on sizes of 1 when it computes strides, in gnncompile's compiles.

    Torch's C++ code works out whether a tensor is contiguous. If all sizes have a hint, it makes a guard per dimension,
    and ``backed_size_oblivious`` does not apply there. Without hints, it asks only for certain facts. Likewise,
    Inductor asks whether a reshape is a view; the function that answers can do without guards.
    """
    has_hint = SymNode.has_hint

    def asked(self: SymNode) -> bool:
        ours = compiling.patches is not None and not compiling.empty_is_special
        if ours and "has_hint" not in sys._getframe(1).f_code.co_names:  # the caller is C++, not a Python function
            return False
        return has_hint(self)

    SymNode.has_hint = asked  # type: ignore[method-assign]
    compute = getattr(fake_impls, "_compute_stride", None)
    if compute is None:
        return

    def strides(shape: Any, stride: Any, wanted: Any, size_oblivious: bool = False) -> Any:
        found = None
        if compiling.patches is not None and not compiling.empty_is_special:
            found = compute(shape, stride, wanted, size_oblivious=True)
        return compute(shape, stride, wanted, size_oblivious=size_oblivious) if found is None else found

    fake_impls._compute_stride = strides  # type: ignore[assignment]


def patch_slice() -> None:
    """Makes the bounds of a slice guards, and its size not data-dependent, in gnncompile's compiles.

    With ``backed_size_oblivious``, torch can't compare bounds with a symbol. It would take ``x[:, :2]`` for a matrix of
    unknown width, and torch's passes lose track of such a width (torch 2.11).
    """
    implementations: Any = fake_impls.op_implementations_dict
    ordinary = implementations[torch.ops.aten.slice.Tensor]

    @functools.wraps(ordinary)
    def decided(
        mode: Any, op: Any, self: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
    ) -> Any:
        if compiling.patches is not None and -self.dim() <= dim < self.dim():
            size = self.size(dim)
            bounds = 0 if start is None else start, size if end is None else end
            if all(size_now(number) is not None for number in (size, *bounds)):
                start, end = (_bound(size, index, step) for index in bounds)
                end = start if bool(start > end) else end
        return ordinary(mode, op, self, dim, start, end, step)

    implementations[torch.ops.aten.slice.Tensor] = decided


def _bound(size: Any, index: Any, step: int) -> Any:
    """Returns the row that an index means. Decides by guards, which answer the shape environment's later questions."""
    if bool(index < 0):
        return index + size if _reaches(size, -index, step) else 0
    return index if _reaches(size, index, step) else size


def _reaches(size: Any, rows: Any, step: int) -> bool:
    """Whether a size is at least a number of rows, by a guard.

    Torch takes sizes for positive, and makes no guard for one row. Without rows, a slice of all but one row would have
    a size of -1, so the range of the size is guarded. In larger steps, the size of the slice is 0.
    """
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    if not (isinstance(rows, int) and rows == 1 and step == 1 and isinstance(expression, sympy.Symbol)):
        return bool(size >= rows)
    environment = size.node.shape_env
    if size_now(size):
        environment._update_var_to_range(expression, ValueRanges(1, int_oo))
        return True
    make_special(environment, {expression})
    environment._set_replacement(expression, sympy.Integer(0), "no rows")
    return False


def make_special(environment: ShapeEnv, sizes: set[sympy.Symbol]) -> None:
    """Lets torch replace sizes, and what it has replaced by them, by the numbers 0 and 1 from now on.

    Torch refuses to do so for a size of which these numbers are not special.
    """
    environment.size_like -= {s for s in environment.size_like if environment.replace(s).free_symbols & sizes}


def patch_automatic_dynamic() -> None:
    """Makes the number of features of a float input static until it changes, in gnncompile's compiles.

    The width of a layer is that of its weights. For a model without weights, code for any width would be slower, and
    Inductor can't fuse reductions of symbolic widths (``CantSplit``, torch 2.11). The first axis may have any size. So
    may the last axis of a dense adjacency matrix, which is as long as another axis. An axis with one feature always
    stays static. Broadcasting must be visible, and torch would take a symbolic size for the size of the other operand.
    """
    decide: Any = builder._automatic_dynamic

    def decided(e: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = decide(e, *args, **kwargs)
        ours = compiling.patches is not None and not compiling.empty_is_special
        if not ours or not hasattr(found, "dynamic_sizes"):
            return found
        values = e.is_floating_point() or e.dtype is torch.bool
        for dim in range(1, e.dim()):
            one = values and isinstance(e.size(dim), int) and e.size(dim) == 1
            if one or (found.dynamic_sizes[dim] is DimDynamic.DUCK and _is_width(e, dim)):
                found.dynamic_sizes[dim] = DimDynamic.STATIC
        return found

    cast(Any, builder)._automatic_dynamic = decided


def _is_width(e: Tensor, dim: int) -> bool:
    """Whether an axis holds features.

    Torch marks an axis as ``DUCK`` while the axis has had only one size and the user has not marked it.
    """
    alone = all(e.size(other) != e.size(dim) for other in range(e.dim()) if other != dim)
    return e.is_floating_point() and dim == e.dim() - 1 and alone


def size_now(size: Any) -> int | None:
    """Returns the value of a size during the capture, without a guard; None if the size is data-dependent."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def first_symbol(size: torch.SymInt) -> str:
    """Returns the symbol that a size was captured with, also if the symbol has become a number since."""
    return str(size.node._expr)


def guards_on(mode: Any, symbols: Collection[Any]) -> list[Any]:
    """Returns the guards so far that involve these symbols, as expressions.

    A size that turned out to equal another size is replaced by it. Guards with numbers that are no sizes stay as they
    are.
    """
    env, found = mode.shape_env, []
    for guard in env.guards:
        replaced = env.replace(guard.expr)
        about = {s for symbol in guard.expr.free_symbols for s in env.replace(symbol).free_symbols}
        if not about.isdisjoint(symbols):
            found.append(replaced if all(_is_size(env, s) for s in guard.expr.free_symbols) else guard.expr)
    return found


def _is_size(env: ShapeEnv, symbol: Any) -> bool:
    """Whether a symbol stands for the size of a tensor, not for a number among the arguments."""
    sources = env.var_to_sources.get(symbol, ())
    return any(isinstance(source, TensorPropertySource) for source in sources)


def unknown_size() -> Any:
    """Returns a new data-dependent size, for an op's fake implementation.

    ``get_ctx().new_dynamic_size()`` breaks the graph, unless all of torch's own ops may have such sizes.
    """
    return allocate_size(torch.library.get_ctx()._shape_env)


def unknown_number() -> Any:
    """Returns a new data-dependent integer of any sign, for an op's fake implementation."""
    environment = torch.library.get_ctx()._shape_env
    if environment is None or not environment.allow_dynamic_output_shape_ops:
        return torch.library.get_ctx().new_dynamic_size()  # raises the error that breaks the graph
    return environment.create_unbacked_symint()


def has_unknown_size(fake: Tensor | torch.SymInt) -> bool:
    """Whether a tensor has a data-dependent size, or a number is one."""
    return bool(free_unbacked_symbols(fake))


def without_base(tensor: Tensor) -> Tensor:
    """Returns the same memory as a tensor that is no view. For a view, Dynamo guards the sizes of its base."""
    return tensor.detach() if tensor._is_view() else tensor


def take_over_size(node: fx.Node, maker: fx.Node | None) -> None:
    """Declares that the first dimension of a new node is the data-dependent size that `maker` has made so far."""
    bindings = maker.meta.get("unbacked_bindings") if maker is not None else None
    if bindings:
        taken: dict[Any, Any] = {symbol: (path[0], pytree.SequenceKey(0)) for symbol, path in bindings.items()}
        node.meta["unbacked_bindings"] = taken


def own_symbol(size: torch.SymInt) -> Any:
    """Returns the symbol that a data-dependent size got when it was made, even if torch replaced the symbol later.

    Returns None for other sizes.
    """
    made = size.node._expr
    return made if made.is_Symbol and free_unbacked_symbols(made) else None


def fresh_sizes(mode: Any) -> Any:
    """Returns a context manager in which operations on fakes of the mode may make data-dependent sizes."""
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def plain_sizes(fakes: Sequence[Any]) -> dict[Any, tuple[int, int | None]]:
    """Returns the symbols of sizes, each with the first place where it is found.

    A place is ``(index of the fake tensor, dimension)``, or ``(index of the number, None)``.
    """
    found: dict[Any, tuple[int, int | None]] = {}
    for where, size in _symbolic(fakes):
        if size.node._expr.is_Symbol:
            found.setdefault(size.node._expr, where)
    return found


def assumed_sizes(fakes: Sequence[Any]) -> list[tuple[tuple[int, int | None], Any]]:
    """Returns the data-dependent sizes that the capture assumed to equal other sizes.

    Each comes as its place (see :func:`plain_sizes`) and the expression that it was assumed to equal.
    """
    found = []
    for where, size in _symbolic(fakes):
        if free_unbacked_symbols(size.node._expr) and size.node._expr != size.node.expr:
            found.append((where, size.node.expr))
    return found


def _symbolic(fakes: Sequence[Any]) -> Iterator[tuple[tuple[int, int | None], torch.SymInt]]:
    for at, fake in enumerate(fakes):
        sizes = enumerate(fake.shape) if isinstance(fake, Tensor) else [(None, fake)]
        yield from (((at, dim), size) for dim, size in sizes if isinstance(size, torch.SymInt))
