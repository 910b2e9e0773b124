"""Deep residual network of generalised aggregations, for node-level tasks."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import DeepGCNLayer, GENConv


class DeepGCN(nn.Module):
    r"""The pre-activated residual network of `"DeeperGCN: All You Need to Train Deeper GCNs"
    <https://arxiv.org/abs/2006.07739>`_ (Li et al., 2020), after `"DeepGCNs: Can GCNs Go as Deep as CNNs?"
    <https://arxiv.org/abs/1904.03751>`_.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{x}_i + \mathrm{MLP} \left( \hat{\mathbf{x}}_i +
        \mathrm{softmax\text{-}aggr}_{j \in \mathcal{N}(i)} \left( \mathrm{ReLU}(\hat{\mathbf{x}}_j +
        \mathbf{e}_{j,i}) + \epsilon \right) \right), \qquad
        \hat{\mathbf{x}} = \mathrm{Dropout}(\mathrm{ReLU}(\mathrm{Norm}(\mathbf{x})))

    with a learned temperature of the softmax. The first layer is the convolution alone. The layers are PyG's
    `DeepGCNLayer`, so their `state_dict` keys are the same as there.

    Args:
        in_channels: width of the input features.
        hidden_channels: width of all layers.
        num_layers: number of layers, at least 1.
        out_channels: width of the output.
        dropout: probability of dropping a hidden feature while training.
        edge_dim: number of features of an edge; None for edges without features.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.node_encoder = nn.Linear(in_channels, hidden_channels)
        self.edge_encoder = None if edge_dim is None else nn.Linear(edge_dim, hidden_channels)
        self.layers = nn.ModuleList(
            DeepGCNLayer(
                GENConv(hidden_channels, hidden_channels, aggr="softmax", learn_t=True, norm="layer"),
                nn.LayerNorm(hidden_channels),
                nn.ReLU(),
                block="res+",
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.lin = nn.Linear(hidden_channels, out_channels)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Computes one output row per node.

        Args:
            x: node features, `[num_nodes, in_channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            edge_attr: features of edges, `[num_edges, edge_dim]`.

        Returns:
            `[num_nodes, out_channels]`.
        """
        x = self.node_encoder(x)
        if self.edge_encoder is not None:
            edge_attr = self.edge_encoder(edge_attr)
        first: DeepGCNLayer = self.layers[0]
        x = first.conv(x, edge_index, edge_attr)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, edge_attr)
        x = F.dropout(first.act(first.norm(x)), self.dropout, self.training)
        out: Tensor = self.lin(x)
        return out
