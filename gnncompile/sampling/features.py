"""Holds the features of nodes or edges on the GPU or in host memory, and gathers the rows of mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError
from gnncompile.layout.streams import Readers
from gnncompile.sampling import gather as rows
from gnncompile.sampling.arguments import PLACES, check_bytes
from gnncompile.sampling.host_memory import PinnedRows, pinned


@dataclass(frozen=True)
class Placed:
    """Where one attribute lies, and how often it was read. :meth:`Features.report` makes it.

    Attributes:
        name: The name of the attribute.
        rows: The number of rows.
        dtype: The dtype.
        bytes: The bytes of all rows.
        place: ``"device"`` or ``"host"``.
        cached_rows: The rows that a cache on the device holds.
        cached_bytes: The bytes of these rows.
        reads: The rows gathered so far; None for an attribute without a cache, which counts nothing.
        hits: The rows among them that came from the cache; None without a cache.
    """

    name: str
    rows: int
    dtype: torch.dtype
    bytes: int
    place: str
    cached_rows: int
    cached_bytes: int
    reads: int | None
    hits: int | None

    @property
    def hit_rate(self) -> float | None:
        """The share of gathered rows that came from the cache; None if no row was counted."""
        return None if not self.reads or self.hits is None else self.hits / self.reads


class FeatureReport(tuple[Placed, ...]):
    """The attributes of :class:`Features`, one :class:`Placed` for each. As text it is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        head = ("attribute", "rows", "dtype", "MB", "place", "cached rows", "cached MB", "reads", "hit rate")
        lines = [head]
        for one in self:
            rate = one.hit_rate
            lines.append((
                one.name, f"{one.rows:,}", str(one.dtype).removeprefix("torch."), f"{one.bytes / 1e6:,.1f}", one.place,
                f"{one.cached_rows:,}", f"{one.cached_bytes / 1e6:,.1f}", "" if one.reads is None else f"{one.reads:,}",
                "" if rate is None else f"{rate:.1%}",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


class Features:
    """Attributes of the nodes of a graph (or of its edges), from which kernels gather the rows of mini-batches.

    An attribute lies on the device, or in host memory. Kernels read pinned host memory by way of the bus, without the
    host's help, so a CUDA graph can hold the gather. Host memory is pinned in place, without a copy where CUDA can do
    that, and stays pinned as long as this object lives. Features are read, never written: change a tensor that lies on
    the host only if no cache holds its rows.

    A cache on the device holds rows that are read often. One kernel reads each row from the cache or from the host, and
    counts on the device how many came from the cache.

    Example::

        from gnncompile.sampling.bounded import BoundedSampler
        from gnncompile.sampling.features import Features
        from gnncompile.sampling.reads import expected_reads

        graph = testing.uniform(10_000, 100_000)
        col, order = graph.edge_index[1].sort(stable=True)
        colptr = torch.searchsorted(col, torch.arange(10_001)).to("cuda")
        row = graph.edge_index[0][order].to("cuda")
        sampler = BoundedSampler(colptr, row, [15, 10], batch_size=1024, seed=0)
        reads = expected_reads(colptr, row, [15, 10], batch_size=1024)
        features = Features({"x": graph.x}, device="cuda", place="host", cache=2**18, reads=reads)
        batch = sampler(torch.arange(1024, device="cuda"))
        x = features.gather("x", batch.node, batch.node_ends[-1:])
        print(features.report())

    Args:
        tensors: The attributes by name, each ``[num_rows, ...]`` of any dtype, contiguous. They may be memory-mapped
            files (``torch.from_file``, ``torch.load(..., mmap=True)``). These are read once, to the device or to pinned
            memory.
        device: Where gathered rows go.
        place: Where attributes lie: ``"device"``, ``"host"``, or one of these for each name.
        cache: The bytes on the device for rows of attributes on the host. The map from rows to the cache takes 4 bytes
            more per row of the graph.
        reads: How often each row is read, by count or by expectation, ``[num_rows]``: the cache holds the rows with the
            largest numbers. None leaves the cache empty and counts reads, until :meth:`refill` fills it.

    Raises:
        MemoryError: The host has not enough memory that can be pinned.
        TypeError: `cache` is no int.
        ValueError: Numbers of rows differ, a tensor is not contiguous or needs a gradient, a place or the name of an
            attribute is unknown, the cache has no use, or `reads` is given without a cache.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: Any,
        *,
        place: str | Mapping[str, str] = "device",
        cache: int = 0,
        reads: Tensor | None = None,
    ) -> None:
        self.device = torch.device(device)
        check_bytes(cache)
        _check(tensors)
        self.places = _places(tensors, place)
        self.num_rows = next(iter(tensors.values())).size(0)
        self._runs = rows.runs(self.device)
        hosted = [name for name, where in self.places.items() if where == "host"]
        self._pins: dict[str, PinnedRows] = {}
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name in hosted and self._runs:
                self._pins[name] = pinned(tensor.detach().cpu(), self.device)
                self._tensors[name] = self._pins[name].tensor
            else:
                self._tensors[name] = tensor.detach().to("cpu" if name in hosted else self.device)
        self._caches: dict[str, rows.Cache] = {}
        self._reads: Tensor | None = None
        if cache:
            self._make_cache(cache, hosted, reads)
        elif reads is not None:
            raise ArgumentError(
                "reads: found a tensor and cache=0, expected a cache to fill; give cache, in bytes, or leave reads out."
            )

    def _make_cache(self, size: int, names: list[str], reads: Tensor | None) -> None:
        if size < 0 or not names or not self._runs:
            raise ArgumentError(
                f"cache: found {size} bytes for attributes on {sorted(set(self.places.values()))}, gathered to "
                f'{self.device}, expected bytes for attributes on the host and a GPU; set cache=0, or place="host".'
            )
        per_row = sum(_row_bytes(self._tensors[name]) for name in names)
        slots = min(size // max(per_row, 1), self.num_rows)
        if self.num_rows and not slots:
            raise ArgumentError(
                f"cache: found {size} bytes, expected at least {per_row}, which a row of {', '.join(names)} takes; "
                "give a larger cache, or leave cache out."
            )
        slot = torch.full((self.num_rows,), -1, dtype=torch.int32, device=self.device)
        for name in names:
            held = self._tensors[name]
            kept = torch.empty(slots, *held.shape[1:], dtype=held.dtype, device=self.device)
            self._caches[name] = rows.Cache(kept, slot, rows.counters(self.device))
        if reads is None:
            self._reads = torch.zeros(self.num_rows, dtype=torch.int32, device=self.device)
        else:
            self.refill(reads)

    def refill(self, reads: Tensor | None = None) -> None:
        """Fills the cache anew with the rows that are read most. CUDA graphs that read the cache stay valid.

        Call it between epochs, on the stream of the gathers, e.g. once after the first epoch.

        Args:
            reads: How often each row is read, ``[num_rows]``; None takes the reads counted so far.

        Raises:
            ValueError: There is no cache, `reads` has another shape, or no reads were counted because `reads` was given
                before.
        """
        given = self._reads if reads is None else reads
        if not self._caches:
            raise ArgumentError(
                "refill: found features without a cache, expected a cache to fill; make the features with "
                'place="host" and cache=..., the bytes of the cache.'
            )
        if given is None:
            raise ArgumentError(
                "reads: found None, expected how often each row is read; give reads here, or make the features with "
                "cache=... and reads=None, which counts."
            )
        if given.shape != (self.num_rows,):
            raise ArgumentError(f"reads: found shape {list(given.shape)}, expected [{self.num_rows}], one per row.")
        slots, slot = next((cache.rows.size(0), cache.slot) for cache in self._caches.values())
        hot = given.to(self.device).argsort(descending=True, stable=True)[:slots]
        slot.fill_(-1)
        slot[hot] = torch.arange(slots, dtype=torch.int32, device=self.device)
        for name, cache in self._caches.items():
            rows.gathered(self._tensors[name], hot, out=cache.rows)

    def gather(self, name: str, node: Tensor, end: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Returns the rows of an attribute at `node`, ``[len(node), ...]``, on the device. Never waits for the device.

        Args:
            name: The attribute.
            node: The rows, int32 or int64, on the device; e.g. ``batch.node`` of a bounded sampler.
            end: The number of valid entries of `node`, int64 ``[1]`` on the device; e.g. ``batch.node_ends[-1:]``. The
                others are padding that repeats the first entries. They are not read from the host, and not counted.
            out: The contiguous tensor to write to; None allocates it.

        Raises:
            IndexError: On a CPU, an index is outside of the attribute. A GPU stops, as with ``torch.index_select``.
            KeyError: There is no such attribute.
            TypeError: `node` is of another dtype.
            ValueError: `out` does not fit.
        """
        x, is_near = self._tensors[name], self.places[name] == "device"
        rows.check(x, node, out, is_readable=not is_near)
        if not self._runs:
            return torch.index_select(x, 0, node, out=out)
        cache = self._caches.get(name)
        end = None if is_near else end
        reads = None if cache is None else self._reads
        return rows.gathered(x, node, out=out, end=end, cache=cache, reads=reads)

    def gather_ahead(self, name: str, node: Tensor, end: Tensor, out: Tensor, position: Tensor) -> None:
        """Gathers the valid rows of an attribute while other kernels run. Rows of `out` after them are not written.

        The arguments are those of :meth:`gather`, and not checked. Row i of `node` goes to row ``position[i]`` of
        `out`.
        """
        cache = self._caches.get(name)
        reads = None if cache is None else self._reads
        held = self._tensors[name]
        rows.gathered(held, node, out=out, end=end, cache=cache, reads=reads, is_ahead=True, position=position)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of dropped tensors on the device until the work that a stream has then is done."""
        Readers(self.held()).add(stream)

    def held(self) -> list[Tensor]:
        """Returns all tensors that gathers read or write: the attributes, the cache and its counters."""
        cached = [tensor for cache in self._caches.values() for tensor in cache]
        return [*self._tensors.values(), *cached, *([] if self._reads is None else [self._reads])]

    def __call__(self, node: Tensor, end: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the rows of all attributes at `node`, by name; see :meth:`gather`."""
        return {name: self.gather(name, node, end) for name in self._tensors}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The attributes by name, where they lie. Only kernels may read those on the host by way of the bus."""
        return self._tensors

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def report(self) -> FeatureReport:
        """Returns the size and place of each attribute, and how many rows came from the cache. Waits for the device."""
        found = []
        for name, x in self._tensors.items():
            cache = self._caches.get(name)
            reads, hits = (None, None) if cache is None else cache.counters.sum(0)[:2].tolist()
            cached = 0 if cache is None else int((cache.slot >= 0).sum())
            size = _row_bytes(x)
            place = self.places[name]
            found.append(
                Placed(name, self.num_rows, x.dtype, self.num_rows * size, place, cached, cached * size, reads, hits)
            )
        return FeatureReport(found)


def _row_bytes(x: Tensor) -> int:
    return x[:1].nbytes if x.size(0) else 0


def _check(tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise ArgumentError("tensors: found none, expected at least one attribute, e.g. {'x': data.x}.")
    sizes = {name: tensor.size(0) if tensor.dim() else 0 for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ArgumentError(
            f"tensors: found {sizes} rows, expected the same number; make Features for each kind of row."
        )
    for name, tensor in tensors.items():
        if not tensor.dim() or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ArgumentError(
                f"tensors: found {name!r} with shape {list(tensor.shape)}, not contiguous, expected a contiguous "
                "tensor [num_rows, ...]; call .contiguous() once."
            )
        if tensor.requires_grad:
            raise ArgumentError(
                f"tensors: found {name!r}, which needs a gradient, expected features that are not trained; look up "
                "learned rows in the model, e.g. by torch.nn.Embedding and batch.n_id."
            )


def _places(tensors: Mapping[str, Tensor], place: str | Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in place if name not in tensors] if isinstance(place, Mapping) else []
    if missing:
        raise ArgumentError(
            f"place: found a place for {missing[0]!r}, expected names of attributes: {', '.join(tensors)}."
        )
    found = {name: place.get(name, "device") if isinstance(place, Mapping) else place for name in tensors}
    unknown = [where for where in found.values() if where not in PLACES]
    if unknown:
        raise ArgumentError(f"place: found {unknown[0]!r}, expected one of {', '.join(PLACES)}.")
    return found
