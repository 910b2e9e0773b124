"""Functions that transforms share which give every node one self loop, with a value for each edge attribute."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

from gnncompile.exc import ArgumentError

from .edges import by_destination, edge_attributes, like, number_of_nodes, plain
from .slices import edges_per_graph, is_batch, set_slices

Fill = float | str | Tensor
"""The edge attribute of a new self loop: a value, or a reduction over the attributes of the node's incoming edges."""


def fills(store: Any, fill_value: Fill | Mapping[str, Fill]) -> dict[str, Fill]:
    """Returns the fill of each edge attribute of a store for new self loops.

    Raises:
        ValueError: `fill_value` gives no fill for an attribute, or an attribute is no tensor.
    """
    found: dict[str, Fill] = {}
    for key in edge_attributes(store):
        value = store[key]
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"{key}: got a {type(value).__name__} of one entry per edge, expected a tensor; remove it"
            )
        if isinstance(fill_value, Mapping):
            if key in fill_value:
                found[key] = fill_value[key]
                continue
        elif value.is_floating_point() or value.is_complex():
            found[key] = fill_value
            continue
        raise ArgumentError(
            f"fill_value: got none for {key!r} ({str(value.dtype).removeprefix('torch.')}), expected what a new self "
            f"loop has there; give fill_value={{{key!r}: ..., ...}} with an entry for each edge attribute"
        )
    return found


def add_loops(data: Any, store: Any, fill: Mapping[str, Fill], existing: str) -> None:
    """Gives every node of a store one self loop, and sorts the edges by destination.

    Args:
        data: a copy of the user's object.
        store: an edge store of `data` that joins nodes of one type; it is changed in place.
        fill: the fill of each edge attribute of a new self loop.
        existing: whether to `"keep"` or to `"replace"` the attributes of existing self loops.
    """
    edges, num_nodes = plain(store.edge_index), number_of_nodes(store)

    def added(attr: Tensor | None, value: Fill) -> tuple[Tensor, Any]:
        if existing == "keep":
            found: tuple[Tensor, Any] = add_remaining_self_loops(edges, attr, value, num_nodes)
            return found
        found = add_self_loops(*remove_self_loops(edges, attr), value, num_nodes)
        return found

    extended, _ = added(None, 1.0)
    perm = by_destination(extended)
    attributes = {key: added(store[key], value)[1].index_select(0, perm) for key, value in fill.items()}
    edge_index = extended.index_select(1, perm)
    store.edge_index = like(store.edge_index, edge_index, "col")
    store.update(attributes)
    if is_batch(data):
        set_slices(data, store, ["edge_index", *fill], edges_per_graph(data, store, edge_index))


def weights(data: Any, store: Any) -> Tensor:
    """Returns `edge_weight`, `[num_edges]`; if there is none, ones of the type of the features."""
    found = store.get("edge_weight")
    if found is not None:
        return found  # type: ignore[no-any-return]
    features = (data if store._key is None else data[store._key[0]]).get("x")
    known = isinstance(features, Tensor) and features.is_floating_point()
    dtype = features.dtype if known else torch.get_default_dtype()
    return torch.ones(store.edge_index.size(1), dtype=dtype, device=store.edge_index.device)


def types_repr(edge_types: Any) -> str:
    """Returns the text of `edge_types` in a `repr`; "" if it was not given."""
    return "" if edge_types is None else f", edge_types={list(edge_types)}"
