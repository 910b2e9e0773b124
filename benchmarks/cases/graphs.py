"""Generates the graphs of the benchmarks from a seed on the CPU, so that every device gets the same graph.

Only the two largest graphs are drawn on a GPU where there is one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnncompile import testing


def uniform(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    """Draws sources and destinations uniformly. Self loops and repeated edges may occur.

    Returns:
        `edge_index`, `[2, num_edges]`, int64.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (2, num_edges), generator=generator)


def power_law(
    num_nodes: int, num_edges: int, max_degree: int, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns the edges of :func:`gnncompile.testing.power_law`, `[2, num_edges]`, int64, drawn on `device`."""
    data = testing.power_law(num_nodes, num_edges, max_degree, channels=None, seed=seed, device=device)
    edge_index: Tensor = data.edge_index
    return edge_index


def bipartite(num_sources: int, num_destinations: int, degree: int, seed: int = 0) -> Tensor:
    """Draws `degree` edges to each destination, from uniformly random sources. Repeated edges may occur.

    Returns:
        `edge_index`, `[2, num_destinations * degree]`, int64, sorted by destination.
    """
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_sources, (num_destinations * degree,), generator=generator)
    return torch.stack([source, torch.arange(num_destinations).repeat_interleave(degree)])


def hub(num_nodes: int, seed: int = 0) -> Tensor:
    """Returns a star: one edge from every node to node 0, in random order, `[2, num_nodes]`, int64."""
    source = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    return torch.stack([source, torch.zeros_like(source)])


def even(num_nodes: int, seed: int = 0) -> Tensor:
    """Returns the edges of :func:`hub`, but each with its own destination, `[2, num_nodes]`, int64."""
    source = hub(num_nodes, seed)[0]
    return torch.stack([source, torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed + 1))])


def large_power_law(num_nodes: int, num_edges: int, max_degree: int) -> Tensor:
    """Draws a large power-law graph, on a GPU if there is one, because a CPU is slow at it."""
    return power_law(num_nodes, num_edges, max_degree, device="cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Graph:
    """A named graph and the feature width it is benchmarked with.

    Attributes:
        num_sources: the number of sources of a bipartite graph, whose `num_nodes` are destinations; None if sources and
            destinations are the same nodes.
    """

    name: str
    num_nodes: int
    num_edges: int
    channels: int
    make: Callable[[], Tensor]
    description: str
    num_sources: int | None = None

    @property
    def sources(self) -> int:
        """The number of nodes that edges come from."""
        return self.num_nodes if self.num_sources is None else self.num_sources

    def __str__(self) -> str:
        nodes = "nodes" if self.num_sources is None else f"destinations, {self.num_sources:,} sources"
        return f"{self.name}: {self.num_nodes:,} {nodes}, {self.num_edges:,} edges ({self.description})"


GRAPHS = {
    graph.name: graph
    for graph in (
        Graph("guide", 10_000, 200_000, 64, lambda: uniform(10_000, 200_000), "uniformly random, as in PyG's guide"),
        Graph(
            "powerlaw-arxiv",
            169_343,
            2_332_486,
            128,
            lambda: power_law(169_343, 2_332_486, max_degree=13_000),
            "power-law degrees with hubs of 13,000, the size of ogbn-arxiv made undirected, random edge order",
        ),
    )
}

# Graphs with the sizes of a weather model's mesh, and of its step from the mesh to the grid.
MESH = Graph("mesh", 40_962, 327_660, 128, lambda: uniform(40_962, 327_660), "uniformly random")
MESH_TO_GRID = Graph(
    "mesh-to-grid",
    542_080,
    1_626_240,
    128,
    lambda: bipartite(40_962, 542_080, 3),
    "3 uniformly drawn sources per destination",
    num_sources=40_962,
)

# For a single aggregation, which is measured at several widths: `channels` is not used here.
KERNEL_GRAPHS = {
    graph.name: graph
    for graph in (
        *GRAPHS.values(),
        Graph("hub", 100_000, 100_000, 64, lambda: hub(100_000), "one node has all edges"),
        Graph("even", 100_000, 100_000, 64, lambda: even(100_000), "the edges of `hub`, one to each node"),
        Graph(
            "powerlaw-products",
            2_449_029,
            123_718_280,
            64,
            lambda: large_power_law(2_449_029, 123_718_280, max_degree=17_000),
            "power-law degrees with hubs of 17,000, the size of ogbn-products, random edge order",
        ),
        Graph(
            "powerlaw-reddit",
            232_965,
            114_615_892,
            64,
            lambda: large_power_law(232_965, 114_615_892, max_degree=21_000),
            "power-law degrees with hubs of 21,000, the size of Reddit, random edge order",
        ),
    )
}
