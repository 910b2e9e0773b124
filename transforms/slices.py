"""Updates the slices of a batch whose numbers of nodes or edges change, so that it can still be taken apart."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.utils import cumsum

from gnncompile.exc import ArgumentError


def is_batch(data: Any) -> bool:
    """Whether `data` is a batch that can be taken apart (`to_data_list`)."""
    return isinstance(data, Batch) and any("_slice_dict" in store.__dict__ for store in data.stores)


def set_slices(data: Any, store: Any, keys: Iterable[str], sizes: Tensor, increments: Tensor | None = None) -> None:
    """Sets the number of rows that some attributes have in each graph of a batch. Does nothing if `data` is no batch.

    Args:
        data: a copy of the user's object, whose slices are set.
        store: the store that holds the attributes.
        keys: the names of the attributes.
        sizes: the number of rows of each graph, `[num_graphs]`.
        increments: the increment that batching added to each graph's values, `[num_graphs, *]`; None keeps the present
            increments.
    """
    if not is_batch(data):
        return
    none = torch.zeros(sizes.numel(), dtype=torch.long)
    for name in ("_slice_dict", "_inc_dict"):
        # The dictionaries are shared with the user's object.
        whole = dict(getattr(data, name))
        part = whole if store._key is None else dict(whole.get(store._key, {}))
        for key in keys:
            if name == "_slice_dict":
                part[key] = cumsum(sizes.cpu())
            elif increments is not None:
                part[key] = increments.cpu()
            else:
                part.setdefault(key, none)
        if store._key is not None:
            whole[store._key] = part
        setattr(data, name, whole)


def edges_per_graph(data: Any, store: Any, edge_index: Tensor) -> Tensor:
    """Returns the number of edges of each graph of a batch, counted by the graph of the destination, `[num_graphs]`."""
    nodes = data if store._key is None else data[store._key[-1]]
    return torch.bincount(nodes.batch[edge_index[1]], minlength=data.num_graphs)


def refuse_followed(store: Any) -> None:
    """Raises an error if a batch was made with `follow_batch`, whose `_ptr` attributes would become wrong.

    Raises:
        ValueError: the store has such an attribute.
    """
    for key in store:
        if key.endswith("_ptr"):
            raise ArgumentError(
                f"{key}: got a batch made with follow_batch=['{key.removesuffix('_ptr')}'], whose starts of graphs "
                "would no longer hold; apply the transform before batching"
            )
