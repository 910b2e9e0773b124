"""Orders a region for a CPU kernel: which values are computed once, per row or per edge, and in which loop nests.

A row is walked by one loop over its edges for each stage of the region. A softmax ends a stage, and so does a
reduction that later edge values need. Values per edge are computed again in every loop that needs them. Only some
softmaxes keep values between loops (:func:`is_buffered`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gnncompile import tuning
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import FEATURE_REDUCTIONS, STATISTICS, Node, Region, Shape, Space

_LONG = ("exp", "exp2", "expm1", "log", "log1p", "erf", "tanh", "softplus", "pow")
"""Functions of several dozens of instructions that depend on each other."""


class Kind(Enum):
    """The action of a step on its node."""

    VALUE = "compute or load it"
    FEATURES = "reduce a feature axis"
    REDUCE = "accumulate the current edge into it"
    OUTER = "accumulate the current edge into it, times each of the edge's features"
    SOFTMAX = "take the current edge's logit into account"
    STORE = "write it to an output"


@dataclass(frozen=True)
class Step:
    """One step of a loop nest: a node, by its index, and for a store the index of the output."""

    kind: Kind
    node: int
    output: int = -1


@dataclass(frozen=True)
class Nest:
    """Steps that share the loops over (heads, channels) of `shape`. Other nests read the values in `keeps`."""

    shape: Shape
    steps: tuple[Step, ...]
    keeps: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """The nests of a kernel, in order.

    Attributes:
        setup: Nests that compute parameter values, once per thread.
        rows: Nests that compute row values, before each loop over the edges and after the last (``len(loops) + 1``).
        loops: Nests of each loop over the edges of a row.
        gathered: For each loop, the inputs that the loop reads per edge or at the edge's other end.
    """

    setup: tuple[Nest, ...]
    rows: tuple[tuple[Nest, ...], ...]
    loops: tuple[tuple[Nest, ...], ...]
    gathered: tuple[tuple[int, ...], ...]


def is_direct(region: Region, node: Node) -> bool:
    """Whether a value is read from its tensor at every use, instead of being loaded once and kept."""
    if node.op != "input" or node.shape == (1, 1):
        return False
    return node.space in region.edge_spaces or node.dtype == region.compute


def is_buffered(node: Node) -> bool:
    """Whether a softmax keeps its values in scratch memory, one number per head for each edge of one row.

    A softmax per channel would need as much memory as the messages, so its values are computed again in every loop.
    """
    return node.shape[1] == 1 and node.shape[0] <= tuning.LOOPS.buffered_heads


def reads(region: Region, step: Step) -> tuple[int, ...]:
    """Returns the nodes whose values a step needs. The index of an input is read where the input's row is found."""
    node = region.nodes[step.node]
    if step.kind is Kind.STORE:
        return (step.node,)
    if step.kind is Kind.VALUE and node.op == "softmax" and is_buffered(node):
        return ()
    return () if node.op == "input" else node.args


def iteration(region: Region, step: Step) -> Shape:
    """Returns the feature shape that a step loops over."""
    node = region.nodes[step.node]
    if step.kind in (Kind.VALUE, Kind.STORE, Kind.OUTER):
        return node.shape
    return region.nodes[node.args[-1]].shape


def plan(region: Region) -> Plan:
    """Returns the nests of a kernel for `region`."""
    return _Planner(region).plan()


