"""The graph that a PyG loader samples from, moved to a device, and why a device can't sample for some loaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.sampler
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler.base import SubgraphType

from gnncompile.sampling.pyg import NeighborSampler

MOST_NEIGHBORS = 1024
"""The largest fan-out besides "all" that is sampled on a device."""

_INT32 = 2**31 - 1


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
    def is_temporal(self) -> bool:
        """Whether neighbours have times."""
        return self.how["node_time"] is not None or self.how["edge_time"] is not None


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
    if not isinstance(source.data, Data):
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
    fan_outs = sampler.num_neighbors.get_mapped_values()
    if not fan_outs or max(fan_outs) > MOST_NEIGHBORS:
        return f"num_neighbors is {list(fan_outs)}, where a device takes hops of at most {MOST_NEIGHBORS}, or -1"
    return None


def _unsupported_data(data: Data) -> str | None:
    if type(data.edge_index) is not Tensor:
        return "there is no edge_index that is a plain tensor"
    if not data.num_nodes:
        return "the graph has no nodes"
    for key, value in data._store.items():
        if key == "edge_index" or not (data.is_node_attr(key) or data.is_edge_attr(key)):
            continue
        if type(value) is not Tensor or value.layout != torch.strided:
            return f"{key} is a {type(value).__name__} with a row for each node or edge"
        if data.__cat_dim__(key, value) % value.dim() != 0:
            return f"{key} has nodes or edges along another dimension than the first"
    return None


def _unsupported_device(device: torch.device) -> str | None:
    # Triton is imported only where it is used.
    from gnncompile.sampling.device_csc import can_sample

    return None if can_sample(device) else f"mini-batches go to {device}, which is no GPU"
