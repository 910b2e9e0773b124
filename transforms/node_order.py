"""Reorders or removes nodes together with every attribute, and maps results of the model back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from gnncompile.exc import ArgumentError

from .edges import plain, take
from .slices import is_batch, refuse_followed, set_slices

Type = str | None
"""A node type; None for `Data`, which has only one."""


def refuse_unordered(data: Any, name: str) -> None:
    """Raises an error if the nodes of `data` can't be reordered.

    Args:
        data: the object whose nodes are to be reordered.
        name: the name of the transform, for the message.

    Raises:
        ValueError: edges are held as a matrix, or `data` is a neighbour loader's sample, whose seed nodes come first.
    """
    for store in data.edge_stores:
        if "adj_t" in store or "adj" in store:
            raise ArgumentError(
                f"adj_t: got edges held as a matrix, expected edge_index; apply {name} before ToSparseTensor"
            )
    for store in data.node_stores:
        if "input_id" in store or ("batch_size" in store and "n_id" in store):
            raise ArgumentError(
                "input_id: got a sample of a neighbour loader, whose seed nodes come first, expected a whole graph; "
                f"apply {name} before the loader"
            )


def graph_of_nodes(data: Any, store: Any) -> Tensor | None:
    """Returns the graph of each node, `[num_nodes]`; None if `data` is a single graph.

    Raises:
        ValueError: `data` is a batch without the graph of each node.
    """
    found: Tensor | None = store.get("batch")
    if found is None and is_batch(data):
        raise ArgumentError(
            "batch: got a batch without the graph of each node, expected one; make it by Batch.from_data_list"
        )
    return found


def select_nodes(data: Any, chosen: Mapping[Type, Tensor]) -> None:
    """Keeps the chosen nodes of each type, in the given order. Edges and other node indices are renumbered.

    Every node gets `node_order`, its earlier index, and every node store gets `original_size`, its earlier number of
    nodes. In a batch both are per graph. A second call composes with the first: both refer to the original graph.

    Args:
        data: a copy of the user's object, changed in place.
        chosen: for each node type, the indices of the nodes to keep, `[num_chosen]`; in a batch, grouped by graph in
            the order of the graphs. Every node that an edge refers to must be kept.
    """
    before = {store._key: int(store.num_nodes) for store in data.node_stores}
    places = {kind: _places(index, before[kind]) for kind, index in chosen.items()}
    stores = {id(store): store for store in (*data.edge_stores, *data.node_stores)}.values()
    named = {id(store): names_nodes(data, store) for store in stores}
    # Found before any attribute is replaced, because PyG's rule compares lengths, which still match now.
    rows = {store._key: _rows(store, named[id(store)]) for store in data.node_stores}
    for store in stores:
        for key in named[id(store)]:
            store[key] = _renamed(store[key], _ends(store, places))
    for store in data.node_stores:
        _take_rows(data, store, rows[store._key], chosen[store._key], before[store._key])
    if is_batch(data):
        for store in stores:
            _set_increments(data, store, named[id(store)])


def _places(index: Tensor, num_nodes: int) -> Tensor:
    places = index.new_full((num_nodes,), -1)
    places[index] = torch.arange(index.numel(), device=index.device)
    return places


def _ends(store: Any, places: Mapping[Type, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns, for each row of `edge_index`, the new index of each old node index."""
    if store._key is None:
        return places[None], places[None]
    return places[store._key[0]], places[store._key[-1]]


def names_nodes(data: Any, store: Any) -> list[str]:
    """Returns the names of attributes that hold node indices: those that PyG increases by the number of nodes when it
    batches graphs.

    Raises:
        ValueError: a `Data` object holds indices of several kinds of nodes.
    """
    found = []
    for key, value in store.items():
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool or "batch" in key:
            continue
        increment = data.__inc__(key, value, store)
        if isinstance(increment, Tensor) and store._key is None:
            raise ArgumentError(
                f"{key}: got nodes of several kinds in one Data (its __inc__ says so), expected HeteroData"
            )
        if isinstance(increment, Tensor) or (store._key is None and 0 < store.num_nodes == increment):
            found.append(key)
    return found


