"""Plans how Triton kernels walk a region: the passes over the edges of a row, and the parts that kernels share.

A sum that a softmax weights is computed in the same pass as the softmax itself. Let `m` be the largest logit so far.
The kernel sums ``exp(logit - m) x``, and rescales the sum by a factor whenever `m` grows (M. Milakov and N. Gimelshein,
*Online normalizer calculation for softmax*, 2018; T. Dao et al., *FlashAttention*, 2022). So each row is gathered only
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gnncompile import tuning
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import FEATURE_REDUCTIONS, LAYERS, STATISTICS, Node, Region, Space, behind

MAX_PASSES = 4
"""Most passes over the edges of one kernel. More passes would cost more than separate regions."""


class WeightedSum(NamedTuple):
    """The summand of a weighted sum: a product of a softmax and other factors.

    Attributes:
        softmax: Index of the softmax, which is a factor once.
        factors: Indices of the other factors, which do not depend on the softmax.
    """

    softmax: int
    factors: tuple[int, ...]


def _weighted(nodes: Sequence[Node], at: int) -> WeightedSum | None:
    """Returns value `at` as a softmax and the factors that it weights; None if it is no such product."""
    if nodes[at].op == "softmax":
        return WeightedSum(at, ())
    if nodes[at].op != "mul":
        return None
    for one, other in (nodes[at].args, nodes[at].args[::-1]):
        inner = _weighted(nodes, one)
        if inner is not None and inner.softmax not in behind(nodes, [other]):
            return WeightedSum(inner.softmax, (*inner.factors, other))
    return None


def _weighted_sums(region: Region) -> dict[int, WeightedSum]:
    """Returns the sums over edges that are weighted by a softmax, by the index of their node."""
    nodes = region.nodes
    found = {i: _weighted(nodes, node.args[0]) for i, node in enumerate(nodes) if node.op == "reduce_sum"}
    return {i: one for i, one in found.items() if one is not None}


def _counted(region: Region) -> dict[int, int]:
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


class Pass(NamedTuple):
    """One loop over the edges of a row.

    Attributes:
        reductions: The softmaxes and reductions that the loop computes.
        values: The values per edge that the loop computes or loads, in program order.
        stores: The positions of the outputs that the loop writes.
        gathered: The inputs that the loop reads per edge or at the edge's other end.
    """

    reductions: tuple[int, ...]
    values: tuple[int, ...]
    stores: tuple[int, ...]
    gathered: tuple[int, ...]


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
        ready: The nodes that must be ready before each pass, and after the last pass.
        loops: The passes, in order.
        edge_spaces: The spaces whose values differ between the edges of a loop. In a region that sums over all edges,
            row values do too, since a program walks edges of many rows.
        every_step: The reductions that combine the edges of each step, rather than keeping lanes that are combined
            after the loop. A wide row spreads the threads of a warp over its channels, so combining costs few shuffles
            and saves many registers. A narrow row spreads them over the edges.
        shared_maxima: The softmaxes with one maximum for all lanes of a row, because each step combines a sum that they
            weight.
        offsets: The offset of each reduction and softmax among the partial results that a piece, or a program's share
            of all edges, stores. A softmax stores its maxima, followed by its sums.
        partial_length: The length of these partial results.
    """

    passes: int
    need: dict[int, int]
    ready: tuple[tuple[int, ...], ...]
    loops: tuple[Pass, ...]
    edge_spaces: frozenset[Space]
    every_step: frozenset[int]
    shared_maxima: frozenset[int]
    offsets: dict[int, int]
    partial_length: int


def schedule(region: Region) -> Schedule:
    """Plans the passes of a region.

    Raises:
        UnsupportedRegion: The region has a value that the Triton generator can't express, or needs too many passes.
    """
    together = Together(_weighted_sums(region), _counted(region))
    ready: list[int] = []  # for each value, the number of passes after which it can be computed
    for i, node in enumerate(region.nodes):
        _check(region, node)
        one = together.weighted_sums.get(i)
        if one is not None and any(ready[a] >= ready[one.softmax] for a in one.factors):
            del together.weighted_sums[i]  # a factor is known only after the softmax's pass
        before = max((ready[a] for a in _reads(region, together, i)), default=0)
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
    return _schedule(region, together, passes)


def _schedule(region: Region, together: Together, passes: int) -> Schedule:
    """Returns the schedule of a region that needs this number of passes."""
    nodes, need = region.nodes, _needs(region, together, passes)
    ready = tuple(tuple(sorted(i for i, k in need.items() if k == step)) for step in range(passes + 1))
    spaces = region.edge_spaces | {region.by} if region.sums_all else region.edge_spaces
    loops = []
    for step in range(passes):
        reductions = tuple(i for i in ready[step + 1] if nodes[i].op in ENDS)
        last = step == passes - 1
        stores = tuple(k for k, o in enumerate(region.outputs) if last and nodes[o.node].space in spaces)
        roots = [a for i in reductions for a in _reads(region, together, i)]
        values = _closure(nodes, spaces, roots + [region.outputs[k].node for k in stores])
        gathered = tuple(i for i in values if nodes[i].op == "input" and nodes[i].space in region.edge_spaces)
        loops.append(Pass(reductions, values, stores, gathered))
    wide = [i for i, n in enumerate(nodes) if n.shape[0] * n.shape[1] >= tuning.TILES.combined_width]
    every_step = frozenset(i for i in wide if nodes[i].op in (*REDUCTIONS, "ties", "outer"))
    maxima = frozenset(one.softmax for i, one in together.weighted_sums.items() if i in every_step)
    offsets, length = dict[int, int](), 0
    for i in sorted(i for i in need if nodes[i].op in ENDS):
        offsets[i] = length
        copies = region.features(i) if nodes[i].op == "outer" else 2 if nodes[i].op == "softmax" else 1
        length += nodes[i].shape[0] * nodes[i].shape[1] * copies
    shared = together.weighted_sums, together.counted
    return Schedule(*shared, passes, need, ready, tuple(loops), spaces, every_step, maxima, offsets, length)


def _closure(nodes: Sequence[Node], spaces: frozenset[Space], roots: list[int]) -> tuple[int, ...]:
    """Returns the values per edge that `roots` are computed from, and `roots` themselves, in program order."""
    found: set[int] = set()
    todo = [i for i in roots if nodes[i].space in spaces]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo.extend(a for a in nodes[i].args if nodes[a].space in spaces)
    return tuple(sorted(found))


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
                _lower(need, _reads(region, together, i), k)
                first = together.first(i)
                if first is not None:
                    _lower(need, (first,), need[i])
                    _lower(need, (i,), need[first])
    return need


def _lower(need: dict[int, int], nodes: Iterable[int], k: int) -> None:
    for a in nodes:
        need[a] = min(need.get(a, k), k)


ENDS = (*REDUCTIONS, "softmax", "ties", "outer")
"""Operations that end a pass over the edges."""


def _reads(region: Region, together: Together, i: int) -> tuple[int, ...]:
    """Returns the values that a node needs, without those that are computed in the same pass."""
    if i in together.weighted_sums:
        return together.weighted_sums[i].factors
    args = region.nodes[i].args
    if region.nodes[i].op != "ties":
        return args
    edges = region.nodes[args[0]].args
    return edges if i in together.counted else (*args, *edges)


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
