"""Graph isomorphism network for graph-level tasks."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MLP, GINConv, global_add_pool


class GIN(nn.Module):
    r"""The graph isomorphism network of `"How Powerful are Graph Neural Networks?" <https://arxiv.org/abs/1810.00826>`_
    (Xu et al., 2019), with a sum over the nodes of each graph as readout.

    .. math::
        \mathbf{x}^{\prime}_i = \mathrm{MLP} \left( (1 + \epsilon) \mathbf{x}_i +
        \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right), \qquad
        \mathbf{y}_g = \mathbf{W} \sum_{i \in g} \mathbf{x}^{(L)}_i + \mathbf{b}

    with ReLU and dropout between layers.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of the hidden layers.
        num_layers: number of convolutions, at least 1.
        out_channels: width of the output, for example the number of classes.
        dropout: probability of dropping a hidden feature while training.
    """

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1)
        self.convs = nn.ModuleList(
            GINConv(MLP([fan_in, hidden_channels, hidden_channels], act="relu", norm=None)) for fan_in in widths
        )
        self.lin = nn.Linear(hidden_channels, out_channels)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        """Computes one output row per graph.

        Args:
            x: node features of all graphs, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            batch: the graph of each node, `[num_nodes]`, int64.
            batch_size: number of graphs (`data.num_graphs`), given so that no size is read from the device.

        Returns:
            `[batch_size, out_channels]`.
        """
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), self.dropout, self.training)
        x = self.convs[-1](x, edge_index)
        out: Tensor = self.lin(global_add_pool(x, batch, batch_size))
        return out
