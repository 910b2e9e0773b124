"""Stores the scaled Laplacian of Chebyshev convolutions as weights of edges sorted by destination."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import scatter

from gnncompile.exc import ArgumentError

from .edges import number_of_nodes, plain, square_stores
from .self_loops import Fill, add_loops, fills, types_repr, weights
from .slices import edges_per_graph, is_batch, set_slices


@functional_transform("sorted_cheb_norm")
class ChebNorm(BaseTransform):
    r"""Replaces the edges by those of the scaled Laplacian of `"Convolutional Neural Networks on Graphs with Fast
    Localized Spectral Filtering" <https://arxiv.org/abs/1606.09375>`_ (functional name: :obj:`sorted_cheb_norm`).

    .. math::
        \mathbf{\hat{L}} = \frac{2 \mathbf{L}}{\lambda_{\max}} - \mathbf{I}, \qquad \mathbf{L} = \mathbf{D} - \mathbf{A}
        \quad \textrm{or} \quad \mathbf{I} - \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} \quad \textrm{or} \quad
        \mathbf{I} - \mathbf{D}^{-1} \mathbf{A}

    The entries of :math:`\mathbf{\hat{L}}` become :obj:`edge_weight`, :obj:`[num_edges]`. Existing self loops are
    removed, every node gets one self loop, and the edges are sorted by destination (see :class:`AddSelfLoops`).
    :class:`~torch_geometric.nn.ChebConv` computes these entries in every forward; :func:`prepare` makes it use the
    stored ones.

    :math:`\lambda_{\max}` is :obj:`data.lambda_max`, a number or :obj:`[num_graphs]`
    (:class:`~torch_geometric.transforms.LaplacianLambdaMax`). Without it, as in the layer, it is twice the largest
    entry, taken over all graphs of a batch. So give :obj:`lambda_max` if graphs are normalised before they are batched.

    Works on :class:`Data`, :class:`HeteroData` (edge types that join nodes of one type) and batches of either, which
    can still be taken apart. The input object and its tensors are not changed.

    Args:
        normalization: the Laplacian: None, :obj:`"sym"` or :obj:`"rw"`, in the order of the formula.
        fill_value: the other edge attributes of new self loops, as for :class:`AddSelfLoops`.
        edge_types: the edge types of :class:`HeteroData` to replace; all by default.

    Raises:
        ValueError: an unknown `normalization`; otherwise as for :class:`AddSelfLoops`.
    """

    def __init__(
        self,
        normalization: str | None = "sym",
        fill_value: Fill | Mapping[str, Fill] = 1.0,
        edge_types: Sequence[tuple[str, str, str]] | None = None,
    ) -> None:
        if normalization not in (None, "sym", "rw"):
            raise ArgumentError(f"normalization: got {normalization!r}, expected None, 'sym' or 'rw'")
        self.normalization, self.fill_value, self.edge_types = normalization, fill_value, edge_types

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Returns `data` with the scaled Laplacian as the edges of each edge type that joins nodes of one type."""
        for store in square_stores(data, self.edge_types):
            fill = fills(store, self.fill_value)
            store.edge_weight = weights(data, store)
            add_loops(data, store, {**fill, "edge_weight": 0.0}, "replace")
            edges = plain(store.edge_index)
            entries = self._laplacian(edges, store.edge_weight, number_of_nodes(store))
            store.edge_weight = _scaled(entries, edges, *_largest(data, store))
            if is_batch(data):
                set_slices(data, store, ["edge_weight"], edges_per_graph(data, store, edges))
        return data

    def _laplacian(self, edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
        """Returns the entries of the Laplacian, `[num_edges]`. Every node has a self loop, whose `weight` is 0."""
        row, col = edges
        degree = scatter(weight, row, 0, dim_size=num_nodes, reduce="sum")
        if self.normalization is None:
            return torch.where(row == col, degree[row], -weight)
        power = -0.5 if self.normalization == "sym" else -1.0
        inverse = degree.pow(power)
        inverse = inverse.masked_fill(inverse == float("inf"), 0)
        weight = inverse[row] * weight * (inverse[col] if self.normalization == "sym" else 1.0)
        return torch.where(row == col, torch.ones_like(weight), -weight)

    def __repr__(self) -> str:
        given = f"normalization={self.normalization!r}, fill_value={self.fill_value!r}"
        return f"{type(self).__name__}({given}{types_repr(self.edge_types)})"


def _largest(data: Any, store: Any) -> tuple[Any, Any]:
    """Returns `lambda_max` or None; and, if each graph has its own value, the graph of each node (else None)."""
    nodes = data if store._key is None else data[store._key[0]]
    found = store.get("lambda_max")
    if isinstance(found, Tensor) and found.numel() > 1:
        return found, nodes.batch
    return found, None


def _scaled(entries: Tensor, edges: Tensor, largest: Any, batch: Tensor | None) -> Tensor:
    row, col = edges
    if entries.numel() == 0:
        return entries
    if largest is None:
        largest = 2.0 * entries.max()
    elif batch is not None:
        largest = largest.to(entries.dtype)[batch[row]]
    scaled = 2.0 * entries / largest
    scaled = scaled.masked_fill(scaled == float("inf"), 0)
    result: Tensor = scaled - (row == col).to(scaled.dtype)
    return result
