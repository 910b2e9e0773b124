"""Stacks of PyG's own layers with networks on the edges."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg

from benchmarks.cases.inputs import EDGE_DIM


class Stacked(nn.Module):
    """A stack of one of PyG's layers, with ReLU in between."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, and the further arguments of the layer."""
        for layer in self.layers:
            x = F.relu(layer(x, *more))
        return x


def cgcnn(channels: int, num_layers: int) -> nn.Module:
    """Crystal graph convolutions (https://arxiv.org/abs/1710.10324) with edge features."""
    return Stacked([pyg.CGConv(channels, dim=channels, batch_norm=True) for _ in range(num_layers)])


def edge_conv(channels: int, num_layers: int) -> nn.Module:
    """Edge convolutions (https://arxiv.org/abs/1801.07829) with two linear layers."""
    return Stacked(
        [
            pyg.EdgeConv(nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels)))
            for _ in range(num_layers)
        ]
    )


def nn_conv(channels: int, num_layers: int) -> nn.Module:
    """Layers whose weight is a function of the edge (https://arxiv.org/abs/1704.01212)."""

    def layer() -> nn.Module:
        weights = nn.Sequential(nn.Linear(EDGE_DIM, 32), nn.ReLU(), nn.Linear(32, channels * channels))
        made: nn.Module = pyg.NNConv(channels, channels, weights)
        return made

    return Stacked([layer() for _ in range(num_layers)])


def point_transformer(channels: int, num_layers: int) -> nn.Module:
    """Vector attention on points (https://arxiv.org/abs/2012.09164)."""

    def mlp(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, channels), nn.ReLU(), nn.Linear(channels, channels))

    return Stacked([pyg.PointTransformerConv(channels, channels, mlp(3), mlp(channels)) for _ in range(num_layers)])
