"""Graphs that benchmarks run on: generated from a seed on the CPU, so that every device gets the same graph."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def uniform(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    """Draws sources and destinations uniformly; self loops and repeated edges may occur.

    Returns:
        `edge_index`, `[2, num_edges]`, int64.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (2, num_edges), generator=generator)


def power_law(
    num_nodes: int,
    num_edges: int,
    max_degree: int,
    exponent: float = 2.4,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    r"""Draws a symmetric graph whose degrees follow a power law, like a citation graph with its edges made undirected.

    Half of the edges lead from uniformly drawn nodes to nodes drawn with weights
    :math:`w_r = (r + c)^{-1/(\gamma - 1)}` of their rank :math:`r`, the other half are their reverses; :math:`c` is
    found such that the heaviest node is expected to get `max_degree` edges. Node numbers and the order of edges are
    random. There are no self loops; edges may repeat.

    Args:
        num_nodes: number of nodes.
        num_edges: number of edges, even.
        max_degree: expected in-degree (and out-degree) of the largest hub.
        exponent: :math:`\gamma` of :math:`P(d) \propto d^{-\gamma}`, above 2.
        seed: of the random numbers.
        device: where they are drawn; each device has numbers of its own.

    Returns:
        `edge_index`, `[2, num_edges]`, int64, on that device.

    Raises:
        ValueError: `num_edges` is odd, or no graph of this size can have such a hub.
    """
    if num_edges % 2:
        raise ValueError(f"num_edges: got {num_edges}, expected an even number, since every edge has its reverse")
    half = num_edges // 2
    mean_degree = half / num_nodes
    if not mean_degree < max_degree - mean_degree < half:
        raise ValueError(
            f"max_degree: got {max_degree}, expected more than {2 * mean_degree:.0f} and less than {half}; change it, "
            "or num_edges"
        )
    generator = torch.Generator(device).manual_seed(seed)
    # A hub is drawn as a destination max_degree - mean_degree times, and as a source as often as any other node.
    weights = _rank_weights(num_nodes, share=(max_degree - mean_degree) / half, slope=1 / (exponent - 1)).to(device)
    cumulative = weights.cumsum(0)
    drawn = torch.rand(half, generator=generator, dtype=torch.float64, device=device) * cumulative[-1]
    rank = torch.searchsorted(cumulative, drawn).clamp_(max=num_nodes - 1)
    popular = torch.randperm(num_nodes, generator=generator, device=device)[rank]
    other = torch.randint(num_nodes, (half,), generator=generator, device=device)
    other = torch.where(other == popular, (other + 1) % num_nodes, other)
    edge_index = torch.stack([torch.cat([other, popular]), torch.cat([popular, other])])
    return edge_index[:, torch.randperm(num_edges, generator=generator, device=device)]


def _rank_weights(num_nodes: int, share: float, slope: float) -> Tensor:
    """`(rank + c) ** -slope` with `c` such that the first weight has the given share of their sum (bisection)."""
    rank = torch.arange(num_nodes, dtype=torch.float64)

    def weights(shift: float) -> Tensor:
        return (rank + shift) ** -slope

    low, high = 1e-9, float(num_nodes) * num_nodes
    for _ in range(100):
        middle = (low * high) ** 0.5
        candidate = weights(middle)
        if candidate[0] / candidate.sum() > share:
            low = middle
        else:
            high = middle
    return weights(high)


def bipartite(num_sources: int, num_destinations: int, degree: int, seed: int = 0) -> Tensor:
    """So many edges to each destination, from sources drawn uniformly; repeated edges may occur.

    Returns:
        `edge_index`, `[2, num_destinations * degree]`, int64, sorted by destination.
    """
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_sources, (num_destinations * degree,), generator=generator)
    return torch.stack([source, torch.arange(num_destinations).repeat_interleave(degree)])


def hub(num_nodes: int, seed: int = 0) -> Tensor:
    """Every node has one edge to node 0, in random order: a star, `[2, num_nodes]`, int64."""
    source = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    return torch.stack([source, torch.zeros_like(source)])


def even(num_nodes: int, seed: int = 0) -> Tensor:
    """The sources of :func:`hub` in the same order, each with a destination of its own, `[2, num_nodes]`, int64."""
    source = hub(num_nodes, seed)[0]
    return torch.stack([source, torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed + 1))])


def large_power_law(num_nodes: int, num_edges: int, max_degree: int) -> Tensor:
    """A power-law graph of so many edges that it is drawn on a GPU if there is one: seconds rather than minutes."""
    return power_law(num_nodes, num_edges, max_degree, device="cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Graph:
    """A named graph and the feature width it is benchmarked with.

    Attributes:
        num_sources: of a bipartite graph, whose `num_nodes` are destinations; None if both are the same nodes.
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

# Of the size of a weather model's mesh, and of the step from its mesh to the grid.
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

# For one aggregation alone, which is measured at several widths: `channels` says nothing here.
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
