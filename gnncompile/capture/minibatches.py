"""Takes apart the tensors of a mini-batch of :func:`gnncompile.loader`, with the metadata that the loader attached.

An edge list enters with its layouts. If the call is padded to the mini-batch's bucket, padded tensors enter. They are
marked as padded for :mod:`gnncompile.passes.padded.mask_padding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile.layout.batch_metadata import BatchMetadata, Bucketed, Count, HopPrefix, Layout

_OPS: Any = torch.ops.gnncompile


class Unpadded(Exception):  # noqa: N818  (no error: the call runs unpadded)
    """A call can't be padded; the message is the reason."""


class Known(NamedTuple):
    """An index with its number of segments, which the loader attached: `carrier` is ``[num_segments, 0]``."""

    numbered: Tensor
    carrier: Tensor


class LaidOut(NamedTuple):
    """An edge list as its two rows, with rowptr, col and edge by destination, then perhaps by source."""

    row: Tensor | Known
    col: Tensor | Known
    layout: tuple[Tensor, ...]


class LaidOutIndex(NamedTuple):
    """An index with its CSR layout: rowptr, col and edge by segment."""

    numbered: Tensor | Known
    layout: tuple[Tensor, ...]


class Padded(NamedTuple):
    """A padded tensor.

    Attributes:
        padded: The tensor, with its number of segments if the model needs it.
        rows: The row type of its rows.
        values: The row type that its values index; -1 for none.
        layout: rowptr, col and edge by its values; empty if it has no layout.
    """

    padded: Tensor | Known
    rows: int
    values: int
    layout: tuple[Tensor, ...]


class PaddedNumber(NamedTuple):
    """The padded number of rows of a row type: `carrier` is ``[number, 0]``, and `rows` is the row type."""

    carrier: Tensor
    rows: int


class PaddedHopPrefixes(NamedTuple):
    """The hop prefixes of an edge list: the edges to the first nodes, the edges to all sources of these, and so on.

    Attributes:
        kind: The row type of the first hop's nodes. From there on, row types of nodes and of edges alternate.
        sizes: One tensor ``[num_nodes, 0]`` per row type of nodes.
        edges: Per row type of edges: sources, destinations, rowptr, then perhaps rowptr, col and edge by source.
    """

    kind: int
    sizes: tuple[Tensor, ...]
    edges: tuple[tuple[Tensor, ...], ...]


class PaddedEdges(NamedTuple):
    """A padded edge list.

    Attributes:
        row: Sources, ``[padded num_edges]``.
        col: Destinations, ``[padded num_edges]``.
        layout: rowptr, col and edge by destination, then perhaps by source; empty if it has no layout.
        rows: The row type of its edges.
        sources: The row type of its sources.
        destinations: The row type of its destinations.
        hop_prefixes: Its hop prefixes, or None.
    """

    row: Tensor
    col: Tensor
    layout: tuple[Tensor, ...]
    rows: int
    sources: int
    destinations: int
    hop_prefixes: PaddedHopPrefixes | None


def laid_out(layout: Layout, what: BatchMetadata, wanted: Callable[[str], bool]) -> LaidOut:
    """Takes an unpadded edge list apart, with its layouts.

    Args:
        layout: Its rows and CSR layouts.
        what: The loader's metadata of the edge list.
        wanted: Whether the model needs the number of segments of a row, given ``"row"`` or ``"col"``.
    """
    rows: list[Tensor | Known] = [layout.row, layout.col]
    for k, name in enumerate(("row", "col")):
        highest = what.highest[k]
        if highest is not None and wanted(name):
            rows[k] = Known(rows[k], _carrier(highest, layout.row))  # type: ignore[arg-type]
    return LaidOut(rows[0], rows[1], _both(layout))


def known(value: Tensor, what: BatchMetadata, wanted: bool) -> Known | LaidOutIndex | Tensor | None:
    """Takes an unpadded index apart; None if its number of segments is needed and the loader does not know it."""
    if wanted and what.highest[0] is None:
        return None
    index = Known(value, _carrier(what.highest[0], value)) if wanted and what.highest[0] is not None else value
    return index if what.layout is None else LaidOutIndex(index, what.layout.by_col)


def padded(value: Tensor, what: BatchMetadata | None, batch: Bucketed, name: str, wanted: bool) -> Any:
    """Takes apart a tensor of a call that is padded.

    Args:
        value: The tensor as the user sees it, unpadded.
        what: The loader's metadata of the tensor, or None.
        batch: The mini-batch that the other arguments belong to.
        name: The place of the tensor in the arguments.
        wanted: Whether the model needs its number of segments.

    Returns:
        A :class:`Padded` or :class:`PaddedEdges`. A 0-dimensional tensor as it is, and one that all mini-batches share.

    Raises:
        Unpadded: The tensor can't be padded, for example because it belongs to another mini-batch.
    """
    if what is not None and what.is_shared:
        return value
    if what is None or what.batch is not batch:
        if value.dim() == 0:
            return value
        raise Unpadded(f"{name} is not of the loader's mini-batch (make it there: with a transform of the dataset)")
    if value.requires_grad:
        raise Unpadded(f"{name} wants a gradient")
    if what.rows is None:
        if value.dim() == 0:
            return value
        raise Unpadded(f"the rows of {name} are no nodes, edges or graphs")
    if len(what.values) == 2:
        sources, destinations = what.values
        if wanted or sources is None or destinations is None:
            raise Unpadded(f"{name} has to say how many nodes there are (pass their number)")
        limits = batch.counts[sources], batch.counts[destinations]
        if any(most is None or most > limit for most, limit in zip(what.highest, limits, strict=True)):
            raise Unpadded(f"{name} has ends that are no nodes")
        layout = what.padded_layout
        if layout is None:
            return PaddedEdges(
                what.padded[0].detach(), what.padded[1].detach(), (), what.rows, sources, destinations, None
            )
        hop_prefixes = _hop_prefixes(what.hop_prefixes, batch) if what.hop_prefixes else None
        return PaddedEdges(layout.row, layout.col, _both(layout), what.rows, sources, destinations, hop_prefixes)
    kind, highest = what.values[0], what.highest[0]
    if kind is not None and (highest is None or highest > batch.counts[kind]):
        raise Unpadded(f"{name} numbers what there is not")
    if not wanted:
        return Padded(what.padded, what.rows, -1 if kind is None else kind, _parts(what.padded_layout))
    if kind is None or highest != batch.counts[kind]:
        raise Unpadded(f"the last of what {name} numbers does not occur in it")
    whole = Known(what.padded, _carrier(batch.sizes[kind], what.padded))
    return Padded(whole, what.rows, kind, _parts(what.padded_layout))


