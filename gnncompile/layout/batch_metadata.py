"""What a loader knows of the tensors of a mini-batch, and attaches to them.

A tensor of a mini-batch holds the first rows of a longer one in the same memory, which is padded to the size of a
bucket. An edge list has its layouts. The user sees tensors of the valid size. A compiled model that is recorded takes
the longer ones, so one recording serves all mini-batches of a bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NAME = "_gnncompile_attached"

ENOUGH = 2
"""Of each kind of things there are at least so many in a mini-batch that is padded: with fewer, models may do something
else (BatchNorm raises an error).
"""


@dataclass(frozen=True, eq=False)
class Bucketed:
    """A mini-batch that was padded to a bucket.

    Attributes:
        kinds: What there are counts of: nodes, edges and graphs (of each type).
        counts: How many there are.
        sizes: How many there are with the padding behind them.
        on_device: The counts, int64 ``[kinds]``.
        things: How many of the kinds are no hop prefixes of others.
    """

    kinds: tuple[str, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    on_device: Tensor
    things: int


class HopPrefix(NamedTuple):
    """The padded edges to the first nodes of a sampled mini-batch, sorted by destination.

    Attributes:
        kinds: Which kinds its nodes, its edges and the sources of these are.
        row: Sources, int32 ``[edges]``.
        col: Destinations, int32 ``[edges]``.
        rowptr: Where the edges to each node begin, int32 ``[nodes + 1]``.
        by_row: rowptr, col and edge by source, perhaps.
    """

    kinds: tuple[int, int, int]
    row: Tensor
    col: Tensor
    rowptr: Tensor
    by_row: tuple[Tensor, Tensor, Tensor] | None


class Layout(NamedTuple):
    """An edge list ``[2, num_edges]`` as kernels want it: its rows, and rowptr, col and edge by either row (perhaps not
    by sources).
    """

    row: Tensor
    col: Tensor
    by_col: tuple[Tensor, Tensor, Tensor]
    by_row: tuple[Tensor, Tensor, Tensor] | None


@dataclass(eq=False)
class BatchMetadata:
    """What is known of one tensor.

    Attributes:
        batch: The mini-batch it belongs to, if that was padded.
        rows: Which kind its rows (an edge list's columns) are; None if they are none of them.
        values: Which kind of thing its values number (for an edge list: sources and destinations).
        highest: One more than its highest value (for an edge list: for each row); None where a value is negative.
        make_padded: Makes the padded tensor.
        make_layout: Makes the layout of an edge list: of the padded one, or of the true one.
        make_hop_prefixes: Makes the hop prefixes of a padded edge list.
    """

    batch: Bucketed | None = None
    rows: int | None = None
    values: tuple[int | None, ...] = (None,)
    highest: tuple[int | None, ...] = (None,)
    make_padded: Callable[[], Tensor] | None = None
    make_layout: Callable[[bool], Layout] | None = None
    make_hop_prefixes: Callable[[], tuple[HopPrefix, ...]] | None = None

    @cached_property
    def padded(self) -> Tensor:
        """The padded tensor."""
        assert self.make_padded is not None
        return self.make_padded()

    @cached_property
    def layout(self) -> Layout | None:
        """The layout of the true edge list."""
        return None if self.make_layout is None else self.make_layout(False)

    @cached_property
    def padded_layout(self) -> Layout | None:
        """The layout of the padded edge list."""
        return None if self.make_layout is None else self.make_layout(True)

    @cached_property
    def hop_prefixes(self) -> tuple[HopPrefix, ...]:
        """Those of the padded edge list; none where it has none."""
        return () if self.make_hop_prefixes is None else self.make_hop_prefixes()


class Count(int):
    """A number of rows of a mini-batch, which a compiled model may take for that of the bucket."""

    batch: Bucketed
    kind: int


class _Thread(threading.local):
    batch: Bucketed | None = None


_thread = _Thread()


class padding_to:  # noqa: N801  (used as a function)
    """Compiled models that this thread calls in the block are called with a padded mini-batch."""

    __slots__ = ("_batch", "_outer")

    def __init__(self, batch: Bucketed | None) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        self._outer, _thread.batch = _thread.batch, self._batch

    def __exit__(self, *_: object) -> None:
        _thread.batch = self._outer


def current() -> Bucketed | None:
    """The padded mini-batch that this thread calls compiled models with."""
    return _thread.batch


def unpad(made: Sequence[Any], padded: Sequence[dict[int, int]]) -> list[Any]:
    """Results of a compiled graph without their padding; one that has none any more is itself.

    Args:
        made: The results.
        padded: For each of them, which dimensions are padded, and of which kind they are.
    """
    batch, results = current(), []
    assert batch is not None
    for value, dims in zip(made, padded, strict=True):
        for dim, kind in dims.items():
            if value.size(dim) != batch.counts[kind]:
                value = value.narrow(dim, 0, batch.counts[kind])
        results.append(value)
    return results


def count(batch: Bucketed, kind: int) -> Count:
    """The number of rows of a kind."""
    made = Count(batch.counts[kind])
    made.batch, made.kind = batch, kind
    return made


def attach(value: Tensor, what: BatchMetadata) -> None:
    """Attaches what is known of a tensor to it."""
    setattr(value, _NAME, (what, _state(value)))


def attached(value: Tensor) -> BatchMetadata | None:
    """What is known of a tensor, if it came from a loader and was not changed since."""
    found = getattr(value, _NAME, None)
    return found[0] if found is not None and found[1] == _state(value) else None


def _state(value: Tensor) -> Any:
    version = -1 if value.is_inference() else value._version
    return version, value.data_ptr(), value.shape, value.stride(), value.dtype


def view(memory: Tensor, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """A tensor in the memory of another one, for autograd and Dynamo no view of it.

    Args:
        memory: Any tensor that stands in that memory.
        dtype: Of the tensor.
        start: Byte of the memory at which it begins.
        shape: Its shape.
        stride: Its strides, if it is not contiguous.
    """
    made = torch.empty(0, dtype=dtype, device=memory.device)
    place = memory.untyped_storage(), start // made.element_size(), shape
    with torch.no_grad():
        return made.set_(*place, stride) if stride else made.set_(*place)  # type: ignore[call-overload]
