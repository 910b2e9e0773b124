"""Builds CSR layouts, and checks the indices while it reads them.

On a GPU the check must not wait for the device: its result is copied to the host in the background and looked at when
the next layout is built or the next step starts (:func:`check_pending`), so a bad index raises one call late there.
Until then bad edges are treated as masked out: nothing is read or written outside a tensor. In the same way the host
learns how many hubs a layout has (:class:`Hubs`): until it knows, kernels are launched for as many as there can be.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, IndexOutOfRangeError
from gnncompile.layout.streams import Ordered

MAX_INDEX = 2**31 - 1 - 2**13
"""Most rows and edges: kernels count in int32, and may count up to one step of a loop past the end."""

HUB = 128
"""A row with more edges than this is a hub: on a GPU it is cut into pieces of so many edges (the last one may have
fewer), for which programs of their own work out what they reduce to. Measured on an H200 with 2.3M edges, the longest
row 13,000, 128 channels: a sum takes 222 us with 128, 237 with 256, 329 with 1024. On graphs of very many edges the
limit is higher (see :func:`most_edges`)."""

LAST_ROW = 2**16
"""A row with fewer edges than one in so many of all is no hub: the device waits little for the last such row, less than
pieces cost. In milliseconds on an H200, a sum of 128 channels in float32 by the limit, which is 1024 for these graphs
(with the tile for few edges per row; with the one that they have it takes 6.7 and 13.5):

=========================  =====  =====  =====  =====  =====  =====
edges; rows                128    256    512    1024   2048   4096
=========================  =====  =====  =====  =====  =====  =====
115M; 233,000              11.91  11.75  9.26   8.91   8.95   9.22
124M; 2.4M                 14.82  14.28  14.16  14.17  14.27  14.58
=========================  =====  =====  =====  =====  =====  =====
"""

NO_HUBS = (0, 0)
"""The number of hubs, and of their pieces, where there are none, nor with one edge more for each row."""

_HUBS = "_gnncompile_hubs"
_ROWS = "_gnncompile_rows"


@dataclass(frozen=True)
class _Arriving:
    """Numbers on their way from a device to the host."""

    host: Tensor
    done: torch.cuda.Event

    @staticmethod
    def of(value: Tensor) -> _Arriving:
        """Starts the copy of numbers that are on a GPU, behind the work on its current stream."""
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(value.device))
        return _Arriving(host, done)


@dataclass(frozen=True)
class _Pending:
    bad: _Arriving
    limits: tuple[int, int] | None


@dataclass
class Hubs:
    """The hubs among the rows of a layout, for the launcher of GPU kernels.

    Attributes:
        rows: Of the rows with most edges, by falling degree: row, first piece, number of pieces (0 for rows that are no
            hubs), int32 ``[most hubs that so many edges can have, 3]``.
        pieces: To which place in `rows` a piece belongs, -1 behind the last piece, int32 ``[most pieces]``.
        version: Of the rowptr that the lists were made from, at that time.
        number: How many hubs and pieces there are; None while the host does not know.
        most_edges: Of a row that is no hub, and of a piece.
        order: Lets other streams than the one that the lists were made on wait for them.
    """

    rows: Tensor
    pieces: Tensor
    version: int
    number: tuple[int, int] | None
    most_edges: int
    _arriving: _Arriving | None
    order: Ordered | None = None

    def programs(self) -> tuple[int, int]:
        """For how many hubs and pieces to launch: as many as there can be until their numbers are known. No sync."""
        arriving = self._arriving
        # While a CUDA graph is captured no event may be asked.
        if arriving is not None and not torch.cuda.is_current_stream_capturing() and arriving.done.query():
            self.number, self._arriving = _pair(arriving.host), None
        return self.number or (self.rows.size(0), self.pieces.size(0))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or pickled rowptr has no list, and gets one of its own when it is used."""
        return type(None), ()


