"""Sizes of graphs for the fuzzer, and the inputs of a program for each size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tests.fuzz.program import EDGES, FLOATS, GRAPHS, NODES, OTHERS, PAIRS, TYPES


@dataclass(frozen=True)
class Size:
    """The size of a batch of graphs.

    Attributes:
        nodes: The number of nodes.
        edges: The number of edges between nodes.
        others: The number of nodes of the second kind.
        pairs: The number of edges from nodes to nodes of the second kind.
        graphs: The number of graphs.
        hub: Whether half of the edges, and half of the pairs, lead to one node.
        sorted: Whether the batch vector is sorted.
    """

    nodes: int = 7
    edges: int = 15
    others: int = 4
    pairs: int = 9
    graphs: int = 2
    hub: bool = False
    sorted: bool = True

    def rows(self, space: str) -> int:
        return {
            NODES: self.nodes,
            EDGES: self.edges,
            OTHERS: self.others,
            PAIRS: self.pairs,
            GRAPHS: self.graphs,
        }[space]


USUAL = (Size(), Size(12, 40, 5, 20, 3), Size(9, 20, 3, 8, 2, sorted=False), Size(40, 150, 17, 70, 5))
AWKWARD = (
    Size(5, 0, 3, 0, 2),
    Size(1, 0, 1, 0, 1),
    Size(1, 3, 1, 2, 1),
    Size(6, 1, 4, 1, 1),
    Size(2, 9, 1, 5, 2),
    Size(9, 4, 7, 3, 4),
    Size(40, 120, 6, 90, 3, hub=True),
    Size(60, 700, 6, 400, 3, hub=True),
)


def inputs(names: Iterable[str], size: Size, seed: int) -> dict[str, Tensor]:
    """Returns inputs by name; floats are float64. The same size and seed give the same tensors."""
    found = _all(size, seed)
    return {name: found[name] for name in names}


@lru_cache(maxsize=64)
def _all(size: Size, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator)

    found = {
        name: torch.randn(size.rows(space), *shape, generator=generator, dtype=torch.float64)
        for name, (space, shape) in FLOATS.items()
    }
    found["atom"], found["bond"] = integers(TYPES, size.nodes), integers(TYPES, size.edges)
    src, dst = integers(size.nodes, size.edges), integers(size.nodes, size.edges)
    row, col = integers(size.nodes, size.pairs), integers(size.others, size.pairs)
    if size.hub:
        dst[: size.edges // 2], col[: size.pairs // 2] = 0, 0
    found["edge_index"], found["pairs"] = torch.stack([src, dst]), torch.stack([row, col])
    found["rev"] = torch.randperm(size.edges, generator=generator)
    batch = integers(size.graphs, size.nodes)
    batch[-1] = size.graphs - 1  # so that batch.max() + 1 is the number of graphs
    found["batch"] = batch.sort()[0] if size.sorted else batch
    return found
