"""How a Triton kernel walks a region: how often it passes over the edges of a row, and what hubs leave to others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gnncompile.codegen.triton.online_softmax import WeightedSum, weighted_sums
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import FEATURE_REDUCTIONS, LAYERS, REDUCTIONS, STATISTICS, Node, Region, Space, behind

MAX_PASSES = 4
"""More passes over the edges than this cost more than separate regions."""

WIDE = 64
"""From this width on, reductions combine the edges of each step at once."""


def edgewise(region: Region, node: Node) -> bool:
    """Whether the node has a value per edge: it lives on edges, or is gathered from the other end."""
    return node.space in (Space.EDGE, Space.ORDERED, region.by.opposite)


def every_step(node: Node) -> bool:
    """Whether a reduction combines the edges of each step at once, rather than in lanes that meet after the loop.

    A wide row spreads the threads of a warp over its channels, so that combining costs few shuffles and saves many
    registers; a narrow one spreads them over the edges. A softmax follows the sums that it weighs.
    """
    return node.op in (*REDUCTIONS, "ties", "outer") and node.shape[0] * node.shape[1] >= WIDE


def counted(region: Region) -> dict[int, int]:
    """The ties that are counted in the pass of their extremum, by their positions, and that extremum.

    Those of an extremum that a later pass compares each edge with anyway are counted there.
    """
    nodes = region.nodes
    wanted = behind(nodes, (o.node for o in region.outputs))
    compared = [set(nodes[i].args) for i in wanted if nodes[i].space is Space.EDGE]
    found = {i: nodes[i].args[0] for i in sorted(wanted) if nodes[i].op == "ties"}
    return {i: at for i, at in found.items() if not any({at, *nodes[at].args} <= args for args in compared)}


@dataclass(frozen=True)
class Together:
    """What is found in the pass of something else.

    Attributes:
        weighed: The sums that are added up in the pass of the softmax that weighs them.
        counted: The ties that are counted in the pass of their extremum, and that extremum.
    """

    weighted_sums: dict[int, WeightedSum]
    counted: dict[int, int]

    def first(self, i: int) -> int | None:
        """The softmax or the extremum in whose pass an operation is done as well."""
        return self.weighted_sums[i].softmax if i in self.weighted_sums else self.counted.get(i)


@dataclass(frozen=True)
class Schedule(Together):
    """In which pass over the edges each value is computed.

    A row-wise value with ``need[i] == k`` must be ready before pass ``k``, so a reduction finishes in pass ``k - 1``
    (likewise the maximum and the sum of a softmax). An edge-wise value with ``need[i] == k`` is first used in pass
    ``k``, and recomputed in every later pass that uses it. Values are placed as late as their users allow, so that
    the first pass of an attention region reads nothing but what its logits need.

    Attributes:
        passes: Number of passes over the edges of a row; 0 in a region without edges.
        need: From node position to pass, for the nodes that the outputs need.
    """

    passes: int
    need: dict[int, int]

    def finished_in(self, step: int) -> list[int]:
        """Positions of all nodes with ``need == step + 1``."""
        return sorted(i for i, k in self.need.items() if k == step + 1)


def schedule(region: Region) -> Schedule:
    """Plans the passes of a region.

    Raises:
        UnsupportedRegion: The region has a value that the Triton generator can't express, or needs too many passes.
    """
    together = Together(weighted_sums(region), counted(region))
    ready: list[int] = []  # number of passes behind which a value can be had
    for i, node in enumerate(region.nodes):
        _check(region, node)
        one = together.weighted_sums.get(i)
        if one is not None and any(ready[a] >= ready[one.softmax] for a in one.factors):
            del together.weighted_sums[i]  # another pass comes first
        before = max((ready[a] for a in reads(region, together, i)), default=0)
        first = together.first(i)
        behind_one_more = before + 1 if first is None else ready[first]
        ready.append(behind_one_more if node.op in ENDS else before)
    wanted = behind(region.nodes, (o.node for o in region.outputs))
    passes = max((ready[i] for i in wanted), default=0)
    for out in region.outputs:
        node = region.nodes[out.node]
        if node.space is region.by.opposite:
            raise UnsupportedRegion("an output lives at the other end of the edges than the rows that are walked")
        if node.space is Space.EDGE:
            passes = max(passes, ready[out.node] + 1)
    if passes > MAX_PASSES:
        raise UnsupportedRegion(f"the region needs {passes} passes over the edges, at most {MAX_PASSES} are generated")
    return Schedule(together.weighted_sums, together.counted, passes, _needs(region, together, passes))


def _needs(region: Region, together: Together, passes: int) -> dict[int, int]:
    """Before which pass each value must be ready (see :class:`Schedule`)."""
    need: dict[int, int] = {}
    for out in region.outputs:
        last = passes - 1 if region.per_edge(out) else passes
        need[out.node] = min(need.get(out.node, last), last)
    before: dict[int, int] = {}
    while need != before:  # what shares a pass is needed as soon as one of it is
        before = dict(need)
        for i in reversed(range(len(region.nodes))):
            if i in need:
                k = need[i] - 1 if region.nodes[i].op in ENDS else need[i]
                _lower(need, reads(region, together, i), k)
                first = together.first(i)
                if first is not None:
                    _lower(need, (first,), need[i])
                    _lower(need, (i,), need[first])
    return need


def _lower(need: dict[int, int], nodes: Iterable[int], k: int) -> None:
    for a in nodes:
        need[a] = min(need.get(a, k), k)


def gathered(region: Region) -> tuple[tuple[int, ...], ...]:
    """For each pass over the edges, the inputs on edges or at their other end that it reads."""
    plan = schedule(region)
    found = []
    for step in range(plan.passes):
        ends = [i for i in plan.finished_in(step) if region.nodes[i].op in ENDS]
        todo = [a for i in ends for a in reads(region, plan, i)]
        if step == plan.passes - 1:
            todo += [o.node for o in region.outputs if region.per_edge(o)]
        seen: set[int] = set()
        while todo:
            i = todo.pop()
            if i not in seen and edgewise(region, region.nodes[i]):
                seen.add(i)
                todo.extend(region.nodes[i].args)
        found.append(tuple(sorted(i for i in seen if region.nodes[i].op == "input")))
    return tuple(found)


ENDS = (*REDUCTIONS, "softmax", "ties", "outer")
"""Operations that end a pass over the edges."""


def reads(region: Region, together: Together, i: int) -> tuple[int, ...]:
    """The values that an operation needs, not among them what is found in the same pass."""
    if i in together.weighted_sums:
        return together.weighted_sums[i].factors
    args = region.nodes[i].args
    if region.nodes[i].op != "ties":
        return args
    edges = region.nodes[args[0]].args
    return edges if i in together.counted else (*args, *edges)


def shares_maximum(region: Region, plan: Schedule, softmax: int) -> bool:
    """Whether the edges of a row share the largest logit so far, as a sum that it weighs is combined in each step."""
    return any(one.softmax == softmax and every_step(region.nodes[i]) for i, one in plan.weighted_sums.items())


def _check(region: Region, node: Node) -> None:
    known = ("input", "const", "softmax", "dropout", *REDUCTIONS, *STATISTICS, *FEATURE_REDUCTIONS, *LAYERS)
    if node.op not in known and node.op not in POINTWISE:
        raise UnsupportedRegion(f"no Triton code for the operation {node.op!r}")
    if node.op in ("softmax", *REDUCTIONS, *FEATURE_REDUCTIONS) and region.nodes[node.args[0]].boolean:
        raise UnsupportedRegion(f"{node.op} of a bool value")


@dataclass(frozen=True)
class Part:
    """Which part of a region's work a kernel does.

    A hub (see :data:`gnncompile.layout.csr.HUB`) has too many edges for one program, so it is cut into pieces. For
    each pass over the edges one launch walks all pieces and stores what every piece reduces to; the next launch starts
    by putting these together, always in the same order, and the last one finishes the hubs' rows. Where there is but
    one pass, one launch walks the pieces and the other rows.

    Attributes:
        walks: "all" rows; the "ordinary" ones, which are no hubs; the "pieces" of hubs, in one pass; "both" of these;
            the "hubs", in no pass: what is left to do when all pieces are walked; or the "edges", where sums are over
            all of them.
        step: The pass over the pieces.
    """

    walks: Literal["all", "ordinary", "pieces", "both", "hubs", "edges"] = "all"
    step: int = 0


WHOLE = Part()
"""All of the work in one kernel."""


def partials(region: Region, plan: Schedule) -> tuple[dict[int, int], int]:
    """Where a piece (or a program's share of all edges) keeps what it reduces to: the offset of every reduction and
    softmax, and the length of it all.

    A softmax keeps its maxima, and behind them its sums.
    """
    offsets: dict[int, int] = {}
    length = 0
    for i in sorted(plan.need):
        node = region.nodes[i]
        if node.op in ENDS:
            offsets[i] = length
            copies = region.features(i) if node.op == "outer" else 2 if node.op == "softmax" else 1
            length += node.shape[0] * node.shape[1] * copies
    return offsets, length
