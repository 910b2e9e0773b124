"""Divides the edges of a region into shares, which its walks in tiles take one after another.

What one walk stores for the next, and for products over all edges, is needed for one share at a time only. So it takes
the memory of a share, not of all edges. Within a share, memory is taken when a walk writes to it, and free again after
the last walk or product that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gnncompile.codegen.triton.tiled_plan import TiledPlan

BYTES = 2**30
"""Bytes that walks may store for a share before the edges are divided further.

A share costs several launches. On an H200, a step of EGNN in float32 with 600,000 edges takes 4.9 ms if they are one
share, 5.3 ms with three shares and 5.9 ms with six.
"""


class Share(NamedTuple):
    """A share of the edges: the positions from `first` up to `end`, in the order of the walk."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """The number of edges."""
        return self.end - self.first


def divide(edges: int, bytes_per_edge: int, wave: int) -> Sequence[Share]:
    """Returns the shares, at least one.

    Args:
        edges: The number of edges.
        bytes_per_edge: What walks store of an edge for walks and products of its share.
        wave: The edges that programs on all multiprocessors take at a time. All shares but the last are so many waves,
            so that no multiprocessor waits for others.
    """
    count = -(-edges * bytes_per_edge // BYTES)
    if count <= 1:
        return (Share(0, edges),)
    size = -(-edges // (count * wave)) * wave
    return tuple(Share(first, min(first + size, edges)) for first in range(0, edges, size))


class Turn(NamedTuple):
    """What happens around one walk over a share.

    Attributes:
        stores: The brief values that the walk stores.
        products: The outputs, by position, that products over edges add to behind the walk.
        done: The brief values that nothing reads any more behind these products.
    """

    stores: tuple[int, ...]
    products: tuple[int, ...]
    done: tuple[int, ...]


def turns(plan: TiledPlan) -> list[Turn]:
    """Returns the turn of each walk of a region."""
    nodes, outputs = plan.region.nodes, plan.region.outputs
    made = {i: number for number, phase in enumerate(plan.phases) for i in phase.stores if i in plan.brief}
    after = {k: max(made[i] for i in nodes[outputs[k].node].args) for k in products(plan, brief=True)}
    last = dict(made)
    for number, phase in enumerate(plan.phases):
        last.update(dict.fromkeys(plan.brief & phase.loads, number))
    for k, number in after.items():
        last.update({i: max(number, last[i]) for i in nodes[outputs[k].node].args})
    return [Turn(_at(number, made), _at(number, after), _at(number, last)) for number in range(len(plan.phases))]


def products(plan: TiledPlan, brief: bool) -> list[int]:
    """Returns the outputs, by position, that are products over edges: those of brief values, or the others."""
    found = {k: out.node for k, out in enumerate(plan.region.outputs) if out.node in plan.products}
    return [k for k, i in found.items() if brief == plan.brief.issuperset(plan.region.nodes[i].args)]


def _at(number: int, numbers: dict[int, int]) -> tuple[int, ...]:
    return tuple(i for i, found in numbers.items() if found == number)
