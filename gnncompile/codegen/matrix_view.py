"""A matrix whose elements lie in the memory of another tensor."""

from __future__ import annotations

from typing import NamedTuple


class View(NamedTuple):
    """The place of each element: ``[i, k]`` is ``offset + i * row_stride + k * column_stride`` elements behind the
    tensor's first one.
    """

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    offset: int
