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
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from gnncompile import tuning
from gnncompile.batches import device_kernels
from gnncompile.batches.hops import MOST, HopPrefix
from gnncompile.batches.memory import ALIGNMENT, Place
from gnncompile.batches.padding_rows import is_position
from gnncompile.batches.placing import Placing
from gnncompile.batches.prepare import COUNTS, Attribute, LayoutHubs, Prepared
from gnncompile.batches.row_types import BATCH, EDGE_INDEX, EDGES, NODES, SEEDS, RowTypes, tensors
from gnncompile.layout import csr
from gnncompile.layout.batch_metadata import BatchMetadata, attach
from gnncompile.layout.streams import Ordered
from gnncompile.sampling.device_graph import DeviceGraph, HeteroDeviceGraph, has_rows
from gnncompile.sampling.features import Features
from gnncompile.sampling.gather import padded
from gnncompile.sampling.neighborhood import steps
from gnncompile.sampling.sampled import FoundEdges, Sampled
from gnncompile.sampling.seeds import SeedsOf

NODE_ID, EDGE_ID, INPUT_ID, TIME = "n_id", "e_id", "input_id", "seed_time"
"""The attributes that PyG adds to a sampled mini-batch, besides numbers."""


class Kind(NamedTuple):
    """A row type of a mini-batch: a node type or an edge type.

    Attributes:
        name: The name of the row type.
        store: The position of its store among those of the graph.
        are_nodes: Whether rows are nodes. Otherwise they are edges.
        at: The position of the node type or the edge type in the sampler.
        ends: The row types of the sources and destinations of edges.
        order: The position of each edge in ``edge_index``, by its position in CSC order, int64; None if it is the same.
        most_neighbors: The most edges to a node of a mini-batch; None if there is no bound.
    """

    name: str
    store: int
    are_nodes: bool
    at: int
    ends: tuple[int, int] | None = None
    order: Tensor | None = None
    most_neighbors: int | None = None


@dataclass(frozen=True, eq=False)
class Columns:
    """The attributes of a graph on a device.

    Attributes:
        shell: The graph without its edges and without its attributes of nodes and edges.
        kinds: The row types.
        rows: The row type of each attribute of nodes or edges, for each store.
        features: The attributes by row type. A type without an attribute is missing.
        seed_store: The position of the store that gets what is said of the seeds.
        time_dtype: The dtype of the times of seeds.
        are_nodes: Whether the seeds are nodes; else they are the ends of links.
    """

    shell: BaseData
    kinds: tuple[Kind, ...]
    rows: tuple[dict[str, int], ...]
    features: Mapping[int, Features]
    seed_store: int
    time_dtype: torch.dtype
    are_nodes: bool

    @staticmethod
    def of(data: Data | HeteroData, seeds: SeedsOf, graph: DeviceGraph | HeteroDeviceGraph, how: Placing) -> Columns:
        """Moves the attributes of a graph to the device of `graph`, which is the same graph, or to where `how` says."""
        shell, kinds = copy.copy(data), _kinds(data, graph)
        rows: list[dict[str, int]] = [{} for _ in data.stores]
        values: dict[int, dict[str, Tensor]] = {}
        for at, (store, made) in enumerate(zip(data.stores, shell.stores, strict=True)):
            for key, value in store.items():
                if key == EDGE_INDEX or (isinstance(data, Data) and key in seeds.replaced):
                    made[key] = None
                elif has_rows(store, key):
                    kind = _kind_of(kinds, at, store, key)
                    rows[at][key] = kind
                    values.setdefault(kind, {})[key] = value.detach().contiguous()
                elif isinstance(value, Tensor):
                    made[key] = value.detach().to(graph.device)
                    attach(made[key], BatchMetadata(is_shared=True))
            for key in rows[at]:
                made[key] = None
        how.check({key: kinds[kind].are_nodes for found in rows for key, kind in found.items()})
        nodes = {kind: kinds[kind].at for kind in values if kinds[kind].are_nodes}
        features = how.placed(values, nodes, graph.device)
        time_dtype = torch.int64 if seeds.time is None else seeds.time.dtype
        found = next(
            (at for at, store in enumerate(data.stores) if getattr(store, "_key", None) == seeds.input_type), 0
        )
        return Columns(shell, kinds, tuple(rows), features, found, time_dtype, seeds.are_nodes)

    def held(self) -> list[Tensor]:
        """Returns all tensors: attributes, orders of edges, and what all mini-batches share."""
        orders = [kind.order for kind in self.kinds if kind.order is not None]
        shared = [value for store in self.shell.stores for value in tensors(store).values()]
        return [*(held for one in self.features.values() for held in one.held()), *orders, *shared]

    def value(self, store: int, key: str) -> Tensor | None:
        """Returns an attribute of nodes or edges, wherever it lies; None if there is no such attribute."""
        return self.features[self.rows[store][key]].tensors[key] if key in self.rows[store] else None


