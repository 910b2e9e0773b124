"""Mini-batches that were sampled on a device: gathers their attributes, pads them, and lays out their edges there.

The result is that of :mod:`gnncompile.batches.prepare`, all in one memory. The host knows the sizes and queues kernels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from gnncompile import tuning
from gnncompile.batches import device_kernels
from gnncompile.batches.hops import MOST, HopPrefix
from gnncompile.batches.memory import ALIGNMENT, Place
from gnncompile.batches.prepare import COUNTS, Attribute, LayoutHubs, Prepared
from gnncompile.batches.row_types import BATCH, EDGE_INDEX, EDGES, NODES, SEEDS, RowTypes
from gnncompile.exc import ArgumentError
from gnncompile.layout import csr
from gnncompile.layout.batch_metadata import ENOUGH
from gnncompile.sampling.ahead import Sampled
from gnncompile.sampling.device_graph import DeviceGraph
from gnncompile.sampling.features import Features
from gnncompile.sampling.gather import padded
from gnncompile.sampling.seeds import SeedsOf

NODE, EDGE = 0, 1
"""The row types of a mini-batch."""

NODE_ID, EDGE_ID, INPUT_ID, TIME = "n_id", "e_id", "input_id", "seed_time"
"""The attributes that PyG adds to a sampled mini-batch, besides numbers."""


@dataclass(frozen=True, eq=False)
class Placing:
    """Where attributes lie: the arguments of :class:`gnncompile.sampling.features.Features`.

    Attributes:
        place: A place, or a place for each name. Attributes without one are on the device.
        cache: The bytes of the cache for attributes of nodes on the host.
        reads: How often each node is read, ``[num_nodes]``; None without a cache.
    """

    place: str | Mapping[str, str] = "device"
    cache: int = 0
    reads: Tensor | None = None

    def is_on_host(self, key: str) -> bool:
        """Whether an attribute lies on the host."""
        return (self.place if isinstance(self.place, str) else self.place.get(key, "device")) == "host"

    def check(self, rows: Mapping[str, int]) -> None:
        """Raises an error if a place or the cache has no use; `rows` are the row types of the attributes by name."""
        unknown = [] if isinstance(self.place, str) else [key for key in self.place if key not in rows]
        if unknown:
            raise ArgumentError(
                f"features: found a place for {unknown[0]!r}, expected names of attributes of nodes or edges: "
                f"{', '.join(rows)}."
            )
        if self.cache and not any(kind == NODE and self.is_on_host(key) for key, kind in rows.items()):
            raise ArgumentError(
                f"cache: found {self.cache} bytes and no attribute of nodes on the host, expected one, which a cache "
                "serves; name it in features, or leave cache out."
            )

    def placed(self, tensors: Mapping[str, Tensor], device: torch.device, are_nodes: bool) -> Features:
        """Puts attributes where they belong. The cache holds attributes of nodes only."""
        is_cached = are_nodes and self.cache > 0 and any(map(self.is_on_host, tensors))
        place = {name: "host" if self.is_on_host(name) else "device" for name in tensors}
        more: dict[str, Any] = {"cache": self.cache, "reads": self.reads} if is_cached else {}
        return Features(tensors, device, place=place, **more)


@dataclass(frozen=True, eq=False)
class Columns:
    """The attributes of a graph on a device.

    Attributes:
        shell: The graph without its edges and without its attributes of nodes and edges.
        rows: The row type of each attribute: :data:`NODE` or :data:`EDGE`.
        features: The attributes of nodes and those of edges, by row type. A type without an attribute is missing.
        order: The position of each edge, by its position in CSC order, int64 ``[num_edges]``; None for the same order.
        most_neighbors: The most edges to a node of a mini-batch; None if there is no bound.
        time_dtype: The dtype of the times of seeds.
        are_nodes: Whether the seeds are nodes; else they are the ends of links.
    """

    shell: Data
    rows: Mapping[str, int]
    features: Mapping[int, Features]
    order: Tensor | None
    most_neighbors: int | None
    time_dtype: torch.dtype
    are_nodes: bool

    @staticmethod
    def of(data: Data, seeds: SeedsOf, graph: DeviceGraph, how: Placing) -> Columns:
        """Moves the attributes of a graph to the device of `graph`, which is the same graph, or to where `how` says."""
        device, fan_outs = graph.colptr.device, graph.fan_outs
        most_neighbors = max(fan_outs) if min(fan_outs) >= 0 else None
        shell, rows = copy.copy(data), {}
        values: dict[int, dict[str, Tensor]] = {NODE: {}, EDGE: {}}
        for key, value in data._store.items():
            if key == EDGE_INDEX or key in seeds.replaced:
                shell[key] = None
            elif data.is_node_attr(key) or data.is_edge_attr(key):
                rows[key] = NODE if data.is_node_attr(key) else EDGE
                values[rows[key]][key] = value.detach().contiguous()
            elif isinstance(value, Tensor):
                shell[key] = value.to(device)
        for key in rows:
            shell[key] = None
        how.check(rows)
        features = {kind: how.placed(found, device, kind == NODE) for kind, found in values.items() if found}
        time_dtype = torch.int64 if seeds.time is None else seeds.time.dtype
        return Columns(shell, rows, features, graph.order, most_neighbors, time_dtype, seeds.are_nodes)

    def value(self, key: str) -> Tensor | None:
        """Returns an attribute of nodes or edges, wherever it lies; None if there is no such attribute."""
        return self.features[self.rows[key]].tensors[key] if key in self.rows else None


class _Room(NamedTuple):
    """A tensor in the memory of one size.

    Attributes:
        start: Its first byte.
        dtype: Its dtype.
        whole: Its shape, padding included.
        dim: The dimension along which it is padded.
        kind: The row type of its rows; None if they have none.
        more: The rows besides one for each of the row type.
    """

    start: int
    dtype: torch.dtype
    whole: tuple[int, ...]
    dim: int
    kind: int | None
    more: int

    def place(self, counts: Sequence[int]) -> Place:
        """Returns the place of the tensor in a mini-batch with these numbers of valid rows."""
        true = list(self.whole)
        if self.kind is not None:
            true[self.dim] = counts[self.kind] + self.more
        return Place(self.start, self.dtype, self.whole, tuple(true))


def kinds_of(columns: Columns, sampled: Sampled, padded: bool) -> RowTypes:
    """Returns the row types of a mini-batch; with hop prefixes if it may be padded."""
    nodes, edges = sampled.node_ends, sampled.edge_ends
    rows = {**columns.rows, EDGE_INDEX: EDGE}
    rows.setdefault(NODE_ID, NODE)
    rows.setdefault(EDGE_ID, EDGE)
    if sampled.batch is not None:
        rows[BATCH] = NODE
    kinds = RowTypes((NODES, EDGES), (nodes[-1], edges[-1]), (rows,), ((NODE, NODE),), True)
    found = []
    for hop in range(min(MOST, len(edges)) if padded and columns.are_nodes else 0):
        if nodes[hop + 1] == nodes[hop]:
            break
        found.append(HopPrefix(nodes[hop], edges[hop], nodes[hop + 1]))
    return kinds.with_hop_prefixes(tuple(found)) if found and min(found[0]) >= ENOUGH else kinds


class DeviceBatch:
    """The places of a mini-batch of one size in its memory, and the kernels that fill it.

    Args:
        columns: The attributes.
        kinds: The row types. Only their names and the number of hop prefixes matter.
        sizes: The size of each row type, padding included.
        seeds: The most seeds.
        sampled: A mini-batch of this kind.
    """

    def __init__(self, columns: Columns, kinds: RowTypes, sizes: tuple[int, ...], seeds: int, sampled: Sampled) -> None:
        self.columns, self.sizes, self.length = columns, sizes, 0
        self.hop_prefixes, self._hops = len(kinds.hop_prefixes), len(sampled.edge_ends)
        self.rooms: dict[str, _Room] = {}
        self._keys = kinds.rows[0]
        device = sampled.node.device
        self._add(COUNTS, torch.int64, (len(sizes),))
        for key, kind in self._keys.items():
            value = columns.value(key)
            if key == EDGE_INDEX:
                self._add(f"0 {key}", torch.int64, (2, sizes[kind]), kind, dim=1)
            elif value is None:
                self._add(f"0 {key}", torch.int64, (sizes[kind],), kind)
            else:
                self._add(f"0 {key}", value.dtype, (sizes[kind], *value.shape[1:]), kind)
        if columns.are_nodes:
            self._add(f"0 {INPUT_ID}", torch.int64, (seeds,))
            if sampled.time is not None:
                self._add(f"0 {TIME}", columns.time_dtype, (seeds,))
        self._add_layout("0 {} by col", EDGE, NODE)
        for at in range(self.hop_prefixes):
            nodes, edges, _ = kinds.hop_prefix(at)
            self._add_layout(f"0 front {at} {{}} by col", edges, nodes)
        self._prefixes = [kinds.hop_prefix(at) for at in range(self.hop_prefixes)]
        self._order = _on_device(tuple(self._places_of_counts()), device)
        self._nodes = torch.arange(sizes[NODE] + 1, device=device)

    def _add(
        self,
        name: str,
        dtype: torch.dtype,
        whole: tuple[int, ...],
        kind: int | None = None,
        dim: int = 0,
        more: int = 0,
    ) -> None:
        self.rooms[name] = _Room(self.length, dtype, whole, dim, kind, more)
        self.length += -(-math.prod(whole) * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def _add_layout(self, name: str, edges: int, nodes: int) -> None:
        self._add(name.format("rowptr"), torch.int32, (self.sizes[nodes] + 1,), nodes, more=1)
        for part in ("col", "edge"):
            self._add(name.format(part), torch.int32, (self.sizes[edges],), edges)

    def _places_of_counts(self) -> list[int]:
        """Returns where the number of valid rows of each row type is in the ends of a sampled mini-batch."""
        hops = self._hops
        found = [hops, 2 * hops + 1]
        for at in range(self.hop_prefixes):
            found += [at, hops + 2 + at]
        return [*found, self.hop_prefixes] if self.hop_prefixes else found

    def fill(self, memory: Tensor, sampled: Sampled) -> None:
        """Queues the kernels that write a mini-batch to its memory, uint8 ``[length]``. Never waits for the device."""
        columns = self.columns
        counts = self._at(memory, COUNTS)
        torch.index_select(sampled.ends, 0, self._order, out=counts)
        node, edge = self._identity(memory, NODE_ID, NODE), self._identity(memory, EDGE_ID, EDGE)
        device_kernels.repeat_rows(sampled.node, counts, NODE, node)
        device_kernels.repeat_rows(sampled.edge, counts, EDGE, edge)
        if columns.order is not None:
            edge.copy_(columns.order[edge])
        if sampled.batch is not None:
            batch = self._at(memory, f"0 {BATCH}")
            device_kernels.repeat_rows(sampled.batch, counts, NODE, batch)
            if sampled.groups is not None:
                batch.remainder_(sampled.groups)
        for key, kind in columns.rows.items():
            ids, end, out = node if kind == NODE else edge, counts[kind : kind + 1], self._at(memory, f"0 {key}")
            if key in sampled.rows:
                padded(sampled.rows[key], end, out)
            else:
                columns.features[kind].gather(key, ids, end, out)
        for key, given in ((INPUT_ID, sampled.input_id), (TIME, sampled.time)):
            if given is not None and f"0 {key}" in self.rooms:
                room = self._at(memory, f"0 {key}")
                number = min(room.numel(), given.numel())
                room[:number].copy_(given[:number])
        self._lay_out(memory, counts, sampled)

    def _identity(self, memory: Tensor, key: str, kind: int) -> Tensor:
        """Returns the tensor for the ids of nodes or edges: in the memory, unless the graph has such an attribute."""
        if key not in self.columns.rows:
            return self._at(memory, f"0 {key}")
        return torch.empty(self.sizes[kind], dtype=torch.int64, device=memory.device)

    def _lay_out(self, memory: Tensor, counts: Tensor, sampled: Sampled) -> None:
        edge_index, layout = self._at(memory, f"0 {EDGE_INDEX}"), self._layout(memory, "0 {} by col")
        ends = sampled.row, sampled.col, counts
        device_kernels.pad_edges(*ends, (EDGE, NODE, NODE), self.sizes, layout[1:], edge_index)
        torch.searchsorted(edge_index[1], self._nodes, out_int32=True, out=layout[0])
        for at, (nodes, edges, sources) in enumerate(self._prefixes):
            prefix, kinds = self._layout(memory, f"0 front {at} {{}} by col"), (edges, sources, nodes)
            device_kernels.pad_edges(*ends, kinds, self.sizes, prefix[1:], None)
            device_kernels.prefix_pointers(layout[0], counts, kinds, self.sizes, prefix[0])

    def _layout(self, memory: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        rowptr, col, edge = (self._at(memory, name.format(part)) for part in ("rowptr", "col", "edge"))
        return rowptr, col, edge

    def _at(self, memory: Tensor, name: str) -> Tensor:
        room = self.rooms[name]
        return Place(room.start, room.dtype, room.whole, room.whole).on(memory, padded=True)

    def finish(
        self, memory: Tensor, sampled: Sampled, kinds: RowTypes, padded: bool, is_reused: bool = False
    ) -> BaseData:
        """Returns the mini-batch with the tensors in its memory. Other mini-batches may use the memory after it."""
        counts, seeds = kinds.counts, sampled.node_ends[0]
        places = {name: room.place(counts) for name, room in self.rooms.items()}
        for key in (INPUT_ID, TIME):
            if (room := self.rooms.get(f"0 {key}")) is not None:
                places[f"0 {key}"] = Place(room.start, room.dtype, room.whole, (seeds,))
        sizes = self.sizes if padded else None
        shell, attributes = self._shell(sampled), self._attributes(sampled, counts)
        ready = Prepared(shell, kinds, sizes, attributes, places, self._hubs(kinds), memory, is_reused)
        return ready.finish(memory)

    def _shell(self, sampled: Sampled) -> Data:
        shell, (nodes, edges) = copy.copy(self.columns.shell), (sampled.node_ends, sampled.edge_ends)
        if "num_nodes" in shell._store:
            shell.num_nodes = nodes[-1]
        shell.num_sampled_nodes = [end - start for start, end in zip([0, *nodes], nodes, strict=False)]
        shell.num_sampled_edges = [end - start for start, end in zip([0, *edges], edges, strict=False)]
        if self.columns.are_nodes:
            shell[SEEDS] = nodes[0]
        for key, value in sampled.labels.items():
            shell[key] = value
        return shell

    def _attributes(self, sampled: Sampled, counts: Sequence[int]) -> tuple[Attribute, ...]:
        found = []
        for key, kind in self._keys.items():
            is_edges = key == EDGE_INDEX
            values = (NODE, NODE) if is_edges else (None,)
            found.append(Attribute(0, key, kind, values, _highest(sampled, counts) if is_edges else (None,)))
        for key in (INPUT_ID, TIME):
            if f"0 {key}" in self.rooms:
                found.append(Attribute(0, key, None, (None,), (None,)))
        return tuple(found)

    def _hubs(self, kinds: RowTypes) -> dict[str, LayoutHubs]:
        """Returns the layouts without a hub. The kernels find the hubs of other layouts."""
        found: dict[str, LayoutHubs] = {}
        most, counts, sizes = self.columns.most_neighbors, kinds.counts, self.sizes
        names = [("0 {} by col", EDGE, NODE)]
        for at in range(self.hop_prefixes):
            nodes, edges, _ = kinds.hop_prefix(at)
            names.append((f"0 front {at} {{}} by col", edges, nodes))
        for name, edges, nodes in names:
            longest = -(-(sizes[edges] - counts[edges]) // max(sizes[nodes] - counts[nodes], 1))
            limit = csr.most_edges(sizes[edges])
            if most is not None and sizes[edges] > tuning.TILES.hub_edges and max(most, longest) < limit:
                found[name] = LayoutHubs(csr.NO_HUBS, True, limit)
        return found


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns numbers on a device, int64. They are copied once."""
    return torch.tensor(numbers, device=device)


def _highest(sampled: Sampled, counts: Sequence[int]) -> tuple[int, int]:
    """Returns one more than the last source, and one more than the last destination."""
    nodes, edges = counts[NODE], counts[EDGE]
    if nodes > sampled.node_ends[0]:
        return nodes, sampled.last + 1  # the node that was found last is a source
    # No hop found a node, so the graph around the seeds is small. The host waits for the device.
    return (int(sampled.row[:edges].max()) + 1 if edges else 0), sampled.last + 1
