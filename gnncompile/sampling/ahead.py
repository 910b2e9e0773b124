"""Samples mini-batches on a device one mini-batch ahead, so that the host need not wait for their sizes.

The kernels that sample mini-batch k + 1 are launched before the training step of mini-batch k, on another stream. The
sizes are copied to the host in the background. When the host asks for them, they are there, or the device still has
the training step of mini-batch k to work on. Rows of attributes on the host are gathered on that stream as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnncompile.cudagraphs import cuda_graph
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError
from gnncompile.layout import streams
from gnncompile.sampling.bounded import BoundedNeighborhood, BoundedSampler, bounds
from gnncompile.sampling.device import sample_neighbors
from gnncompile.sampling.device_csc import checked
from gnncompile.sampling.device_graph import DeviceGraph
from gnncompile.sampling.launch import NODES
from gnncompile.sampling.neighborhood import Neighborhood
from gnncompile.sampling.rows_ahead import Hosted, RowsAhead, fitting
from gnncompile.sampling.seeds import Seeds

AHEAD = 1
"""The number of mini-batches that are sampled ahead."""

MOST_EDGES = 2**23
"""Mini-batches that may have more edges than this are not sampled ahead, which takes 64 bytes for each edge."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """A sampled mini-batch, on the device. Tensors may be longer than the valid rows, which come first.

    Attributes:
        node: As in :class:`gnncompile.sampling.neighborhood.Neighborhood`.
        row: The local source of each edge, int64.
        col: The local destination of each edge, int64, ascending.
        edge: The position of each edge in CSC order, int64.
        batch: For disjoint subgraphs, the seed's position for each node, int64; otherwise None.
        ends: The valid nodes up to the seeds and each hop, a 0, then the valid edges up to each hop, int64
            ``[2 * hops + 2]``.
        node_ends: The valid nodes up to the seeds and up to each hop.
        edge_ends: The valid edges up to each hop.
        last: The last destination that has an edge; -1 if there is no edge.
        input_id: As in :class:`gnncompile.sampling.seeds.Seeds`, int64, or None.
        time: As in :class:`gnncompile.sampling.seeds.Seeds`, int64, or None.
        labels: As in :class:`gnncompile.sampling.seeds.Seeds`.
        groups: As in :class:`gnncompile.sampling.seeds.Seeds`.
        place: Which memory the tensors are in, if the sampler uses it again; else None.
        rows: The rows of attributes that were gathered ahead, by name. Valid rows come first.
    """

    node: Tensor
    row: Tensor
    col: Tensor
    edge: Tensor
    batch: Tensor | None
    ends: Tensor
    node_ends: list[int]
    edge_ends: list[int]
    last: int
    input_id: Tensor | None
    time: Tensor | None
    labels: dict[str, Tensor]
    groups: int | None
    place: int | None
    rows: dict[str, Tensor] = field(default_factory=dict)


class SamplesAhead:
    """Samples mini-batches with fixed fan-outs ahead. The host waits only if the device lags a whole step behind.

    Each :meth:`begin` is followed by a :meth:`take`, and at most :data:`AHEAD` further calls of :meth:`begin` come
    before it. On a GPU the kernels are replayed as a CUDA graph.

    Args:
        graph: The graph.
        batch_size: The largest number of seeds.
        has_times: Whether seeds have times.
        hosted: Attributes on the host, whose rows are gathered ahead as well.
    """

    def __init__(self, graph: DeviceGraph, batch_size: int, has_times: bool, hosted: Sequence[Hosted] = ()) -> None:
        self._places = [_Place(graph, batch_size, has_times, hosted) for _ in range(AHEAD + 1)]
        self._begun: deque[int] = deque()
        self._next = 0

    def __len__(self) -> int:
        """The number of mini-batches that have begun and were not taken."""
        return len(self._begun)

    def begin(self, seeds: Seeds, random_seed: int) -> None:
        """Starts to sample around seeds. The same `random_seed`, 0 to 2**63 - 1, gives the same neighbourhood."""
        self._places[self._next].begin(seeds, random_seed)
        self._begun.append(self._next)
        self._next = (self._next + 1) % len(self._places)

    def take(self) -> Sampled:
        """Returns the next mini-batch. The tensors are valid until :meth:`release`.

        Raises:
            IndexError: A seed or a source is outside the graph.
            ValueError: Weights are no weights, or times are not sorted.
        """
        place = self._begun.popleft()
        return self._places[place].take(place)

    def release(self, sampled: Sampled) -> None:
        """Ends the use of a mini-batch, after the work on the current stream that reads it."""
        if sampled.place is not None:
            self._places[sampled.place].release()

    def drop(self) -> None:
        """Forgets all mini-batches that were not taken. Their memory may be freed after that."""
        for place in self._begun:
            self._places[place].follow()
        self._begun.clear()


class _Place:
    """The memory of one mini-batch that is sampled ahead."""

    def __init__(self, graph: DeviceGraph, batch_size: int, has_times: bool, hosted: Sequence[Hosted]) -> None:
        device = graph.colptr.device
        self._sampler = BoundedSampler(graph.colptr, graph.row, graph.fan_outs, batch_size, seed=0, **graph.how)
        self._given = torch.zeros(1 + 3 * batch_size, dtype=torch.int64, device=device)
        pins = device_of(device).has_streams
        self._host = torch.zeros(self._given.shape, dtype=torch.int64, pin_memory=pins)
        self._found = torch.zeros(self._sampler.state.numel() + 1, dtype=torch.int64, pin_memory=pins)
        self._device, self._size, self._has_times = device, batch_size, has_times
        self._has_limits = has_times and graph.is_temporal
        self._stream = streams.copying(device) if pins else None
        self._done = torch.cuda.Event(blocking=True) if pins else None
        self._order = graph.order
        self._rows = RowsAhead(hosted, (self._sampler.max_edges, self._sampler.max_nodes), device) if hosted else None
        self._gathered = torch.cuda.Event() if pins else None
        self._keep(graph, hosted)
        self._read = torch.cuda.Event() if pins else None
        self.release()  # the kernels follow the work that has made the graph and this memory
        self._sample = _Recorded(self._draw, device)
        self._gather = _Recorded(self._gather_rows, device)
        self._made: tuple[BoundedNeighborhood, Tensor] | None = None
        self._seeds: Seeds | None = None

    def begin(self, seeds: Seeds, random_seed: int) -> None:
        if self._done is not None:
            self._done.synchronize()  # an earlier copy may still read the pinned memory, if its result was not taken
        self._seeds = seeds
        number, size, host = seeds.node.numel(), self._size, self._host
        host[0] = random_seed
        host[1 : 1 + number], host[1 + number : 1 + size] = seeds.node, -1
        if seeds.input_id is not None:
            host[1 + size : 1 + size + number] = seeds.input_id
        if seeds.time is not None:
            host[1 + 2 * size : 1 + 2 * size + number] = seeds.time
        with self._on_stream():
            if self._stream is not None and self._read is not None:
                self._stream.wait_event(self._read)
            self._given.copy_(host, non_blocking=True)
            self._run()

    def take(self, place: int) -> Sampled:
        if self._done is not None:
            self._done.synchronize()
        self.follow()
        *state, last = self._found.tolist()
        node_ends, edge_ends = self._sampler.read(state)
        assert self._made is not None and self._seeds is not None
        found, size, seeds = self._made[0], self._size, self._seeds
        row, col = found.edge_index
        input_id, time = self._given[1 + size : 1 + 2 * size], self._given[1 + 2 * size :]
        return Sampled(
            found.node,
            row,
            col,
            found.edge,
            found.batch,
            self._sampler.state[NODES + 1 :],
            node_ends,
            edge_ends,
            last if edge_ends[-1] else -1,
            None if seeds.input_id is None else input_id,
            time if self._has_times else None,
            _on_device(seeds.labels, self._device),
            seeds.groups,
            place,
            {} if self._rows is None else self._rows.rows,
        )

    def follow(self) -> None:
        """Makes the current stream wait for the sampler and for the rows that were gathered ahead."""
        if self._gathered is not None:
            torch.cuda.current_stream(self._device).wait_event(self._gathered)

    def release(self) -> None:
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _keep(self, graph: DeviceGraph, hosted: Sequence[Hosted]) -> None:
        """Keeps the memory that this stream reads until its work is done, even if the loader is dropped meanwhile."""
        if self._stream is None:
            return
        for tensor in (graph.colptr, graph.row, graph.order, *graph.how.values()):
            if isinstance(tensor, Tensor):
                tensor.record_stream(self._stream)
        for one in hosted:
            one.features.record_stream(self._stream)

    def _run(self) -> None:
        """Samples, copies the sizes to the host, and gathers rows, for which the host need not wait."""
        self._made = self._sample()
        self._found[:-1].copy_(self._sampler.state, non_blocking=True)
        self._found[-1:].copy_(self._made[1], non_blocking=True)
        if self._done is not None:
            self._done.record(self._stream)
        if self._rows is not None:
            self._gather()
        if self._gathered is not None:
            self._gathered.record(self._stream)

    def _draw(self) -> tuple[BoundedNeighborhood, Tensor]:
        size, given = self._size, self._given
        self._sampler.seed.copy_(given[:1])
        found = self._sampler(given[1 : 1 + size], given[1 + 2 * size :] if self._has_limits else None)
        return found, found.edge_index[1][(found.edge_ends[-1:] - 1).clamp_(min=0)]

    def _gather_rows(self) -> None:
        assert self._made is not None and self._rows is not None
        found = self._made[0]
        edge = found.edge if self._order is None else self._order[found.edge]
        self._rows.gather(found.node, edge, (found.edge_ends[-1:], found.node_ends[-1:]))


class _Recorded:
    """Work that is done as it is the first time, to compile its kernels, then as a CUDA graph if the device has them.

    The results of a CUDA graph stay in the same memory.
    """

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._work, self._device, self._is_compiled = work, device, False
        self._replay: Callable[[], None] | None = None
        self._result: Any = None

    def __call__(self) -> Any:
        if self._replay is None and self._is_compiled and device_of(self._device).can_be_recorded:
            self._replay, self._result = cuda_graph.recorder(self._device)(self._work)
        if self._replay is not None:
            self._replay()
            return self._result
        self._is_compiled = True
        return self._work()


class SamplesOnDemand:
    """Samples mini-batches when they are taken: with hops of all neighbours, or too large to be sampled ahead.

    The host waits for the sizes of each mini-batch. The methods are those of :class:`SamplesAhead`.
    """

    def __init__(self, graph: DeviceGraph) -> None:
        self._graph = graph
        self._begun: deque[tuple[Seeds, int]] = deque()

    def __len__(self) -> int:
        """See :class:`SamplesAhead`."""
        return len(self._begun)

    def begin(self, seeds: Seeds, random_seed: int) -> None:
        """See :class:`SamplesAhead`."""
        self._begun.append((seeds, random_seed))

    def take(self) -> Sampled:
        """See :class:`SamplesAhead`."""
        graph, (seeds, random_seed) = self._graph, self._begun.popleft()
        device = graph.colptr.device
        node, time = seeds.node.to(device), None if seeds.time is None else seeds.time.to(device, torch.int64)
        limit = time if graph.is_temporal else None
        found = sample_neighbors(
            graph.colptr, graph.row, node, graph.fan_outs, seed_time=limit, seed=random_seed, **graph.how
        )
        return _sampled(found, seeds, time)

    def release(self, sampled: Sampled) -> None:
        """See :class:`SamplesAhead`."""

    def drop(self) -> None:
        """See :class:`SamplesAhead`."""
        self._begun.clear()


def _on_device(labels: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies tensors to a device, without a wait."""
    pins = device_of(device).has_streams
    return {key: (value.pin_memory() if pins else value).to(device, non_blocking=True) for key, value in labels.items()}


