"""Cuts the backward of a tiled region into stages.

1. One walk in tiles computes the values of the forward again, or reads those that the forward returned. It computes
   everything that comes from an edge: sums for the region's own rows, gradients per edge, and sums over all edges for
   weights and parameters.
2. A gradient of rows that were gathered at the other end is stored per edge by that walk. Walks over the other end's
   rows add it up. They compute it themselves if that reads no more than writing and reading it would.

So each layer is computed at most once more, whatever the number of gradients that need it, and no hidden row is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gnncompile.ir.cutting import Stages, elements
from gnncompile.ir.region import LAYERS, Node, Region, Space, behind
from gnncompile.ir.stages import Gradient


@dataclass
class Cotangents:
    """The cotangents of one forward value: one per edge, one per row, and sums over all edges for a layer's weights."""

    edge: int | None = None
    row: int | None = None
    layers: list[int] = field(default_factory=list)


Found = tuple[int, Node, Cotangents]
"""An input whose gradient is wanted: its tensor position, its node and its cotangents."""

_Root = tuple[int, bool, str]
"""An output of a stage: a scratch value, whether the value is summed over edges, and a dtype."""


def cut(stages: Stages, region: Region, inputs: Iterable[Found]) -> dict[int, Gradient]:
    """Adds the stages of a backward, and returns the gradient of each input that has one, by tensor position.

    Args:
        stages: The stages so far. They compute row values that the cotangents read.
        region: The forward.
        inputs: The inputs whose gradients are wanted.
    """
    wanted = [(position, node, _roots(stages, region, node, total)) for position, node, total in inputs]
    again = _computed_again(stages, region, wanted)
    roots = [root for _, _, found in wanted for root in found if root not in again]
    made = dict(zip(roots, stages.add(region.by, roots), strict=True))
    gradients = {}
    for position, node, found in wanted:
        if found and node.space is region.by.opposite:
            (root,) = found
            value = root[0] if root in again else stages.load(made[root], Space.EDGE, root[0], node.dtype)
            (summed,) = stages.add(region.by.opposite, [(value, True, node.dtype)])
            gradients[position] = Gradient((summed,), False)
        elif found:
            gradients[position] = Gradient(tuple(made[root] for root in found), node.space is Space.PARAMETER)
    return gradients


def _computed_again(stages: Stages, region: Region, wanted: Sequence[tuple[int, Node, list[_Root]]]) -> set[_Root]:
    """Returns the values per edge that walks over the other end's rows compute themselves, so that nobody stores them.

    Such a value needs no layer, what it is computed from is no wider than two rows like it, and no gradient of another
    input needs it in memory.
    """
    nodes, opposite = stages.scratch.nodes, region.by.opposite
    others = {at for _, node, found in wanted if node.space is not opposite for at, _, _ in found}
    kept = others.union(*(nodes[at].args for at in others if nodes[at].op == "outer"))

    def is_free(at: int) -> bool:
        rows = nodes[at].args if nodes[at].op == "on_edges" else ()
        needed = [nodes[k] for k in behind(nodes, [at])]
        read = [n for n in needed if n.op == "input" and (n.space.computed is Space.EDGE or n.space is region.by)]
        reads_little = elements(read) <= 2 * elements([nodes[at]])
        return reads_little and kept.isdisjoint((at, *rows)) and not any(n.op in LAYERS for n in needed)

    return {root for _, node, found in wanted if node.space is opposite for root in found if is_free(root[0])}


def sum_dtype(node: Node, sums: Sequence[int], compute: str) -> str:
    """Returns the dtype of the sums over all edges that are the gradient of an input.

    A single sum is the gradient. Several sums are added up later, in the dtype that the region computes in.
    """
    return node.dtype if len(sums) == 1 else compute


def _roots(stages: Stages, region: Region, node: Node, total: Cotangents) -> list[_Root]:
    """Returns what the walk stores for the gradient of one input."""
    b, compute = stages.scratch, stages.compute
    sums = list(total.layers)
    if node.space is Space.PARAMETER and total.edge is not None:
        sums.append(b.over_all_edges(total.edge, node.shape))
    if node.space is Space.PARAMETER and total.row is not None:
        return [(sum_, False, compute) for sum_ in (*sums, total.row)]
    roots: list[_Root] = [(sum_, False, sum_dtype(node, sums, compute)) for sum_ in sums]
    if node.space is Space.PARAMETER:
        return roots
    if total.edge is not None:
        summed = node.space is region.by
        roots.append((total.edge if summed else b.on_edges(total.edge), summed, node.dtype))
    if total.row is not None:
        roots.append((total.row, False, node.dtype))
    return roots
