"""Message passing on meshes, with a state on every edge."""

import torch
from torch import Tensor, nn


def _mlp(in_channels: int, channels: int, num_hidden: int = 1) -> nn.Sequential:
    """Returns linear layers with ReLU in between, and a norm at the end."""
    layers: list[nn.Module] = [nn.Linear(in_channels, channels), nn.ReLU()]
    for _ in range(num_hidden - 1):
        layers += [nn.Linear(channels, channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(channels, channels), nn.LayerNorm(channels))


class GraphNetBlock(nn.Module):
    r"""One step of a `MeshGraphNet`: it updates the state of each edge, and then that of each node.

    .. math::
        \mathbf{e}^{\prime}_{ij} &= \mathbf{e}_{ij} + \mathrm{MLP}_e \left(
        \mathbf{e}_{ij} \, \Vert \, \mathbf{x}_j \, \Vert \, \mathbf{x}_i \right)

        \mathbf{x}^{\prime}_i &= \mathbf{x}_i + \mathrm{MLP}_x \left(
        \mathbf{x}_i \, \Vert \sum_{j \in \mathcal{N}(i)} \mathbf{e}^{\prime}_{ij} \right)

    Args:
        channels: width of all states.
        num_hidden: number of hidden layers in each of the two networks, at least 1.
    """

    def __init__(self, channels: int, num_hidden: int = 1) -> None:
        super().__init__()
        self.edge_mlp = _mlp(3 * channels, channels, num_hidden)
        self.node_mlp = _mlp(2 * channels, channels, num_hidden)

    def forward(self, x: Tensor, edge_attr: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the next states.

        Args:
            x: node states, `[num_nodes, channels]`.
            edge_attr: edge states, `[num_edges, channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.

        Returns:
            The next node states and edge states, of the same shapes.
        """
        source, destination = edge_index
        edge_attr = edge_attr + self.edge_mlp(torch.cat([edge_attr, x[source], x[destination]], dim=-1))
        received = torch.zeros_like(x).index_add(0, destination, edge_attr)
        return x + self.node_mlp(torch.cat([x, received], dim=-1)), edge_attr


class MeshGraphNet(nn.Module):
    r"""The network of `"Learning Mesh-Based Simulation with Graph Networks" <https://arxiv.org/abs/2010.03409>`_
    (Pfaff et al., 2021): an encoder, `num_layers` steps of :class:`GraphNetBlock`, and a decoder.

    Args:
        in_channels: width of the node features.
        edge_channels: width of the edge features.
        hidden_channels: width of all states.
        num_layers: number of steps of message passing.
        out_channels: width of the output.
        num_hidden: number of hidden layers in each network, at least 1.
    """

    def __init__(
        self,
        in_channels: int,
        edge_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        num_hidden: int = 1,
    ) -> None:
        super().__init__()
        self.encode_nodes = _mlp(in_channels, hidden_channels, num_hidden)
        self.encode_edges = _mlp(edge_channels, hidden_channels, num_hidden)
        self.blocks = nn.ModuleList(GraphNetBlock(hidden_channels, num_hidden) for _ in range(num_layers))
        self.decode = nn.Sequential(
            nn.Linear(hidden_channels, hidden_channels), nn.ReLU(), nn.Linear(hidden_channels, out_channels)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Computes one output row per node.

        Args:
            x: node features, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            edge_attr: edge features, `[num_edges, edge_channels]`, such as the distance of the two ends.

        Returns:
            `[num_nodes, out_channels]`.
        """
        x, edge_attr = self.encode_nodes(x), self.encode_edges(edge_attr)
        for block in self.blocks:
            x, edge_attr = block(x, edge_attr, edge_index)
        out: Tensor = self.decode(x)
        return out
