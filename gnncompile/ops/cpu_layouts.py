"""Layouts on a CPU by the C++ code of :mod:`gnncompile.codegen.cpp.layout_source`.

Layouts and degrees are those of :mod:`gnncompile.layout.csr`. In one thread of an EPYC, a graph of 2,000 rows and
11,000 edges took 0.02 ms, and 0.6 ms by torch's operations; 170,000 rows and 2,300,000 edges took 14 ms, and 66 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.codegen.cpp.arguments import address, pack
from gnncompile.codegen.cpp.compiler import load
from gnncompile.codegen.cpp.layout_source import CSR, DEGREES, LOOPS
from gnncompile.device import device_of
from gnncompile.exc import ArgumentError, KernelMemoryError, UnsupportedRegion
from gnncompile.layout import csr as by_torch
from gnncompile.layout.bad_indices import raise_out_of_range

_Run = Callable[..., int]


@lru_cache
def _compiled(source: str, entry: str = "run") -> _Run | None:
    """Returns an entry point of compiled code, or None if there is no working C++ compiler."""
    try:
        run = getattr(load(source, contract=False), entry)
    except UnsupportedRegion:
        return None
    run.argtypes, run.restype = (ctypes.c_char_p,), ctypes.c_int
    found: _Run = run
    return found


def _run_of(index: Tensor, source: str, entry: str = "run") -> _Run | None:
    """Returns an entry point for a tensor's device, or None where torch's operations compute the layout."""
    return _compiled(source, entry) if device_of(index.device).generator == "cpp" else None


def _fresh(like: Tensor, *sizes: int) -> list[Tensor]:
    return [_compat.empty_vector(like, size, torch.int32) for size in sizes]


def csr(
    index: Tensor,
    other: Tensor,
    num_rows: int,
    num_columns: int,
    alive: Tensor | None,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> tuple[Tensor, ...]:
    """The same as :func:`gnncompile.layout.csr.csr`, for tensors on a CPU."""
    run = _run_of(index, CSR)
    if run is None:
        return by_torch.csr(index, other, num_rows, num_columns, alive, wrap_rows, wrap_columns)
    num_edges = index.numel()
    rows, columns, kept = checked_edges(index, other, alive, num_rows, num_columns)
    made = _fresh(index, num_rows + 1, num_edges, num_edges)
    wide = rows.dtype is torch.int64, columns.dtype is torch.int64
    found = (ctypes.c_int64 * 3)()
    sizes = num_edges, num_rows, num_columns, wrap_rows, wrap_columns
    addresses = map(address, (rows, columns, kept, *made))
    failed = run(pack(*sizes, *wide, *addresses, ctypes.addressof(found)))
    if failed == 1:
        raise KernelMemoryError(f"edge_index: no memory to sort {num_edges} edges by {num_rows} rows; split the graph")
    if failed:
        at, row, column = found
        raise_out_of_range((row, column), (num_rows, num_columns), at, index is other)
    return tuple(made)


def with_loops(rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None) -> tuple[Tensor, ...]:
    """The same as :func:`gnncompile.layout.csr.with_loops`, for tensors on a CPU."""
    run = _run_of(edge, LOOPS)
    if run is None:
        return by_torch.with_loops(rowptr, col, edge, index, alive)
    num_edges, num_rows = edge.numel(), rowptr.numel() - 1
    by_torch.check_sizes(num_edges + num_rows, num_rows, num_rows)
    given = [None if one is None else one.contiguous() for one in (rowptr, col, edge, alive)]
    made = _fresh(edge, num_rows + 1, num_edges + num_rows, num_edges + num_rows)
    run(pack(num_edges, num_rows, *map(address, (*given, *made))))
    return tuple(made)


def inverse_degree(rowptr: Tensor, dtype: str) -> Tensor:
    """The same as :func:`gnncompile.layout.csr.inverse_degree`, for tensors on a CPU."""
    is_compiled = rowptr.dtype is torch.int32 and dtype in ("float32", "float64")
    run = _run_of(rowptr, DEGREES, f"run_{dtype}") if is_compiled else None
    if run is None:
        return by_torch.inverse_degree(rowptr, dtype)
    rows, rowptr = rowptr.numel() - 1, rowptr.contiguous()
    made = _compat.empty_vector(rowptr, rows, getattr(torch, dtype))
    run(pack(rows, rowptr.data_ptr(), made.data_ptr()))
    return made


def checked_edges(
    index: Tensor, other: Tensor, alive: Tensor | None, num_rows: int, num_columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the edges of :func:`gnncompile.layout.csr.csr` as sorts read them: contiguous, ends as int32 or int64.

    Raises:
        ValueError: There are more edges, rows or columns than kernels can count, or the ends of edges or their mask
            have other numbers of entries.
    """
    by_torch.check_sizes(index.numel(), num_rows, num_columns)
    lengths = [one.numel() for one in (index, other, alive) if one is not None]
    if lengths.count(lengths[0]) < len(lengths):
        raise ArgumentError(
            f"edge_index: found {' and '.join(map(str, lengths))} entries for its rows, columns and mask, expected as "
            "many of each; pass both ends of each edge."
        )
    return _readable(index), _readable(other), None if alive is None else alive.contiguous()


def _readable(index: Tensor) -> Tensor:
    return (index if index.dtype in (torch.int32, torch.int64) else index.long()).contiguous()
