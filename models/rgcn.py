"""Relational graph convolutional network for node-level tasks on typed edges."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import RGCNConv


class RGCN(nn.Module):
    r"""The relational graph convolutional network of `"Modeling Relational Data with Graph Convolutional Networks"
    <https://arxiv.org/abs/1703.06103>`_ (Schlichtkrull et al., 2018).

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}_{\mathrm{root}} \mathbf{x}_i + \sum_{r \in \mathcal{R}}
        \frac{1}{|\mathcal{N}_r(i)|} \sum_{j \in \mathcal{N}_r(i)} \mathbf{\Theta}_r \mathbf{x}_j + \mathbf{b}

    with ReLU and dropout between layers.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of the hidden layers.
        num_layers: number of convolutions, at least 1.
        out_channels: width of the output.
        num_relations: number of types of edges.
        dropout: probability of dropping a hidden feature while training.
        num_bases: if given, each relation's weight is a combination of this number of shared matrices.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        num_relations: int,
        dropout: float = 0.0,
        num_bases: int | None = None,
    ) -> None:
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList(RGCNConv(*pair, num_relations, num_bases=num_bases) for pair in pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Computes one output row per node.

        Args:
            x: node features, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            edge_type: the relation of each edge, `[num_edges]`, int64, below `num_relations`.

        Returns:
            `[num_nodes, out_channels]`.
        """
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index, edge_type).relu(), self.dropout, self.training)
        out: Tensor = self.convs[-1](x, edge_index, edge_type)
        return out
