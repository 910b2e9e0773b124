"""Samples mini-batches on a device one mini-batch ahead, so that the host need not wait for their sizes.

The kernels that sample mini-batch k + 1 are launched before the training step of mini-batch k, on another stream. The
sizes are copied to the host in the background. When the host asks for them, they are there, or the device still has
the training step of mini-batch k to work on. Rows of attributes on the host are gathered on that stream as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from gnncompile.cudagraphs import cuda_graph
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError
from gnncompile.layout import streams
from gnncompile.layout.streams import Readers
from gnncompile.sampling.device_graph import DeviceGraph, HeteroDeviceGraph
from gnncompile.sampling.drawing import OneType, SeveralTypes, drawn_now, of_seeds, types_drawn_now
from gnncompile.sampling.rows_ahead import Hosted, RowsAhead, fitting
from gnncompile.sampling.sampled import Sampled, Seeds

AHEAD = 1
"""The number of mini-batches that are sampled ahead."""

MOST_EDGES = 2**23
"""Mini-batches that may have more edges than this are not sampled ahead, which takes 64 bytes for each edge."""

Drawing = OneType | SeveralTypes
"""What draws a mini-batch into memory of a fixed size."""


class SamplesAhead:
    """Samples mini-batches with fixed fan-outs ahead. The host waits only if the device lags a whole step behind.

    Each :meth:`begin` is followed by a :meth:`take`, and at most :data:`AHEAD` further calls of :meth:`begin` come
    before it. On a GPU the kernels are replayed as a CUDA graph.

    Args:
        graph: The graph.
        draws: Makes what draws a mini-batch.
        hosted: Attributes on the host, whose rows are gathered ahead as well.
    """

    def __init__(
        self, graph: DeviceGraph | HeteroDeviceGraph, draws: Callable[[], Drawing], hosted: Sequence[Hosted] = ()
    ) -> None:
        # The side stream works on this memory, so it is the side stream's: see gnncompile.layout.streams.
        with _on_side_stream(graph.device):
            made = draws()
            hosted = fitting(hosted, made.sizes, graph.device)
            more = [made, *[draws() for _ in range(AHEAD)]]
            self._places = [_Place(graph, one, hosted) for one in more]
        for place in self._places:
            place.release()  # the kernels follow the work that has made the graph
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
        """Forgets all mini-batches that were not taken. The memory may be freed after that."""
        for at in self._begun:
            self._places[at].follow()
        for place in self._places:
            place.end()
        self._begun.clear()


class _Place:
    """The memory of one mini-batch that is sampled ahead."""

    def __init__(self, graph: DeviceGraph | HeteroDeviceGraph, draws: Drawing, hosted: Sequence[Hosted]) -> None:
        device, self._draws = graph.device, draws
        self._given = torch.zeros(draws.size, dtype=torch.int64, device=device)
        pins = device_of(device).has_streams
        self._host = torch.zeros(draws.size, dtype=torch.int64, pin_memory=pins)
        self._found = torch.zeros(draws.state_size, dtype=torch.int64, pin_memory=pins)
        self._device = device
        self._stream = streams.copying(device) if pins else None
        self._done = torch.cuda.Event(blocking=True) if pins else None
        self._gathered = torch.cuda.Event() if pins else None
        self._rows = RowsAhead(hosted, draws.sizes, device) if hosted else None
        self._keep(graph, hosted)
        self._read = torch.cuda.Event() if pins else None
        self._draw = _Recorded(lambda: draws.draw(self._given), device)
        self._gather = _Recorded(self._gather_rows, device)
        self._seeds: Seeds | None = None

    def begin(self, seeds: Seeds, random_seed: int) -> None:
        if self._done is not None:
            self._done.synchronize()  # an earlier copy may still read the pinned memory, if its result was not taken
        self._seeds = seeds
        self._host[0] = random_seed
        self._draws.pack(self._host, seeds)
        with _on_side_stream(self._device):
            if self._stream is not None and self._read is not None:
                self._stream.wait_event(self._read)
            self._given.copy_(self._host, non_blocking=True)
            self._run()

    def take(self, place: int) -> Sampled:
        if self._done is not None:
            self._done.synchronize()
        self.follow()
        assert self._seeds is not None
        rows = {} if self._rows is None else self._rows.rows
        more = {**of_seeds(self._seeds, self._device), "place": place, "rows": rows}
        try:
            return self._draws.sampled(self._found.tolist(), self._given, self._seeds, more)
        except (IndexError, ValueError):
            self.release()  # the problem is cleared on this stream, before the memory is used again
            raise

    def follow(self) -> None:
        """Makes the current stream wait for the sampler and for the rows that were gathered ahead."""
        if self._gathered is not None:
            torch.cuda.current_stream(self._device).wait_event(self._gathered)

    def release(self) -> None:
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """Makes later work on this memory, anyone's, wait for the last reader: the side stream owns the memory."""
        if self._stream is not None and self._read is not None:
            self._stream.wait_event(self._read)

    def _keep(self, graph: DeviceGraph | HeteroDeviceGraph, hosted: Sequence[Hosted]) -> None:
        """Keeps the memory that this stream reads until its work is done, even if the loader is dropped meanwhile."""
        if self._stream is None:
            return
        Readers([*graph.tensors(), *(tensor for one in hosted for tensor in one.features.held())]).add(self._stream)

    def _run(self) -> None:
        """Samples, copies the sizes to the host, and gathers rows, for which the host need not wait."""
        self._draw()
        start = 0
        for part in self._draws.state():
            self._found[start : start + part.numel()].copy_(part, non_blocking=True)
            start += part.numel()
        if self._done is not None:
            self._done.record(self._stream)
        if self._rows is not None:
            self._gather()
        if self._gathered is not None:
            self._gathered.record(self._stream)

    def _gather_rows(self) -> None:
        assert self._rows is not None
        self._rows.gather(self._draws.ids)