def _rows(store: Any, named: list[str]) -> list[str]:
    return [
        key
        for key in store
        if key not in named and not (key == "ptr" or key.endswith("_ptr")) and store.is_node_attr(key)
    ]


def _renamed(value: Tensor, ends: tuple[Tensor, Tensor]) -> Tensor:
    numbers = plain(value)
    if numbers.dim() == 2 and numbers.size(0) == 2:
        new = torch.stack([ends[0][numbers[0]], ends[1][numbers[1]]])
    else:
        new = ends[0][numbers]
    if isinstance(value, EdgeIndex):
        size = (int((ends[0] >= 0).sum()), int((ends[1] >= 0).sum()))
        new = EdgeIndex(new, sparse_size=size, is_undirected=value.is_undirected)
    return new


def _take_rows(data: Any, store: Any, keys: list[str], index: Tensor, before: int) -> None:
    graph = graph_of_nodes(data, store)
    per_graph = None if graph is None else torch.bincount(graph, minlength=_graphs(data, graph))
    for key in keys:
        store[key] = take(store[key], index, data.__cat_dim__(key, store[key], store))
    if "num_nodes" in store:
        store.num_nodes = index.numel()
    if "node_order" not in store:
        starts = None if per_graph is None else (per_graph.cumsum(0) - per_graph)[store.batch]
        store.node_order = index if starts is None else index - starts
        store.original_size = before if per_graph is None else per_graph
        keys = [*keys, "node_order"]
    if not is_batch(data):
        return
    refuse_followed(store)
    sizes = torch.bincount(store.batch, minlength=data.num_graphs)
    store.ptr = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    if hasattr(store, "_num_nodes"):
        store._num_nodes = sizes.tolist()
    own = [key for key in keys if key not in ("batch", "ptr")]
    set_slices(data, store, own, sizes)
    set_slices(data, store, ["original_size"], torch.ones_like(sizes))


def _graphs(data: Any, graph: Tensor) -> int:
    if is_batch(data):
        return int(data.num_graphs)
    return int(graph.max()) + 1 if graph.numel() else 0


def _set_increments(data: Any, store: Any, named: list[str]) -> None:
    """Sets the increments that batching would have added to node indices if the graphs had been reordered before."""
    if store._key is None:
        increments = data.ptr[:-1]
    elif isinstance(store._key, tuple):
        increments = torch.stack([data[store._key[0]].ptr[:-1], data[store._key[-1]].ptr[:-1]], dim=1).unsqueeze(-1)
    for key in named:
        sizes = data._slice_dict[key] if store._key is None else data._slice_dict[store._key][key]
        set_slices(data, store, [key], sizes.diff(), increments)


def restore_order(rows: Tensor, data: Any, fill_value: float = 0.0) -> Tensor:
    """Puts a model's output rows back into the order that the nodes had before `Reorder` and `RemoveIsolated`.

    Args:
        rows: one row per node, `[num_nodes, *]`; gradients flow through.
        data: the data that the model ran on, or the part of one node type of :class:`HeteroData`, `data["paper"]`. It
            may be a batch that was reordered before or after batching.
        fill_value: the value of the rows of removed nodes.

    Returns:
        `[original_num_nodes, *]`, for a batch with the rows of all graphs one after the other.

    Raises:
        ValueError: the nodes of `data` were never reordered, or `rows` does not have one row per node.
    """
    order, size, graph = (data.get(key) for key in ("node_order", "original_size", "batch"))
    if order is None or size is None:
        raise ArgumentError(
            "data: got no node_order, expected data that Reorder or RemoveIsolated have been applied to"
        )
    if rows.size(0) != order.numel():
        raise ArgumentError(f"rows: got {rows.size(0)}, expected one for each of the {order.numel()} nodes of data")
    if graph is not None:
        sizes = torch.as_tensor(size, device=order.device).view(-1)
        order = order + (sizes.cumsum(0) - sizes)[graph]
        size = sizes.sum()
    whole: Tensor = rows.new_full((int(size), *rows.shape[1:]), fill_value).index_copy(0, order, rows)
    return whole
