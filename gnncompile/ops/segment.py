"""Marker ops that a captured graph carries from capture to region forming.

They exist in captured graphs only: the passes fuse them or replace them by torch ops (:data:`WRITTEN_OUT`).

These compute a result:

- ``segment_reduce(src, index, num_segments, reduce)``: PyG's ``scatter`` along the first dimension.
- ``segment_softmax(src, index, num_segments)``: PyG's ``softmax`` along the first dimension.
- ``edge_dropout(src, seed, p)``: dropout of the rows of edges, with the mask that regions make from the same seed.
- ``num_segments(index)`` and ``longest_segment(index)``: the number of segments, and the length of the longest
  segment. They are dimensions of the carrier if the caller attached one (:mod:`gnncompile.capture.inputs`).
- ``adjacency(row, col, values, shape)``: a sparse matrix, whose shape is the first two dimensions of `shape`.

These return their first argument (or two) unchanged, and tell the passes a fact:

- ``mark_dead(index, alive)``: columns where `alive` is False are to be ignored. Self loops are removed by this, without
  a data-dependent size.
- ``sized(index, carrier)``: the dimensions of `carrier` are the number of segments and the length of the longest.
- ``sorted_index(index)``: the index is sorted; an unsorted index raises an error.
- ``laid_out(row, col, layout)``: the edges have these layouts: rowptr, col and edge by `col`, then perhaps by `row`.
- ``hop_prefix(row, col, nodes, sources, edges)``: all edges to the first nodes come from the first sources. `nodes` and
  `sources` are tensors with that number of rows. `edges` holds the ends of these edges, their rowptr, and perhaps
  rowptr, col and edge by source.
- ``padded(value, counts, rows, values)``: only the first ``counts[rows]`` rows are valid, and the values index rows of
  the row type `values` (-1: they index none).
- ``chosen_rows(index, table, rows)``: ``table[index]`` equals `rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.exc import ArgumentError, ArgumentTypeError
from gnncompile.ir import philox
from gnncompile.layout.side_table import SideTable
from gnncompile.ops.region import LIBRARY

LIBRARY.define("segment_reduce(Tensor src, Tensor index, SymInt num_segments, str reduce) -> Tensor")
LIBRARY.define("segment_softmax(Tensor src, Tensor index, SymInt num_segments) -> Tensor")
LIBRARY.define("edge_dropout(Tensor src, Tensor seed, float p) -> Tensor")
LIBRARY.define("mark_dead(Tensor index, Tensor alive) -> Tensor")
LIBRARY.define("num_segments(Tensor index) -> SymInt")
LIBRARY.define("longest_segment(Tensor index) -> SymInt")
LIBRARY.define("sorted_index(Tensor index) -> Tensor")
LIBRARY.define("adjacency(Tensor row, Tensor col, Tensor values, Tensor shape) -> Tensor")
LIBRARY.define("chosen_rows(Tensor index, Tensor table, Tensor rows) -> Tensor")
LIBRARY.define("sized(Tensor index, Tensor carrier) -> Tensor")
LIBRARY.define("laid_out(Tensor row, Tensor col, Tensor[] layout) -> (Tensor, Tensor)")
LIBRARY.define("hop_prefix(Tensor row, Tensor col, Tensor nodes, Tensor sources, Tensor[] edges) -> (Tensor, Tensor)")
LIBRARY.define("padded(Tensor value, Tensor counts, int rows, int values) -> Tensor")


def _expand(index: Tensor, like: Tensor) -> Tensor:
    # int64, because scatter_reduce has a wrong gradient for an expanded int32 index (seen in torch 2.13 on a CPU).
    return index.long().view([-1] + [1] * (like.dim() - 1)).expand_as(like)


def segment_reduce(src: Tensor, index: Tensor, num_segments: int, reduce: str) -> Tensor:
    """Reduces rows of `src` ``[num_items, ...]`` by segment: ``[num_segments, ...]``; empty segments give 0."""
    size = [num_segments, *src.shape[1:]]
    if reduce in ("sum", "mean"):
        out = src.new_zeros(size).index_add(0, index, src)
        if reduce == "sum":
            return out
        count = src.new_zeros(num_segments).index_add(0, index, src.new_ones(src.size(0))).clamp(min=1)
        return out / count.view([-1] + [1] * (src.dim() - 1))
    if reduce == "mul":
        return src.new_ones(size).scatter_reduce(0, _expand(index, src), src, "prod", include_self=True)
    return src.new_zeros(size).scatter_reduce(0, _expand(index, src), src, f"a{reduce}", include_self=False)


def segment_softmax(src: Tensor, index: Tensor, num_segments: int) -> Tensor:
    """Softmax of `src` ``[num_items, ...]`` within each segment."""
    highest = segment_reduce(src.detach(), index, num_segments, "max")
    out = (src - highest.index_select(0, index)).exp()
    return out / (segment_reduce(out, index, num_segments, "sum") + 1e-16).index_select(0, index)


def edge_dropout(src: Tensor, seed: Tensor, p: float) -> Tensor:
    """Dropout of `src` ``[num_edges, ...]``, ``0 < p < 1``, with a seed ``[1]``, int64, instead of a generator."""
    edge = torch.arange(src.size(0), device=src.device).view([-1] + [1] * (src.dim() - 1))
    feature = torch.arange(math.prod(src.shape[1:]), device=src.device).view(src.shape[1:])
    return src * philox.factors(seed, edge, feature, p, src.dtype)


def _num_segments(index: Tensor) -> int:
    return int(index.max()) + 1 if index.numel() else 0


@dataclass(frozen=True)
class _Facts:
    """What a trace knows of the fake tensor of an index that a marker op returned.

    Attributes:
        segments: The number of segments, an int or a symbolic one, or None.
        longest: The length of the longest segment, or None.
        source: The place of the index in the arguments, or None if it is no input.
    """

    segments: Any
    longest: Any
    source: str | None


_NOTHING = _Facts(None, None, None)
_facts: SideTable[_Facts] = SideTable()
"""What traces know of fake tensors."""


def _fake_num_segments(index: Tensor) -> Any:
    return _size_of(index, longest=False)


def _fake_longest_segment(index: Tensor) -> Any:
    return _size_of(index, longest=True)


def _size_of(index: Tensor, longest: bool) -> Any:
    """The size that the caller attached to an index, or asks the caller to attach it; else an unbacked integer."""
    known = _facts.get(index) or _NOTHING
    size = known.longest if longest else known.segments
    if size is not None:
        return size
    request_size(index, longest)
    # Not a size yet: for integers that are all negative, which are no index, the number may be negative.
    return _compat.unknown_number()


def request_size(index: Tensor, longest: bool = False) -> None:
    """Asks the caller, once, for the number of segments of a model input, or for the longest segment's length as well.

    Returns if the index is no model input, or if the caller can't attach sizes or was asked before.

    Raises:
        Recapture: The caller must attach the size and trace again.
    """
    source = _source(index)
    if source is None or not (backend := _compat.current_settings()).attaches_sizes:
        return
    if (source, longest) not in backend.asked:
        backend.asked.add((source, longest))
        reason = f"the model needs the number of segments of {source}"
        raise _compat.Recapture(_compat.Setting.SIZES, (source, longest), reason)


def _longest_segment(index: Tensor) -> int:
    return int(torch.bincount(index).max()) if index.numel() else 0


def _copy(index: Tensor) -> Tensor:
    return index.clone(memory_format=torch.contiguous_format)


def _contiguous_like(index: Tensor) -> Tensor:
    """A fake result. Not by ``empty_like``: it divides by sizes to find strides, which fails for size 0."""
    return index.new_empty(index.shape)


def _fake_sized(index: Tensor, carrier: Tensor) -> Tensor:
    out = _contiguous_like(index)
    longest = carrier.size(1) if carrier.dim() > 2 else None
    _facts.set(out, _Facts(carrier.size(0), longest, _source(index)))
    return out


def _sorted_index(index: Tensor) -> Tensor:
    if not bool((index[:-1] <= index[1:]).all()):
        raise ArgumentError(
            "index: found an unsorted index, expected a sorted one, as this aggregation needs; sort the edges by "
            "destination, e.g. with data.sort(sort_by_row=False)"
        )
    return _copy(index)


def _source(index: Tensor) -> str | None:
    """The place of an index in the arguments, without our field names such as ``.segment``; None if it is no input."""
    known = _facts.get(index)
    if known is not None and known.source is not None:
        return known.source
    name = _compat.tracked_input_name(index) if _compat.takes_arguments() else None  # None after a graph break
    for field in (".segment", ".numbered", ".padded"):
        name = name.removesuffix(field) if name is not None else None
    return name


def _fake_known(index: Tensor) -> Tensor:
    out, known = _contiguous_like(index), _facts.get(index) or _NOTHING
    _facts.set(out, _Facts(known.segments, known.longest, _source(index)))
    return out


WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    torch.ops.gnncompile.segment_reduce: segment_reduce,
    torch.ops.gnncompile.segment_reduce.default: segment_reduce,
    torch.ops.gnncompile.segment_softmax: segment_softmax,
    torch.ops.gnncompile.segment_softmax.default: segment_softmax,
    torch.ops.gnncompile.edge_dropout.default: edge_dropout,
}
"""By marker op that computes a result: the function that computes the same in torch ops."""


def _check_index(index: Tensor) -> None:
    """Raises TypeError for an index that is not of integers, as torch's scatter does: its values would be truncated."""
    if index.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(
            f"index (of edges, or batch): found dtype {index.dtype}, expected torch.int64 (or int32). Convert it with "
            "index.long()."
        )