@dataclass
class _Rows:
    """The row of each edge of a layout, and the version of the rowptr that it was made from."""

    rows: Tensor
    version: int
    order: Ordered | None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """As that of :class:`Hubs`."""
        return type(None), ()


_pending: deque[_Pending] = deque()
_flags: dict[torch.device, Tensor] = {}
"""Whether a layout that a CUDA graph built had a bad index, on each GPU."""
_lock = threading.Lock()


def csr(
    index: Tensor,
    other: Tensor,
    num_rows: int,
    num_columns: int,
    alive: Tensor | None,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The edges ordered by `index`, stably.

    Args:
        index: The row of each edge, ``[num_edges]``, int64 or int32.
        other: The other end of each edge, ``[num_edges]``.
        num_rows: Valid values of `index` are below it.
        num_columns: Valid values of `other` are below it.
        alive: Edges to keep, bool ``[num_edges]``; the rest goes behind the last row.
        wrap_rows: Whether negative entries of `index` count from the end, as in Python's indexing.
        wrap_columns: Whether negative entries of `other` do.

    Returns:
        rowptr ``[num_rows + 1]``, col ``[num_edges]``, edge ``[num_edges]``, all int32.

    Raises:
        IndexError: An index is out of range (on a GPU: at a later call).
    """
    num_edges = index.numel()
    if max(num_edges, num_rows, num_columns) > MAX_INDEX:
        raise ArgumentError(f"graph with {num_edges} edges: kernels index with int32, at most {MAX_INDEX} are possible")
    lowest = -num_rows if wrap_rows else 0, -num_columns if wrap_columns else 0
    bad = (index < lowest[0]) | (index >= num_rows) | (other < lowest[1]) | (other >= num_columns)
    _report(bad, index, other, (num_rows, num_columns))
    index = _wrapped(index, num_rows) if wrap_rows else index
    other = _wrapped(other, num_columns) if wrap_columns else other
    masked = bad if alive is None else bad | ~alive
    # Masked edges sort behind the last row, where no kernel looks.
    row = torch.where(masked, num_rows, index).to(torch.int32)
    row, order = torch.sort(row, stable=True)
    # Counting by search keeps this free of atomics and of a data-dependent size.
    rowptr = torch.searchsorted(row, torch.arange(num_rows + 1, device=row.device, dtype=torch.int32), out_int32=True)
    _attach_hubs(rowptr, num_edges)
    return rowptr, other.clamp(0, max(num_columns - 1, 0)).to(torch.int32)[order], order.to(torch.int32)


def _wrapped(index: Tensor, size: int) -> Tensor:
    """An index whose negative entries are replaced by the rows that they stand for."""
    if index.device.type == "cpu" and (not index.numel() or int(index.min()) >= 0):
        return index  # a GPU is not asked: the host would wait
    return torch.where(index < 0, index + size, index)


def with_loops(
    rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A layout with a self loop behind the edges of each row, without a sort: what :func:`csr` makes of all of them.

    Args:
        rowptr: ``[num_rows + 1]``, int32.
        col: ``[num_edges]``, int32.
        edge: ``[num_edges]``, int32.
        index: The row of each edge, in the order of the edges, ``[num_edges]``.
        alive: Edges to keep, in that order, bool ``[num_edges]``; the rest goes behind the last row.

    Returns:
        rowptr ``[num_rows + 1]``, col and edge ``[num_edges + num_rows]``; the loops are the last edges.
    """
    num_edges, num_rows = edge.numel(), rowptr.numel() - 1
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=rowptr.device)
    place = torch.arange(num_edges, dtype=torch.int32, device=rowptr.device)
    row = index[edge].to(torch.int32)
    if alive is None:
        starts, places = rowptr + rows, place + row
    else:
        keep = alive[edge]
        before = torch.nn.functional.pad(keep.cumsum(0, dtype=torch.int32), (1, 0))
        starts = before[rowptr] + rows
        places = torch.where(keep, before[:-1] + row, starts[-1] + place - before[:-1])
    places = torch.cat([places, starts[1:] - 1]).long()
    loops = torch.arange(num_edges, num_edges + num_rows, dtype=torch.int32, device=rowptr.device)
    new_col, new_edge = torch.empty_like(places, dtype=torch.int32), torch.empty_like(places, dtype=torch.int32)
    new_col.scatter_(0, places, torch.cat([col, rows[:-1]]))
    new_edge.scatter_(0, places, torch.cat([edge, loops]))
    known = given_hubs(rowptr)
    if known is not None and known.number == NO_HUBS:
        give_hubs(starts, known.rows, known.pieces, NO_HUBS, known.most_edges)
    else:
        _attach_hubs(starts, num_edges + num_rows)
    return starts, new_col, new_edge


