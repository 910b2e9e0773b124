"""Removes the nodes that no edge touches."""

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from gnncompile.exc import ArgumentError

from .node_order import graph_of_nodes, names_nodes, refuse_unordered, select_nodes
from .slices import is_batch


@functional_transform("remove_isolated")
class RemoveIsolated(BaseTransform):
    r"""Removes the nodes that no edge of any type touches (functional name: :obj:`remove_isolated`).

    A node stays if :obj:`edge_index` contains it, even in a self loop. It also stays if another attribute contains it
    that PyG increases by the number of nodes when it batches graphs (:obj:`edge_label_index`, :obj:`face`). Nodes and
    edges keep their order.

    The node that is now in row :obj:`i` was in row :obj:`data.node_order[i]` of its graph before (:obj:`[num_nodes]`,
    int64). :func:`restore_order` puts a model's output back, with zeros for the removed nodes. PyG's
    :class:`~torch_geometric.transforms.RemoveIsolatedNodes` keeps no such mapping and leaves batches that cannot be
    taken apart. Works on :class:`Data`, :class:`HeteroData` and batches of either. The input object and its tensors are
    not changed.

    Raises:
        ValueError: edges held as a matrix (:obj:`adj_t`), a neighbour loader's sample, a batch made with
            :obj:`follow_batch`, or a batch with equal numbers of nodes and graphs, whose attributes cannot be told
            apart.
    """

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Returns `data` without isolated nodes."""
        refuse_unordered(data, "RemoveIsolated")
        touched = {}
        for store in data.node_stores:
            graph = graph_of_nodes(data, store)
            if graph is not None and is_batch(data) and store.num_nodes == data.num_graphs:
                raise ArgumentError(
                    f"batch: got as many nodes as graphs ({data.num_graphs}), whose attributes cannot be told apart; "
                    "apply RemoveIsolated before batching"
                )
            device = next((value.device for value in store.values() if isinstance(value, torch.Tensor)), None)
            touched[store._key] = torch.zeros(store.num_nodes, dtype=torch.bool, device=device)
        for store in data.edge_stores:
            for key in names_nodes(data, store):
                ends = (None, None) if store._key is None else (store._key[0], store._key[-1])
                rows = store[key] if store[key].dim() == 2 and store[key].size(0) == 2 else store[key].view(1, -1)
                for kind, numbers in zip(ends, rows, strict=False):
                    touched[kind][numbers.flatten()] = True
        select_nodes(data, {kind: kept.nonzero().view(-1) for kind, kept in touched.items()})
        return data
