"""Mini-batches of a PyG loader that are sampled on a device, from a graph that is there.

For a padded mini-batch the host launches two CUDA graphs: one samples the next mini-batch, the other gathers, pads and
lays out this one. A mini-batch has its memory to itself as long as any of its tensors is in use. Then the memory is
used again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.loader import LinkLoader, NodeLoader

from gnncompile import _compat
from gnncompile.batches.buckets import MOST_KINDS, Buckets
from gnncompile.batches.device_batch import Columns, DeviceBatch, kinds_of
from gnncompile.batches.placing import Placing
from gnncompile.batches.row_types import RowTypes
from gnncompile.cudagraphs import cuda_graph
from gnncompile.device import device_of
from gnncompile.exc import UnsupportedSampling
from gnncompile.layout.streams import Readers
from gnncompile.sampling.ahead import AHEAD, SamplesAhead, Sampling, sampling
from gnncompile.sampling.arguments import UNKNOWN
from gnncompile.sampling.device_graph import DeviceGraph, HeteroDeviceGraph, moved, moved_types, sampler_of
from gnncompile.sampling.features import FeatureReport
from gnncompile.sampling.pyg import NeighborSampler
from gnncompile.sampling.reads import expected_reads, expected_reads_hetero
from gnncompile.sampling.rows_ahead import Hosted
from gnncompile.sampling.sampled import Sampled
from gnncompile.sampling.seeds import SeedsOf

logger = logging.getLogger(__name__)

MOST_MEMORIES = 3
"""The most memories of one size that are kept. A loop alternates between two of them."""

MOST_FULL = 0.9
"""A graph is moved to a device only if it fills at most this fraction of the free memory."""


class DeviceLoader:
    """Yields the mini-batches of a loader of nodes or links, sampled on a device.

    Args:
        source: The loader, for which :func:`gnncompile.sampling.device_graph.unsupported` returns None.
        device: Where the graph is moved to, and mini-batches are made.
        buckets: The sizes that mini-batches are padded to; None without padding.
        place: Where attributes lie: see :func:`gnncompile.loader`.
        cache: The bytes of the cache of attributes of nodes on the host.

    Raises:
        MemoryError: The host has not enough memory that can be pinned.
        UnsupportedSampling: The graph does not fit into the memory of the device.
        ValueError: Times, weights and other settings of the loader exclude each other.
    """

    def __init__(
        self,
        source: NodeLoader | LinkLoader,
        device: torch.device,
        buckets: Buckets | None,
        place: str | Mapping[str, str] = "device",
        cache: int = 0,
    ) -> None:
        sampler = sampler_of(source)
        own = sampler if isinstance(sampler, NeighborSampler) else NeighborSampler.like(sampler)
        how = Placing(place, cache)
        _check_room(source.data, own, device, how)
        self._source, self._buckets = source, buckets
        self._seeds = SeedsOf(source)
        try:
            self._graph: DeviceGraph | HeteroDeviceGraph = (
                moved_types(own, device) if isinstance(source.data, HeteroData) else moved(own, device)
            )
            if cache:
                how = Placing(place, cache, self._expected_reads(self._graph))
            self._columns = Columns.of(source.data, self._seeds, self._graph, how)
        except torch.OutOfMemoryError as error:
            raise UnsupportedSampling(f"the graph does not fit into the memory of {device}") from error
        if device_of(device).has_streams:
            torch.cuda.current_stream(device).synchronize()  # epochs may run on other streams
        self._readers = Readers([*self._graph.tensors(), *self._columns.held()])
        self._lock = threading.Lock()  # iterators in several threads share what follows
        self._idle: list[Sampling] = []
        self._is_told = False
        self._memories: dict[Any, _Memories] = {}

    def report(self) -> FeatureReport:
        """Returns where the attributes lie, and how many rows came from the cache. Waits for the device.

        In a graph with several node types, the name of an attribute is followed by its type: "x of paper".
        """
        found = []
        for at, features in self._columns.features.items():
            _, _, of = self._columns.kinds[at].name.partition(" ")
            found += [replace(one, name=f"{one.name} of {of}") if of else one for one in features.report()]
        return FeatureReport(found)

    def _expected_reads(self, graph: DeviceGraph | HeteroDeviceGraph) -> dict[int, Tensor]:
        """Returns how often a mini-batch reads each node, by the position of its node type in the sampler."""
        seeds = self._seeds.every()
        most = self._seeds.most or {name: nodes.numel() for name, nodes in seeds.items()}
        sizes = {name: max(number, 1) for name, number in most.items()}
        if isinstance(graph, DeviceGraph):
            one = expected_reads(graph.colptr, graph.row, graph.fan_outs, batch_size=sizes[None], seeds=seeds[None])
            return {0: one}
        by_type = dict(zip(graph.edge_types, graph.relations, strict=True))
        known = zip(graph.node_types, graph.num_nodes, strict=True)
        found = expected_reads_hetero(
            {kind: one.graph.colptr for kind, one in by_type.items()},
            {kind: one.graph.row for kind, one in by_type.items()},
            {kind: one.fan_outs for kind, one in by_type.items()},
            graph.edge_types,
            graph.node_types,
            batch_size_dict={str(name): number for name, number in sizes.items()},
            seed_dict={str(name): nodes for name, nodes in seeds.items()},
            num_nodes_dict={name: number for name, number in known if number != UNKNOWN},
        )
        return {at: found[name] for at, name in enumerate(graph.node_types)}

    def __iter__(self) -> Iterator[BaseData]:
        """Yields the mini-batches of an epoch."""
        source, transform = self._source, self._source.transform
        # Iterators at the same time sample in memory of their own.
        with _ordinary():
            samples = self._idle_or_new()
        ahead = AHEAD if isinstance(samples, SamplesAhead) else 0
        seeds = iter(source.batch_sampler)
        try:
            left = True
            while left or len(samples):
                while left and len(samples) <= ahead:
                    left = self._begin(samples, seeds)
                if len(samples):
                    with _ordinary():
                        made = self._take(samples)
                    yield made if transform is None else transform(made)
                    del made
        finally:
            samples.drop()
            self._idle.append(samples)

    def _idle_or_new(self) -> Sampling:
        with self._lock:
            return self._idle.pop() if self._idle else self._sampling()

    def _sampling(self) -> Sampling:
        hosted = []
        for at, one in self._columns.features.items():
            kind = self._columns.kinds[at]
            names = [name for name, place in one.places.items() if place == "host"]
            hosted += [Hosted((kind.are_nodes, kind.at, name), one) for name in names]
        return sampling(self._graph, self._seeds.most, self._seeds.time is not None, hosted)

    def _begin(self, samples: Sampling, seeds: Iterator[list[int]]) -> bool:
        """Starts to sample the next mini-batch. Returns False after the last one."""
        index = next(seeds, None)
        if index is None:
            return False
        with _ordinary():
            samples.begin(self._seeds(index), int(torch.randint(2**63 - 1, ())))
        return True

    def _take(self, samples: Sampling) -> BaseData:
        device = self._graph.device
        if device_of(device).has_streams:
            self._readers.add(torch.cuda.current_stream(device))
        sampled = samples.take()
        kinds = kinds_of(self._columns, sampled, self._buckets is not None)
        sizes = None if self._buckets is None else self._buckets.choose(kinds)
        if self._buckets is not None and sizes is None:
            self._tell_unpadded(kinds)
        if sizes is None:
            kinds = kinds_of(self._columns, sampled, False)
            batch, is_kept = DeviceBatch(self._columns, kinds, kinds.counts, sampled.seeds, sampled), False
            memory = torch.empty(batch.length, dtype=torch.uint8, device=sampled.state.device)
            batch.fill(memory, sampled)
        else:
            memories = self._memories_of(sizes, kinds, sampled)
            batch, (memory, is_kept) = memories.batch, memories.fill(sampled)
        samples.release(sampled)
        return batch.finish(memory, sampled, kinds, sizes is not None, is_kept)

    def _tell_unpadded(self, kinds: RowTypes) -> None:
        """Logs once that a mini-batch of several node types was not padded."""
        if self._is_told or not isinstance(self._graph, HeteroDeviceGraph):
            return
        self._is_told = True
        logger.warning(
            "a mini-batch was not padded, and the step over it is not recorded: it has %d node types and edge types, "
            "expected at most %d; leave some out",
            len(kinds.names),
            MOST_KINDS,
        )

    def _memories_of(self, sizes: tuple[int, ...], kinds: RowTypes, sampled: Sampled) -> _Memories:
        """Returns the memories of a padded size. Forgets the sizes that buckets had before they grew."""
        assert self._buckets is not None
        most = self._seeds.most
        key = kinds.names, sizes, sampled.seeds if most is None else sum(most.values())
        with self._lock:
            if key not in self._memories:
                known = self._buckets.sizes()
                self._memories = {other: kept for other, kept in self._memories.items() if other[1] in known}
                self._memories[key] = _Memories(DeviceBatch(self._columns, kinds, sizes, key[2], sampled))
            return self._memories[key]


@contextmanager
def _ordinary() -> Iterator[None]:
    """A context manager: tensors made inside are ordinary ones, which later calls may write to.

    The caller may be in inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Memories:
    """The memories of the mini-batches of one size. A memory is used again after all tensors in it are gone."""

    def __init__(self, batch: DeviceBatch) -> None:
        self.batch = batch
        self._kept: list[_Memory] = []
        self._lock = threading.Lock()  # iterators in several threads share the memories

    def fill(self, sampled: Sampled) -> tuple[Tensor, bool]:
        """Returns a memory with the mini-batch in it, and whether an earlier mini-batch was there."""
        with self._lock:
            found = next((memory for memory in self._kept if memory.is_free), None)
            is_used_again = found is not None
            if found is None:
                found = _Memory(self.batch, sampled.state.device)
                self._kept.append(found)
                del self._kept[:-MOST_MEMORIES]  # one that somebody holds for long gives way
            return found.fill(sampled), is_used_again


