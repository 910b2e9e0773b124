"""Plans how Triton kernels walk a region: the passes over the edges of a row, and the parts that kernels share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gnncompile import tuning
from gnncompile.codegen.triton.online_softmax import WeightedSum, weighted_sums
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import FEATURE_REDUCTIONS, LAYERS, STATISTICS, Node, Region, Space, behind

MAX_PASSES = 4
"""Most passes over the edges of one kernel. More passes would cost more than separate regions."""


def edgewise(region: Region, node: Node) -> bool:
    """Whether a node has a value per edge: it lives on edges, or is gathered from the other end."""
    return node.space in (Space.EDGE, Space.ORDERED, region.by.opposite)


def every_step(node: Node) -> bool:
    """Whether a reduction combines the edges of each step, rather than keeping lanes that are combined after the loop.

    A wide row spreads the threads of a warp over its channels, so combining costs few shuffles and saves many
    registers. A narrow row spreads them over the edges. For a softmax, see :func:`shares_maximum`.
    """
    return node.op in (*REDUCTIONS, "ties", "outer") and node.shape[0] * node.shape[1] >= tuning.TILES.combined_width


def counted(region: Region) -> dict[int, int]:
    """Returns the ties nodes that are counted in the pass of their extremum, mapped to that extremum.

    If a later pass compares each edge with the extremum anyway, the ties are counted in that pass instead.
    """
    nodes = region.nodes
    wanted = behind(nodes, (o.node for o in region.outputs))
    compared = [set(nodes[i].args) for i in wanted if nodes[i].space is Space.EDGE]
    found = {i: nodes[i].args[0] for i in sorted(wanted) if nodes[i].op == "ties"}
    return {i: at for i, at in found.items() if not any({at, *nodes[at].args} <= args for args in compared)}


@dataclass(frozen=True)
class Together:
    """The reductions that are computed in the pass of another node.

    Attributes:
        weighted_sums: The sums that are computed in the pass of the softmax that weights them.
        counted: The ties nodes that are counted in the pass of their extremum, mapped to that extremum.
    """

    weighted_sums: dict[int, WeightedSum]
    counted: dict[int, int]

    def first(self, i: int) -> int | None:
        """Returns the softmax or the extremum in whose pass node `i` is computed, or None."""
        return self.weighted_sums[i].softmax if i in self.weighted_sums else self.counted.get(i)


@dataclass(frozen=True)
class Schedule(Together):
    """The pass over the edges in which each value is computed.

    A row value with ``need[i] == k`` must be ready before pass ``k``. So a reduction finishes in pass ``k - 1``, and so
    do the maximum and the sum of a softmax. A value per edge with ``need[i] == k`` is first used in pass ``k``, and
    computed again in every later pass that uses it. Values are placed as late as their users allow, so that the first
    pass of an attention region reads only the operands of its logits.

    Attributes:
        passes: The number of passes over the edges of a row; 0 in a region without edges.
        need: From node index to pass, for the nodes that the outputs need.
    """

    passes: int
    need: dict[int, int]

    def finished_in(self, step: int) -> list[int]:
        """Returns the nodes with ``need == step + 1``: those that must be ready after pass `step`."""
        return sorted(i for i, k in self.need.items() if k == step + 1)


def schedule(region: Region) -> Schedule:
    """Plans the passes of a region.

    Raises:
        UnsupportedRegion: The region has a value that the Triton generator can't express, or needs too many passes.
    """
    together = Together(weighted_sums(region), counted(region))
    ready: list[int] = []  # for each value, the number of passes after which it can be computed
    for i, node in enumerate(region.nodes):
        _check(region, node)
        one = together.weighted_sums.get(i)
        if one is not None and any(ready[a] >= ready[one.softmax] for a in one.factors):
            del together.weighted_sums[i]  # a factor is known only after the softmax's pass
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
    """Returns the pass before which each value must be ready (see :class:`Schedule`)."""
    need: dict[int, int] = {}
    for out in region.outputs:
        last = passes - 1 if region.per_edge(out) else passes
        need[out.node] = min(need.get(out.node, last), last)
    before: dict[int, int] = {}
    while need != before:  # nodes that share a pass are needed as soon as one of them is needed
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
    """Returns, for each pass over the edges, the inputs that the pass reads per edge or at the edge's other end."""
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
    """Returns the values that a node needs, without those that are computed in the same pass."""
    if i in together.weighted_sums:
        return together.weighted_sums[i].factors
    args = region.nodes[i].args
    if region.nodes[i].op != "ties":
        return args
    edges = region.nodes[args[0]].args
    return edges if i in together.counted else (*args, *edges)


def shares_maximum(region: Region, plan: Schedule, softmax: int) -> bool:
    """Whether all lanes of a row share one maximum, because each step combines a sum that the softmax weights."""
    return any(one.softmax == softmax and every_step(region.nodes[i]) for i, one in plan.weighted_sums.items())


def _check(region: Region, node: Node) -> None:
    known = ("input", "const", "softmax", "dropout", *REDUCTIONS, *STATISTICS, *FEATURE_REDUCTIONS, *LAYERS)
    if node.op not in known and node.op not in POINTWISE:
        raise UnsupportedRegion(f"no Triton code for the operation {node.op!r}")
    if node.op in ("softmax", *REDUCTIONS, *FEATURE_REDUCTIONS) and region.nodes[node.args[0]].boolean:
        raise UnsupportedRegion(f"{node.op} of a bool value")


@dataclass(frozen=True)
class Part:
    """The part of a region's work that a kernel does.

    A hub (see :func:`gnncompile.layout.csr.most_edges`) has too many edges for one program, so it is cut into pieces.
    For each pass over the edges, one launch walks all pieces and stores the partial results of each. The next launch
    starts by joining these results, always in the same order. The last launch finishes the hubs' rows. If there is only
    one pass, one launch walks both the pieces and the other rows.

    Attributes:
        walks: "all" rows; "ordinary" rows, which are no hubs; "pieces" of hubs, in one pass; "both" pieces and ordinary
            rows; "hubs", whose pieces are walked already and are now joined; or all "edges", for sums over all edges.
        step: The index of the pass, for "pieces".
    """

    walks: Literal["all", "ordinary", "pieces", "both", "hubs", "edges"] = "all"
    step: int = 0


WHOLE = Part()
"""The part that is all of the work, in one kernel."""


def partials(region: Region, plan: Schedule) -> tuple[dict[int, int], int]:
    """Returns the layout of the partial results that a piece, or a program's share of all edges, stores.

    The result is the offset of every reduction and softmax, and the total length. A softmax stores its maxima, followed
    by its sums.
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