class _Planner:
    def __init__(self, region: Region) -> None:
        self.region, self.nodes = region, region.nodes
        self.edgewise = [n.space in region.edge_spaces for n in self.nodes]
        self.outers = [i for i, n in enumerate(self.nodes) if n.op == "outer"]
        self.num_loops, self.loop_of = self._stages()

    def plan(self) -> Plan:
        loops, gathered = [], []
        first_use: dict[int, int] = {}
        for k in range(self.num_loops):
            steps = self._loop(k)
            used = {a for s in steps for a in reads(self.region, s)} | {s.node for s in steps if s.kind is Kind.VALUE}
            gathered.append(tuple(sorted(i for i in used if self.nodes[i].op == "input" and self.edgewise[i])))
            for i in used:
                first_use.setdefault(i, k)
            loops.append(self._nests(steps))
        rows = [self._nests(steps) for steps in self._rows(first_use)]
        setup = self._nests(self._values(Space.PARAMETER))
        outside = [nest for context in (setup, *rows, *loops) for nest in context]
        return Plan(
            self._keep(setup, outside),
            tuple(self._keep(nests, outside) for nests in rows),
            tuple(self._keep(nests, nests) for nests in loops),
            tuple(gathered),
        )

    def _stages(self) -> tuple[int, dict[int, int]]:
        """Returns the number of loops over the edges, and the loop in which each softmax and reduction accumulates."""
        ends = {*self.region.softmaxes, *self.region.reductions, *self.outers}
        level: list[int] = []
        for i, node in enumerate(self.nodes):
            level.append(max((level[a] for a in node.args), default=0) + (i in ends))
        stored = [level[o.node] + 1 for o in self.region.outputs if self.edgewise[o.node]]
        count = max([level[i] for i in ends] + stored, default=0)
        inner: set[int] = set()
        for i in reversed(range(len(self.nodes))):
            if i in inner or i in ends or self.edgewise[i]:
                inner.update(self.nodes[i].args)
        # A reduction that only the epilogue reads accumulates in the last loop, which may read the same inputs.
        return count, {i: level[i] - 1 if i in inner or self.edgewise[i] else count - 1 for i in ends}

    def _loop(self, k: int) -> list[Step]:
        """The steps of one loop over the edges."""
        roots = [Step(self._end(i), i) for i, at in self.loop_of.items() if at == k]
        roots.sort(key=lambda s: s.node)
        if k == self.num_loops - 1:
            outputs = enumerate(self.region.outputs)
            roots += [Step(Kind.STORE, o.node, at) for at, o in outputs if self.edgewise[o.node]]
        needed: set[int] = set()
        todo = [a for s in roots for a in reads(self.region, s)]
        while todo:
            i = todo.pop()
            if i in needed or not self.edgewise[i] or is_direct(self.region, self.nodes[i]):
                continue
            needed.add(i)
            todo.extend(reads(self.region, self._value(i)))
        return [self._value(i) for i in sorted(needed)] + roots

    def _end(self, i: int) -> Kind:
        if i in self.outers:
            return Kind.OUTER
        return Kind.SOFTMAX if self.edgewise[i] else Kind.REDUCE

    def _value(self, i: int) -> Step:
        return Step(Kind.FEATURES if self.nodes[i].op in (*FEATURE_REDUCTIONS, "transposed") else Kind.VALUE, i)

    def _values(self, space: Space) -> list[Step]:
        """The steps that compute the values of a space outside the loops over edges."""
        never = (*REDUCTIONS, *STATISTICS, "const")
        found = [i for i, n in enumerate(self.nodes) if n.space is space and n.op not in never]
        return [self._value(i) for i in found if not is_direct(self.region, self.nodes[i])]

    def _rows(self, first_use: dict[int, int]) -> list[list[Step]]:
        """Returns the row steps before each loop and after the last loop, each as late as its readers allow."""
        steps = self._values(self.region.by)
        at: dict[int, int] = {}
        for step in reversed(steps):
            at[step.node] = min(first_use.get(step.node, self.num_loops), at.get(step.node, self.num_loops))
            for a in reads(self.region, step):
                at[a] = min(at[step.node], at.get(a, self.num_loops))
        rows = [[s for s in steps if at[s.node] == k] for k in range(self.num_loops + 1)]
        for position, out in enumerate(self.region.outputs):
            if self.region.per_row(out):
                rows[-1].append(Step(Kind.STORE, out.node, position))
        return rows

    def _nests(self, steps: Sequence[Step]) -> list[Nest]:
        """Groups steps into nests greedily, smallest shapes first."""
        left, nests = list(steps), []
        pending = {s.node for s in steps if s.kind in (Kind.VALUE, Kind.FEATURES)}
        while left:
            for shape in sorted({iteration(self.region, s) for s in left}):
                chosen = self._ready(left, shape, pending)
                if chosen:
                    break
            nests.append(Nest(shape, tuple(chosen)))
            pending -= {s.node for s in chosen if s.kind in (Kind.VALUE, Kind.FEATURES)}
            left = [s for s in left if s not in chosen]
        return nests

    def _ready(self, left: Iterable[Step], shape: Shape, pending: set[int]) -> list[Step]:
        """Returns steps of one shape whose arguments come from earlier nests or from earlier steps of this nest.

        A nest computes no long function of the result of another one. A processor can't look ahead over both, so its
        units would wait for results.
        """
        chosen, pending = [], set(pending)
        late: set[int] = set()  # values of this nest that are computed from the result of a long function
        for step in left:
            read = reads(self.region, step)
            is_long = step.kind is Kind.VALUE and self.nodes[step.node].op in _LONG
            if iteration(self.region, step) != shape or not pending.isdisjoint(read):
                continue
            if is_long and shape[0] * shape[1] > 1 and not late.isdisjoint(read):
                continue
            chosen.append(step)
            if step.kind is Kind.VALUE:  # the result of a feature reduction is known only after its nest
                pending.discard(step.node)
                if is_long or not late.isdisjoint(read):
                    late.add(step.node)
        return chosen

    def _keep(self, nests: Iterable[Nest], readers: Sequence[Nest]) -> tuple[Nest, ...]:
        """Marks the values that another nest reads. Scalars stay in scope, so they need no array and no mark."""
        done = []
        for nest in nests:
            read = {a for other in readers if other is not nest for s in other.steps for a in reads(self.region, s)}
            made = {s.node for s in nest.steps if s.kind is Kind.VALUE} if nest.shape != (1, 1) else set()
            done.append(Nest(nest.shape, nest.steps, frozenset(made & read)))
        return tuple(done)
