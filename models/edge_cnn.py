"""Edge convolutions for node-level tasks, as on point clouds."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MLP, EdgeConv


class EdgeCNN(nn.Module):
    r"""The edge convolutions of `"Dynamic Graph CNN for Learning on Point Clouds" <https://arxiv.org/abs/1801.07829>`_
    (Wang et al., 2019), on given edges.

    .. math::
        \mathbf{x}^{\prime}_i = \max_{j \in \mathcal{N}(i)} \mathrm{MLP} \left(
        \mathbf{x}_i \, \Vert \, \mathbf{x}_j - \mathbf{x}_i \right)

    with ReLU and dropout between layers; a node without neighbours gets zeros.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of the hidden layers.
        num_layers: number of convolutions, at least 1.
        out_channels: width of the output.
        dropout: probability of dropping a hidden feature while training.
    """

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList(
            EdgeConv(MLP([2 * fan_in, fan_out, fan_out], act="relu", norm=None)) for fan_in, fan_out in pairwise(widths)
        )
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Computes one output row per node.

        Args:
            x: node features, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.

        Returns:
            `[num_nodes, out_channels]`.
        """
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), self.dropout, self.training)
        out: Tensor = self.convs[-1](x, edge_index)
        return out
