"""Prepares a mini-batch: sorts its edges, builds CSR layouts, pads it to its bucket, and packs it into one memory.

Mini-batches are prepared where they are: on the CPU, or on the GPU if another engine has sampled them there.

Padded nodes repeat the features of the first nodes, so no operation sees values that are not in the mini-batch.
Positions, and one node or none, are repeated in smaller numbers (:mod:`gnncompile.batches.padding_rows`). Padded edges
join padded nodes in rings. Padded graphs share the padded nodes evenly, so no padded graph is empty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric.data import Batch
from torch_geometric.data.data import BaseData

from gnncompile import tuning
from gnncompile.batches.buckets import Buckets
from gnncompile.batches.edge_layouts import highest, is_sorted, order_of, pointers, sort
from gnncompile.batches.hops import HopPrefix, hop_prefixes
from gnncompile.batches.memory import Memory, Place
from gnncompile.batches.padding_edges import Ring, evenly, shared
from gnncompile.batches.padding_rows import is_position, padding_rows
from gnncompile.batches.row_types import (
    BATCH,
    EDGE_INDEX,
    SEEDS,
    Levels,
    RowTypes,
    is_shared,
    kept_by_batch,
    row_types_of,
    tensors,
    unprepared_edges,
)
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError
from gnncompile.layout import batch_metadata, csr
from gnncompile.layout.batch_metadata import BatchMetadata, Bucketed, Layout, attach, count

COUNTS = "counts"
"""The name in the memory of the number of valid rows of each row type."""

OF_SEEDS = ("y", "input_id", "seed_time")
"""Attributes that may have a row for each seed, besides those with "label" or "target" in their name."""

MANY_EDGES = 2**16
"""With more edges than this, a worker process computes only the row pointers by destination. The device then computes
the rest, the layout by source included, in far less time than a step takes; a worker process would take longer.
"""


class Attribute(NamedTuple):
    """A tensor of a mini-batch: its store and key, and the fields of
    :class:`gnncompile.layout.batch_metadata.BatchMetadata`.
    """

    store: int
    key: str
    rows: int | None
    values: tuple[int | None, ...]
    highest: tuple[int | None, ...]
    is_shared: bool = False

    @property
    def name(self) -> str:
        """The tensor's name in the memory."""
        return f"{self.store} {self.key}"


class LayoutHubs(NamedTuple):
    """The hubs of a layout.

    Attributes:
        number: The number of hubs, and the number of pieces that they are split into.
        only_true: Whether every hub is a valid row, not a padded one.
        most_edges: See :class:`gnncompile.layout.csr.Hubs`.
    """

    number: tuple[int, int]
    only_true: bool
    most_edges: int