def _attach_hubs(rowptr: Tensor, num_edges: int) -> None:
    most = _most_hubs(rowptr.numel() - 1, num_edges)
    if most and rowptr.device.type != "cpu":  # kernels for the CPU don't ask
        setattr(rowptr, _HUBS, _find_hubs(rowptr, most, num_edges))


def _report(bad: Tensor, index: Tensor, other: Tensor, limits: tuple[int, int]) -> None:
    if bad.device.type == "cpu":
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            _raise((int(index[at]), int(other[at])), limits, at, index is other)
        return
    if _capturing(bad):
        flag = _flags.get(bad.device)
        if flag is not None:
            flag.logical_or_(bad.any())
        return
    pending = _Pending(_Arriving.of(bad.any()), limits)
    with _lock:
        _pending.append(pending)


def watch(device: torch.device) -> None:
    """Makes what the layouts note bad indices in that a CUDA graph builds; to be called before its capture."""
    if device not in _flags:
        _flags[device] = torch.zeros((), dtype=torch.bool, device=device)


def look(device: torch.device) -> None:
    """Asks whether a CUDA graph noted a bad index; :func:`check_pending` has the answer later."""
    if device in _flags:
        with _lock:
            _pending.append(_Pending(_Arriving.of(_flags[device]), None))


def check_pending(wait: bool = False) -> None:
    """Raises IndexError for a bad index that an earlier layout on a GPU found; without `wait` it never blocks."""
    while _pending and not torch.cuda.is_current_stream_capturing():
        with _lock:
            if not _pending or not (wait or _pending[0].bad.done.query()):
                return
            first = _pending.popleft()
        if wait:
            first.bad.done.synchronize()
        if bool(first.bad.host):
            for flag in _flags.values():
                flag.zero_()
            _raise(None, first.limits, None, False)


def _raise(found: tuple[int, int] | None, limits: tuple[int, int] | None, at: int | None, segments: bool) -> None:
    if segments and found is not None and limits is not None:
        raise IndexOutOfRangeError(
            f"edge_index or batch: entry {at} is {found[0]}, outside the graph; expected indices from "
            f"{_range(limits[0])}. Check edge_index against x.size(0), batch against the number of graphs (size, "
            "batch_size), edge_type against num_relations."
        )
    what = f"edge {at} joins nodes {found[0]} and {found[1]}" if found is not None else "an edge has an end"
    expected = f"; expected indices from {_range(limits[0])} and {_range(limits[1])}" if limits is not None else ""
    raise IndexOutOfRangeError(
        f"edge_index: {what} outside the graph{expected}. Check edge_index against x.size(0), or pass the right "
        "size/num_nodes; where edges have types, check edge_type against num_relations."
    )


def _range(limit: int) -> str:
    return f"0 to {limit - 1}" if limit else "no rows"


