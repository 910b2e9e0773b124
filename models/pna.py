"""Principal neighbourhood aggregation for node-level tasks."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import PNAConv


class PNA(nn.Module):
    r"""Principal neighbourhood aggregation of `"Principal Neighbourhood Aggregation for Graph Nets"
    <https://arxiv.org/abs/2004.05718>`_ (Corso et al., 2020).

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W} \left( \mathbf{x}_i \, \Vert \, \bigoplus_{j \in \mathcal{N}(i)}
        \mathbf{M} \left( \mathbf{x}_i \Vert \mathbf{x}_j \right) \right), \qquad \bigoplus =
        \left( \mathrm{scalers} \right) \otimes \left( \mathrm{aggregators} \right)

    where a scaler multiplies by a power of :math:`\log(d_i + 1) / \delta`, :math:`\delta` being the mean of
    :math:`\log(d + 1)` over the training graphs, with ReLU and dropout between layers.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of the hidden layers.
        num_layers: number of convolutions, at least 1.
        out_channels: width of the output.
        deg: number of training nodes with each in-degree, `[max_degree + 1]`, int64 (`PNAConv.get_degree_histogram`).
        dropout: probability of dropping a hidden feature while training.
        aggregators: reductions over the neighbours.
        scalers: functions of the degree that each reduction is multiplied by.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        deg: Tensor,
        dropout: float = 0.0,
        aggregators: Sequence[str] = ("mean", "min", "max", "std"),
        scalers: Sequence[str] = ("identity", "amplification", "attenuation"),
    ) -> None:
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList(PNAConv(*pair, list(aggregators), list(scalers), deg) for pair in pairwise(widths))
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
