"""Packs all tensors of a mini-batch into one piece of memory, so that one copy moves them between processes or to a
device.
"""

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
"""Each tensor begins at a multiple of this many bytes, as allocations on a device do."""


class Place(NamedTuple):
    """The position of a tensor in the memory, its type, and its shape with padding (`whole`) and without (`true`).

    Along one dimension the padding follows the valid rows.
    """

    start: int
    dtype: torch.dtype
    whole: tuple[int, ...]
    true: tuple[int, ...]

    def on(self, memory: Tensor, padded: bool) -> Tensor:
        """Returns the tensor as a view of a memory, with or without its padding."""
        if padded or self.true == self.whole:
            return view(memory, self.dtype, self.start, self.whole)
        strides = [math.prod(self.whole[k + 1 :]) for k in range(len(self.whole))]
        return view(memory, self.dtype, self.start, self.true, strides)


class Memory:
    """Collects tensors and then writes them one after the other into one piece of memory.

    Args:
        device: Where the memory is.

    Attributes:
        places: The place of each tensor, by its name.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.places: dict[str, Place] = {}
        self._parts: list[tuple[Place, list[Tensor], int]] = []
        self._length = 0

    def add(self, name: str, parts: Sequence[Tensor], dtype: torch.dtype | None = None, dim: int = 0) -> None:
        """Adds a tensor.

        Args:
            name: Its name in `places`.
            parts: The valid rows, followed by padding.
            dtype: The type to store; that of the first part if None.
            dim: The dimension along which the parts are concatenated.
        """
        true = tuple(parts[0].shape)
        whole = list(true)
        for part in parts[1:]:
            whole[dim] += part.size(dim)
        place = Place(self._length, dtype or parts[0].dtype, tuple(whole), true)
        self.places[name] = place
        self._parts.append((place, list(parts), dim))
        self._length += -(-math.prod(whole) * place.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def bytes(self) -> Tensor:
        """Returns the memory with all tensors, uint8 ``[bytes]``; in a worker process it is shared memory."""
        if get_worker_info() is not None:
            made = _compat.shared_bytes(self._length)
        else:
            made = torch.empty(self._length, dtype=torch.uint8, device=self._device)
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
