"""The graph that a PyG loader samples from, moved to a device, and why a device can't sample for some loaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.sampler
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler.base import SubgraphType

from gnncompile.sampling.arguments import check_exclusive, numbers_of_nodes
from gnncompile.sampling.neighborhood import EdgeType
from gnncompile.sampling.pyg import NeighborSampler

MOST_NEIGHBORS = 1024
"""The largest fan-out besides "all" that is sampled on a device."""

_INT32 = 2**31 - 1

_SET_BY_LOADERS = (
    "batch", "batch_size", "input_id", "seed_time", "num_sampled_nodes", "num_sampled_edges", "edge_label",
    "edge_label_index", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index",
)  # fmt: skip
"""The attributes that loaders set. A graph with several node types that has one of them is sampled on the CPU."""


@dataclass(frozen=True, eq=False)
class DeviceGraph:
    """A graph in CSC order on a device, and how its neighbours are drawn.

    Attributes:
        colptr: The first edge of each destination, ``[num_nodes + 1]``, int32 if it fits.
        row: The source of each edge, ``[num_edges]``, int32 if it fits.
        order: The position of each edge in the user's ``edge_index``, int64 ``[num_edges]``; None for the same order.
        fan_outs: For each hop, the most neighbours of a node. A negative number takes all.
        how: The keyword arguments of the samplers: times, weights, ``replace``, ``disjoint``, ``temporal_strategy``.
    """

    colptr: Tensor
    row: Tensor
    order: Tensor | None
    fan_outs: tuple[int, ...]
    how: dict[str, Any]

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.colptr.device

    @property
    def is_temporal(self) -> bool:
        """Whether neighbours have times."""
        return self.how["node_time"] is not None or self.how["edge_time"] is not None

    def tensors(self) -> list[Tensor]:
        """Returns all tensors."""
        return [value for value in (self.colptr, self.row, self.order, *self.how.values()) if isinstance(value, Tensor)]


@dataclass(frozen=True, eq=False)
class HeteroDeviceGraph:
    """A graph with several node types in CSC order on a device, and how its neighbours are drawn.

    Attributes:
        device: The device.
        node_types: The names of the node types.
        edge_types: The names of the edge types.
        num_nodes: The number of nodes of each node type.
        relations: The edges of each edge type, :class:`gnncompile.sampling.hetero_launch.Relation`.
        orders: For each edge type as `order` of :class:`DeviceGraph`.
        disjoint: Whether each seed gets a subgraph of its own.
        is_temporal: Whether neighbours have times.
    """

    device: torch.device
    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    num_nodes: tuple[int, ...]
    relations: tuple[Any, ...]
    orders: tuple[Tensor | None, ...]
    disjoint: bool
    is_temporal: bool

    def tensors(self) -> list[Tensor]:
        """Returns all tensors."""
        found = [value for value in self.orders if value is not None]
        for one in self.relations:
            parts = (one.graph.colptr, one.graph.row, one.graph.node_time, one.graph.edge_time, one.graph.weight)
            found += [value for value in parts if value is not None]
        return found


def moved_types(sampler: NeighborSampler, device: torch.device) -> HeteroDeviceGraph:
    """Returns the graph of a sampler of several node types, on a device.

    Raises:
        ValueError: Times, weights and other settings exclude each other.
    """
    # Triton is imported only where it is used.
    from gnncompile.sampling.hetero_device import relations_of

    def on(values: Any) -> dict[Any, Tensor] | None:
        return None if values is None else {key: value.to(device).contiguous() for key, value in values.items()}

    def narrow(value: Tensor, limit: int) -> Tensor:
        return value.to(device, torch.int32 if limit <= _INT32 else torch.int64)

    node_types, edge_types = tuple(sampler.node_types), tuple(sampler.edge_types)
    colptr, row = sampler._by_type(sampler.colptr_dict), sampler._by_type(sampler.row_dict)
    given = {name: number for name, number in sampler.num_nodes.items() if number is not None}
    number = numbers_of_nodes(node_types, edge_types, colptr, given)
    colptr = {kind: narrow(value, row[kind].numel()) for kind, value in colptr.items()}
    row = {kind: narrow(value, number[kind[0]]) for kind, value in row.items()}
    times = {
        "node_time": on(sampler._node_time),
        "edge_time": None if sampler._edge_time is None else on(sampler._by_type(sampler._edge_time)),
        "weight": None if sampler._weight is None else on(sampler._by_type(sampler._weight)),
    }
    check_exclusive(times["node_time"], times["edge_time"], times["weight"], sampler.disjoint, "_dict")
    how = {name: getattr(sampler, name) for name in ("replace", "disjoint", "temporal_strategy")}
    fan_outs = sampler._by_type(sampler.num_neighbors.get_mapped_values(sampler.edge_types))
    relations = relations_of(colptr, row, fan_outs, edge_types, node_types, number, times, {**how, "directed": True})
    orders = {kind: order for kind, order in (sampler.edge_permutation or {}).items() if order is not None}
    return HeteroDeviceGraph(
        device,
        node_types,
        edge_types,
        tuple(number[name] for name in node_types),
        tuple(relations),
        tuple(orders[kind].to(device) if kind in orders else None for kind in edge_types),
        sampler.disjoint,
        times["node_time"] is not None or times["edge_time"] is not None,
    )


def moved(sampler: NeighborSampler, device: torch.device) -> DeviceGraph:
    """Returns the graph of a sampler, on a device."""

    def on(value: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        return None if value is None else value.to(device=device, dtype=dtype or value.dtype).contiguous()

    nodes, edges = sampler.colptr.numel() - 1, sampler.row.numel()
    colptr = on(sampler.colptr, torch.int32 if edges <= _INT32 else torch.int64)
    row = on(sampler.row, torch.int32 if nodes <= _INT32 else torch.int64)
    assert colptr is not None and row is not None
    how = {
        "node_time": on(sampler._node_time),
        "edge_time": on(sampler._edge_time),
        "weight": on(sampler._weight),
        "replace": sampler.replace,
        "disjoint": sampler.disjoint,
        "temporal_strategy": sampler.temporal_strategy,
    }
    fan_outs = tuple(int(number) for number in sampler.num_neighbors.get_mapped_values())
    return DeviceGraph(colptr, row, on(sampler.edge_permutation), fan_outs, how)


def unsupported(source: Any, device: torch.device) -> str | None:
    """Returns why neighbours of a loader can't be sampled on a device, or None if they can.

    Looks at the settings and shapes only. Imports no Triton unless the device may sample.
    """
    base = next((kind for kind in (NodeLoader, LinkLoader) if isinstance(source, kind)), None)
    if base is None:
        return f"{type(source).__name__} is no loader of nodes or links"
    for name in ("collate_fn", "filter_fn"):
        if getattr(type(source), name) is not getattr(base, name):
            return f"{type(source).__name__} has a {name} of its own"
    if getattr(source.collate_fn, "__func__", None) is not base.collate_fn:
        return "the loader was given another collate_fn"
    if not isinstance(source.data, (Data, HeteroData)):
        return f"the graph is a {type(source.data).__name__}"
    return _unsupported_sampler(source) or _unsupported_data(source.data) or _unsupported_device(device)


def sampler_of(source: NodeLoader | LinkLoader) -> Any:
    """Returns the sampler of a loader."""
    return source.node_sampler if isinstance(source, NodeLoader) else source.link_sampler


def _unsupported_sampler(source: NodeLoader | LinkLoader) -> str | None:
    sampler = sampler_of(source)
    if type(sampler) not in (torch_geometric.sampler.NeighborSampler, NeighborSampler):
        return f"the sampler is a {type(sampler).__name__}"
    if sampler.subgraph_type != SubgraphType.directional:
        return f"subgraph_type is {sampler.subgraph_type.value!r}"
    if getattr(sampler, "sample_direction", "forward") != "forward":
        return "sample_direction is 'backward'"
    if getattr(sampler, "keep_orig_edges", False):
        return "the sampler keeps the original edges"
    if source.transform_sampler_output is not None or source.custom_cls is not None:
        return "transform_sampler_output or custom_cls is given"
    if source.batch_sampler is None:
        return "batch_size is None"
    time = source.input_data.time
    if time is not None and (time.is_floating_point() or time.is_complex()):
        return f"the times of seeds have the dtype {time.dtype}"
    is_hetero = isinstance(source.data, HeteroData)
    given = sampler.num_neighbors.get_mapped_values(*((sampler.edge_types,) if is_hetero else ()))
    for fan_outs in given.values() if is_hetero else [given]:
        if not fan_outs or max(fan_outs) > MOST_NEIGHBORS:
            return f"num_neighbors is {list(fan_outs)}, where a device takes hops of at most {MOST_NEIGHBORS}, or -1"
    return None


def _unsupported_data(data: Data | HeteroData) -> str | None:
    is_hetero = isinstance(data, HeteroData)
    edges = data.edge_stores
    if not edges or any(type(store.get("edge_index")) is not Tensor for store in edges):
        return "there is no edge_index that is a plain tensor" + (" of each edge type" if is_hetero else "")
    if not any(store.num_nodes for store in data.node_stores):
        return "the graph has no nodes"
    for store in data.stores:
        reason = _unsupported_store(data, store)
        if reason is not None:
            return reason
    return None


def _unsupported_store(data: Data | HeteroData, store: Any) -> str | None:
    for key, value in store.items():
        if isinstance(data, HeteroData) and key in _SET_BY_LOADERS:
            return f"the graph has an attribute {key}, which loaders set"
        if key == "edge_index" or not has_rows(store, key):
            continue
        if type(value) is not Tensor or value.layout != torch.strided:
            return f"{key} is a {type(value).__name__} with a row for each node or edge"
        if data.__cat_dim__(key, value, store) % value.dim() != 0:
            return f"{key} has nodes or edges along another dimension than the first"
    return None


def has_rows(store: Any, key: str) -> bool:
    """Whether an attribute of a store has a row for each node, or for each edge."""
    of_nodes, of_edges = getattr(store, "is_node_attr", None), getattr(store, "is_edge_attr", None)
    return bool((of_nodes is not None and of_nodes(key)) or (of_edges is not None and of_edges(key)))


def _unsupported_device(device: torch.device) -> str | None:
    # Triton is imported only where it is used.
    from gnncompile.sampling.device_csc import can_sample

    return None if can_sample(device) else f"mini-batches go to {device}, which is no GPU"
