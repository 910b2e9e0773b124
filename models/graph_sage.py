"""GraphSAGE for node-level tasks."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv


class GraphSAGE(nn.Module):
    r"""GraphSAGE of `"Inductive Representation Learning on Large Graphs" <https://arxiv.org/abs/1706.02216>`_
    (Hamilton et al., 2017).

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \cdot \mathrm{aggr}_{j \in \mathcal{N}(i)} \mathbf{x}_j + \mathbf{b}
        + \mathbf{W}_2 \mathbf{x}_i

    with ReLU and dropout between layers.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of the hidden layers.
        num_layers: number of convolutions, at least 1.
        out_channels: width of the output.
        dropout: probability of dropping a hidden feature while training.
        aggr: how neighbours are reduced: `"mean"`, `"max"`, `"min"` or `"sum"`.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        aggr: str = "mean",
    ) -> None:
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList(SAGEConv(*pair, aggr=aggr) for pair in pairwise(widths))
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