def _sampled(found: Neighborhood, seeds: Seeds, time: Tensor | None) -> Sampled:
    assert found.edge is not None and found.num_sampled_edges is not None
    nodes = torch.tensor(found.num_sampled_nodes).cumsum(0).tolist()
    edges = torch.tensor(found.num_sampled_edges).cumsum(0).tolist()
    device = found.node.device
    ends = torch.tensor([*nodes, 0, *edges], device=device)
    input_id = None if seeds.input_id is None else seeds.input_id.to(device)
    last = int(found.col[-1]) if found.col.numel() else -1
    return Sampled(
        found.node,
        found.row,
        found.col,
        found.edge,
        found.batch,
        ends,
        nodes,
        edges,
        last,
        input_id,
        time,
        _on_device(seeds.labels, device),
        seeds.groups,
        None,
    )


Sampling = SamplesAhead | SamplesOnDemand


def sampling(graph: DeviceGraph, batch_size: int | None, has_times: bool, hosted: Sequence[Hosted] = ()) -> Sampling:
    """Returns what samples mini-batches of up to `batch_size` seeds; None is any number.

    The rows of the attributes `hosted` are gathered ahead, if mini-batches are sampled ahead and there is room.

    Raises:
        ValueError: Times, weights and other settings exclude each other, or times of seeds are missing.
    """
    if graph.how["edge_time"] is not None and not has_times:
        raise ArgumentError(
            "input_time: found None, expected the time of each seed, as the loader samples by times of edges."
        )
    plain = checked(graph.colptr, graph.row, directed=True, **graph.how)
    is_bounded = min(graph.fan_outs) >= 0
    if batch_size is not None and is_bounded:
        most = bounds(plain, batch_size, graph.fan_outs)
        if most.edges <= MOST_EDGES:
            sizes = most.edges, most.nodes
            return SamplesAhead(graph, batch_size, has_times, fitting(hosted, sizes, graph.colptr.device))
    return SamplesOnDemand(graph)
