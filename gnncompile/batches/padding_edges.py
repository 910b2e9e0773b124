"""What stands behind the true edges of a padded mini-batch: edges between padded nodes, in rings.

All of it follows from where the edges of each node begin, so that nothing has to be sorted or counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def evenly(number: int, size: int) -> Any:
    """Where the things of each of `size` begin that share `number` as evenly as can be, in order, int64 ``[size + 1]``
    of NumPy.
    """
    return -(-np.arange(size + 1) * number // max(size, 1))


def shared(number: int, first: int, end: int) -> Tensor:
    """Those from `first` to `end`, each as often as it has things of `number`, int64 ``[number]``."""
    return _repeated(np.arange(first, end), np.diff(evenly(number, end - first)))


class Ring:
    """Edges to the destinations from the first to the end of some, evenly; each comes from the source behind its
    destination, the last of them from the first.

    Args:
        number: How many edges.
        sources: The first source, and one behind the last.
        destinations: Likewise.

    Attributes:
        row: Sources, int64 ``[number]``.
        col: Destinations, sorted, int64 ``[number]``.
        rowptr: Where the edges of each destination begin, int64 ``[destinations + 1]``.
    """

    def __init__(self, number: int, sources: tuple[int, int], destinations: tuple[int, int]) -> None:
        self._starts = evenly(number, destinations[1] - destinations[0])
        self._lengths, self._sources = np.diff(self._starts), sources[1] - sources[0]
        self._behind = (np.arange(len(self._lengths)) + 1) % max(self._sources, 1)
        self.row = _repeated(sources[0] + self._behind, self._lengths)
        self.col = _repeated(np.arange(*destinations), self._lengths)
        self.rowptr = torch.from_numpy(self._starts)

    def by_source(self) -> tuple[Tensor, Tensor]:
        """The stable order of the edges by source, int64 ``[number]``; where those of each source begin in it, int64
        ``[sources + 1]``.
        """
        order = np.argsort(self._behind, kind="stable")
        lengths = self._lengths[order]
        moved = _repeated(self._starts[order] - (np.cumsum(lengths) - lengths), lengths)
        rowptr = np.zeros(self._sources + 1, np.int64)
        np.add.at(rowptr, self._behind + 1, self._lengths)
        return moved + torch.arange(moved.numel()), torch.from_numpy(rowptr.cumsum())


def _repeated(values: Any, times: Any) -> Tensor:
    return torch.from_numpy(np.repeat(values, times))