def _kinds(data: Data | HeteroData, graph: DeviceGraph | HeteroDeviceGraph) -> tuple[Kind, ...]:
    """Returns the row types, in the order of :func:`gnncompile.batches.row_types.row_types_of`."""
    if isinstance(graph, DeviceGraph):
        return Kind(NODES, 0, True, 0), Kind(EDGES, 0, False, 0, (0, 0), graph.order, _most(graph.fan_outs))
    found: list[Kind] = []
    nodes: dict[Any, int] = {}
    for at, store in enumerate(data.stores):
        if isinstance(store, NodeStorage) and store._key in graph.node_types:
            nodes[store._key] = len(found)
            found.append(Kind(f"{NODES} {store._key}", at, True, graph.node_types.index(store._key)))
        elif isinstance(store, EdgeStorage):
            which, ends = graph.edge_types.index(store._key), (nodes[store._key[0]], nodes[store._key[2]])
            most = _most(graph.relations[which].fan_outs)
            found.append(Kind(f"{EDGES} {store._key}", at, False, which, ends, graph.orders[which], most))
    return tuple(found)


def _most(fan_outs: Sequence[int]) -> int | None:
    return max(fan_outs) if min(fan_outs) >= 0 else None


def _kind_of(kinds: Sequence[Kind], store: int, values: Any, key: str) -> int:
    """Returns the row type of an attribute that has a row for each node or edge."""
    found = [at for at, kind in enumerate(kinds) if kind.store == store]
    return next((at for at in found if kinds[at].are_nodes and values.is_node_attr(key)), found[-1])


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
    """Returns the row types of a mini-batch; with hop prefixes if it may be padded and has one node type."""
    rows = tuple(dict(found) for found in columns.rows)
    ends: list[tuple[int, int] | None] = [None] * len(rows)
    for at, kind in enumerate(columns.kinds):
        found = rows[kind.store]
        found.setdefault(NODE_ID if kind.are_nodes else EDGE_ID, at)
        if kind.are_nodes and sampled.nodes[kind.at].batch is not None:
            found[BATCH] = at
        if not kind.are_nodes:
            found[EDGE_INDEX], ends[kind.store] = at, kind.ends
    counts = tuple(
        sampled.nodes[kind.at].ends[-1] if kind.are_nodes else sampled.edges[kind.at].ends[-1] for kind in columns.kinds
    )
    kinds = RowTypes(tuple(kind.name for kind in columns.kinds), counts, rows, tuple(ends), True)
    return kinds.with_hop_prefixes(_hop_prefixes(columns, sampled)) if padded else kinds


