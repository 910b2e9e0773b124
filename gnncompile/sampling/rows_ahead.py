"""Gathers rows of attributes on the host for a mini-batch that is sampled ahead, while a training step runs.

The bus is slow: the rows of a mini-batch may take as long as its training step. So the rows of mini-batch k + 1 cross
the bus during the step of mini-batch k, into memory for the most rows that a mini-batch may have. Rows are read in
ascending order: the GPU translates the address of each page on the host, and finds few translations again at random.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.sampling.features import Features

logger = logging.getLogger(__name__)

MOST_BYTES = 2**31
"""The most memory for rows that are gathered ahead, for each mini-batch that is sampled ahead."""

MOST_OF_FREE = 1 / 8
"""The same as a share of the free memory of a GPU. The smaller of the two counts."""

_LAST = 2**62
"""The row that stands for rows that are not valid, after all others."""

Key = tuple[bool, int, str]
"""Whether the rows of an attribute are nodes (or else edges), the position of their type, and the attribute's name."""


class Hosted(NamedTuple):
    """An attribute whose rows are gathered ahead.

    Attributes:
        key: See :data:`Key`.
        features: The attributes of its rows' type, by name.
    """

    key: Key
    features: Features

    @property
    def held(self) -> Tensor:
        """The attribute on the host."""
        return self.features.tensors[self.key[2]]

    def most(self, sizes: tuple[Sequence[int], Sequence[int]]) -> int:
        """Returns the most rows of a mini-batch, given the most nodes of each node type and edges of each edge type."""
        are_nodes, at, _ = self.key
        return sizes[0 if are_nodes else 1][at]


class RowsAhead:
    """The memory of the rows of one mini-batch.

    Args:
        hosted: The attributes.
        sizes: The most nodes of each node type, and the most edges of each edge type.
        device: The device.

    Attributes:
        rows: The rows of each attribute, ``[most, ...]``. Valid rows come first.
    """

    def __init__(
        self, hosted: Sequence[Hosted], sizes: tuple[Sequence[int], Sequence[int]], device: torch.device
    ) -> None:
        self._hosted = hosted
        self.rows: dict[Key, Tensor] = {}
        for one in hosted:
            held = one.held
            self.rows[one.key] = torch.empty(one.most(sizes), *held.shape[1:], dtype=held.dtype, device=device)

    def gather(self, ids: Callable[[bool, int], tuple[Tensor, Tensor]]) -> None:
        """Launches the kernels.

        Args:
            ids: Returns the rows of a type, int64, of which valid rows come first, and their number on the device,
                int64 ``[1]``. Its arguments are the first two parts of a :data:`Key`.
        """
        ascending: dict[tuple[bool, int], tuple[Tensor, Tensor, Tensor]] = {}
        for one in self._hosted:
            kind, name = one.key[:2], one.key[2]
            if kind not in ascending:
                row, end = ids(*kind)
                ascending[kind] = (*_ascending(row, end), end)
            first, position, end = ascending[kind]
            one.features.gather_ahead(name, first, end, self.rows[one.key], position)


def _ascending(row: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Returns valid rows in ascending order, others after them, and the position of each in `row`."""
    is_valid = torch.arange(row.numel(), device=row.device) < end
    found, position = torch.where(is_valid, row, _LAST).sort()
    return found, position


def fitting(
    hosted: Sequence[Hosted], sizes: tuple[Sequence[int], Sequence[int]], device: torch.device
) -> tuple[Hosted, ...]:
    """Returns the attributes whose rows have room ahead. A log message names those that have none."""
    room = float(MOST_BYTES)
    if device_of(device).has_streams:
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = min(room, MOST_OF_FREE * (torch.cuda.mem_get_info(device)[0] + kept))
    found = []
    for one in hosted:
        needed = one.held[:1].nbytes * one.most(sizes)
        if needed <= room:
            found.append(one)
            room -= needed
        else:
            logger.warning(
                "features: the rows of %r cross the bus between training steps, not while they run: the most rows of a "
                "mini-batch take %.1f GB, and %.1f GB are left for rows ahead; lower num_neighbors or batch_size",
                one.key[2],
                needed / 1e9,
                room / 1e9,
            )
    return tuple(found)
