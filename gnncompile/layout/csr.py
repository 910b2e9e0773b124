"""Builds CSR layouts, and checks the indices while it reads them.

On a GPU the check must not wait for the device, so a bad index raises one call late
(:mod:`gnncompile.layout.bad_indices`). Until then bad edges are treated as masked out: nothing is read or written
outside a tensor.

The host learns the number of hubs of a layout (:class:`Hubs`) in the background too. Until then, kernels are launched
for the largest possible number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError
from gnncompile.layout import bad_indices
from gnncompile.layout.arriving import Arriving
from gnncompile.layout.side_table import SideTable, version_of
from gnncompile.layout.streams import Ordered

MAX_INDEX = 2**31 - 1 - 2**13
"""The largest number of rows or edges. Kernels count in int32, and may count up to one step of a loop past the end."""

NO_HUBS = (0, 0)
"""The numbers of hubs and of pieces of a layout that has no hubs, even with one more edge for each row."""


@dataclass
class Hubs:
    """The hubs among the rows of a layout, for the launcher of GPU kernels.

    Attributes:
        rows: The rows with most edges, by falling degree, int32 ``[most hubs for this number of edges, 3]``. Each entry
            is the row, its first piece and its number of pieces (0 for rows that are no hubs).
        pieces: The index in `rows` to which each piece belongs, -1 after the last piece, int32 ``[most pieces]``.
        version: The version of the rowptr when the lists were made from it.
        number: The numbers of hubs and of pieces; None while the host does not know them.
        most_edges: The most edges of a row that is no hub, and of a piece.
        order: Lets streams wait for the lists, other than the stream on which the lists were made.
    """

    rows: Tensor
    pieces: Tensor
    version: int
    number: tuple[int, int] | None
    most_edges: int
    _arriving: Arriving | None
    order: Ordered | None = None

    def programs(self) -> tuple[int, int]:
        """Returns the numbers of hubs and of pieces to launch for, without a sync.

        Until the host knows the numbers, these are the largest possible numbers.
        """
        arriving = self._arriving
        # While a CUDA graph is captured, no event may be queried.
        if arriving is not None and not torch.cuda.is_current_stream_capturing() and arriving.done.query():
            self.number, self._arriving = _pair(arriving.host), None
        return self.number or (self.rows.size(0), self.pieces.size(0))


@dataclass
class _Rows:
    """The row of each edge of a layout, and the version of the rowptr that it was made from."""

    rows: Tensor
    version: int
    order: Ordered | None


Find = Callable[[Tensor, int, int], Hubs]
"""Finds the hubs of a rowptr, given the largest possible number of them and the number of edges."""

_hubs: SideTable[Hubs] = SideTable()
"""The hubs of layouts, by rowptr."""
_rows: SideTable[_Rows] = SideTable()
"""The row of each edge of layouts, by rowptr."""


def csr(
    index: Tensor,
    other: Tensor,
    num_rows: int,
    num_columns: int,
    alive: Tensor | None,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the layout of the edges, sorted by `index`, stably.

    Args:
        index: The row of each edge, ``[num_edges]``, int64 or int32.
        other: The other end of each edge, ``[num_edges]``.
        num_rows: The number of rows; valid values of `index` are below it.
        num_columns: The number of columns; valid values of `other` are below it.
        alive: Edges to keep, bool ``[num_edges]``; the other edges go after the last row.
        wrap_rows: Whether negative entries of `index` count from the end, as in Python's indexing.
        wrap_columns: Whether negative entries of `other` count from the end.

    Returns:
        rowptr ``[num_rows + 1]``, col ``[num_edges]``, edge ``[num_edges]``, all int32.

    Raises:
        IndexError: An index is out of range (on a GPU: at a later call).
    """
    num_edges = index.numel()
    check_sizes(num_edges, num_rows, num_columns)
    wraps = wrap_rows, wrap_columns
    bad = out_of_range(index, other, (num_rows, num_columns), wraps)
    bad_indices.report(bad, index, other, (num_rows, num_columns))
    index = _wrapped(index, num_rows) if wrap_rows else index
    other = _wrapped(other, num_columns) if wrap_columns else other
    found = sorted_edges(index, other, num_rows, num_columns, bad if alive is None else bad | ~alive)
    attach_hubs(found[0], num_edges)
    return found


