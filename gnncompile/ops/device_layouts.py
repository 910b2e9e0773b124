"""Layouts on a GPU by the kernels of :mod:`gnncompile.codegen.triton.sorting` and its lists of hubs.

They give what :mod:`gnncompile.layout.csr` gives, with fewer launches: for a graph that is new in each call, the host's
time of these launches is most of the call. The order of hubs with equally many pieces may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.device import device_of
from gnncompile.layout import bad_indices
from gnncompile.layout import csr as by_torch
from gnncompile.ops.cpu_layouts import checked_edges


def csr(
    index: Tensor,
    other: Tensor,
    num_rows: int,
    num_columns: int,
    alive: Tensor | None,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> tuple[Tensor, ...]:
    """The same as :func:`gnncompile.layout.csr.csr`, for tensors on a GPU."""
    if not _has_kernels(index):
        return by_torch.csr(index, other, num_rows, num_columns, alive, wrap_rows, wrap_columns)
    from gnncompile.codegen.triton.sorting import sort_edges

    rows, columns, kept = checked_edges(index, other, alive, num_rows, num_columns)
    place = bad_indices.place_for(index.device, (num_rows, num_columns))
    *layout, bad = sort_edges(rows, columns, kept, num_rows, num_columns, (wrap_rows, wrap_columns), place)
    if place is None:
        bad_indices.report(bad, index, other, (num_rows, num_columns))
    by_torch.attach_hubs(layout[0], index.numel(), find_hubs)
    return tuple(layout)


def with_loops(rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None) -> tuple[Tensor, ...]:
    """The same as :func:`gnncompile.layout.csr.with_loops`, for tensors on a GPU."""
    if not _has_kernels(edge):
        return by_torch.with_loops(rowptr, col, edge, index, alive)
    from gnncompile.codegen.triton import sorting

    num_edges, num_rows = edge.numel(), rowptr.numel() - 1
    by_torch.check_sizes(num_edges + num_rows, num_rows, num_rows)
    kept = None if alive is None else alive.contiguous()
    made = sorting.with_loops(rowptr.contiguous(), col.contiguous(), edge.contiguous(), kept)
    by_torch.attach_hubs_with_loops(rowptr, made[0], num_edges + num_rows, find_hubs)
    return made


def inverse_degree(rowptr: Tensor, dtype: str) -> Tensor:
    """The same as :func:`gnncompile.layout.csr.inverse_degree`, for tensors on a GPU."""
    if not _has_kernels(rowptr):
        return by_torch.inverse_degree(rowptr, dtype)
    from gnncompile.codegen.triton import sorting

    return sorting.inverse_degree(rowptr.contiguous(), getattr(torch, dtype))


def find_hubs(rowptr: Tensor, most: int, num_edges: int) -> by_torch.Hubs:
    """Returns the `most` rows with most edges and their pieces; those of most pieces come first."""
    from gnncompile.codegen.triton import hub_lists

    longest = by_torch.most_edges(num_edges)
    rows, pieces, number = hub_lists.find_hubs(rowptr, most, num_edges // longest + most, longest)
    return by_torch.hubs_of(rowptr, rows, pieces, number, longest)


def compile_ahead(graph: fx.Graph) -> None:
    """Starts to compile the kernels that a structure program needs for its example, beside Inductor."""
    own = torch.ops.gnncompile
    begin: dict[Any, Callable[..., None]] = {
        own.csr.default: _compile_sort,
        own.csr_with_loops.default: _compile_loops,
        own.inverse_degree.default: _compile_degrees,
    }
    for node in graph.nodes:
        if node.target in begin:
            given = [one.meta["val"] if isinstance(one, fx.Node) else one for one in node.args]
            if _has_kernels(given[0]):
                begin[node.target](*given)


def _compile_loops(rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None) -> None:
    from gnncompile.codegen.triton import sorting

    sorting.compile_loops_ahead(alive is not None)


def _compile_degrees(rowptr: Tensor, dtype: str) -> None:
    from gnncompile.codegen.triton import sorting

    sorting.compile_degrees_ahead(getattr(torch, dtype))


def _compile_sort(
    index: Tensor,
    other: Tensor,
    num_rows: Any,
    _: Any,
    alive: Tensor | None,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> None:
    from gnncompile.codegen.triton import hub_lists, sorting

    rows, edges = (_compat.size_now(one) for one in (num_rows, index.size(0)))
    row, column = (one.dtype if one.dtype is torch.int32 else torch.int64 for one in (index, other))
    edges = edges or 0
    rows = edges if rows is None else rows
    sorting.compile_ahead(row, column, alive is not None, (wrap_rows, wrap_columns), rows, edges)
    if by_torch.most_hubs(rows, edges):
        hub_lists.compile_ahead()


def _has_kernels(tensor: Tensor) -> bool:
    return device_of(tensor.device).generator == "triton"
