"""Graph attention network with dynamic attention, for node-level tasks."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv

from gnncompile.exc import ArgumentError


class GATv2(nn.Module):
    r"""The graph attention network of `"How Attentive are Graph Attention Networks?"
    <https://arxiv.org/abs/2105.14491>`_ (Brody et al., 2022), in which the ranking of neighbours depends on the node.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_l \mathbf{x}_j,
        \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathbf{a}^{\top} \mathrm{LeakyReLU} \left(
        \mathbf{\Theta}_l \mathbf{x}_j + \mathbf{\Theta}_r \mathbf{x}_i \right) \right)

    with ReLU and dropout between layers. Hidden layers concatenate their heads; the last layer averages them. Same
    `state_dict` keys as PyG's `GAT(..., v2=True)`.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of the hidden layers, all heads together; a multiple of `heads`.
        num_layers: number of convolutions, at least 1.
        out_channels: width of the output.
        dropout: probability of dropping a hidden feature, and an attention weight, while training.
        heads: number of attention heads.

    Raises:
        ValueError: `hidden_channels` is not a multiple of `heads`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        heads: int = 1,
    ) -> None:
        super().__init__()
        if hidden_channels % heads:
            raise ArgumentError(
                f"hidden_channels: got {hidden_channels}, expected a multiple of heads={heads}; change one of them"
            )
        widths = [in_channels] + [hidden_channels] * (num_layers - 1)
        self.convs = nn.ModuleList(
            GATv2Conv(fan_in, hidden_channels // heads, heads=heads, dropout=dropout) for fan_in in widths[:-1]
        )
        self.convs.append(GATv2Conv(widths[-1], out_channels, heads=heads, concat=False, dropout=dropout))
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
