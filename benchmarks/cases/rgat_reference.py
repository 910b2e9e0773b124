"""RGAT in less memory: PyG's layer copies the weight matrix of the relation for every edge."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import RGATConv
from torch_geometric.typing import OptTensor
from torch_geometric.utils import softmax


class RelationByRelation(RGATConv):
    r"""`RGATConv` with its default attention (additive, over all relations), one product per relation.

    :math:`\mathbf{W}_r \mathbf{x}_j` is computed for the edges of one relation at a time, so that no tensor is larger
    than `[num_edges, heads * channels]`.
    """

    @classmethod
    def of(cls, layer: nn.Module) -> "RelationByRelation":
        """Returns this form of an `RGATConv`, with copies of its parameters."""
        relations = layer.num_relations
        own = cls(layer.in_channels, layer.out_channels, relations, heads=layer.heads)
        own.load_state_dict(layer.state_dict())
        own.to(next(layer.parameters()).device)
        return own

    def message(
        self, x_i: Tensor, x_j: Tensor, edge_type: Tensor, index: Tensor, ptr: OptTensor, size_i: int
    ) -> Tensor:
        """Returns the weighted messages, `[num_edges, heads, channels]`."""
        out_i, out_j = (self._transformed(x, edge_type) for x in (x_i, x_j))
        alpha = nn.functional.leaky_relu(out_i @ self.q + out_j @ self.k, self.negative_slope)
        alpha = softmax(alpha, index, ptr, size_i)
        self._alpha = alpha
        weighted: Tensor = alpha.view(-1, self.heads, 1) * out_j.view(-1, self.heads, self.out_channels)
        return weighted

    def _transformed(self, x: Tensor, edge_type: Tensor) -> Tensor:
        edges = [(edge_type == relation).nonzero().view(-1) for relation in range(self.num_relations)]
        products = [x[edge] @ weight for edge, weight in zip(edges, self.weight, strict=True)]
        return torch.cat(products)[torch.cat(edges).argsort()]
