"""Random regions, graphs and tensors for hypothesis. Expected results come from the reference, and from autograd.

Programs are grown from a list of drawn numbers, so hypothesis shrinks a failure to few operations, edges and features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from gnncompile.ir import reference as interpreter
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import BOOL, COMPUTE, SEED, Node, Output, Region, Shape, Space
from gnncompile.ir.verify import verify
from tests.graphs import layout

D, S, E, P, F = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER, Space.FEATURE
SMOOTH = ("add", "sub", "mul", "neg", "sin", "cos", "erf", "sigmoid", "tanh")
KINKED = ("abs", "where", "sign", "floor", "ceil", "float")
PARTIAL = ("div", "exp", "expm1", "exp2", "log", "log1p", "sqrt", "pow")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("and", "or", "not")
ARITY = {"where": 3, **dict.fromkeys(("add", "sub", "mul", "div", "pow", "and", "or", *COMPARISONS), 2)}
GRIDS: list[Shape] = [(1, 1), (1, 3), (2, 1), (2, 3), (1, 17), (3, 7), (1, 64)]
FEATURES = 4


# -- graphs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edges:
    """Edges as (row, column) pairs. The region walks the edges by row. Edges that are not `alive` are masked out."""

    pairs: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    alive: tuple[bool, ...] | None = None

    def both(self) -> list[Tensor]:
        """Returns the layout by row, then the layout by column."""
        row, column = torch.tensor(self.pairs, dtype=torch.long).view(-1, 2).t()
        alive = None if self.alive is None else torch.tensor(self.alive, dtype=torch.bool)
        return [*layout(row, column, self.rows, alive), *layout(column, row, self.columns, alive)]


@st.composite
def edges(draw: st.DrawFn, masked: bool = True) -> Edges:
    """Draws graphs, including graphs without rows or edges, with duplicates, empty rows, hubs and masked edges."""
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    one = st.tuples(st.integers(0, max(rows - 1, 0)), st.integers(0, max(columns - 1, 0)))
    pairs = draw(st.lists(one, max_size=24 if rows and columns else 0))
    pairs *= draw(st.sampled_from([1, 1, 1, 13]))  # 13 copies of each edge make hubs
    alive = (
        draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs))) if masked and len(pairs) < 30 else []
    )
    return Edges(tuple(pairs), rows, columns, tuple(alive) if draw(st.booleans()) and alive else None)


# -- programs -----------------------------------------------------------------------------------------------------


class _Program:
    """A region under construction, with the values that the next operation may read."""

    def __init__(self, draw: st.DrawFn, by: Space, dtypes: Sequence[str], smooth: bool) -> None:
        self.draw, self.smooth = draw, smooth
        self.b = Builder(by)
        self.grid = draw(st.sampled_from(GRIDS))
        self.pool: list[int] = []
        for position in range(draw(st.integers(1, 4))):
            space = draw(st.sampled_from([by.opposite, by, E, P]))
            shape = tuple(n if draw(st.booleans()) else 1 for n in self.grid)
            self._add(self.b.input(position, space, shape, draw(st.sampled_from([*dtypes, *dtypes, BOOL]))))  # type: ignore[arg-type]
        self.count = position + 1

    def _add(self, value: int) -> None:
        if value not in self.pool:
            self.pool.append(value)

    def pick(self, *, boolean: bool = False, among: Sequence[int] | None = None) -> int:
        """Draws a float value, or a bool if `boolean`. Makes a value of the wanted type if there is none."""
        pool = self.pool if among is None else among
        found = [v for v in pool if self.b.nodes[v].boolean == boolean]
        if found:
            return self.draw(st.sampled_from(found))
        if boolean:
            return self.b.op("gt", self.pick(among=among), self.b.const(0.25))
        return self.b.op("float", self.draw(st.sampled_from(list(pool)))) if pool else self.b.const(0.75)

    def number(self, among: Sequence[int] | None = None) -> int:
        """Draws a float value, or at times a constant."""
        if self.draw(st.integers(0, 5)) == 0:
            return self.b.const(self.draw(st.sampled_from([-2.0, 0.0, -0.0, 0.5, 1.0, 3.0])))
        return self.pick(among=among)

    def step(self, among: Sequence[int] | None = None) -> int:
        """Adds an operation; returns its value."""
        b = self.b
        name = self.draw(st.sampled_from([*SMOOTH, *KINKED, *PARTIAL, *COMPARISONS, *LOGIC]))
        if name in LOGIC or name == "float":
            return b.op(name, *(self.pick(boolean=True, among=among) for _ in range(ARITY.get(name, 1))))
        if name == "where":
            return b.op(name, self.pick(boolean=True, among=among), self.number(among), self.number(among))
        args = [self.number(among) for _ in range(ARITY.get(name, 1))]
        return self._inside(name, args) if self.smooth else b.op(name, *args)

    def _inside(self, name: str, args: list[int]) -> int:
        """Adds an operation whose arguments are kept within its domain, and whose results stay bounded."""
        b = self.b
        if name in ("log", "log1p", "sqrt", "div", "pow"):
            at = 0 if name == "pow" else -1
            args[at] = b.op("add", b.op("abs", args[at]), b.const(0.5))
        if name == "pow":
            args[1] = b.op("tanh", args[1])
        if name in ("exp", "exp2", "expm1"):
            args = [b.op("neg", b.op("abs", args[0]))]
        return b.op(name, *args)

    def steps(self, most: int) -> None:
        for _ in range(self.draw(st.integers(0, most))):
            made = self.draw(st.sampled_from(["step", "step", "step", "step", "sum", "dot", "layer"]))
            if made == "dot":
                self._add(self.b.sum_axis(self.b.op("mul", self.pick(), self.pick()), 1))
            elif made == "sum":
                self._add(self.b.sum_axis(self.pick(), self.draw(st.integers(0, 1))))
            elif made == "layer" and self.count < 5:
                features = self.b.input(self.count, E, (1, FEATURES), COMPUTE)
                weights = self.b.input(self.count + 1, F, self.grid, COMPUTE)
                self.count += 2
                self._add(self.b.linear(features, weights))
            else:
                self._add(self.step())


@st.composite
def regions(draw: st.DrawFn, dtypes: Sequence[str], smooth: bool, dropout: bool = False) -> Region:
    """Draws a region: a message of up to a dozen operations, softmax, reductions, an epilogue.

    An output has a row per row of the region or per edge.

    If `smooth`, the arguments of functions stay within their domains, because gradients need that.
    """
    by = draw(st.sampled_from([D, S]))
    p = _Program(draw, by, dtypes, smooth)
    b = p.b
    p.steps(5)
    if draw(st.booleans()):
        p._add(b.softmax(p.pick()))
        p.steps(3)
    if dropout and draw(st.booleans()):
        p._add(b.op("mul", p.pick(), b.dropout(b.input(p.count, P, (1, 1), SEED), 0.4, p.grid)))
        p.count += 1
    per_edge = [v for v in p.pool if b.nodes[v].space is E and b.nodes[v].op != "input"]
    kinds = draw(st.lists(st.sampled_from(["sum", "sum", "max", "min"]), min_size=0 if per_edge else 1, max_size=3))
    rows = [b.reduce(kind, p.pick()) for kind in kinds]
    rows += [v for v in p.pool if b.nodes[v].space in (by, P)]
    for _ in range(draw(st.integers(0, 4))):
        rows.append(p.step(rows))
    results = [v for v in [*rows, *per_edge] if b.nodes[v].space is not P]
    results = (
        draw(st.lists(st.sampled_from(results), min_size=1, max_size=3)) if results else [b.reduce("sum", p.pick())]
    )
    region = b.finish([Output(v, BOOL if b.nodes[v].boolean else dtypes[0], b.nodes[v].shape) for v in results])
    storage = tuple(replace(n, dtype=dtypes[0]) if n.op == "input" and n.dtype == COMPUTE else n for n in region.nodes)
    region = replace(region, nodes=storage, unmasked=False)
    verify(region)
    return region


def tensors_of(region: Region, where: Edges, seed: int, kind: str) -> list[Tensor]:
    """Returns random inputs for a region.

    Args:
        region: The region.
        where: The graph.
        seed: The seed of the random numbers.
        kind: ``"normal"``, ``"whole"`` (small integers, many of them equal) or ``"special"`` (some are infinite, NaN,
            or a zero of either sign).
    """
    generator = torch.Generator().manual_seed(seed)
    counts = {region.by: where.rows, region.by.opposite: where.columns, E: len(where.pairs), P: 1, F: FEATURES}
    found: dict[int, Tensor] = {}
    for node in region.inputs:
        size = (counts[node.space], *node.shape)
        if node.dtype == SEED:
            found[int(node.value or 0)] = torch.tensor([seed * 7919 + 1])
            continue
        made = torch.randn(size, generator=generator, dtype=torch.float64)
        if kind == "whole":
            made = (made * 1.5).round()
        elif kind == "special":
            special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30])
            chosen = special[torch.randint(len(special), size, generator=generator)]
            made = torch.where(torch.rand(size, generator=generator) < 0.25, chosen, made)
        found[int(node.value or 0)] = made > 0 if node.dtype == BOOL else made.to(getattr(torch, node.dtype))
    return [found.get(k, torch.empty(0)) for k in range(region.count)]


def in_double(region: Region) -> Region:
    """Returns the region with all float inputs and outputs in float64."""

    def wide(dtype: str) -> str:
        return "float64" if dtype.startswith(("float", "bfloat")) else dtype

    nodes = tuple(replace(n, dtype=wide(n.dtype)) for n in region.nodes)
    outputs = tuple(replace(o, dtype=wide(o.dtype)) for o in region.outputs)
    return replace(region, nodes=nodes, outputs=outputs)


def in_single(region: Region) -> Region:
    """Returns the region with inputs and outputs in float32, to measure the effect of rounding."""

    def narrow(n: Node) -> Node:
        return replace(n, dtype="float32") if n.op == "input" and n.dtype not in (BOOL, SEED) else n

    outputs = tuple(o if o.dtype == BOOL else replace(o, dtype="float32") for o in region.outputs)
    return replace(region, nodes=tuple(map(narrow, region.nodes)), outputs=outputs)


Run = Callable[[list[Tensor]], Sequence[Tensor]]


def reference(region: Region, where: Edges) -> Run:
    """Returns a function that runs the region in plain torch operations, which autograd differentiates."""
    walk = Layout(*where.both()[:3])
    return lambda tensors: interpreter.run(region, tensors, walk)


Gradients = list[Tensor | None]


def derive(fn: Run, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Gradients]:
    """Returns the results of a function, and the gradients of its float inputs for fixed cotangents."""
    leaves = _leaves(tensors)
    found = fn(leaves)
    return [t.detach() for t in found], _gradients(found, leaves)


def derive_twice(fn: Run, tensors: Sequence[Tensor]) -> Gradients:
    """Returns the second derivatives of a function: gradients of its gradients, both for fixed cotangents."""
    leaves = _leaves(tensors)
    first = _gradients(fn(leaves), leaves, create_graph=True)
    return _gradients([g for g in first if g is not None], leaves)


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], create_graph: bool = False) -> Gradients:
    parts = []
    for out in results:
        if out.requires_grad:
            weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
            parts.append((out.double() * weight.to(out.device)).sum())
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(
        torch.autograd.grad(sum(parts), wanted, allow_unused=True, create_graph=create_graph)  # type: ignore[arg-type]
        if parts and wanted
        else []
    )
    return [next(found, None) if t.requires_grad else None for t in leaves]
