"""Metadata that a loader attaches to the tensors of a mini-batch.

A tensor of a mini-batch holds the first rows of a longer tensor in the same memory, which is padded to the size of a
bucket. An edge list carries its layouts. The user sees tensors of the valid size. A compiled model that is recorded
takes the padded tensors, so one recording serves all mini-batches of a bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile.layout.side_table import SideTable, version_of


@dataclass(frozen=True, eq=False)
class Bucketed:
    """A mini-batch that was padded to a bucket.

    Attributes:
        kinds: The row types: nodes, edges and graphs (of each type).
        counts: The number of valid rows of each row type.
        sizes: The number of rows of each row type, padding included.
        on_device: The counts, int64 ``[kinds]``.
        things: The number of row types that are no hop prefixes of others. These row types come first.
        memory: The address of the memory of the mini-batch, if its loader uses the memory again; else None.
    """

    kinds: tuple[str, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    on_device: Tensor
    things: int
    memory: int | None = None


@dataclass(frozen=True)
class RowLimit:
    """The numbers of valid rows with which a captured graph may run padded. With others, the model behaves in another
    way: BatchNorm raises an error for one row.

    Attributes:
        kind: The row type.
        name: Its name.
        number: The least number of valid rows, or the one number that is excluded. None is the largest integer among
            the arguments.
        is_excluded: Whether `number` is excluded.
    """

    kind: int
    name: str
    number: int | None
    is_excluded: bool = False

    def is_met(self, batch: Bucketed) -> bool:
        """Whether a mini-batch has such a number of valid rows, or rows of other types."""
        if self.number is None or not self.is_of(batch):
            return True
        count = batch.counts[self.kind]
        return count != self.number if self.is_excluded else count >= self.number

    def is_of(self, batch: Bucketed) -> bool:
        """Whether a mini-batch has the row type."""
        return self.kind < len(batch.kinds) and batch.kinds[self.kind] == self.name

    def __str__(self) -> str:
        return f"{'any number but' if self.is_excluded else 'at least'} {self.number} of {self.name!r}"


class HopPrefix(NamedTuple):
    """The padded edges to the first nodes of a sampled mini-batch, sorted by destination.

    Attributes:
        kinds: The indices of the row types of its nodes, of its edges and of the sources of these edges.
        row: Sources, int32 ``[edges]``.
        col: Destinations, int32 ``[edges]``.
        rowptr: The first edge of each node, int32 ``[nodes + 1]``.
        by_row: rowptr, col and edge sorted by source, or None.
    """

    kinds: tuple[int, int, int]
    row: Tensor
    col: Tensor
    rowptr: Tensor
    by_row: tuple[Tensor, Tensor, Tensor] | None


class Layout(NamedTuple):
    """An edge list ``[2, num_edges]`` in the form that kernels need.

    Attributes:
        row: The first row of the edge list, the sources.
        col: The second row of the edge list, the destinations.
        by_col: rowptr, col and edge sorted by destination.
        by_row: rowptr, col and edge sorted by source, or None.
    """

    row: Tensor
    col: Tensor
    by_col: tuple[Tensor, Tensor, Tensor]
    by_row: tuple[Tensor, Tensor, Tensor] | None


@dataclass(eq=False)
class BatchMetadata:
    """The metadata of one tensor.

    Attributes:
        batch: The padded mini-batch of the tensor; None if the mini-batch was not padded.
        rows: The index of the row type of its rows (of an edge list's columns), or None.
        values: The index of the row type that its values are indices of (for an edge list: of sources and
            destinations).
        highest: The highest value plus one (for an edge list: of each row); None if a value is negative.
        make_padded: Makes the padded tensor.
        make_layout: Makes the layout of an edge list: of the padded list for True, of the valid list for False.
        make_hop_prefixes: Makes the hop prefixes of a padded edge list.
        is_shared: Whether the tensor has the shape that it has in the graph, as weights of classes have. It is not
            padded.
    """

    batch: Bucketed | None = None
    rows: int | None = None
    values: tuple[int | None, ...] = (None,)
    highest: tuple[int | None, ...] = (None,)
    make_padded: Callable[[], Tensor] | None = None
    make_layout: Callable[[bool], Layout] | None = None
    make_hop_prefixes: Callable[[], tuple[HopPrefix, ...]] | None = None
    is_shared: bool = False

    @cached_property
    def padded(self) -> Tensor:
        """The padded tensor."""
        assert self.make_padded is not None
        return self.make_padded()

    @cached_property
    def layout(self) -> Layout | None:
        """The layout of the valid edge list, or None."""
        return None if self.make_layout is None else self.make_layout(False)

    @cached_property
    def padded_layout(self) -> Layout | None:
        """The layout of the padded edge list, or None."""
        return None if self.make_layout is None else self.make_layout(True)

    @cached_property
    def hop_prefixes(self) -> tuple[HopPrefix, ...]:
        """The hop prefixes of the padded edge list; empty if it has none."""
        return () if self.make_hop_prefixes is None else self.make_hop_prefixes()


_attached: SideTable[tuple[BatchMetadata, Any]] = SideTable()
"""The metadata of tensors, each with the state of its tensor at the time."""


class Count(int):
    """The number of valid rows of a row type. A compiled model may replace it by the number of rows of the bucket."""

    batch: Bucketed
    kind: int


class _Thread(threading.local):
    batch: Bucketed | None = None


_thread = _Thread()


class padding_to:  # noqa: N801  (used as a function)
    """A context manager: compiled models that this thread calls inside it get a padded mini-batch."""

    __slots__ = ("_batch", "_outer")

    def __init__(self, batch: Bucketed | None) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        self._outer, _thread.batch = _thread.batch, self._batch

    def __exit__(self, *_: object) -> None:
        _thread.batch = self._outer


def current() -> Bucketed | None:
    """Returns the padded mini-batch with which this thread calls compiled models, or None."""
    return _thread.batch


def unpad(made: Sequence[Any], padded: Sequence[dict[int, int]]) -> list[Any]:
    """Returns the results of a compiled graph without padding. A result without padding is returned itself.

    Args:
        made: The results.
        padded: For each result, its padded dimensions and the index of the row type of each.
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
    """Returns the number of valid rows of a row type, as a :class:`Count`."""
    made = Count(batch.counts[kind])
    made.batch, made.kind = batch, kind
    return made


def attach(value: Tensor, what: BatchMetadata) -> None:
    """Attaches metadata to a tensor."""
    _attached.set(value, (what, _state(value)))


def attached(value: Tensor) -> BatchMetadata | None:
    """Returns the metadata of a tensor; None if no loader attached any, or if the tensor was changed since."""
    found = _attached.get(value)
    return found[0] if found is not None and found[1] == _state(value) else None


def _state(value: Tensor) -> Any:
    version = version_of(value)
    return version, value.data_ptr(), value.shape, value.stride(), value.dtype


def view(memory: Tensor, dtype: torch.dtype, start: int, shape: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """Returns a tensor in the memory of another tensor. Autograd and Dynamo do not take it for a view.

    Args:
        memory: Any tensor in that memory.
        dtype: The dtype of the result.
        start: The byte of the memory at which the result begins.
        shape: The shape of the result.
        stride: The strides of the result, if it is not contiguous.
    """
    made = torch.empty(0, dtype=dtype, device=memory.device)
    place = memory.untyped_storage(), start // made.element_size(), shape
    with torch.no_grad():
        return made.set_(*place, stride) if stride else made.set_(*place)  # type: ignore[call-overload]