def most_edges(num_edges: int) -> int:
    """Edges of the longest row of a graph that is no hub: a power of two, by how many edges the graph has."""
    return max(HUB, 1 << max(num_edges // LAST_ROW, 1).bit_length() - 1)


def hubs(rowptr: Tensor, num_edges: int) -> Hubs | None:
    """The hubs of a layout, or None if it has too few edges for one.

    The list that :func:`csr` made travels as an attribute of the rowptr tensor, since compiled graphs pass layouts as
    plain tensors. A rowptr that came without it, or was changed since, gets a new one here.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        num_edges: Edges of the layout, masked ones included.
    """
    if num_edges <= HUB:
        return None
    found = given_hubs(rowptr)
    if found is not None and found.version == _version(rowptr):
        if found.order is not None:
            found.order.follow()
        return found
    most = _most_hubs(rowptr.size(0) - 1, num_edges)
    if not most:
        return None
    found = _find_hubs(rowptr, most, num_edges)
    # A list made while a CUDA graph is captured belongs to the graph, which makes it again whenever it is replayed.
    if not _capturing(rowptr):
        setattr(rowptr, _HUBS, found)
    return found


def give_hubs(rowptr: Tensor, rows: Tensor, pieces: Tensor, number: tuple[int, int] | None, most_edges: int) -> None:
    """Attaches the list of its hubs to a layout; see :class:`Hubs` for the arguments."""
    setattr(rowptr, _HUBS, Hubs(rows, pieces, _version(rowptr), number, most_edges, None))


def given_hubs(rowptr: Tensor) -> Hubs | None:
    """The list of hubs that is attached to a tensor."""
    found: Hubs | None = getattr(rowptr, _HUBS, None)
    return found


def rows_of_edges(rowptr: Tensor, num_edges: int) -> Tensor:
    """The row of each edge in the order of a layout, int32 ``[num_edges]``; one behind the last row where edges are
    masked out. It is made once for a layout and travels with it, as the list of its hubs does.
    """
    found: _Rows | None = getattr(rowptr, _ROWS, None)
    if found is not None and found.version == _version(rowptr):
        if found.order is not None:
            found.order.follow()
        return found.rows
    positions = torch.arange(num_edges, dtype=torch.int32, device=rowptr.device)
    rows = torch.searchsorted(rowptr[1:], positions, right=True, out_int32=True)
    if not _capturing(rowptr):
        setattr(rowptr, _ROWS, _Rows(rows, _version(rowptr), Ordered.after([rows])))
    return rows


def _most_hubs(num_rows: int, num_edges: int) -> int:
    return min(num_edges // (most_edges(num_edges) + 1), num_rows)


def _find_hubs(rowptr: Tensor, most: int, num_edges: int) -> Hubs:
    """Lists the `most` longest rows, the longest first, so that they are started first, and their pieces."""
    longest = most_edges(num_edges)
    degree, rows = torch.topk(rowptr.diff(), most)
    pieces = torch.where(degree > longest, (degree + (longest - 1)) // longest, 0)
    ends = pieces.cumsum(0)
    table = torch.stack([rows, ends - pieces, pieces], 1).int()
    ids = torch.arange(num_edges // longest + most, device=rowptr.device)
    owner = torch.where(ids < ends[-1], torch.searchsorted(ends, ids, right=True), -1).int()
    number = torch.stack([(degree > longest).sum(), ends[-1]])
    version = _version(rowptr)
    if number.device.type == "cpu":
        return Hubs(table, owner, version, _pair(number), longest, None)
    arriving = None if _capturing(rowptr) else _Arriving.of(number)
    return Hubs(table, owner, version, None, longest, arriving, Ordered.after([table, owner]))


def _pair(numbers: Tensor) -> tuple[int, int]:
    hubs, pieces = numbers.tolist()
    return hubs, pieces


def _capturing(tensor: Tensor) -> bool:
    """Whether work on the tensor goes into a CUDA graph (a build of torch for CPUs can't be asked)."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def inverse_degree(rowptr: Tensor, dtype: str) -> Tensor:
    """1 / max(number of edges, 1) of every row: ``[num_rows]``, "float32" or "float64"."""
    degree = (rowptr[1:] - rowptr[:-1]).clamp(min=1)
    return degree.to(getattr(torch, dtype)).reciprocal()
