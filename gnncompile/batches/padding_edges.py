"""Padding edges, which follow the valid edges of a padded mini-batch and join padded nodes in rings.

Their layouts follow from the row pointers by arithmetic, so no edge has to be sorted or counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def evenly(number: int, size: int) -> Any:
    """Distributes `number` items over `size` rows as evenly as possible; returns the row pointers, a NumPy int64 array
    ``[size + 1]``.
    """
    return -(-np.arange(size + 1) * number // max(size, 1))


def shared(number: int, first: int, end: int) -> Tensor:
    """Distributes `number` items evenly over the rows `first` to `end - 1`; returns the row of each item, int64
    ``[number]``.
    """
    return _repeated(np.arange(first, end), np.diff(evenly(number, end - first)))


class Ring:
    """Edges in a ring, spread evenly over a range of destinations. The k-th destination's edges come from source k + 1
    of a range of sources; after the last source follows the first.

    Args:
        number: The number of edges.
        sources: The first source, and one more than the last.
        destinations: The first destination, and one more than the last.

    Attributes:
        row: Sources, int64 ``[number]``.
        col: Destinations, sorted, int64 ``[number]``.
        rowptr: Row pointers by destination, int64 ``[destinations + 1]``.
    """

    def __init__(self, number: int, sources: tuple[int, int], destinations: tuple[int, int]) -> None:
        self._starts = evenly(number, destinations[1] - destinations[0])
        self._lengths, self._sources = np.diff(self._starts), sources[1] - sources[0]
        self._behind = (np.arange(len(self._lengths)) + 1) % max(self._sources, 1)
        self.row = _repeated(sources[0] + self._behind, self._lengths)
        self.col = _repeated(np.arange(*destinations), self._lengths)
        self.rowptr = torch.from_numpy(self._starts)

    def by_source(self) -> tuple[Tensor, Tensor]:
        """Returns the permutation that sorts the edges stably by source, int64 ``[number]``, and the row pointers by
        source, int64 ``[sources + 1]``.
        """
        order = np.argsort(self._behind, kind="stable")
        lengths = self._lengths[order]
        moved = _repeated(self._starts[order] - (np.cumsum(lengths) - lengths), lengths)
        rowptr = np.zeros(self._sources + 1, np.int64)
        np.add.at(rowptr, self._behind + 1, self._lengths)
        return moved + torch.arange(moved.numel()), torch.from_numpy(rowptr.cumsum())


def _repeated(values: Any, times: Any) -> Tensor:
    return torch.from_numpy(np.repeat(values, times))
