"""``gnncompile.loader``: wraps a PyG loader so that mini-batches are prepared ahead.

Worker processes sort the edges, build CSR layouts and pad to buckets. A thread copies each mini-batch to pinned memory
and, on a separate stream, to the device. Meanwhile the model works on the previous mini-batch, and nothing waits for
the device.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gnncompile import _compat
from gnncompile.batches.buckets import MOST, Buckets
from gnncompile.batches.memories import on_gpu
from gnncompile.batches.prepare import Prepare, Prepared, prepare_all
from gnncompile.batches.row_types import levels_of
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError, ArgumentTypeError, MissingLibraryError, UnsupportedSampling
from gnncompile.layout.streams import copying
from gnncompile.sampling.arguments import PLACES, check_bytes
from gnncompile.sampling.device_graph import unsupported
from gnncompile.sampling.loaders import check_types_of, samples_neighbors, with_own_sampler

if TYPE_CHECKING:
    from gnncompile.sampling.features import FeatureReport

logger = logging.getLogger(__name__)

AHEAD = 2
"""The number of mini-batches that are prepared ahead."""

_END = object()

_moving = threading.Lock()
"""Held while a loader moves its graph to the device. A lock of each loader would keep loaders from being pickled."""

SAMPLERS = ("gnncompile", "device", "cpu", "pyg")
"""Who may sample neighbours, and where."""


def loader(
    source: Iterable[Any],
    device: Any = None,
    buckets: bool | int = False,
    sampler: str = "gnncompile",
    features: str | Mapping[str, str] = "device",
    cache: int = 0,
) -> Loader:
    """Wraps a loader so that compiled models need not sort edges or build layouts in their calls.

    The loader yields the mini-batches of `source`, on `device`, with the edges sorted by destination. The sort is
    stable, and edge attributes are permuted alike.

    With `buckets`, mini-batches are padded to a few sizes. Models compiled with ``mode="reduce-overhead"`` and
    :class:`gnncompile.TrainStep` then replay one recording for all mini-batches of a bucket. The padding is never seen:
    tensors, results and losses are those of the mini-batch alone. A model runs without padding if it has an operation
    from whose result the padding can't be removed, and :func:`gnncompile.explain` says why.

    Around ``NeighborLoader`` and ``LinkNeighborLoader``, gnncompile samples, with the meaning of PyG's samplers and
    without pyg-lib or torch-sparse. See :class:`gnncompile.sampling.pyg.NeighborSampler`. If the graph is a ``Data`` or
    a ``HeteroData`` and `device` a GPU, the GPU samples. The graph and its attributes are then moved there once. Some
    loaders sample on the CPU: of other subgraphs than directional ones, with `buckets` and a ``transform``, or of a
    graph that does not fit into the memory of the GPU. A log message names the reason, and
    :attr:`Loader.not_on_device` holds it.

    Features that do not fit into the memory of the GPU may stay on the host: ``features="host"``. Kernels read the rows
    of each mini-batch there, by way of the bus, while the model trains on the mini-batch before. This takes memory on
    the GPU for the most rows of two mini-batches; a log message names attributes for which there is no room. A `cache`
    on the GPU holds the rows of nodes that are expected to be read most for their bytes
    (:func:`gnncompile.sampling.reads.expected_reads`), and :meth:`Loader.report` says how many were found there.

    A mini-batch that a GPU has sampled has the attributes that PyG gives it. ``torch.manual_seed`` repeats a run on
    the same device; the CPU and the GPU draw different neighbours.

    Loaders of other engines are taken as they are: those of ``torch_geometric.distributed`` and cuGraph-PyG, and
    anything that yields ``Data`` or ``HeteroData``, or objects with a method ``to_pyg_data`` as GraphBolt's.
    Mini-batches that a GPU holds are sorted, laid out and padded there. A warning in the log names edges that are no
    tensor ``edge_index``; these are not sorted, and their mini-batches are not padded.

    Example::

        loader = gnncompile.loader(DataLoader(dataset, batch_size=128, shuffle=True), device="cuda", buckets=True)
        step = gnncompile.TrainStep(model, torch.nn.functional.cross_entropy, optimizer)
        for batch in loader:
            step(batch.x, batch.edge_index, batch.batch, target=batch.y)

    Args:
        source: A loader of PyG, or anything that yields ``Data``, ``HeteroData`` or ``Batch`` objects (or lists and
            tuples of them), on the CPU or a GPU.
        device: Where mini-batches go; None leaves them on the CPU.
        buckets: Whether mini-batches are padded, or the largest number of sizes (True: 4).
        sampler: Who samples neighbours, and where. ``"gnncompile"`` samples on `device` if it can, or else on the CPU.
            ``"device"`` and ``"cpu"`` allow one of the two. ``"pyg"`` is the sampler of `source`. Samplers other than
            PyG's ``NeighborSampler`` are always used as they are, and a warning says so.
        features: Where the attributes of nodes and edges lie while a GPU samples: ``"device"``, ``"host"``, or one of
            these by the name of an attribute, such as ``{"x": "host"}``; others are then on the device. The memory of
            attributes on the host is pinned.
        cache: The bytes on the GPU that cache attributes of nodes on the host. Node types share them.

    Raises:
        TypeError: `source` can't be iterated over, the times that it samples by are not integers, or `cache` is no int.
        ValueError: `buckets` is negative, `sampler` is unknown, or neighbours are not sorted by the times of `source`.
            Or `num_neighbors` or the input of `source` lacks a type of the graph, or names one that is not there.
            Or `sampler` is ``"device"``, or `features` or a `cache` is given, and the device can't sample; this may be
            known at the first mini-batch. While iterating: `device` is the CPU, and a GPU holds the mini-batches.
        MemoryError: The host has not enough memory that can be pinned, at the first mini-batch.
        ImportError: There is neither a C++ compiler for the sampler nor a library that PyG samples with. While
            iterating: the library that `source` samples with is missing.
    """
    return Loader(source, device, buckets, sampler, features, cache)


class Loader:
    """An iterable of prepared mini-batches: see :func:`loader`.

    Attributes:
        source: The loader that was wrapped.
        device: Where mini-batches go.
        buckets: The sizes that mini-batches are padded to; None without padding.
        not_on_device: Why neighbours are not sampled on the device; None if they are. The size of the graph is checked
            at the first mini-batch.
    """

    def __init__(
        self,
        source: Iterable[Any],
        device: Any = None,
        buckets: bool | int = False,
        sampler: str = "gnncompile",
        features: str | Mapping[str, str] = "device",
        cache: int = 0,
    ) -> None:
        if not hasattr(source, "__iter__"):
            raise ArgumentTypeError(
                f"source: found {type(source).__name__}, expected a loader, e.g. "
                "torch_geometric.loader.DataLoader(dataset, batch_size=128)."
            )
        if buckets < 0:
            raise ArgumentError(f"buckets: found {buckets}, expected True, False or how many sizes there may be.")
        if sampler not in SAMPLERS:
            raise ArgumentError(f"sampler: found {sampler!r}, expected one of {', '.join(SAMPLERS)}.")
        self.source = source
        self.device = torch.device("cpu" if device is None else device)
        self.buckets = Buckets(MOST if buckets is True else int(buckets)) if buckets else None
        self._sampler = sampler
        self._features, self._cache = features, cache
        _check_features(features, cache)
        if sampler != "pyg":
            check_types_of(source)
        self._on_device: Any = None  # a DeviceLoader, whose module imports Triton
        self._prepared: Any = None
        self.not_on_device = self._why_not_on_device(sampler)
        if self.not_on_device is not None:
            self._leave_to_cpu(self.not_on_device)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        most = self.buckets.most if self.buckets is not None else 0
        return f"{type(self).__name__}({self.source}, device={str(self.device)!r}, buckets={most})"

    def _why_not_on_device(self, sampler: str) -> str | None:
        if sampler in ("cpu", "pyg"):
            return f"sampler is {sampler!r}"
        if sampler != "device" and not device_of(self.device).has_streams:
            return f"mini-batches go to {self.device}, which is no GPU"
        if self.buckets is not None and getattr(self.source, "transform", None) is not None:
            return "a transform may change sizes, so with buckets it runs before the padding, on the CPU"
        return unsupported(self.source, self.device)

    def _leave_to_cpu(self, why: str) -> None:
        """Lets the CPU sample. Tells why, if the device was expected to."""
        if self._features != "device" or self._cache:
            raise ArgumentError(
                f"features: found {self._features!r} and a cache of {self._cache} bytes, which need neighbours "
                f"that are sampled on the device ({why}); change that, or leave features and cache out."
            )
        if self._sampler == "device":
            raise ArgumentError(
                f"sampler: found 'device', which can't sample for this loader ({why}); change that, or leave sampler "
                "out, so that the CPU samples."
            )
        if self._sampler == "gnncompile" and samples_neighbors(self.source) and device_of(self.device).has_streams:
            logger.warning("%s samples on the CPU: %s", type(self.source).__name__, why)
        source = self.source if self._sampler == "pyg" else with_own_sampler(self.source)
        self._prepared = _preparing(source, self.buckets, self.device)
        self.not_on_device = why

    def __iter__(self) -> Iterator[Any]:
        self._move()
        return iter(self._on_device) if self._on_device is not None else self._from_cpu()

    def report(self) -> FeatureReport:
        """Returns the size and the place of each attribute of nodes and edges, and the hit rates of the cache.

        In a graph with several node types, the name of an attribute is followed by its type: "x of paper".
        Moves the graph if there was no mini-batch yet, and waits for the device.

        Raises:
            ValueError: The CPU samples, so the loader has no attributes of its own.
        """
        self._move()
        if self._on_device is None:
            raise ArgumentError(
                f"report: found a loader that samples on the CPU ({self.not_on_device}), expected one that samples "
                "on a GPU; the attributes are those of its source."
            )
        report: FeatureReport = self._on_device.report()
        return report

    def _move(self) -> None:
        """Moves the graph to the device, once for iterators in all threads. Lets the CPU sample if it does not fit."""
        if self._is_decided():
            return
        with _moving:
            if self._is_decided():  # by another thread
                return
            # Triton is imported only where it is used.
            from gnncompile.batches.device_loader import DeviceLoader

            given = self.buckets, self._features, self._cache
            try:
                self._on_device = DeviceLoader(self.source, _with_index(self.device), *given)
            except UnsupportedSampling as reason:
                self._leave_to_cpu(str(reason))

    def _is_decided(self) -> bool:
        return self.not_on_device is not None or self._on_device is not None

    def _from_cpu(self) -> Iterator[Any]:
        device = _with_index(self.device)
        found = _explaining(iter(self._prepared), self.source)
        levels = levels_of(self.source)
        items = _noticing((prepare_all(item, self.buckets, device, levels) for item in found), self.source)
        if not device_of(self.device).has_streams:
            return (_each(item, lambda ready: ready.finish(ready.memory).to(self.device)) for item in items)
        pins = isinstance(self.source, DataLoader) and self.source.pin_memory
        return _Ahead(items, self.device, _compat.pinned if pins else _as_it_is).batches()


def _with_index(device: torch.device) -> torch.device:
    """Returns a device with its index. A GPU without one is the current GPU."""
    index: int | None = device.index
    is_current = device_of(device).has_streams and index is None
    return torch.device(device.type, torch.cuda.current_device()) if is_current else device


def _check_features(features: str | Mapping[str, str], cache: int) -> None:
    places = list(features.values()) if isinstance(features, Mapping) else [features]
    if not all(place in PLACES for place in places):
        raise ArgumentError(
            f"features: found {features!r}, expected 'device', 'host', or one of them by the name of an attribute."
        )
    check_bytes(cache)
    if cache < 0 or (cache and "host" not in places):
        raise ArgumentError(
            f"cache: found {cache} bytes with features={features!r}, expected bytes of 0 or more, and attributes on "
            "the host; set features='host', or leave cache out."
        )


def _preparing(source: Iterable[Any], buckets: Buckets | None, device: torch.device) -> Iterable[Any]:
    """Returns the loader, changed so that its worker processes prepare the mini-batches."""
    if not isinstance(source, DataLoader):
        return source
    prepared = copy.copy(source)
    prepared._iterator = None
    prepared.collate_fn = Prepare(source.collate_fn, buckets, levels_of(source))
    # For a GPU the copying thread pins instead: it has pinned buffers for mini-batches, and pins all other values too.
    prepared.pin_memory = source.pin_memory and not device_of(device).has_streams
    return prepared


def _explaining(items: Iterator[Any], source: Any) -> Iterator[Any]:
    try:
        yield from items
    except MissingLibraryError:
        raise
    except ImportError as missing:
        raise MissingLibraryError(
            f"loader: {type(source).__name__} samples with a library that is not installed; expected pyg-lib or "
            "torch-sparse. PyPI has no pyg-lib: install it from https://data.pyg.org for your release of torch, or use "
            f'a loader around NeighborSampler with sampler="gnncompile". ({str(missing).splitlines()[0]})'
        ) from missing


def _noticing(items: Iterator[Any], source: Any) -> Iterator[Any]:
    """Yields the items. Warns if the first one holds no mini-batch that could be prepared."""
    for at, item in enumerate(items):
        if at == 0:
            found: list[Prepared] = []
            _each(item, found.append)
            name = type(source).__name__
            if not found:
                logger.warning(
                    "%s yields %s, expected Data or HeteroData: nothing is sorted or padded", name, type(item).__name__
                )
            for key, value in (one for ready in found for one in ready.unprepared_edges()):
                logger.warning(
                    "%s yields edges as %s (%s), expected a tensor edge_index: these edges are not sorted, and "
                    "mini-batches are not padded",
                    name,
                    key,
                    type(value).__name__,
                )
        yield item


def _as_it_is(value: Any) -> Any:
    return value


def _each(value: Any, make: Callable[[Prepared], Any], other: Callable[[Any], Any] = _as_it_is) -> Any:
    """Applies `make` to every prepared mini-batch in nested lists and tuples, and `other` to every other value."""
    if isinstance(value, Prepared):
        return make(value)
    if type(value) in (list, tuple):
        return type(value)(_each(v, make, other) for v in value)
    return other(value)


class _Pinned:
    """Pinned host buffers that are reused after the device has copied from them."""

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []

    def take(self, length: int) -> Tensor:
        """Returns a pinned buffer of at least `length` bytes; may wait until an earlier copy has ended."""
        if len(self._free) > AHEAD:
            memory, copied = self._free.pop(0)
            copied.synchronize()
            if memory.numel() >= length:
                return memory
        return torch.empty(length + length // 4, dtype=torch.uint8, pin_memory=True)

    def give(self, memory: Tensor, copied: torch.cuda.Event) -> None:
        """Takes a buffer back. The device may read it until the event `copied` has happened."""
        self._free.append((memory, copied))


class _Ahead:
    """Copies mini-batches to a GPU in a thread.

    Everything on the GPU that an item reads is recorded on the stream of its reader: the memory that was copied, and
    other tensors, such as sparse matrices and what another engine has made. See :mod:`gnncompile.layout.streams`.

    Args:
        items: The prepared mini-batches.
        device: The GPU.
        other: Applied to every value that is no mini-batch.
    """

    def __init__(self, items: Iterator[Any], device: torch.device, other: Callable[[Any], Any]) -> None:
        self._items, self._other = items, other
        self._device = _with_index(device)
        self._stream = copying(self._device)
        self._pinned = _Pinned()
        self._ready: queue.Queue[Any] = queue.Queue(AHEAD)
        self._stopped = threading.Event()

    def batches(self) -> Iterator[Any]:
        """Yields the mini-batches; the current stream waits for each copy."""
        # Mini-batches that are on the GPU already may have been made on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        thread = threading.Thread(target=self._work, name="gnncompile loader", daemon=True)
        thread.start()
        try:
            while (found := self._ready.get()) is not _END:
                if isinstance(found, BaseException):
                    raise found
                item, memories, copied = found
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                for memory in memories:
                    memory.record_stream(stream)
                yield item
        finally:
            self._stopped.set()
            thread.join()

    def _work(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                for item in self._items:
                    memories: list[Tensor] = []
                    made = _each(item, partial(self._copy, memories), self._other)
                    memories += on_gpu(made, memories)
                    if not self._put((made, memories, self._stream.record_event())):
                        return
            self._put(_END)
        except BaseException as error:
            self._put(error)

    def _put(self, value: Any) -> bool:
        """Puts a value into the queue. Returns False if the iteration was stopped."""
        while not self._stopped.is_set():
            try:
                self._ready.put(value, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _copy(self, memories: list[Tensor], ready: Prepared) -> Any:
        if ready.memory.device == self._device:  # another engine's mini-batch, prepared there
            memories.append(ready.memory)
            return ready.finish(ready.memory).to(self._device)
        length = ready.memory.numel()
        pinned = self._pinned.take(length)
        pinned[:length] = ready.memory
        memory = torch.empty(length, dtype=torch.uint8, device=self._device)
        memory.copy_(pinned[:length], non_blocking=True)
        self._pinned.give(pinned, self._stream.record_event())
        memories.append(memory)
        return ready.finish(memory).to(self._device, non_blocking=True)