def out_of_range(index: Tensor, other: Tensor, limits: tuple[int, int], wraps: tuple[bool, bool]) -> Tensor:
    """Returns whether an end of each edge is outside of the graph, bool ``[num_edges]``.

    Args:
        index: The row of each edge, ``[num_edges]``.
        other: The other end of each edge, ``[num_edges]``.
        limits: The number of rows and the number of columns.
        wraps: Whether negative entries of `index` and of `other` count from the end.
    """
    lowest = [-limit if wrap else 0 for limit, wrap in zip(limits, wraps, strict=True)]
    return (index < lowest[0]) | (index >= limits[0]) | (other < lowest[1]) | (other >= limits[1])


def sorted_edges(
    index: Tensor, other: Tensor, num_rows: int, num_columns: int, masked: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the layout of :func:`csr`.

    Args:
        index: The row of each edge, ``[num_edges]``. Rows of masked edges may be any number.
        other: The other end of each edge, ``[num_edges]``. Ends of masked edges may be any number.
        num_rows: The number of rows.
        num_columns: The number of columns.
        masked: The edges that go after the last row, where no kernel reads, bool ``[num_edges]``.
    """
    row = torch.where(masked, num_rows, index).to(torch.int32)
    row, order = torch.sort(row, stable=True)
    # Counting by search keeps this free of atomics and of a data-dependent size.
    rowptr = torch.searchsorted(row, torch.arange(num_rows + 1, device=row.device, dtype=torch.int32), out_int32=True)
    col = other.clamp(0, max(num_columns - 1, 0)).to(torch.int32)[order]
    return rowptr, col, order.to(torch.int32)


def check_sizes(num_edges: int, num_rows: int, num_columns: int) -> None:
    """Raises ValueError if a graph has more edges, rows or columns than kernels can count."""
    if max(num_edges, num_rows, num_columns) > MAX_INDEX:
        raise ArgumentError(f"graph with {num_edges} edges: kernels index with int32, at most {MAX_INDEX} are possible")


def _wrapped(index: Tensor, size: int) -> Tensor:
    """Returns an index whose negative entries are replaced by the rows that they stand for."""
    if not device_of(index.device).host_waits and (not index.numel() or int(index.min()) >= 0):
        return index
    return torch.where(index < 0, index + size, index)


def with_loops(
    rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layout with a self loop after the edges of each row, without a sort.

    The result is the same as that of :func:`csr` for the edges followed by the loops.

    Args:
        rowptr: ``[num_rows + 1]``, int32.
        col: ``[num_edges]``, int32.
        edge: ``[num_edges]``, int32.
        index: The row of each edge, in the order of the edges, ``[num_edges]``. Not read: the layout tells the rows.
        alive: Edges to keep, in that order, bool ``[num_edges]``; the other edges go after the last row.

    Returns:
        rowptr ``[num_rows + 1]``, col and edge ``[num_edges + num_rows]``; the loops are the last edges.
    """
    # Not index[edge]: masked edges have no row in the layout, and on a GPU an index may still be out of range.
    row = _search_rows(rowptr, edge.numel())
    starts, places, columns, edges = loops_added(rowptr, col, edge, row, alive)
    new_col = torch.empty_like(columns).scatter_(0, places, columns)
    new_edge = torch.empty_like(edges).scatter_(0, places, edges)
    attach_hubs_with_loops(rowptr, starts, new_edge.numel())
    return starts, new_col, new_edge


def loops_added(
    rowptr: Tensor, col: Tensor, edge: Tensor, row: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the rowptr of :func:`with_loops`, the places of edges and loops in it, and `col` and `edge` with loops at
    their ends. The sizes may be symbols.

    Args:
        rowptr: ``[num_rows + 1]``, int32.
        col: ``[num_edges]``, int32.
        edge: ``[num_edges]``, int32.
        row: The row of each edge in the order of the layout, int32 ``[num_edges]``.
        alive: Edges to keep, by their numbers in `edge`, bool ``[num_edges]``.
    """
    num_edges, num_rows = edge.size(0), rowptr.size(0) - 1
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=rowptr.device)
    place = torch.arange(num_edges, dtype=torch.int32, device=rowptr.device)
    if alive is None:
        starts, places = rowptr + rows, place + row
    else:
        keep = alive[edge] & (row < num_rows)
        before = torch.nn.functional.pad(keep.cumsum(0, dtype=torch.int32), (1, 0))
        starts = before[rowptr] + rows
        places = torch.where(keep, before[:-1] + row, starts[-1] + place - before[:-1])
    places = torch.cat([places, first_edges(starts)[1] - 1]).long()
    loops = torch.arange(num_edges, num_edges + num_rows, dtype=torch.int32, device=rowptr.device)
    return starts, places, torch.cat([col, first_edges(rows)[0]]), torch.cat([edge, loops])


def attach_hubs(rowptr: Tensor, num_edges: int, find: Find | None = None) -> None:
    """Gives the rowptr of a new layout its lists of hubs, where they are found early.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        num_edges: The number of edges of the layout, masked edges included.
        find: Finds the hubs; None finds them with operations of torch's.
    """
    most = most_hubs(rowptr.numel() - 1, num_edges)
    if most and device_of(rowptr.device).finds_hubs_early:
        _hubs.set(rowptr, (find or _find_hubs)(rowptr, most, num_edges))


def attach_hubs_with_loops(rowptr: Tensor, with_loops: Tensor, num_edges: int, find: Find | None = None) -> None:
    """The same for a layout with self loops.

    Args:
        rowptr: The layout without them.
        with_loops: The layout with them.
        num_edges: The number of edges of the layout with them.
        find: Finds the hubs.
    """
    known = given_hubs(rowptr)
    if known is not None and known.number == NO_HUBS:
        give_hubs(with_loops, known.rows, known.pieces, NO_HUBS, known.most_edges)
    else:
        attach_hubs(with_loops, num_edges, find)


def most_edges(num_edges: int) -> int:
    """Returns the most edges of a row that is no hub: a power of two, by the number of edges of the graph.

    A GPU reduces a hub in pieces of this many edges, with a program for each (the last piece may have fewer).
    """
    tiles = tuning.TILES
    return max(tiles.hub_edges, 1 << max(num_edges // tiles.hub_share, 1).bit_length() - 1)


def hubs(rowptr: Tensor, num_edges: int) -> Hubs | None:
    """Returns the hubs of a layout, or None if it has too few edges for a hub.

    The lists that :func:`csr` made are in a side table, by rowptr, since compiled graphs pass layouts as plain tensors.
    A rowptr that has no lists, or was changed since, gets new lists here.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        num_edges: The number of edges of the layout, masked edges included.
    """
    if num_edges <= tuning.TILES.hub_edges:
        return None
    found = given_hubs(rowptr)
    if found is not None and found.version == version_of(rowptr):
        if found.order is not None:
            found.order.follow()
        return found
    most = most_hubs(rowptr.size(0) - 1, num_edges)
    if not most:
        return None
    found = _find_hubs(rowptr, most, num_edges)
    # Lists made while a CUDA graph is captured belong to the graph, which makes them again at every replay.
    if not device_of(rowptr.device).is_capturing:
        _hubs.set(rowptr, found)
    return found


def give_hubs(rowptr: Tensor, rows: Tensor, pieces: Tensor, number: tuple[int, int] | None, most_edges: int) -> None:
    """Gives the rowptr of a layout its lists of hubs; see :class:`Hubs` for the arguments."""
    _hubs.set(rowptr, Hubs(rows, pieces, version_of(rowptr), number, most_edges, None))


def given_hubs(rowptr: Tensor) -> Hubs | None:
    """Returns the hubs that a tensor was given, or None."""
    return _hubs.get(rowptr)


def rows_of_edges(rowptr: Tensor, num_edges: int) -> Tensor:
    """Returns the row of each edge in the order of a layout, int32 ``[num_edges]``.

    Masked edges get the index after the last row. The tensor is made once for a layout and kept by rowptr, as the hubs
    are.
    """
    found = _rows.get(rowptr)
    if found is not None and found.version == version_of(rowptr):
        if found.order is not None:
            found.order.follow()
        return found.rows
    rows = _search_rows(rowptr, num_edges)
    if not device_of(rowptr.device).is_capturing:
        _rows.set(rowptr, _Rows(rows, version_of(rowptr), Ordered.after([rows])))
    return rows


def _search_rows(rowptr: Tensor, num_edges: int) -> Tensor:
    positions = torch.arange(num_edges, dtype=torch.int32, device=rowptr.device)
    return torch.searchsorted(rowptr[1:], positions, right=True, out_int32=True)


def find_rows(rowptr: Tensor, num_edges: int) -> Tensor:
    """Returns the tensor of :func:`rows_of_edges`. The sizes may be symbols.

    Inductor's search takes no view that begins within a tensor, so this searches all of rowptr.
    """
    positions = torch.arange(num_edges, dtype=torch.int32, device=rowptr.device)
    return torch.searchsorted(rowptr, positions, right=True, out_int32=True) - 1


def first_edges(rowptr: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the place of the first edge of each row, and of each next row, ``[num_rows]``: views of a rowptr.

    Inductor of torch 2.11 can't slice a tensor whose number of rows depends on data.
    """
    size, at = (rowptr.size(0) - 1,), rowptr.storage_offset()
    return rowptr.as_strided(size, (1,), at), rowptr.as_strided(size, (1,), at + 1)


def most_hubs(num_rows: int, num_edges: int) -> int:
    """Returns the largest possible number of hubs of a layout."""
    return min(num_edges // (most_edges(num_edges) + 1), num_rows)


def _find_hubs(rowptr: Tensor, most: int, num_edges: int) -> Hubs:
    """Returns the `most` longest rows and their pieces. The longest row comes first, so that it is started first."""
    longest = most_edges(num_edges)
    degree, rows = torch.topk(rowptr.diff(), most)
    pieces = torch.where(degree > longest, (degree + (longest - 1)) // longest, 0)
    ends = pieces.cumsum(0)
    table = torch.stack([rows, ends - pieces, pieces], 1).int()
    ids = torch.arange(num_edges // longest + most, device=rowptr.device)
    owner = torch.where(ids < ends[-1], torch.searchsorted(ends, ids, right=True), -1).int()
    return hubs_of(rowptr, table, owner, torch.stack([(degree > longest).sum(), ends[-1]]), longest)


def hubs_of(rowptr: Tensor, rows: Tensor, pieces: Tensor, number: Tensor, most_edges: int) -> Hubs:
    """Returns the hubs of a layout whose lists were just made on the current stream.

    Args:
        rowptr: The rowptr of the layout.
        rows: See :class:`Hubs`, as for `pieces` and `most_edges`.
        pieces: See there.
        number: The numbers of hubs and of pieces, ``[2]``, or ``[4]`` with two parts of each.
        most_edges: See there.
    """
    version = version_of(rowptr)
    if not device_of(number.device).host_waits:
        return Hubs(rows, pieces, version, _pair(number), most_edges, None)
    arriving = None if device_of(rowptr.device).is_capturing else Arriving.of(number)
    return Hubs(rows, pieces, version, None, most_edges, arriving, Ordered.after([rows, pieces]))


def _pair(numbers: Tensor) -> tuple[int, int]:
    found: list[int] = numbers.tolist()
    half = len(found) // 2
    return sum(found[:half]), sum(found[half:])


def inverse_degree(rowptr: Tensor, dtype: str) -> Tensor:
    """Returns ``1 / max(num_edges, 1)`` of every row: ``[num_rows]``, "float32" or "float64"."""
    begins, ends = first_edges(rowptr)
    degree = (ends - begins).clamp(min=1)
    return degree.to(getattr(torch, dtype)).reciprocal()