@dataclass(frozen=True)
class Prepared:
    """A prepared mini-batch.

    Attributes:
        shell: The mini-batch object without its tensors.
        kinds: Its row types.
        sizes: The padded size of each row type; None without padding.
        attributes: Its tensors.
        places: The places of tensors and layouts in the memory, by name.
        hubs: The hubs of each layout that has any, by the layout's name.
        memory: All tensors and layouts, uint8 ``[bytes]``.
        is_reused: Whether other mini-batches will be in the same memory.
    """

    shell: BaseData
    kinds: RowTypes
    sizes: tuple[int, ...] | None
    attributes: tuple[Attribute, ...]
    places: dict[str, Place]
    hubs: dict[str, LayoutHubs]
    memory: Tensor
    is_reused: bool = False

    def pin_memory(self) -> Prepared:
        """Returns the mini-batch in pinned memory. A loader calls this if its mini-batches stay on the CPU."""
        return replace(self, memory=self.memory.pin_memory())

    def unprepared_edges(self) -> list[tuple[str, Any]]:
        """Returns the names and values of edges that no layout was built for, since they are no ``edge_index``."""
        found = ((store, unprepared_edges(store)) for store in self.shell.stores)
        return [(key, store[key]) for store, key in found if key is not None]

    def finish(self, memory: Tensor) -> BaseData:
        """Builds the mini-batch from a copy of the memory, which may be on another device."""
        batch = None
        if self.sizes is not None:
            on_device = self.places[COUNTS].on(memory, True)
            address = on_device.data_ptr() if self.is_reused else None
            batch = Bucketed(self.kinds.names, self.kinds.counts, self.sizes, on_device, self.kinds.things, address)
        data = copy.copy(self.shell)
        for attribute in self.attributes:
            value = self.places[attribute.name].on(memory, padded=False)
            attach(value, self._attached(attribute, memory, batch))
            data.stores[attribute.store][attribute.key] = value
        _change_slices(data, np.ndarray, torch.from_numpy)
        if batch is not None and isinstance(data, Batch) and self.kinds.graphs is not None:
            data._num_graphs = count(batch, self.kinds.graphs)
        if batch is not None and self.kinds.hop_prefixes:
            data[SEEDS] = count(batch, self.kinds.hop_prefix(0)[0])
        return data

    def _attached(self, attribute: Attribute, memory: Tensor, batch: Bucketed | None) -> BatchMetadata:
        _, _, rows, values, highest, is_shared = attribute
        if is_shared:
            return BatchMetadata(is_shared=True)
        place, make_layout, make_hop_prefixes = self.places[attribute.name], None, None
        if attribute.key == EDGE_INDEX and f"{attribute.store} rowptr by col" in self.places:
            make_layout = partial(self._edge_layout, attribute, memory)
            make_hop_prefixes = partial(self._hop_prefixes, attribute.store, memory)
        elif f"{attribute.name} rowptr" in self.places:
            make_layout = partial(self._index_layout, attribute, memory)
        whole = partial(place.on, memory, True) if batch is not None and rows is not None else None
        return BatchMetadata(batch, rows, values, highest, whole, make_layout, make_hop_prefixes)

    def _edge_layout(self, attribute: Attribute, memory: Tensor, padded: bool) -> Layout:
        start, dtype, whole, true = self.places[attribute.name]
        ends = [Place(start + k * whole[1] * dtype.itemsize, dtype, whole[1:], true[1:]) for k in range(2)]
        by_col, by_row = (f"{attribute.store} {{}} by {end}" for end in ("col", "row"))
        both = by_row.format("rowptr") in self.places
        return Layout(
            ends[0].on(memory, padded),
            ends[1].on(memory, padded),
            self._by(by_col, memory, padded, ends[0]),
            self._by(by_row, memory, padded) if both else None,
        )

    def _hop_prefixes(self, store: int, memory: Tensor) -> tuple[batch_metadata.HopPrefix, ...]:
        found = []
        for at in range(len(self.kinds.hop_prefixes)):
            by_col, by_row = (f"{store} front {at} {{}} by {end}" for end in ("col", "row"))
            rowptr, row, col = self._by(by_col, memory, True)
            other = self._by(by_row, memory, True) if by_row.format("rowptr") in self.places else None
            found.append(batch_metadata.HopPrefix(self.kinds.hop_prefix(at), row, col, rowptr, other))
        return tuple(found)

    def _index_layout(self, attribute: Attribute, memory: Tensor, padded: bool) -> Layout:
        index, by = self.places[attribute.name], self._by(f"{attribute.name} {{}}", memory, padded)
        return Layout(index.on(memory, padded), index.on(memory, padded), by, by)

    def _by(
        self, name: str, memory: Tensor, padded: bool, sources: Place | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        def part(what: str) -> Tensor:
            return self.places[name.format(what)].on(memory, padded)

        rowptr = part("rowptr")
        if name.format("edge") in self.places:
            edge = part("edge")
            # No kernel gathers rows of graphs, so `col` is not read. Passing `edge` itself twice would add a guard.
            col = part("col" if name.format("col") in self.places else "edge")
        else:
            assert sources is not None
            col = sources.on(memory, padded).to(torch.int32)
            edge = torch.arange(col.numel(), dtype=torch.int32, device=memory.device)
        hubs = self.hubs.get(name)
        if hubs is not None and hubs.number == csr.NO_HUBS:
            csr.give_hubs(rowptr, edge.new_empty(0, 3), edge.new_empty(0), hubs.number, hubs.most_edges)
        elif hubs is not None and (padded or hubs.only_true):
            csr.give_hubs(rowptr, part("hub rows"), part("hub pieces"), hubs.number, hubs.most_edges)
        return rowptr, col, edge


NO_LEVELS: Levels = MappingProxyType({})
"""The levels of a mini-batch whose graph is not known."""


def prepare(data: BaseData, buckets: Buckets | None, levels: Levels = NO_LEVELS) -> Prepared:
    """Prepares a mini-batch, whose tensors are on one device. The mini-batch itself is not changed."""
    return _Preparation(data, buckets, levels).run()


def prepared_on(data: BaseData, device: torch.device | str | None, buckets: Buckets | None) -> BaseData:
    """Returns a prepared copy of a graph or mini-batch on `device`; None keeps the device of `data`."""
    found = [t for store in data.stores for t in tensors(store).values()]
    if device is None:
        device = found[0].device if found else "cpu"
    if any(device_of(t.device).host_waits for t in found):
        data = copy.copy(data).cpu()
    ready = prepare(data, buckets)
    return ready.finish(ready.memory.to(device))


class _Preparation:
    def __init__(self, data: BaseData, buckets: Buckets | None, levels: Levels) -> None:
        self.data, self.levels = copy.copy(data), levels
        _make_seeds_a_number(self.data)
        self.device = next((t.device for store in data.stores for t in tensors(store).values()), torch.device("cpu"))
        self.kinds = row_types_of(self.data, levels)
        self.ends_highest = [highest(store[EDGE_INDEX], 2) if EDGE_INDEX in store else () for store in self.data.stores]
        self.is_sorted = [self._sort(at) for at in range(len(self.data.stores))]
        self.bucket = None
        if buckets is not None:
            self.kinds = self._with_rows_of_seeds(self.kinds.with_hop_prefixes(self._find_hop_prefixes()))
            self.bucket = buckets.choose(self.kinds)
        self.counts, self.sizes = self.kinds.counts, self.bucket or self.kinds.counts
        self.memory = Memory(self.device)
        self.attributes: list[Attribute] = []
        self.hubs: dict[str, LayoutHubs] = {}

    def run(self) -> Prepared:
        """See :func:`prepare`."""
        self.memory.add(COUNTS, [torch.tensor(self.counts)])
        for at, store in enumerate(self.data.stores):
            ends = self.kinds.ends[at]
            for key, value in tensors(store).items():
                self._add(at, key, value.detach(), ends)
                store[key] = None
                if self.is_sorted[at] and ends is not None and key == EDGE_INDEX:
                    self._lay_out(at, value, ends)
        _change_slices(self.data, Tensor, lambda value: value.numpy(force=True))
        memory, attributes = self.memory.bytes(), tuple(self.attributes)
        return Prepared(self.data, self.kinds, self.bucket, attributes, self.memory.places, self.hubs, memory)

    def _sort(self, at: int) -> bool:
        """Sorts the edges of a store; False where it has none."""
        ends = self.kinds.ends[at]
        rows, counts = self.kinds.rows[at], self.kinds.counts
        if ends is None:
            return False
        return sort(self.data.stores[at], rows, self.ends_highest[at], (counts[ends[0]], counts[ends[1]]))

    def _find_hop_prefixes(self) -> tuple[HopPrefix, ...]:
        """Returns the hop prefixes around the seeds of a sampled mini-batch; none without seeds."""
        seeds, ends = self.data.stores[0].get(SEEDS), self.kinds.ends[0]
        if self.is_sorted != [True] or isinstance(self.data, Batch) or type(seeds) is not int or ends is None:
            return ()
        return hop_prefixes(self.data.stores[0][EDGE_INDEX], seeds, self.kinds.counts[ends[0]])

    def _with_rows_of_seeds(self, kinds: RowTypes) -> RowTypes:
        """Adds the row types of attributes that have a row for each seed, such as the labels of GraphBolt.

        A size alone does not tell: weights of classes may be as many as the seeds. So the name has to be one of seeds.
        """
        if not kinds.hop_prefixes:
            return kinds
        nodes, seeds = kinds.hop_prefix(0)[0], kinds.hop_prefixes[0].nodes
        store, rows = self.data.stores[0], dict(kinds.rows[0])
        for key, value in tensors(store).items():
            is_listed = self.data.__cat_dim__(key, value, store) == 0
            is_shape = isinstance(self.levels.get((None, key)), tuple)  # the graph has it, and not by node or edge
            if is_listed and not is_shape and _is_of_seeds(key) and key not in rows and value.shape[:1] == (seeds,):
                rows[key] = nodes
        return replace(kinds, rows=(rows,))

    def _add(self, store: int, key: str, value: Tensor, ends: tuple[int, int] | None) -> None:
        rows, is_edges = self.kinds.rows[store].get(key), key == EDGE_INDEX and ends is not None
        numbers_graphs = key == BATCH or key.endswith(f"_{BATCH}")
        values = ends if is_edges and ends is not None else (self.kinds.graphs if numbers_graphs else None,)
        found = self.ends_highest[store] if is_edges else highest(value, 1) if rows is not None else (None,)
        attribute = Attribute(
            store, key, rows, values, found, is_shared(self.levels, self.data.stores[store], key, value)
        )
        self.attributes.append(attribute)
        padding = self._padding(value, attribute)
        self.memory.add(attribute.name, [value, *padding], dim=1 if is_edges else 0)
        if numbers_graphs and values[0] is not None and rows is not None:
            self._lay_out_index(attribute.name, value, found[0], rows, values[0])

    def _padding(self, value: Tensor, attribute: Attribute) -> list[Tensor]:
        """Returns the padding of a tensor as a list of tensors to append."""
        rows, values = attribute.rows, attribute.values
        if self.bucket is None or rows is None:
            return []
        number = self.sizes[rows] - self.counts[rows]
        if len(values) == 2:
            ring = self._ring(number, values)  # type: ignore[arg-type]
            return [torch.stack([ring.row, ring.col])]
        if values[0] is not None:
            return [shared(number, self.counts[values[0]], self.sizes[values[0]]).to(value.dtype)]
        return padding_rows(value, number, is_position(attribute.key))

    def _ring(self, number: int, ends: tuple[int, int]) -> Ring:
        sources, destinations = ((self.counts[end], self.sizes[end]) for end in ends)
        return Ring(number, sources, destinations)

    def _lay_out(self, store: int, edges: Tensor, ends: tuple[int, int]) -> None:
        """Builds the layouts of the edges by destination and by source; padding comes last.

        Padded hop prefixes get layouts too. These hold the destination of an edge in place of its position.
        """
        name, true, kind = f"{store}", edges.size(1), self.kinds.rows[store][EDGE_INDEX]
        rowptr = pointers(edges[1], self.counts[ends[1]])
        more = self._ring(self.sizes[kind] - true, ends)
        if true <= MANY_EDGES:
            self._add_layout(name, edges[0], more, self._places(true, self.sizes[kind]))
            self._lay_out_by_source(name, edges, more, ends)
        self._add_rowptr(f"{name} {{}} by col", rowptr, more.rowptr)
        for at, hop_prefix in enumerate(self.kinds.hop_prefixes if self.bucket is not None else ()):
            name, (nodes, kind, sources) = f"{store} front {at}", self.kinds.hop_prefix(at)
            first, pointed = edges[:, : hop_prefix.edges], rowptr[: hop_prefix.nodes + 1]
            more = self._ring(self.sizes[kind] - hop_prefix.edges, (sources, nodes))
            self._add_layout(name, first[0], more, (first[1], more.col))
            self._add_rowptr(f"{name} {{}} by col", pointed, more.rowptr)
            if hop_prefix.edges <= MANY_EDGES:
                self._lay_out_by_source(name, first, more, (sources, nodes))

    def _add_layout(self, name: str, row: Tensor, more: Ring, edge: Sequence[Tensor]) -> None:
        self.memory.add(f"{name} col by col", (row, more.row), torch.int32)
        self.memory.add(f"{name} edge by col", edge, torch.int32)

    def _lay_out_by_source(self, name: str, edges: Tensor, more: Ring, ends: tuple[int, int]) -> None:
        row, col = edges
        order, (after, rowptr) = order_of(row), more.by_source()
        by_row = f"{name} {{}} by row"
        self.memory.add(by_row.format("col"), (col[order], more.col[after]), torch.int32)
        self.memory.add(by_row.format("edge"), (order, after + row.numel()), torch.int32)
        self._add_rowptr(by_row, pointers(row, self.counts[ends[0]]), rowptr)

    def _lay_out_index(self, name: str, index: Tensor, highest: int | None, rows: int, end: int) -> None:
        """Builds the layout of a sorted index, such as ``batch``, the graph of each node."""
        if highest is None or highest > self.counts[end] or not is_sorted(index):
            return
        true, whole = self.counts[rows], self.sizes[rows]
        self.memory.add(f"{name} edge", self._places(true, whole))
        padding = torch.from_numpy(evenly(whole - true, self.sizes[end] - self.counts[end]))
        self._add_rowptr(f"{name} {{}}", pointers(index, self.counts[end]), padding)

    def _places(self, true: int, whole: int) -> list[Tensor]:
        """Returns the positions of the valid rows, then the positions of the padding, both int32."""
        return list(torch.arange(whole, dtype=torch.int32, device=self.device).split([true, whole - true]))

    def _add_rowptr(self, name: str, true: Tensor, padding: Tensor) -> None:
        """Adds the row pointers of a layout, valid rows before padded rows, and the list of hubs."""
        more = padding[1:].to(true) + true[-1]
        self.memory.add(name.format("rowptr"), [true, more])
        rowptr = torch.cat([true, more])
        num_edges = int(rowptr[-1])
        if num_edges <= tuning.TILES.hub_edges:
            return
        longest, most_edges = int(rowptr.diff().max()), csr.most_edges(num_edges)
        if longest < most_edges:
            self.hubs[name] = LayoutHubs(csr.NO_HUBS, True, most_edges)
        if longest <= most_edges:
            return
        found = csr.hubs(rowptr.cpu(), num_edges)
        assert found is not None and found.number is not None
        only_true = more.numel() == 0 or int(padding.diff().max()) <= most_edges
        self.hubs[name] = LayoutHubs(found.number, only_true, most_edges)
        self.memory.add(name.format("hub rows"), [found.rows])
        self.memory.add(name.format("hub pieces"), [found.pieces])


def _is_of_seeds(key: str) -> bool:
    return key in OF_SEEDS or "label" in key or "target" in key


def _make_seeds_a_number(data: BaseData) -> None:
    """Replaces a ``batch_size`` that is a tensor of one number by the number."""
    for store in data.stores:
        seeds = store.get(SEEDS)
        if isinstance(seeds, Tensor) and seeds.numel() == 1 and not seeds.is_floating_point():
            store[SEEDS] = int(seeds)


def _change_slices(data: BaseData, kind: type, change: Callable[[Any], Any]) -> None:
    """Applies `change` to the slices and increments that a ``Batch`` keeps, wherever they are of type `kind`.

    They travel as NumPy arrays, because each tensor would cost a file of shared memory between processes.
    """
    for name in ("_slice_dict", "_inc_dict"):
        kept = kept_by_batch(data, name)
        if kept is not None:
            setattr(data, name, tree_map_only(kind, change, kept))


class Prepare:
    """A collate function that prepares the mini-batches of another one, in the process that calls it."""

    def __init__(self, collate: Callable[[Any], Any], buckets: Buckets | None, levels: Levels = NO_LEVELS) -> None:
        self.collate, self.buckets, self.levels = collate, buckets, dict(levels)

    def __call__(self, items: Any) -> Any:
        """Collates and prepares."""
        return prepare_all(self.collate(items), self.buckets, levels=self.levels)


def prepare_all(
    value: Any, buckets: Buckets | None, device: torch.device | None = None, levels: Levels = NO_LEVELS
) -> Any:
    """Prepares every mini-batch in nested lists and tuples; every other value is returned unchanged.

    Args:
        value: Mini-batches of PyG, or objects with a method ``to_pyg_data`` as those of GraphBolt.
        buckets: The sizes that mini-batches are padded to; None without padding.
        device: Where mini-batches go. Those with tensors on a GPU are moved there and prepared there. None leaves them
            unprepared: worker processes prepare nothing on a GPU.
        levels: What the attributes of the mini-batches' graph are, as far as it is known.

    Raises:
        ValueError: A mini-batch is on a GPU, and `device` is the CPU.
    """
    if not isinstance(value, BaseData) and callable(getattr(value, "to_pyg_data", None)):
        value = value.to_pyg_data()
    if isinstance(value, BaseData) and hasattr(value, "stores"):
        places = {t.device for store in value.stores for t in tensors(store).values()}
        on_gpu = next((place for place in places if device_of(place).host_waits), None)
        if on_gpu is None:
            return prepare(value, buckets, levels)
        return value if device is None else _prepare_on(device, value, on_gpu, buckets, levels)
    if type(value) in (list, tuple):
        return type(value)(prepare_all(v, buckets, device, levels) for v in value)
    return value


def _prepare_on(
    device: torch.device, data: BaseData, place: torch.device, buckets: Buckets | None, levels: Levels
) -> Prepared:
    """Prepares a mini-batch on a GPU, where another engine may have sampled it on a stream of its own."""
    if not device_of(device).host_waits:
        raise ArgumentError(
            f"device: found {device} for mini-batches that {place} holds; pass device={str(place)!r}, so that they "
            "stay there, or move them in the source."
        )
    if not device_of(device).has_streams:
        return prepare(copy.copy(data).to(device), buckets, levels)
    stream = torch.cuda.current_stream(device)
    stream.wait_stream(torch.cuda.default_stream(place))
    made = prepare(copy.copy(data).to(device), buckets, levels)
    # The engine may give the tensors of the mini-batch other contents as soon as nobody holds them.
    stream.synchronize()
    return made