def _on_side_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context manager: work and memory inside are those of the stream that samples ahead."""
    return torch.cuda.stream(streams.copying(device)) if device_of(device).has_streams else nullcontext()


class _Recorded:
    """Work that is launched the first time, to compile its kernels, and is then a CUDA graph if the device has them."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self._work, self._device, self._is_compiled = work, device, False
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._replay is None and self._is_compiled and device_of(self._device).can_be_recorded:
            self._replay, _ = cuda_graph.recorder(self._device)(self._work)
        if self._replay is not None:
            self._replay()
        else:
            self._work()
        self._is_compiled = True


class SamplesOnDemand:
    """Samples mini-batches when they are taken: with hops of all neighbours, or too large to be sampled ahead.

    The host waits for the sizes of each mini-batch. The methods are those of :class:`SamplesAhead`.
    """

    def __init__(self, graph: DeviceGraph | HeteroDeviceGraph) -> None:
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
        given = self._begun.popleft()
        if isinstance(self._graph, HeteroDeviceGraph):
            return types_drawn_now(self._graph, *given)
        return drawn_now(self._graph, *given)

    def release(self, sampled: Sampled) -> None:
        """See :class:`SamplesAhead`."""

    def drop(self) -> None:
        """See :class:`SamplesAhead`."""
        self._begun.clear()


Sampling = SamplesAhead | SamplesOnDemand


def sampling(
    graph: DeviceGraph | HeteroDeviceGraph,
    most: Mapping[str | None, int] | None,
    has_times: bool,
    hosted: Sequence[Hosted] = (),
) -> Sampling:
    """Returns what samples mini-batches.

    The rows of the attributes `hosted` are gathered ahead, if mini-batches are sampled ahead and there is room.

    Args:
        graph: The graph.
        most: The most seeds of each node type, by its name; of a graph with one node type by None. Without it, there
            may be any number.
        has_times: Whether seeds have times.
        hosted: Attributes on the host.

    Raises:
        ValueError: Times, weights and other settings exclude each other, or times of seeds are missing.
    """
    draws: Callable[[], Drawing]
    if isinstance(graph, HeteroDeviceGraph):
        by_type = {str(name): number for name, number in (most or {}).items()}
        edges = None if most is None else SeveralTypes.most_edges(graph, by_type)
        draws = partial(SeveralTypes, graph, by_type, has_times)
    else:
        if graph.how["edge_time"] is not None and not has_times:
            raise ArgumentError(
                "input_time: found None, expected the time of each seed, as the loader samples by times of edges."
            )
        batch_size = 1 if most is None else most[None]
        bound = OneType.most_edges(graph, batch_size)
        edges = None if most is None else bound
        draws = partial(OneType, graph, batch_size, has_times)
    if edges is not None and edges <= MOST_EDGES:
        return SamplesAhead(graph, draws, hosted)
    return SamplesOnDemand(graph)
