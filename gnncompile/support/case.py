"""One entry of the support table: a layer of PyG, a way to make it, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch_geometric.data import Data

CHANNELS = 8
"""The number of input and output features of a node."""

EDGE_CHANNELS = 3
"""The number of features of an edge."""

TYPES = 3
"""The number of edge types in typed graphs."""

LADDER = ((12, 40), (17, 61), (9, 23), (30, 100), (7, 0), (1, 1))
"""Sizes (nodes, edges) that one captured graph must serve: some ordinary ones, no edge, a single node."""


@dataclass(frozen=True)
class Graph:
    """Random inputs of one size, the same at every call. Each attribute may be an argument of a case.

    Floats are float64 by default, so that rounding explains no difference. Nodes belong to up to three graphs of a
    batch. Edges are unsorted, with duplicates and self loops. Only the edges of `batch_edge_index` stay within a graph
    of the batch. No node has two self loops: PyG keeps the weight of one of them, but gives the gradient to both.

    Args:
        nodes: Number of nodes.
        edges: Number of edges.
        dtype: The type of floats.
    """

    nodes: int
    edges: int
    dtype: torch.dtype = torch.float64

    def normal(self, *size: int, seed: int) -> Tensor:
        """Returns random features that require a gradient."""
        random = torch.Generator().manual_seed(seed + 1000 * self.nodes + self.edges)
        return torch.randn(size, generator=random, dtype=torch.float64).to(self.dtype).requires_grad_()

    def integers(self, high: int, *size: int, seed: int) -> Tensor:
        """Returns random integers below `high`."""
        return torch.randint(high, size, generator=torch.Generator().manual_seed(seed + self.edges))

    @cached_property
    def x(self) -> Tensor:
        """Features, ``[nodes, CHANNELS]``."""
        return self.normal(self.nodes, CHANNELS, seed=1)

    @cached_property
    def x0(self) -> Tensor:
        """Other features, ``[nodes, CHANNELS]``."""
        return self.normal(self.nodes, CHANNELS, seed=2)

    @cached_property
    def x_history(self) -> Tensor:
        """Features of three layers, ``[nodes, 3, CHANNELS]``."""
        return self.normal(self.nodes, 3, CHANNELS, seed=3)

    @cached_property
    def pos(self) -> Tensor:
        """Positions, ``[nodes, 3]``."""
        return self.normal(self.nodes, 3, seed=4)

    @cached_property
    def normals(self) -> Tensor:
        """Unit vectors, ``[nodes, 3]``."""
        return nn.functional.normalize(self.normal(self.nodes, 3, seed=5).detach(), dim=1)

    @cached_property
    def edge_index(self) -> Tensor:
        """Edges, ``[2, edges]``."""
        found = self.integers(self.nodes, 2, self.edges, seed=6)
        found[0] = torch.where(found[0] == found[1], (found[0] + 1) % self.nodes, found[0])
        if self.edges >= 8:
            found[:, 1] = found[:, 0]
            found[:, 2:4] = torch.tensor([0, self.nodes - 1])
        return found

    @cached_property
    def other_edge_index(self) -> Tensor:
        """Other edges, ``[2, edges]``."""
        return self.integers(self.nodes, 2, self.edges, seed=7)

    @cached_property
    def batch_edge_index(self) -> Tensor:
        """Edges within the graphs of the batch, ``[2, edges]``."""
        source = self.edge_index[0]
        same = self.batch[source].unsqueeze(1) == self.batch.unsqueeze(0)
        choice = self.integers(1 << 20, self.edges, seed=8) % same.sum(1).clamp(min=1)
        target = (same.cumsum(1) - 1 == choice.unsqueeze(1)).logical_and(same).int().argmax(1)
        return torch.stack([source, target]) if self.edges else self.edge_index

    @cached_property
    def edge_weight(self) -> Tensor:
        """One positive number per edge, ``[edges]``."""
        return self.normal(self.edges, seed=9).detach().abs().requires_grad_()

    @cached_property
    def edge_attr(self) -> Tensor:
        """Features of edges, ``[edges, EDGE_CHANNELS]``."""
        return self.normal(self.edges, EDGE_CHANNELS, seed=10)

    @cached_property
    def edge_type(self) -> Tensor:
        """Types of edges, ``[edges]``."""
        return self.integers(TYPES, self.edges, seed=11)

    @cached_property
    def node_type(self) -> Tensor:
        """Types of nodes, ``[nodes]``."""
        return self.integers(2, self.nodes, seed=12)

    @cached_property
    def z(self) -> Tensor:
        """Atomic numbers, ``[nodes]``."""
        return self.integers(9, self.nodes, seed=13) + 1

    @cached_property
    def batch(self) -> Tensor:
        """The graph of each node, sorted, ``[nodes]``; graph 1 is empty if there are few nodes."""
        return (torch.arange(self.nodes) * 3 // max(self.nodes, 1)).clamp(max=2)

    @cached_property
    def data(self) -> Data:
        """The batch as one object."""
        return Data(x=self.x, edge_index=self.batch_edge_index, batch=self.batch)

    @cached_property
    def sorted_index(self) -> Tensor:
        """A group of each node, sorted, ``[nodes]``."""
        return self.integers(max(self.nodes // 3, 1), self.nodes, seed=14).sort().values


def degrees() -> Tensor:
    """Returns the number of nodes with each degree, for layers that scale by the average degree."""
    return torch.tensor([1, 3, 5, 2, 1])


Argument = str | Callable[[Graph], Any]
"""The name of an attribute of :class:`Graph`, or a function that makes an argument from a :class:`Graph`."""


@dataclass(frozen=True)
class Case:
    """A layer, model or function of PyG.

    Attributes:
        name: PyG's name, with the variant in brackets.
        make: Makes the module or returns the function.
        inputs: Its positional arguments.
        named: Its keyword arguments.
        dtype: The type of its floats; float32 if PyG itself makes float32 tensors.
        asks: The number of device syncs that a step can't avoid, because a size depends on learned or random values.
        asks_for: The values that these syncs read, in words.
        drawn: Whether training draws random numbers, which differ in compiled code.
    """

    name: str
    make: Callable[[], Any]
    inputs: tuple[Argument, ...] = ("x", "edge_index")
    named: Mapping[str, Argument] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    asks: int = 0
    asks_for: str = ""
    drawn: bool = False

    def arguments(self, graph: Graph) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and keyword arguments of the case on a graph."""
        made = tuple(_made(a, graph) for a in self.inputs), {k: _made(a, graph) for k, a in self.named.items()}
        return made if self.dtype == torch.float64 else tree_map(self._converted, made)

    def _converted(self, value: Any) -> Any:
        if isinstance(value, Data):
            return value.clone().apply(self._converted)
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().to(self.dtype).requires_grad_(value.requires_grad) if floats else value


def _made(argument: Argument, graph: Graph) -> Any:
    return getattr(graph, argument) if isinstance(argument, str) else argument(graph)


@dataclass(frozen=True)
class Absent:
    """An exported name that is not run: it is no layer, or it can't run here even without a compiler.

    Attributes:
        name: PyG's name.
        why: The reason.
    """

    name: str
    why: str
