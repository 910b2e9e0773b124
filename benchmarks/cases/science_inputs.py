"""Draws the arguments of the models of the suite `science`, in float32, from a graph and a seed."""

import torch
from torch import Generator, Tensor

from benchmarks.cases.graphs import Graph, bipartite, uniform
from benchmarks.cases.inputs import ordered
from benchmarks.cases.science_models import NUM_RELATIONS, triplets

QUERIES = 8
GRID_PER_MESH = 4
"""Points of the grid per node of the mesh."""

TO_MESH, TO_GRID = 2, 3
"""Edges per point of the grid: to nodes of the mesh, and from them."""


def edge_states(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, channels]`, `edge_index` `[2, edges]`, and `edge_attr` `[edges, channels]`."""
    x = torch.randn(graph.num_nodes, graph.channels, generator=generator)
    return x, *ordered(graph, order, torch.randn(graph.num_edges, graph.channels, generator=generator))


def positions(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, channels]`, `pos` `[nodes, 3]` in a cube of side 4, and `edge_index` `[2, edges]`."""
    x = torch.randn(graph.num_nodes, graph.channels, generator=generator)
    return x, 4 * torch.rand(graph.num_nodes, 3, generator=generator), *ordered(graph, order)


def relations(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, queries, channels]`, `edge_index` `[2, edges]`, and `edge_type` `[edges]`."""
    x = torch.randn(graph.num_nodes, QUERIES, graph.channels, generator=generator)
    return x, *ordered(graph, order, torch.randint(NUM_RELATIONS, (graph.num_edges,), generator=generator))


def bonds(num_atoms: int, num_bonds: int) -> Tensor:
    """Draws bonds in both directions, `[2, num_bonds]`: columns `2k` and `2k + 1` are each other's reverse."""
    one = uniform(num_atoms, num_bonds // 2)
    return torch.stack([one, one.flip(0)], dim=2).view(2, -1)


def with_triplets(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """`x` `[nodes, channels]`, `pos` `[nodes, 3]`, `edge_index` `[2, edges]`, `idx_kj` and `idx_ji` `[triplets]`."""
    x, pos, edge_index = positions(graph, order, generator)
    return x, pos, edge_index, *triplets(edge_index, graph.num_nodes)


def line_graph(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """Those of :func:`edge_states`, `line_index` `[2, triplets]`, and `angle_attr` `[triplets, channels]`."""
    x, edge_index, edge_attr = edge_states(graph, order, generator)
    line_index = torch.stack(triplets(edge_index, graph.num_nodes))
    return x, edge_index, edge_attr, line_index, torch.randn(line_index.size(1), graph.channels, generator=generator)


def grid_and_mesh(graph: Graph, order: str, generator: Generator) -> tuple[Tensor, ...]:
    """States of grid and mesh, and the edges to the mesh, of the mesh and to the grid with their states.

    The graph is the mesh. Each point of the grid has `TO_MESH` edges to the mesh and `TO_GRID` edges from the mesh.
    """
    mesh, edge_index, edge_attr = edge_states(graph, order, generator)
    num_grid = GRID_PER_MESH * graph.num_nodes
    to_mesh = bipartite(graph.num_nodes, num_grid, TO_MESH, seed=1).flip(0)
    to_grid = bipartite(graph.num_nodes, num_grid, TO_GRID, seed=2)
    grid, to_mesh_attr, to_grid_attr = (
        torch.randn(rows, graph.channels, generator=generator) for rows in (num_grid, to_mesh.size(1), to_grid.size(1))
    )
    return grid, mesh, to_mesh, to_mesh_attr, edge_index, edge_attr, to_grid, to_grid_attr
