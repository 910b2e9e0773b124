"""Models of meshes, and of a grid around a mesh: a state on every edge."""

from typing import cast

import torch
from gnncompile.models.mesh_graph_net import GraphNetBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.cases.science_models.row_sums import sum_rows


class Processor(nn.Module):
    """The steps of a MeshGraphNet (https://arxiv.org/abs/2010.03409), without its encoder and decoder."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GraphNetBlock(channels) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `edge_index` `[2, edges]`, and edge states `[edges, channels]`."""
        for block in self.blocks:
            x, edge_attr = self.step(block, x, edge_attr, edge_index)
        return torch.cat([x, sum_rows(edge_attr, edge_index[1], x.size(0))], dim=-1)

    def step(self, block: nn.Module, *given: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a block on the states of nodes, those of edges, and the edges; returns the new states."""
        return cast(tuple[Tensor, Tensor], block(*given))


class CheckpointedProcessor(Processor):
    """A processor that keeps only states, and runs its blocks again in the backward."""

    @classmethod
    def of(cls, model: nn.Module) -> "CheckpointedProcessor":
        """Returns a processor with the parameters of another one."""
        found = cls(1, 0)
        found.blocks = cast(nn.ModuleList, model.blocks)
        return found

    def step(self, block: nn.Module, *given: Tensor) -> tuple[Tensor, Tensor]:
        """As for :class:`Processor`, but without keeping what is inside of the block."""
        return cast(tuple[Tensor, Tensor], checkpoint(block, *given, use_reentrant=False))


class GraphCast(nn.Module):
    """A grid and a mesh (https://arxiv.org/abs/2212.12794): grid to mesh, steps on the mesh, and mesh to grid.

    The embeddings of the inputs and the layer of the outputs are left out. The grid and the mesh share their width.
    """

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.encoder, self.decoder = _Bipartite(channels), _Bipartite(channels)
        self.grid_mlp = _mlp(channels, channels)
        self.blocks = nn.ModuleList(GraphNetBlock(channels) for _ in range(num_layers))

    def forward(
        self,
        grid: Tensor,
        mesh: Tensor,
        to_mesh: Tensor,
        to_mesh_attr: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor,
        to_grid: Tensor,
        to_grid_attr: Tensor,
    ) -> Tensor:
        """Returns the next states of the grid, `[grid, channels]`.

        Args:
            grid: states of the grid, `[grid, channels]`.
            mesh: states of the mesh, `[mesh, channels]`.
            to_mesh: edges from the grid to the mesh, `[2, edges to the mesh]`, int64.
            to_mesh_attr: their states, `[edges to the mesh, channels]`.
            edge_index: edges of the mesh, `[2, edges]`, int64.
            edge_attr: their states, `[edges, channels]`.
            to_grid: edges from the mesh to the grid, `[2, edges to the grid]`, int64.
            to_grid_attr: their states, `[edges to the grid, channels]`.
        """
        mesh = self.encoder(grid, mesh, to_mesh, to_mesh_attr)
        grid = grid + self.grid_mlp(grid)
        for block in self.blocks:
            mesh, edge_attr = block(mesh, edge_attr, edge_index)
        mesh = mesh + sum_rows(edge_attr, edge_index[1], mesh.size(0))
        out: Tensor = self.decoder(mesh, grid, to_grid, to_grid_attr)
        return out


class _Bipartite(nn.Module):
    """Messages between two sets of nodes: a network on the edges, and one on the destinations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.edge_mlp, self.node_mlp = _mlp(3 * channels, channels), _mlp(2 * channels, channels)

    def forward(self, source_x: Tensor, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, destination = edge_index
        message = self.edge_mlp(torch.cat([edge_attr, source_x[source], x[destination]], dim=-1))
        received = sum_rows(message, destination, x.size(0))
        next_x: Tensor = x + self.node_mlp(torch.cat([x, received], dim=-1))
        return next_x


def _mlp(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_channels, channels), nn.SiLU(), nn.Linear(channels, channels), nn.LayerNorm(channels)
    )
