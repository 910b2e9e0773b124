"""Sorts the edges of a layout on a GPU, by launches that depend on sizes alone. Imports Triton.

Few edges are sorted by one launch, in which each edge counts the edges before it. Operations of torch's would take
about ten launches, which is most of the time of a small graph. More edges take three or six launches of a radix sort
(:mod:`gnncompile.codegen.triton.radix_sort`) and one more, and the largest graphs two beside torch's sort.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile import _compat, tuning
from gnncompile.codegen.triton import layout_kernels, radix_sort, sort_kernels
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel, on_device

FEW = 4096
"""The most edges, and the most rows and one, that are sorted by counting. The work grows as their square."""

_WARPS = tuning.TILES.short_warps
_keep, _add_loops = (Kernel(kernel, num_warps=_WARPS) for kernel in (sort_kernels.keep, sort_kernels.add_loops))
_inverse = {dtype: Kernel(layout_kernels.invert_degrees, num_warps=_WARPS) for dtype in (torch.float32, torch.float64)}


class _Kernels(NamedTuple):
    rank: Kernel
    keys: Kernel
    place: dict[torch.dtype, Kernel]


@cache
def _kernels(index: torch.dtype, other: torch.dtype) -> _Kernels:
    """Returns the kernels for indices of two dtypes: a launch does not ask for dtypes.

    There is a kernel `place` for each dtype of the edges' numbers.
    """
    orders = torch.int32, torch.int64
    places = {order: Kernel(sort_kernels.place, num_warps=_WARPS) for order in orders}
    return _Kernels(Kernel(sort_kernels.rank, num_warps=_WARPS), Kernel(sort_kernels.keys, num_warps=_WARPS), places)


_RANKED, _STEP = 16, 128
"""The edges or rows of a program of the kernel that counts, and those that it compares them with at once."""
_PLACED = 256
"""The edges or rows of a program that writes the layout of sorted keys. It waits for several reads in turn."""
_BLOCK = 1024
"""The edges or rows of a program of the other kernels."""


NUMBERS = {"few": FEW, "ranked": _RANKED, "block": _BLOCK, "placed": _PLACED, **radix_sort.NUMBERS}
"""What a package must know to launch the kernels of :func:`entries`."""


def entries(index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool]) -> dict[str, Entry]:
    """Returns the kernels for packages by their names, for indices of two dtypes.

    - rank sorts few edges: index, other, alive; rowptr, col, edge, bad.
    - keys writes the keys of many edges: index, other, alive; key, bad.
    - place writes the layout of keys that torch sorted: key, order, other; rowptr, col, edge.
    - place_radix does the same for keys that the radix sort sorted.
    - The others are those of :func:`gnncompile.codegen.triton.radix_sort.entries`.

    Args:
        index: The dtype of the rows.
        other: The dtype of the columns.
        masked: Whether some edges are dropped. If none is, the kernels do not read `alive`.
        wraps: Whether negative rows and columns count from the end.
    """
    given, layout = (index, other, torch.bool), (torch.int32,) * 3
    names, made = ("index", "other", "alive"), ("rowptr", "col", "edge")
    placed, constants, kernels = ("key", "order", "other", *made), (*wraps, masked), _kernels(index, other)
    ranked = (*given, *layout, torch.bool)
    place, place_radix = (
        kernels.place[order].entry(placed, (torch.int32, order, other, *layout), 3, (_PLACED,))
        for order in (torch.int64, torch.int32)
    )
    found = {
        "rank": kernels.rank.entry((*names, *made, "bad"), ranked, 3, (*constants, _RANKED, _STEP)),
        "keys": kernels.keys.entry((*names, "key", "bad"), (*given, torch.int32, torch.bool), 3, (*constants, _BLOCK)),
        "place": place,
        "place_radix": place_radix,
        **radix_sort.entries(index, other, masked, wraps),
    }
    return {name: _of_package(entry) for name, entry in found.items()}


def _of_package(entry: Entry) -> Entry:
    """Returns a kernel whose index may be a row of edge_index, and which sets a flag of the call."""
    return replace(entry, aligned=False, flag="index" if "bad" in entry.names else None)


def sort_edges(
    index: Tensor,
    other: Tensor,
    alive: Tensor | None,
    num_rows: int,
    num_columns: int,
    wraps: tuple[bool, bool] = (False, False),
    bad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rowptr ``[num_rows + 1]``, col, edge ``[num_edges]``, int32, and a bool ``[1]``: if one is out of range.

    Args:
        index: The row of each edge, ``[num_edges]``, contiguous, int32 or int64.
        other: The other end of each edge, ``[num_edges]``, contiguous, int32 or int64.
        alive: The edges to keep, bool ``[num_edges]``, contiguous, or None.
        num_rows: The number of rows.
        num_columns: The number of columns.
        wraps: Whether negative entries of `index` and of `other` count from the end.
        bad: The bool ``[1]`` to set if an end is out of range, which the device can write to. By default a new one.
    """
    edges, sizes, constants = index.size(0), [index.size(0), num_rows, num_columns], (*wraps, alive is not None)
    kernels = _kernels(index.dtype, other.dtype)
    bad = index.new_zeros((1,), dtype=torch.bool) if bad is None else bad
    given = [index, other, bad if alive is None else alive]
    with on_device(index.get_device()):
        rowptr, col, edge = (_compat.empty_vector(index, n, torch.int32) for n in (num_rows + 1, edges, edges))
        if _are_few(num_rows, edges):
            programs = _blocks(edges, _RANKED) + _blocks(num_rows + 1, _RANKED)
            kernels.rank(programs, [*given, rowptr, col, edge, bad], sizes, (*constants, _RANKED, _STEP))
            return rowptr, col, edge, bad
        if radix_sort.fits(num_rows, edges):
            key, order = radix_sort.sort(given, bad, sizes, wraps, alive is not None, edge)
        else:
            kernels.keys(_blocks(edges, _BLOCK), [*given, edge, bad], sizes, (*constants, _BLOCK))
            key, order = torch.sort(edge, stable=True)
        programs = _blocks(edges, _PLACED) + _blocks(num_rows + 1, _PLACED)
        kernels.place[order.dtype](programs, [key, order, other, rowptr, col, edge], sizes, (_PLACED,))
    return rowptr, col, edge, bad