class _Memory:
    """The memory of a mini-batch, with the CUDA graphs that fill it.

    The memory is used again as soon as the host holds no tensor in it. The stream that fills it waits for the stream
    that filled it before, where the mini-batch was read. Work on a third stream has to end before the last tensor is
    dropped, or the second stream has to wait for it: ``record_stream`` of these tensors has no effect.
    """

    def __init__(self, batch: DeviceBatch, device: torch.device) -> None:
        self._batch = batch
        self._memory = torch.empty(batch.length, dtype=torch.uint8, device=device)
        self._readers = Readers([self._memory])
        self._users = _compat.storage_users(self._memory)
        self._filled: dict[int, Callable[[], None] | None] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_free(self) -> bool:
        """Whether no tensor in the memory is in use."""
        return _compat.storage_users(self._memory) <= self._users

    def fill(self, sampled: Sampled) -> Tensor:
        """Writes a mini-batch to the memory. Returns the memory, under a storage of its own.

        Caches know graph structure by the storage of a tensor, so each mini-batch needs another storage.
        """
        if device_of(self._memory.device).has_streams:
            stream = torch.cuda.current_stream(self._memory.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)  # the mini-batch before may have been read there
            self._stream = stream
            self._readers.add(stream)
        self._write(sampled)
        return _compat.same_memory(self._memory)

    def _write(self, sampled: Sampled) -> None:
        """Writes a mini-batch, by a CUDA graph if an earlier one was sampled to the same memory."""
        is_fixed = sampled.place is not None and sampled.groups is None
        if not is_fixed or not device_of(self._memory.device).can_be_recorded:
            self._batch.fill(self._memory, sampled)
            return
        source = sampled.state.data_ptr()
        if source not in self._filled:
            self._batch.fill(self._memory, sampled)  # compiles kernels
            self._filled[source] = None
            return
        replay = self._filled[source]
        if replay is None:
            record = cuda_graph.recorder(self._memory.device)
            replay, _ = record(lambda: self._batch.fill(self._memory, sampled))
            self._filled[source] = replay
        replay()


def _check_room(data: Data | HeteroData, sampler: NeighborSampler, device: torch.device, how: Placing) -> None:
    """Raises UnsupportedSampling if a graph does not fit into the free memory of a GPU."""
    if not device_of(device).has_streams:
        return
    parts: list[Any] = [sampler._node_time, sampler._edge_time, sampler._weight, sampler.edge_permutation]
    if isinstance(data, HeteroData):
        parts += [sampler.colptr_dict, sampler.row_dict]
    else:
        parts += [sampler.colptr, sampler.row]
    tensors = [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]
    for store in data.stores:
        for key, value in store.items():
            if isinstance(value, Tensor) and value.device != device and not how.is_on_host(key):
                tensors.append(value)
    needed = how.cache + sum(value.nbytes for value in tensors)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > MOST_FULL * free:
        raise UnsupportedSampling(
            f'the graph needs {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB free; features="host" '
            "leaves attributes on the host"
        )
