"""Batches whose numbers of nodes or edges change: where each graph's part begins, so that they can be taken apart."""

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
    """Notes how many rows of some attributes each graph of a batch has now; nothing where `data` is no batch.

    Args:
        data: the object to note it in, a copy of the user's.
        store: where the attributes are.
        keys: their names.
        sizes: rows of each graph, `[num_graphs]`.
        increments: what each graph's values were increased by, `[num_graphs, *]`; None leaves what is noted already.
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
    """How many edges each graph of a batch has, by the graphs of their destinations, `[num_graphs]`."""
    nodes = data if store._key is None else data[store._key[-1]]
    return torch.bincount(nodes.batch[edge_index[1]], minlength=data.num_graphs)


def refuse_followed(store: Any) -> None:
    """Raises an error where another attribute repeats the sizes that are about to change (`follow_batch`).

    Raises:
        ValueError: there is one.
    """
    for key in store:
        if key.endswith("_ptr"):
            raise ArgumentError(
                f"{key}: got a batch made with follow_batch=['{key.removesuffix('_ptr')}'], whose starts of graphs "
                "would no longer hold; apply the transform before batching"
            )