def _hop_prefixes(columns: Columns, sampled: Sampled) -> tuple[HopPrefix, ...]:
    if not columns.are_nodes or len(sampled.nodes) > 1 or len(sampled.edges) > 1:
        return ()
    nodes, edges = sampled.nodes[0].ends, sampled.edges[0].ends
    found = []
    for hop in range(min(MOST, len(edges))):
        if nodes[hop + 1] == nodes[hop]:
            break
        found.append(HopPrefix(nodes[hop], edges[hop], nodes[hop + 1]))
    return tuple(found)


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
        self._pads = sizes != kinds.counts
        self.hop_prefixes = len(kinds.hop_prefixes)
        self.rooms: dict[str, _Room] = {}
        self._keys = kinds.rows
        device = sampled.state.device
        self._add(COUNTS, torch.int64, (len(sizes),))
        for store, keys in enumerate(kinds.rows):
            for key, kind in keys.items():
                value = columns.value(store, key)
                if key == EDGE_INDEX:
                    self._add(f"{store} {key}", torch.int64, (2, sizes[kind]), kind, dim=1)
                elif value is None:
                    self._add(f"{store} {key}", torch.int64, (sizes[kind],), kind)
                else:
                    self._add(f"{store} {key}", value.dtype, (sizes[kind], *value.shape[1:]), kind)
        if columns.are_nodes:
            self._add(self._of_seeds(INPUT_ID), torch.int64, (seeds,))
            if sampled.time is not None:
                self._add(self._of_seeds(TIME), columns.time_dtype, (seeds,))
        for at, one in enumerate(columns.kinds):
            if one.ends is not None:
                self._add_layout(f"{one.store} {{}} by col", at, one.ends[1])
        self._prefixes = [kinds.hop_prefix(at) for at in range(self.hop_prefixes)]
        for at, (nodes, edges, _) in enumerate(self._prefixes):
            self._add_layout(f"0 front {at} {{}} by col", edges, nodes)
        self._order = _on_device(tuple(self._places_of_counts(sampled)), device)
        self._nodes = {
            kind.ends[1]: torch.arange(sizes[kind.ends[1]] + 1, device=device)
            for kind in columns.kinds
            if kind.ends is not None
        }
        self._made = Ordered.after([self._order, *self._nodes.values()])

    def _of_seeds(self, key: str) -> str:
        return f"{self.columns.seed_store} {key}"

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

    def _places_of_counts(self, sampled: Sampled) -> list[int]:
        """Returns where the state of a sampled mini-batch has the number of valid rows of each row type."""
        found = [
            (sampled.nodes[kind.at] if kind.are_nodes else sampled.edges[kind.at]).at[-1] for kind in self.columns.kinds
        ]
        for at in range(self.hop_prefixes):
            found += [sampled.nodes[0].at[at], sampled.edges[0].at[at]]
        return [*found, sampled.nodes[0].at[self.hop_prefixes]] if self.hop_prefixes else found

    def fill(self, memory: Tensor, sampled: Sampled) -> None:
        """Queues the kernels that write a mini-batch to its memory, uint8 ``[length]``. Never waits for the device."""
        if self._made is not None:
            self._made.follow()  # iterators in several threads, and epochs, may run on several streams
        counts = self._at(memory, COUNTS)
        torch.index_select(sampled.state, 0, self._order, out=counts)
        for at, kind in enumerate(self.columns.kinds):
            if kind.are_nodes:
                self._fill_nodes(memory, counts, sampled, at)
            else:
                self._fill_edges(memory, counts, sampled, at)
        for key, given in ((INPUT_ID, sampled.input_id), (TIME, sampled.time)):
            if given is not None and self._of_seeds(key) in self.rooms:
                room = self._at(memory, self._of_seeds(key))
                number = min(room.numel(), given.numel())
                room[:number].copy_(given[:number])
        for at, kind in enumerate(self.columns.kinds):
            if kind.ends is not None:
                self._lay_out(memory, counts, sampled.edges[kind.at], at)

    def _fill_nodes(self, memory: Tensor, counts: Tensor, sampled: Sampled, at: int) -> None:
        kind = self.columns.kinds[at]
        found = sampled.nodes[kind.at]
        node = self._identity(memory, kind.store, NODE_ID, at)
        device_kernels.repeat_rows(found.node, counts, at, node)
        if found.batch is not None:
            batch = self._at(memory, f"{kind.store} {BATCH}")
            device_kernels.repeat_rows(found.batch, counts, at, batch)
            if sampled.groups is not None:
                batch.remainder_(sampled.groups)
        self._gather(memory, counts, sampled, at, node)

    def _fill_edges(self, memory: Tensor, counts: Tensor, sampled: Sampled, at: int) -> None:
        kind = self.columns.kinds[at]
        edge = self._identity(memory, kind.store, EDGE_ID, at)
        device_kernels.repeat_rows(sampled.edges[kind.at].edge, counts, at, edge)
        if kind.order is not None and kind.order.numel():
            edge.copy_(kind.order[edge])
        self._gather(memory, counts, sampled, at, edge)

    def _gather(self, memory: Tensor, counts: Tensor, sampled: Sampled, at: int, ids: Tensor) -> None:
        """Queues the kernels that write the attributes of a row type."""
        columns, kind, end = self.columns, self.columns.kinds[at], counts[at : at + 1]
        for key in (key for key, other in columns.rows[kind.store].items() if other == at):
            out, ahead = self._at(memory, f"{kind.store} {key}"), sampled.rows.get((kind.are_nodes, kind.at, key))
            if ahead is not None:
                padded(ahead, end, out)
            elif columns.features[at].num_rows:
                columns.features[at].gather(key, ids, end, out)
            if self._pads:
                device_kernels.spread_rows(out, counts, at, is_position(key))

    def _identity(self, memory: Tensor, store: int, key: str, kind: int) -> Tensor:
        """Returns the tensor for the ids of nodes or edges: in the memory, unless the graph has such an attribute."""
        if key not in self.columns.rows[store]:
            return self._at(memory, f"{store} {key}")
        return torch.empty(self.sizes[kind], dtype=torch.int64, device=memory.device)

    def _lay_out(self, memory: Tensor, counts: Tensor, found: FoundEdges, at: int) -> None:
        kind = self.columns.kinds[at]
        assert kind.ends is not None
        edge_index = self._at(memory, f"{kind.store} {EDGE_INDEX}")
        layout = self._layout(memory, f"{kind.store} {{}} by col")
        ends = found.row, found.col, counts
        device_kernels.pad_edges(*ends, (at, *kind.ends), self.sizes, layout[1:], edge_index)
        torch.searchsorted(edge_index[1], self._nodes[kind.ends[1]], out_int32=True, out=layout[0])
        for prefix_at, (nodes, edges, sources) in enumerate(self._prefixes):
            prefix, kinds = self._layout(memory, f"0 front {prefix_at} {{}} by col"), (edges, sources, nodes)
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
        counts = kinds.counts
        places = {name: room.place(counts) for name, room in self.rooms.items()}
        for key in (INPUT_ID, TIME):
            if (room := self.rooms.get(self._of_seeds(key))) is not None:
                places[self._of_seeds(key)] = Place(room.start, room.dtype, room.whole, (sampled.seeds,))
        sizes = self.sizes if padded else None
        shell, attributes = self._shell(sampled), self._attributes(sampled, counts)
        ready = Prepared(shell, kinds, sizes, attributes, places, self._hubs(kinds), memory, is_reused)
        return ready.finish(memory)

    def _shell(self, sampled: Sampled) -> BaseData:
        shell = copy.copy(self.columns.shell)
        stores = shell.stores
        for kind in self.columns.kinds:
            store = stores[kind.store]
            ends = (sampled.nodes[kind.at] if kind.are_nodes else sampled.edges[kind.at]).ends
            if kind.are_nodes and "num_nodes" in store:
                store.num_nodes = ends[-1]
            name = "num_sampled_nodes" if kind.are_nodes else "num_sampled_edges"
            store[name] = steps(ends)
        if self.columns.are_nodes:
            stores[self.columns.seed_store][SEEDS] = sampled.seeds
        for (name, key), value in sampled.labels.items():
            (shell if name is None else shell[name])[key] = value
        return shell

    def _attributes(self, sampled: Sampled, counts: Sequence[int]) -> tuple[Attribute, ...]:
        found = []
        for store, keys in enumerate(self._keys):
            for key, kind in keys.items():
                ends = self.columns.kinds[kind].ends if key == EDGE_INDEX else None
                if ends is None:
                    found.append(Attribute(store, key, kind, (None,), (None,)))
                else:
                    edges = sampled.edges[self.columns.kinds[kind].at]
                    found.append(Attribute(store, key, kind, ends, _highest(edges, counts[kind])))
        for key in (INPUT_ID, TIME):
            if self._of_seeds(key) in self.rooms:
                found.append(Attribute(self.columns.seed_store, key, None, (None,), (None,)))
        return tuple(found)

    def _hubs(self, kinds: RowTypes) -> dict[str, LayoutHubs]:
        """Returns the layouts without a hub. The kernels find the hubs of other layouts."""
        found: dict[str, LayoutHubs] = {}
        counts, sizes = kinds.counts, self.sizes
        names = [
            (f"{kind.store} {{}} by col", at, kind.ends[1], kind.most_neighbors)
            for at, kind in enumerate(self.columns.kinds)
            if kind.ends is not None
        ]
        for at, (nodes, edges, _) in enumerate(self._prefixes):
            names.append((f"0 front {at} {{}} by col", edges, nodes, names[0][3]))
        for name, edges, nodes, most in names:
            longest = -(-(sizes[edges] - counts[edges]) // max(sizes[nodes] - counts[nodes], 1))
            limit = csr.most_edges(sizes[edges])
            if most is not None and sizes[edges] > tuning.TILES.hub_edges and max(most, longest) < limit:
                found[name] = LayoutHubs(csr.NO_HUBS, True, limit)
        return found


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns numbers on a device, int64. They are copied once."""
    return torch.tensor(numbers, device=device)


def _highest(found: FoundEdges, number: int) -> tuple[int, int]:
    """Returns one more than the last source, and one more than the last destination."""
    source, destination = found.highest
    # No hop found a node, so the graph around the seeds is small. The host waits for the device.
    return int(found.row[:number].max()) + 1 if source is None else source, destination
