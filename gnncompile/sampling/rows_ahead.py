"""Gathers rows of attributes on the host for a mini-batch that is sampled ahead, while a training step runs.

The bus is slow: the rows of a mini-batch may take as long as its training step. So the rows of mini-batch k + 1 cross
the bus during the step of mini-batch k, into memory for the most rows that a mini-batch may have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.sampling.features import Features

logger = logging.getLogger(__name__)

MOST_BYTES = 2**31
"""The most memory for rows that are gathered ahead, for each mini-batch that is sampled ahead."""

MOST_OF_FREE = 1 / 8
"""The most memory for them, as a share of the free memory of a GPU."""


class Hosted(NamedTuple):
    """An attribute whose rows are gathered ahead.

    Attributes:
        name: The name of the attribute.
        features: The attributes, by name.
        are_nodes: Whether its rows are nodes. Otherwise they are edges.
    """

    name: str
    features: Features
    are_nodes: bool


class RowsAhead:
    """The memory of the rows of one mini-batch.

    Args:
        hosted: The attributes.
        sizes: The most edges and the most nodes of a mini-batch.
        device: The device.

    Attributes:
        rows: The rows of each attribute by name, ``[most, ...]``. Valid rows come first.
    """

    def __init__(self, hosted: Sequence[Hosted], sizes: tuple[int, int], device: torch.device) -> None:
        self._hosted = hosted
        self.rows: dict[str, Tensor] = {}
        for name, features, are_nodes in hosted:
            held = features.tensors[name]
            self.rows[name] = torch.empty(sizes[are_nodes], *held.shape[1:], dtype=held.dtype, device=device)

    def gather(self, node: Tensor, edge: Tensor, ends: tuple[Tensor, Tensor]) -> None:
        """Launches the kernels.

        Args:
            node: The nodes, int64. Valid nodes come first.
            edge: The positions of edges in the user's ``edge_index``, int64. Valid edges come first.
            ends: The numbers of valid edges and of valid nodes, each int64 ``[1]`` on the device.
        """
        for name, features, are_nodes in self._hosted:
            out = self.rows[name]
            features.gather_ahead(name, (node if are_nodes else edge)[: out.size(0)], ends[are_nodes], out)


def fitting(hosted: Sequence[Hosted], sizes: tuple[int, int], device: torch.device) -> tuple[Hosted, ...]:
    """Returns the attributes whose rows have room ahead. A log message names those that have none."""
    room = float(MOST_BYTES)
    if device_of(device).has_streams:
        room = min(room, MOST_OF_FREE * torch.cuda.mem_get_info(device)[0])
    found = []
    for one in hosted:
        held = one.features.tensors[one.name]
        needed = held[:1].nbytes * sizes[one.are_nodes]
        if needed <= room:
            found.append(one)
            room -= needed
        else:
            logger.warning(
                "features: the rows of %r cross the bus between training steps, not while they run: the most rows of a "
                "mini-batch take %.1f GB, and %.1f GB are left for rows ahead; lower num_neighbors or batch_size",
                one.name,
                needed / 1e9,
                room / 1e9,
            )
    return tuple(found)