def with_loops(rowptr: Tensor, col: Tensor, edge: Tensor, alive: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layout with a self loop after the edges of each row: see :func:`gnncompile.layout.csr.with_loops`.

    Args:
        rowptr: ``[num_rows + 1]``, int32, as `col` and `edge` contiguous.
        col: ``[num_edges]``, int32.
        edge: ``[num_edges]``, int32.
        alive: Edges to keep, by their numbers in `edge`, bool ``[num_edges]``, contiguous, or None.
    """
    edges, rows = edge.size(0), rowptr.size(0) - 1
    with on_device(rowptr.get_device()):
        sizes = rows + 1, edges + rows, edges + rows
        new_rowptr, new_col, new_edge = (_compat.empty_vector(edge, n, torch.int32) for n in sizes)
        sums = rowptr
        if alive is not None:
            kept = torch.empty_like(edge)
            _keep(_blocks(edges, _BLOCK), [rowptr, edge, alive, kept], [edges, rows], (_BLOCK,))
            sums = kept.cumsum(0, dtype=torch.int32)
        programs = _blocks(edges, _BLOCK) + _blocks(rows + 1, _BLOCK)
        made = [new_rowptr, new_col, new_edge]
        _add_loops(programs, [rowptr, col, edge, sums, *made], [edges, rows], (alive is not None, _BLOCK))
    return new_rowptr, new_col, new_edge


def inverse_degree(rowptr: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``1 / max(num_edges, 1)`` of every row, ``[num_rows]``: see :func:`gnncompile.layout.csr.inverse_degree`.

    Args:
        rowptr: ``[num_rows + 1]``, int32, contiguous.
        dtype: float32 or float64.
    """
    rows = rowptr.size(0) - 1
    with on_device(rowptr.get_device()):
        out = _compat.empty_vector(rowptr, rows, dtype)
        _inverse[dtype](_blocks(rows, _BLOCK), [rowptr, out], [rows], (dtype is torch.float64, _BLOCK))
    return out


def compile_ahead(
    index: torch.dtype, other: torch.dtype, masked: bool, wraps: tuple[bool, bool], num_rows: int, num_edges: int
) -> None:
    """Starts to compile the kernels of :func:`sort_edges` for a graph, in other threads."""
    kernels = _kernels(index, other)
    given, layout, constants = (index, other, torch.bool), (torch.int32,) * 3, (*wraps, masked)
    if _are_few(num_rows, num_edges):
        kernels.rank.compile_ahead((*given, *layout, torch.bool), 3, (*constants, _RANKED, _STEP))
        return
    order = torch.int64
    if radix_sort.fits(num_rows, num_edges):
        order = torch.int32
        radix_sort.compile_ahead(index, other, masked, wraps, num_rows)
    else:
        kernels.keys.compile_ahead((*given, torch.int32, torch.bool), 3, (*constants, _BLOCK))
    kernels.place[order].compile_ahead((torch.int32, order, other, *layout), 3, (_PLACED,))


def compile_degrees_ahead(dtype: torch.dtype) -> None:
    """Starts to compile the kernel of :func:`inverse_degree`, in another thread."""
    _inverse[dtype].compile_ahead((torch.int32, dtype), 1, (dtype is torch.float64, _BLOCK))


def compile_loops_ahead(masked: bool) -> None:
    """Starts to compile the kernels of :func:`with_loops`, in other threads."""
    if masked:
        _keep.compile_ahead((torch.int32, torch.int32, torch.bool, torch.int32), 2, (_BLOCK,))
    _add_loops.compile_ahead((torch.int32,) * 7, 2, (masked, _BLOCK))


def _are_few(num_rows: int, num_edges: int) -> bool:
    return num_edges <= FEW and num_rows < FEW


def _blocks(number: int, block: int) -> int:
    return -(-number // block)
