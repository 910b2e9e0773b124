"""Symbolic sizes: what torch may assume of them, and what it has found out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.source import TensorPropertySource
from torch._dynamo.variables import builder
from torch._library.fake_impl import allocate_size
from torch._subclasses import fake_impls
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree

from gnncompile._compat.compiles import compiling


def patch_has_hint() -> None:
    """Keeps torch from guarding on sizes of 1 in order to know strides, in compiles of ours.

    Whether a tensor is contiguous its C++ code works out with a guard per dimension if all sizes have a hint, which
    ``backed_size_oblivious`` was not made part of; without hints it asks only for what is certain. Whether a reshape is
    a view Inductor asks likewise, of a function that knows how to do without.
    """
    has_hint = SymNode.has_hint

    def asked(self: SymNode) -> bool:
        ours = compiling.patches is not None and not compiling.empty_is_special
        if ours and "has_hint" not in sys._getframe(1).f_code.co_names:  # by C++, not by a function of Python
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
    """In compiles of ours, where a slice begins and ends is a guard, and its size no secret of the data.

    With ``backed_size_oblivious`` it can't be told of any symbol: torch would take ``x[:, :2]`` for a matrix of unknown
    width, of which its passes lose track (torch 2.11).
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
                start, end = (_bound(size, index) for index in bounds)
                end = start if bool(start > end) else end
        return ordinary(mode, op, self, dim, start, end, step)

    implementations[torch.ops.aten.slice.Tensor] = decided


def _bound(size: Any, index: Any) -> Any:
    """Which row an index means, by guards, from which the environment learns what is asked next."""
    if bool(index < 0):
        return index + size if bool(index + size >= 0) else 0
    return index if bool(index <= size) else size


def patch_automatic_dynamic() -> None:
    """In compiles of ours a float input has as many features as it came with, until it comes with others.

    The width of a layer is that of its weights. Where a model uses none, the code for any width would be slower, and
    Inductor can't fuse reductions of widths that are symbols (``CantSplit``, torch 2.11). The first axis may have
    any size, and so may the last axis of a dense adjacency matrix, which is as long as another. An axis with one
    feature has one for good: what broadcasts must be seen, and torch would take its size for the other operand's.
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
    """Whether an axis holds features; torch calls it ``DUCK`` as long as it has had one size, and nobody marked it."""
    alone = all(e.size(other) != e.size(dim) for other in range(e.dim()) if other != dim)
    return e.is_floating_point() and dim == e.dim() - 1 and alone


def patch_evaluate_symexpr() -> None:
    """Makes Inductor report the strides of a forward's results as symbols, in compiles of ours.

    Up to torch 2.14 it would report those of the first call. The backward is compiled for them wherever it can't be
    told that they are what it expects, which with ``backed_size_oblivious`` it can't of any symbol: wrong gradients for
    other sizes. Torch 2.15 reports symbols.
    """
    evaluate: Any = getattr(ShapeEnv, "evaluate_symexpr", None)
    if evaluate is None:
        return

    def stride(self: ShapeEnv, code: str) -> Any:
        return evaluate(self, code) if compiling.patches is None else self.deserialize_symexpr(code)

    cast(Any, ShapeEnv).evaluate_symexpr = stride


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


def unknown_number() -> Any:
    """An integer of any sign that an op makes of data, in its fake implementation."""
    environment = torch.library.get_ctx()._shape_env
    if environment is None or not environment.allow_dynamic_output_shape_ops:
        return torch.library.get_ctx().new_dynamic_size()  # raises what breaks the graph
    return environment.create_unbacked_symint()


def has_unknown_size(fake: Tensor) -> bool:
    """Whether only the data knows a size of a tensor."""
    return bool(free_unbacked_symbols(fake))


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
