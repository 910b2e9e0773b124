"""A matrix whose elements lie in the memory of another tensor."""

from __future__ import annotations

from typing import NamedTuple


class View(NamedTuple):
    """A view of a tensor: element ``[i, k]`` is ``offset + i * row_stride + k * column_stride`` elements behind its
    first.
    """

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    offset: int
