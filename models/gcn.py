"""Graph convolutional network for node-level tasks."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv


class GCN(nn.Module):
    r"""The graph convolutional network of `"Semi-supervised Classification with Graph Convolutional Networks"
    <https://arxiv.org/abs/1609.02907>`_ (Kipf and Welling, 2017).

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}^{\top} \sum_{j \in \mathcal{N}(i) \cup \{ i \}}
        \frac{e_{j,i}}{\sqrt{\hat{d}_j \hat{d}_i}} \mathbf{x}_j + \mathbf{b}, \qquad
        \hat{d}_i = 1 + \sum_{j \in \mathcal{N}(i)} e_{j,i}

    with ReLU and dropout between layers.

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
        self.convs = nn.ModuleList(GCNConv(*pair) for pair in pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Computes one output row per node.

        Args:
            x: node features, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            edge_weight: weight of each edge, `[num_edges]`.

        Returns:
            `[num_nodes, out_channels]`.
        """
        for conv in self.convs[:-1]:
            x = conv(x, edge_index, edge_weight).relu()
            x = F.dropout(x, self.dropout, self.training)
        out: Tensor = self.convs[-1](x, edge_index, edge_weight)
        return out
