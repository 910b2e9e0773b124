"""Functions that transforms of edges share: plain edge tensors, edge attributes, and the order by destination."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from gnncompile.exc import ArgumentError

from .slices import is_batch, refuse_followed


def plain(edge_index: Tensor) -> Tensor:
    """Returns the edges as a plain tensor, without PyG's `EdgeIndex` class."""
    edges: Tensor = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    return edges


def like(edge_index: Tensor, edges: Tensor, sort_order: str | None) -> Tensor:
    """Returns `edges` as an `EdgeIndex` with the size of `edge_index` and the given order, if `edge_index` is an
    `EdgeIndex`; else `edges`.
    """
    if not isinstance(edge_index, EdgeIndex):
        return edges
    size, undirected = edge_index.sparse_size(), edge_index.is_undirected
    result: Tensor = EdgeIndex(edges, sparse_size=size, sort_order=sort_order, is_undirected=undirected)
    return result


def edge_attributes(store: Any) -> list[str]:
    """Returns the names of the edge attributes by PyG's own rule, except `edge_index` and edges to predict."""
    return [
        key for key in store if key != "edge_index" and not key.startswith("edge_label") and store.is_edge_attr(key)
    ]


def take(value: Any, index: Tensor, dim: int) -> Any:
    """Returns the rows of an attribute in the given order; it is a tensor, array, list, tuple or TensorFrame."""
    if isinstance(value, Tensor):
        return value.index_select(dim, index.to(value.device))
    if isinstance(value, np.ndarray):
        return np.take(value, index.cpu().numpy(), axis=dim)
    if isinstance(value, list | tuple):
        return type(value)(value[i] for i in index.tolist())
    return value[index]  # a TensorFrame


def square_stores(data: Any, edge_types: Sequence[tuple[str, str, str]] | None) -> Iterator[Any]:
    """Yields the edge stores whose sources and destinations have the same node type.

    Args:
        data: the object that holds the stores.
        edge_types: the edge types to yield; None for all.

    Raises:
        ValueError: the edges are held as a matrix; one of `edge_types` is absent or joins two node types; or the batch
            was made with `follow_batch`.
    """
    found = [store for store in data.edge_stores if edge_types is None or store._key in edge_types]
    if edge_types is not None and len(found) < len(set(edge_types)):
        raise ArgumentError(
            f"edge_types: got {list(edge_types)}, expected some of {[store._key for store in data.edge_stores]}"
        )
    for store in found:
        if "adj_t" in store or "adj" in store:
            raise ArgumentError(
                "adj_t: got edges held as a matrix, expected edge_index; apply the transform before ToSparseTensor"
            )
        if "edge_index" not in store:
            continue
        if is_batch(data):
            refuse_followed(store)
        if not store.is_bipartite():
            yield store
        elif edge_types is not None:
            raise ArgumentError(f"edge_types: got {store._key}, expected types of edges among nodes of one type")


def number_of_nodes(store: Any) -> int:
    """Returns the number of nodes for an edge store whose sources and destinations have the same node type."""
    size: int = store.size(0) if store._key is not None else store.num_nodes
    return size


def by_destination(edge_index: Tensor) -> Tensor:
    """Returns the permutation that sorts edges stably by destination, `[num_edges]`, int64."""
    return torch.argsort(edge_index[1], stable=True)
