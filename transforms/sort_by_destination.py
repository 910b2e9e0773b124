"""Stable sort of the edges by destination, with every edge attribute permuted alike."""

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from .edges import by_destination, like, plain, take


@functional_transform("sort_by_destination")
class SortByDestination(BaseTransform):
    r"""Sorts the edges of a graph by destination node (functional name: :obj:`sort_by_destination`).

    Message passing reduces messages per destination. With :obj:`edge_index[1]` in ascending order, the edges of one
    destination lie side by side. So a layout (CSR) needs no permutation, and edge features are read in order.

    :obj:`edge_index` of shape :obj:`[2, num_edges]` is sorted by its second row. The sort is stable: edges with the
    same destination keep their order. Every edge attribute, of shape :obj:`[num_edges, *]`, is permuted alike. PyG's
    own rule decides which attributes these are (:meth:`~torch_geometric.data.Data.is_edge_attr`). Nodes keep their
    order, and so do predictions and labels per node.

    Works on :class:`Data`, :class:`HeteroData` (each edge type by itself) and batches of either, whose graphs can still
    be taken apart. Edge types held as an adjacency matrix (:obj:`adj_t`) are sorted already and are left alone. The
    input object and its tensors are not changed.

    Example:
        >>> data = Data(edge_index=torch.tensor([[0, 1, 2], [2, 0, 1]]), edge_weight=torch.tensor([0.1, 0.2, 0.3]))
        >>> data = SortByDestination()(data)
        >>> data.edge_index.tolist(), data.edge_weight.tolist()
        ([[1, 2, 0], [0, 1, 2]], [0.2..., 0.3..., 0.1...])
    """

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Returns `data` with the edges of each edge type sorted by destination."""
        for store in data.edge_stores:
            if "edge_index" not in store:
                continue
            # Found before `edge_index` is replaced, because PyG's rule compares lengths, which still match now.
            keys = [key for key in store if key != "edge_index" and store.is_edge_attr(key)]
            perm = by_destination(plain(store.edge_index))
            for key in keys:
                store[key] = take(store[key], perm, data.__cat_dim__(key, store[key], store))
            store.edge_index = like(store.edge_index, plain(store.edge_index).index_select(1, perm), "col")
        return data