def padded_number(value: int, batch: Bucketed, largest: int, name: str) -> int | PaddedNumber:
    """Takes apart an integer of a call that is padded: the loader's counts become padded, others stay as they are.

    Raises:
        Unpadded: The integer may be a size of the mini-batch.
    """
    if isinstance(value, Count) and value.batch is batch:
        return PaddedNumber(_carrier(batch.sizes[value.kind], batch.on_device), value.kind)
    things = batch.counts[: batch.things]
    if not isinstance(value, bool) and value in things:
        raise Unpadded(f"{name} is {value}, as there are {batch.kinds[things.index(value)]}")
    if value > largest or value < 0:
        raise Unpadded(f"{name} is {value}, and the model may take so many rows")
    return value


def _hop_prefixes(hop_prefixes: tuple[HopPrefix, ...], batch: Bucketed) -> PaddedHopPrefixes:
    kinds = [*(hop_prefix.kinds[0] for hop_prefix in hop_prefixes), hop_prefixes[-1].kinds[2]]
    sizes = tuple([_carrier(batch.sizes[kind], hop_prefixes[0].row) for kind in kinds])
    return PaddedHopPrefixes(
        kinds[0], sizes, tuple([(f.row, f.col, f.rowptr, *(f.by_row or ())) for f in hop_prefixes])
    )


def _both(layout: Layout) -> tuple[Tensor, ...]:
    return (*layout.by_col, *(layout.by_row or ()))


def _parts(layout: Layout | None) -> tuple[Tensor, ...]:
    return () if layout is None else layout.by_col


def _carrier(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, 0, device=like.device)


def join(value: Any, counts: Tensor | None) -> Any:
    """The inverse of the functions here, traced by Dynamo: the tensor or integer that the model sees."""
    if isinstance(value, Known):
        return _OPS.sized(value.numbered, value.carrier)
    if isinstance(value, LaidOut):
        row, col = [_OPS.sized(*end) if isinstance(end, Known) else end for end in (value.row, value.col)]
        return torch.stack(_OPS.laid_out(row, col, value.layout))
    if isinstance(value, LaidOutIndex):
        index = join(value.numbered, counts) if isinstance(value.numbered, Known) else value.numbered
        return _OPS.laid_out(index, index, value.layout)[0]
    if isinstance(value, PaddedNumber):
        return _OPS.padded(value.carrier, counts, value.rows, -1).size(0)
    if isinstance(value, PaddedEdges):
        row = _OPS.padded(value.row, counts, value.rows, value.sources)
        col = _OPS.padded(value.col, counts, value.rows, value.destinations)
        if len(value.layout) > 0:
            row, col = _OPS.laid_out(row, col, value.layout)
        if value.hop_prefixes is not None:
            row, col = _join_hop_prefixes(row, col, value.hop_prefixes, counts)
        return torch.stack([row, col])
    return _join_padded(value, counts)


def _join_hop_prefixes(row: Any, col: Any, hop_prefixes: PaddedHopPrefixes, counts: Tensor | None) -> tuple[Any, Any]:
    kinds = range(hop_prefixes.kind, hop_prefixes.kind + 2 * len(hop_prefixes.sizes), 2)
    sizes = [_OPS.padded(size, counts, kind, -1) for size, kind in zip(hop_prefixes.sizes, kinds, strict=True)]
    for at, (first, second, *parts) in enumerate(hop_prefixes.edges):
        nodes, edges, sources = kinds[at], kinds[at] + 1, kinds[at] + 2
        ends = _OPS.padded(first, counts, edges, sources), _OPS.padded(second, counts, edges, nodes)
        row, col = _OPS.hop_prefix(row, col, sizes[at], sizes[at + 1], [*ends, *parts])
    return row, col


def _join_padded(value: Padded, counts: Tensor | None) -> Any:
    given = value.padded
    made = _OPS.padded(given.numbered if isinstance(given, Known) else given, counts, value.rows, value.values)
    if isinstance(given, Known):
        made = _OPS.sized(made, _OPS.padded(given.carrier, counts, value.values, -1))
    if len(value.layout) > 0:
        made = _OPS.laid_out(made, made, value.layout)[0]
    return made


KINDS = (Known, LaidOut, LaidOutIndex, Padded, PaddedEdges, PaddedNumber)
"""The classes that :func:`join` takes."""
