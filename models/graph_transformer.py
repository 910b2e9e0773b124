"""Transformer whose attention runs along the edges of a graph, for node-level tasks."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

from gnncompile.exc import ArgumentError


class GraphTransformer(nn.Module):
    r"""The graph transformer of `"A Generalization of Transformer Networks to Graphs"
    <https://arxiv.org/abs/2012.09699>`_ (Dwivedi and Bresson, 2021), with layer norm.

    .. math::
        \hat{\mathbf{x}}_i = \mathrm{Norm} \Bigl( \mathbf{x}_i + \mathbf{O} \bigl\Vert_{h} \sum_{j \in \mathcal{N}(i)}
        \mathrm{softmax}_j \Bigl( \frac{\mathbf{Q}_h \mathbf{x}_i \cdot \mathbf{K}_h \mathbf{x}_j}{\sqrt{d}} \Bigr)
        \mathbf{V}_h \mathbf{x}_j \Bigr), \qquad
        \mathbf{x}^{\prime}_i = \mathrm{Norm} \left( \hat{\mathbf{x}}_i + \mathrm{FFN}(\hat{\mathbf{x}}_i) \right)

    between a first and a last linear layer. Positional encodings are features: append them to `x`. Features of edges,
    if given, are added to keys and values (`"Masked Label Prediction" <https://arxiv.org/abs/2009.03509>`_, Shi et al.,
    2021).

    Args:
        in_channels: width of the input features.
        hidden_channels: width of all layers; a multiple of `heads`.
        num_layers: number of layers, at least 1.
        out_channels: width of the output.
        dropout: probability of dropping a hidden feature, and an attention weight, while training.
        heads: number of attention heads.
        edge_dim: number of features of an edge; None for edges without features.

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
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        if hidden_channels % heads:
            raise ArgumentError(
                f"hidden_channels: got {hidden_channels}, expected a multiple of heads={heads}; change one of them"
            )
        self.lin_in = nn.Linear(in_channels, hidden_channels)
        self.layers = nn.ModuleList(_Layer(hidden_channels, heads, dropout, edge_dim) for _ in range(num_layers))
        self.lin_out = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Computes one output row per node.

        Args:
            x: node features, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            edge_attr: features of edges, `[num_edges, edge_dim]`.

        Returns:
            `[num_nodes, out_channels]`.
        """
        x = self.lin_in(x)
        for layer in self.layers:
            x = layer(x, edge_index, edge_attr)
        out: Tensor = self.lin_out(x)
        return out


class _Layer(nn.Module):
    def __init__(self, channels: int, heads: int, dropout: float, edge_dim: int | None) -> None:
        super().__init__()
        self.conv = TransformerConv(
            channels, channels // heads, heads, dropout=dropout, edge_dim=edge_dim, root_weight=False
        )
        self.lin = nn.Linear(channels, channels)
        self.feed_forward = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * channels, channels)
        )
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
        attention = self.lin(self.conv(x, edge_index, edge_attr))
        x = self.norm1(x + F.dropout(attention, self.dropout, self.training))
        out: Tensor = self.norm2(x + F.dropout(self.feed_forward(x), self.dropout, self.training))
        return out
