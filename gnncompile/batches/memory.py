"""One piece of memory for all tensors of a mini-batch, which is copied as a whole from process to process to device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from gnncompile import _compat
from gnncompile.layout.batch_metadata import view

ALIGNMENT = 256
"""Bytes at a multiple of which each tensor begins, as those of a device's own allocations do."""


class Place(NamedTuple):
    """Where a tensor stands: first its true part, then, along one dimension, padding."""

    start: int
    dtype: torch.dtype
    whole: tuple[int, ...]
    true: tuple[int, ...]

    def on(self, memory: Tensor, padded: bool) -> Tensor:
        """The tensor in a memory, padded or not."""
        if padded or self.true == self.whole:
            return view(memory, self.dtype, self.start, self.whole)
        strides = [math.prod(self.whole[k + 1 :]) for k in range(len(self.whole))]
        return view(memory, self.dtype, self.start, self.true, strides)


class Memory:
    """Tensors that are put one behind the other.

    Attributes:
        places: Where each stands, by its name.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._parts: list[tuple[Place, list[Tensor], int]] = []
        self._length = 0

    def add(self, name: str, parts: Sequence[Tensor], dtype: torch.dtype | None = None, dim: int = 0) -> None:
        """Adds a tensor: its true part, and behind it, along a dimension, padding; of the first one's type."""
        true = tuple(parts[0].shape)
        whole = list(true)
        for part in parts[1:]:
            whole[dim] += part.size(dim)
        place = Place(self._length, dtype or parts[0].dtype, tuple(whole), true)
        self.places[name] = place
        self._parts.append((place, list(parts), dim))
        self._length += -(-math.prod(whole) * place.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def bytes(self) -> Tensor:
        """All of them, uint8 ``[bytes]``, where other processes find them if this one works for them."""
        shared = get_worker_info() is not None
        made = _compat.shared_bytes(self._length) if shared else torch.empty(self._length, dtype=torch.uint8)
        for place, parts, dim in self._parts:
            into = place.on(made, padded=True)
            if into.dim() == 0:
                into.copy_(parts[0])
                continue
            start = 0
            for part in parts:
                into.narrow(dim, start, part.size(dim)).copy_(part)
                start += part.size(dim)
        return made
