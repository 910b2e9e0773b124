"""Bools of edges packed into words: element f of an edge is bit ``f % 32`` of its word ``f // 32``.

A comparison per edge and channel, such as where a relu is open or which edges reach a maximum, is all that many
gradients need of two wide rows. Packed it takes a 32nd of one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from gnncompile.ir.region import BITS, Shape

PER_WORD = 32


def words(shape: Shape) -> int:
    """How many words hold the elements of an edge."""
    return -(-math.prod(shape) // PER_WORD)


def packable(shape: Shape) -> bool:
    """Whether no word belongs to two heads. Triton 3.6 mixes up what heads of 8 channels put into them."""
    return shape[0] == 1 or shape[1] % PER_WORD == 0


def tensor_type(dtype: str) -> torch.dtype:
    """The type of a tensor that holds values of a storage type of the IR."""
    return torch.int32 if dtype == BITS else getattr(torch, dtype)


def pack(value: Tensor) -> Tensor:
    """Bools ``[rows, ...]`` as int32 ``[rows, words]``; bits behind the last element are 0."""
    flat = value.flatten(1)
    filled = pad(flat, (0, -flat.size(1) % PER_WORD)).long().unflatten(1, (-1, PER_WORD))
    place = torch.arange(PER_WORD, device=value.device)
    return torch.bitwise_left_shift(filled, place).sum(2).to(torch.int32)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`pack`, as ``[rows, *shape]``."""
    bits = packed.unsqueeze(2) >> torch.arange(PER_WORD, device=packed.device, dtype=torch.int32)
    flat = (bits & 1).bool().flatten(1)[:, : math.prod(shape)]
    return flat.reshape(-1, *shape)