def _fake_segment_reduce(src: Tensor, index: Tensor, num_segments: int, reduce: str) -> Tensor:
    _check_index(index)
    torch._check(src.size(0) == index.size(0), lambda: "segment_reduce: src and index differ in length")
    return src.new_empty((num_segments, *src.shape[1:]))


def _fake_segment_softmax(src: Tensor, index: Tensor, num_segments: int) -> Tensor:
    _check_index(index)
    torch._check(src.size(0) == index.size(0), lambda: "segment_softmax: src and index differ in length")
    return torch.empty_like(src)


LIBRARY.impl("segment_reduce", segment_reduce, "CompositeExplicitAutograd")
LIBRARY.impl("segment_softmax", segment_softmax, "CompositeExplicitAutograd")
LIBRARY.impl("edge_dropout", edge_dropout, "CompositeExplicitAutograd")
LIBRARY.impl("mark_dead", lambda index, alive: _copy(index), "CompositeExplicitAutograd")
LIBRARY.impl("sized", lambda index, carrier: _copy(index), "CompositeExplicitAutograd")
LIBRARY.impl("laid_out", lambda row, col, layout: (_copy(row), _copy(col)), "CompositeExplicitAutograd")
LIBRARY.impl("hop_prefix", lambda row, col, *_: (_copy(row), _copy(col)), "CompositeExplicitAutograd")
LIBRARY.impl("padded", lambda value, counts, rows, values: _copy(value), "CompositeExplicitAutograd")
LIBRARY.impl("chosen_rows", lambda index, table, rows: _copy(index), "CompositeExplicitAutograd")
LIBRARY.impl("num_segments", _num_segments, "CompositeExplicitAutograd")
LIBRARY.impl("longest_segment", _longest_segment, "CompositeExplicitAutograd")
LIBRARY.impl("sorted_index", _sorted_index, "CompositeExplicitAutograd")
for _name, _fake in (
    ("segment_reduce", _fake_segment_reduce),
    ("segment_softmax", _fake_segment_softmax),
    ("edge_dropout", lambda src, seed, p: torch.empty_like(src)),
    ("mark_dead", lambda index, alive: _contiguous_like(index)),
    ("chosen_rows", lambda index, table, rows: _contiguous_like(index)),
    ("sized", _fake_sized),
    ("laid_out", lambda row, col, layout: (_fake_known(row), _fake_known(col))),
    ("hop_prefix", lambda row, col, *_: (_fake_known(row), _fake_known(col))),
    ("padded", lambda value, counts, rows, values: _fake_known(value)),
    ("num_segments", _fake_num_segments),
    ("longest_segment", _fake_longest_segment),
    ("sorted_index", _fake_known),
    ("adjacency", lambda row, col, values, shape: values.new_empty(shape.shape[:2])),
):
    torch.library.register_fake(f"gnncompile::{_name}", _fake, lib=LIBRARY)
