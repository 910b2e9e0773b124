"""Padded rows of a mini-batch change nothing: what would mix them with true ones is masked.

Before: ``batch_norm(x, ...)``; ``mean(x, [0])``; ``mse_loss(out, y)``, where only the first n rows of x are true
After:  the same of the first n rows, by masks, with n read on the device
Why it pays: all mini-batches of a bucket have one size, so one recording serves them. What is done row by row, or
        along edges, whose padding joins padded nodes, stays as it is; what is not known to be safe has the model
        run with true sizes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from gnncompile.passes.context import (
    Context,
    NotPadded,
    PaddedInputs,
    aten,
    drop_unused,
    is_switch,
    is_tensor,
    user_line,
    value,
)
from gnncompile.passes.padded import guards, masked_reductions, ops
from gnncompile.passes.padded.ops import Kinds, expression, single
from gnncompile.passes.padded.selections import SELECTED, is_trivial_check, select_once
from gnncompile.passes.pointwise import POINTWISE


def run(ctx: Context) -> None:
    """Rewrites the graph in place, and records which results are padded.

    Raises:
        NotPadded: An operation is not known to be safe.
    """
    if ctx.padded is not None:
        Padding(ctx, ctx.padded).run()


class Padding:
    """What is padded in a graph, and the means to undo it."""

    def __init__(self, ctx: Context, known: PaddedInputs) -> None:
        self.ctx, self.known = ctx, known
        self.kinds: dict[sympy.Expr, Kinds] = {symbol: (kind,) for symbol, kind in known.sizes.items()}
        self.repeats: dict[sympy.Expr, int] = {}
        self.values: dict[fx.Node, int] = dict(known.values)
        """For tensors that number things, of which kind these are: padded rows number padded things."""
        self.given: set[fx.Node] = set(known.whole)
        """Padded tensors that stand in the inputs as they are: whatever they number exists."""
        self.numbers: dict[int, fx.Node] = {}
        self.last_input = ctx.inputs_first()

    def run(self) -> None:
        """See :func:`run`."""
        select_once(self)
        for node in self.ctx.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
            if is_trivial_check(node):
                self.ctx.graph.erase_node(node)
        drop_unused(self.ctx.graph)
        for node in self.ctx.graph.find_nodes(op="call_function", target=aten.cat.default):
            self._note_joined(node)
        for node in list(self.ctx.graph.nodes):
            if node.op != "call_function" or not self._meets_padding(node):
                continue
            self.at = node
            with self.ctx.graph.inserting_before(node):
                self._treat(node)
        (output,) = self.ctx.graph.find_nodes(op="output")
        self.at = output
        self.ctx.log.padded = [self._result(v) for v in output.args[0]]
        guards.check(self)
        drop_unused(self.ctx.graph)

    def refuse(self, why: str) -> NotPadded:
        """What to raise."""
        return NotPadded(why, user_line(self.at))

    # What is padded

    def of(self, size: Any) -> Kinds | None:
        """Of what a dimension of some size consists; None where nothing is padded."""
        if not isinstance(size, torch.SymInt):
            return None
        expr = size.node.expr
        if expr in self.kinds:
            return self.kinds[expr]
        if not expr.free_symbols & set(self.known.sizes):
            return None
        raise self.refuse(f"a size of {expr} is none of the mini-batch's")

    def dims(self, node: Any) -> dict[int, Kinds]:
        """The padded dimensions of a tensor."""
        if not is_tensor(node):
            return {}
        found = {d: self.of(s) for d, s in enumerate(value(node).shape)}
        return {d: kinds for d, kinds in found.items() if kinds is not None}

    def is_padded_number(self, node: Any) -> bool:
        """Whether a whole number depends on the size of a bucket."""
        found = node.meta.get("val") if isinstance(node, fx.Node) else node
        return isinstance(found, torch.SymInt) and bool(found.node.expr.free_symbols & set(self.known.sizes))

    def _meets_padding(self, node: fx.Node) -> bool:
        reads = any(self._is_padded(n) for n in node.all_input_nodes)
        return (reads or self._is_padded(node)) and not is_switch(node)

    def _is_padded(self, node: fx.Node) -> bool:
        found = node.meta.get("val")
        sizes = [s for t in (found if isinstance(found, (tuple, list)) else [found]) for s in getattr(t, "shape", [t])]
        return any(self.is_padded_number(s) for s in sizes)

    # Masks and numbers

    def number(self, kind: int) -> fx.Node:
        """How many things of a kind there are, a tensor without dimensions."""
        if kind not in self.numbers:
            with self.ctx.graph.inserting_after(self.last_input):
                self.numbers[kind] = self.ctx.call(aten.select.int, self.known.counts, 0, kind)
        return self.numbers[kind]

    def add_kind(self, size: Any, number: fx.Node) -> None:
        """Notes that a size is that of rows that a mask selects, of which so many are true."""
        kind = SELECTED + len(self.kinds)
        self.kinds[expression(size)], self.numbers[kind] = (kind,), number

    def count(self, kinds: Sequence[Kinds], sizes: Sequence[Any]) -> fx.Node:
        """How many true combinations there are along padded dimensions."""
        true = [self._true(parts, size) for parts, size in zip(kinds, sizes, strict=True)]
        return functools.reduce(lambda one, other: self.ctx.call(aten.mul.Tensor, one, other), true)

    def _true(self, kinds: Kinds, size: Any) -> fx.Node:
        """How many of a padded dimension are true."""
        kind = single(kinds)
        if kind is None:
            raise self.refuse("how many true rows there are is not known where several tensors are joined")
        times = self.repeats.get(expression(size), 1)
        return self.number(kind) if times == 1 else self.ctx.call(aten.mul.Tensor, self.number(kind), times)

    def mask(self, node: fx.Node, dims: Sequence[int] | None = None) -> fx.Node:
        """Which rows, columns, ... (those in `dims`) of a tensor are true, of a shape that is broadcast to its own."""
        rank, made = value(node).dim(), None
        padded = {d: kinds for d, kinds in self.dims(node).items() if dims is None or d in dims}
        for dim, kinds in padded.items():
            one = self._mask_of(node, dim, kinds)
            shape = [1] * rank
            shape[dim] = -1
            one = self.ctx.call(aten.view.default, one, shape)
            made = one if made is None else self.ctx.call(aten.logical_and.default, made, one)
        assert made is not None
        return made

    def _mask_of(self, node: fx.Node, dim: int, kinds: Kinds) -> fx.Node:
        limit = self._true(kinds, value(node).shape[dim])
        size = self.ctx.call(aten.sym_size.int, node, dim)
        places = self.ctx.call(aten.arange.default, size, dtype=torch.int64, device=value(node).device)
        return self.ctx.call(aten.lt.Tensor, places, limit)

    # Operations

    def _treat(self, node: fx.Node) -> None:
        """Checks one operation, or replaces it."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            self._python(node)
            return
        rule = ops.RULES.get(target)
        if rule is not None:
            rule(self, node)
        elif torch.Tag.pointwise in target.tags or target in POINTWISE:
            ops.pointwise(self, node)
        elif target in ops.VIEWS:
            ops.view(self, node)
        else:
            raise self.refuse(f"{target} is not known to leave padded rows alone")

    def _python(self, node: fx.Node) -> None:
        """Arithmetic of sizes, and parts of tuples; both are checked where they are used."""
        if node.target is not operator.getitem and not self.is_padded_number(node):
            raise self.refuse(f"{node.target} compares sizes of the mini-batch")

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Puts another value in a node's place."""
        node.replace_all_uses_with(new)
        self.ctx.graph.erase_node(node)

    def numbers_as(self, node: fx.Node, source: Any) -> None:
        """Notes that a tensor numbers what another one does."""
        if source in self.values:
            self.values[node] = self.values[source]
        if source in self.given:
            self.given.add(node)

    def _note_joined(self, node: fx.Node) -> None:
        """Notes what a dimension consists of along which tensors are joined; its size may be used before."""
        self.at = node
        parts: Any = node.args[0]
        dim = (node.args[1] if len(node.args) > 1 else 0) % value(node).dim()
        size = value(node).shape[dim]
        if len(parts) == 1 or not self.is_padded_number(size):
            return
        kinds = tuple(kind for part in parts for kind in self.of(value(part).shape[dim]) or (None,))
        if self.kinds.setdefault(expression(size), kinds) != kinds:
            raise self.refuse("two dimensions of one size are padded in two ways")

    def cleared(self, node: fx.Node, fill: float = 0) -> fx.Node:
        """A tensor with its padding filled."""
        return self.ctx.inline(masked_reductions.cleared, node, self.mask(node), fill, like=self.at)

    def _result(self, node: Any) -> dict[int, int]:
        """Of which kind the padded dimensions of a result are."""
        if self.is_padded_number(node):
            raise self.refuse("returns a size of the mini-batch")
        if not is_tensor(node):
            return {}
        found = {}
        for dim, kinds in self.dims(node).items():
            kind = single(kinds)
            if kind is None or expression(value(node).shape[dim]) in self.repeats:
                raise self.refuse("returns several padded tensors as one")
            if kind >= SELECTED:
                raise self.refuse("returns rows that a mask selects")
            found[dim] = kind
        return found
