"""Triton kernels that write a sampled mini-batch, with its padding, to the memory of one size.

The numbers of valid rows are read on the device, so the kernels can be replayed for other mini-batches of the size.
Padding follows the rules of :mod:`gnncompile.batches.prepare`. Imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnncompile.batches import padding_rows
from gnncompile.codegen.triton.launcher import Kernel, on_device
from gnncompile.sampling.kernels import REPEATED

BLOCK = 1024

PROGRAMS = 128
"""The most programs that spread the padded rows of an attribute. For most attributes they have nothing to do."""


@triton.jit(do_not_specialize=["kind", "size"])
def _repeat_rows(source_ptr, counts_ptr, out_ptr, kind, size, BLOCK: tl.constexpr):
    """Copies the valid entries of a vector. Padding repeats the first REPEATED ones or fewer, or is 0."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    number = tl.load(counts_ptr + kind)
    inside = at < size
    repeated = (at - number) % tl.minimum(tl.maximum(number, 1), REPEATED)
    value = tl.load(source_ptr + tl.where(at < number, at, repeated), mask=inside & (number > 0), other=0)
    tl.store(out_ptr + at, value, mask=inside)


@triton.jit(do_not_specialize=["edges", "sources", "destinations", "size", "sources_size", "destinations_size"])
def _pad_edges(
    row_ptr,
    col_ptr,
    counts_ptr,
    long_row_ptr,
    long_col_ptr,
    col_by_col_ptr,
    edge_by_col_ptr,
    edges,
    sources,
    destinations,
    size,
    sources_size,
    destinations_size,
    IS_PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies edges, pads them by a ring (:class:`gnncompile.batches.padding_edges.Ring`), and lays them out.

    Edges and their ends are of the row types `edges`, `sources` and `destinations`. The layout of a hop prefix has the
    destination of each edge in place of its position.
    """
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    number = tl.load(counts_ptr + edges)
    first_source, first_destination = tl.load(counts_ptr + sources), tl.load(counts_ptr + destinations)
    valid, inside = at < number, at < size
    k = (at - number) * (destinations_size - first_destination) // tl.maximum(size - number, 1)
    ring_row = first_source + (k + 1) % tl.maximum(sources_size - first_source, 1)
    row = tl.where(valid, tl.load(row_ptr + at, mask=valid & inside, other=0), ring_row)
    col = tl.where(valid, tl.load(col_ptr + at, mask=valid & inside, other=0), first_destination + k)
    tl.store(col_by_col_ptr + at, row.to(tl.int32), mask=inside)
    if IS_PREFIX:
        tl.store(edge_by_col_ptr + at, col.to(tl.int32), mask=inside)
    else:
        tl.store(edge_by_col_ptr + at, at.to(tl.int32), mask=inside)
        tl.store(long_row_ptr + at, row, mask=inside)
        tl.store(long_col_ptr + at, col, mask=inside)


@triton.jit(do_not_specialize=["edges", "destinations", "size", "destinations_size"])
def _prefix_pointers(
    rowptr_ptr,
    counts_ptr,
    out_ptr,
    edges,
    destinations,
    size,
    destinations_size,
    BLOCK: tl.constexpr,
):
    """Writes the row pointers of a padded hop prefix, given those of all edges."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    number, first = tl.load(counts_ptr + edges), tl.load(counts_ptr + destinations)
    inside, valid = at <= destinations_size, at <= first
    rows = tl.maximum(destinations_size - first, 1)
    ring = number + ((at - first) * (size - number) + rows - 1) // rows
    pointer = tl.load(rowptr_ptr + at, mask=inside & valid, other=0)
    tl.store(out_ptr + at, tl.where(valid, pointer, ring.to(tl.int32)), mask=inside)


@triton.jit(do_not_specialize=["kind", "rows", "width", "tiles"])
def _spread_rows(
    out_ptr,
    counts_ptr,
    kind,
    rows,
    width,
    tiles,
    IS_FLOAT: tl.constexpr,
    ALWAYS: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    PERIOD: tl.constexpr,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    TYPES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Changes padded rows that repeat the first rows, so that they differ; see :mod:`gnncompile.batches.padding_rows`.

    This holds for floats with one valid row or none, or with ALWAYS. Other attributes without a row get zeros.
    """
    number = tl.load(counts_ptr + kind)
    if (number == 0) | (IS_FLOAT & (ALWAYS | (number == 1))):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            at = (tile + tl.zeros((BLOCK,), tl.int64)) * BLOCK + tl.arange(0, BLOCK)
            row, column = at // width, at % width
            inside = (row < rows) & (row >= number)
            made = tl.load(out_ptr + at, mask=inside & (number > 0), other=0)
            if IS_FLOAT:
                more = (LEAST + (ROW * row + COLUMN * column) % PERIOD).to(tl.float32) / SCALE
                made = made.to(tl.float64) if made.dtype == tl.float64 else made.to(tl.float32)
                made = tl.where(made != 0, made * (1 - more), more / 4)
            tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), mask=inside)


_repeat = Kernel(_repeat_rows, num_warps=4)
_spread = Kernel(_spread_rows, num_warps=4)
_pad = Kernel(_pad_edges, num_warps=4)
_point = Kernel(_prefix_pointers, num_warps=4)


def repeat_rows(source: Tensor, counts: Tensor, kind: int, out: Tensor) -> None:
    """Copies the valid entries of a vector to `out`. Padding repeats the first 1,024 or fewer, or is 0.

    Args:
        source: At least the valid entries, int64.
        counts: The number of valid rows of each row type, int64 ``[kinds]``.
        kind: The row type of the entries.
        out: int64 ``[size]``.
    """
    with on_device(out.get_device()):
        _repeat(-(-out.numel() // BLOCK), (source, counts, out), (kind, out.numel()), (BLOCK,))


def spread_rows(out: Tensor, counts: Tensor, kind: int, always: bool) -> None:
    """Makes padded rows of floats differ, and pads attributes without a row; see
    :func:`gnncompile.batches.padding_rows.padding_rows`.

    Args:
        out: The attribute, contiguous, ``[size, ...]``. Its padded rows repeat the first rows.
        counts: The number of valid rows of each row type, int64 ``[kinds]``.
        kind: The row type of its rows.
        always: Whether padded rows differ even if there are several valid rows.
    """
    if not out.numel():
        return
    is_float = out.dtype in padding_rows.SPREAD
    words = out if is_float else out.unsqueeze(-1).view(torch.uint8)
    width = words[0].numel()
    tiles = -(-words.numel() // BLOCK)
    rule = (padding_rows.ROW, padding_rows.COLUMN, padding_rows.PERIOD, padding_rows.LEAST, padding_rows.SCALE)
    with on_device(out.get_device()):
        _spread(
            min(tiles, PROGRAMS),
            (words, counts),
            (kind, out.size(0), width, tiles),
            (is_float, always, *rule, str(words.dtype), BLOCK),
        )


def pad_edges(
    row: Tensor,
    col: Tensor,
    counts: Tensor,
    kinds: tuple[int, int, int],
    sizes: tuple[int, ...],
    layout: tuple[Tensor, Tensor],
    edge_index: Tensor | None,
) -> None:
    """Writes padded edges and their layout by destination, without row pointers.

    Args:
        row: The source of each edge, int64. At least the valid edges.
        col: The destination of each edge, int64, ascending.
        counts: The number of valid rows of each row type, int64 ``[kinds]``.
        kinds: The row types of the edges, of their sources and of their destinations.
        sizes: The padded size of each row type.
        layout: The tensors for the sources and the positions of edges, int32 ``[edges]``.
        edge_index: The tensor for the edge list, int64 ``[2, edges]``. None for a hop prefix, whose layout has the
            destinations in place of the positions.
    """
    long = layout if edge_index is None else (edge_index[0], edge_index[1])
    size = sizes[kinds[0]]
    with on_device(counts.get_device()):
        _pad(
            -(-size // BLOCK),
            (row, col, counts, *long, *layout),
            (*kinds, *(sizes[kind] for kind in kinds)),
            (edge_index is None, BLOCK),
        )


def prefix_pointers(
    rowptr: Tensor, counts: Tensor, kinds: tuple[int, int, int], sizes: tuple[int, ...], out: Tensor
) -> None:
    """Writes the row pointers of a padded hop prefix, int32 ``[nodes + 1]``.

    Args:
        rowptr: The row pointers of all edges, int32.
        counts: The number of valid rows of each row type, int64 ``[kinds]``.
        kinds: The row types of the edges, of their sources and of their destinations.
        sizes: The padded size of each row type.
        out: The tensor to write to.
    """
    edges, _, destinations = kinds
    with on_device(counts.get_device()):
        _point(
            -(-out.numel() // BLOCK),
            (rowptr, counts, out),
            (edges, destinations, sizes[edges], sizes[destinations]),
            (BLOCK,),
        )
