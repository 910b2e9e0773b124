"""Bools per edge, packed into words: element f of an edge is bit ``f % 32`` of the edge's word ``f // 32``.

Many gradients need two wide rows only for one comparison per edge and channel. Examples are where a relu is positive,
and which edges reach a maximum. The packed comparison takes a 32nd of the memory of one such row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from gnncompile.ir.region import BITS, Shape

PER_WORD = 32


def words(shape: Shape) -> int:
    """Returns the number of words that hold the elements of one edge."""
    return -(-math.prod(shape) // PER_WORD)


def packable(shape: Shape) -> bool:
    """Whether no word holds bits of two heads. Triton 3.6 mixes up words that heads of 8 channels share."""
    return shape[0] == 1 or shape[1] % PER_WORD == 0


def tensor_type(dtype: str) -> torch.dtype:
    """Returns the torch dtype of a tensor that holds values of the IR storage type `dtype`."""
    return torch.int32 if dtype == BITS else getattr(torch, dtype)


def storage_type(dtype: torch.dtype) -> str:
    """Returns the IR storage type of a tensor of floats or bools; the inverse of :func:`tensor_type`."""
    return str(dtype).removeprefix("torch.")


def pack(value: Tensor) -> Tensor:
    """Packs bools ``[rows, ...]`` into int32 ``[rows, words]``; bits after the last element are 0."""
    flat = value.flatten(1)
    filled = pad(flat, (0, -flat.size(1) % PER_WORD)).long().unflatten(1, (-1, PER_WORD))
    place = torch.arange(PER_WORD, device=value.device)
    return torch.bitwise_left_shift(filled, place).sum(2).to(torch.int32)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`pack`; returns bools ``[rows, *shape]``."""
    bits = packed.unsqueeze(2) >> torch.arange(PER_WORD, device=packed.device, dtype=torch.int32)
    flat = (bits & 1).bool().flatten(1)[:, : math.prod(shape)]
    return flat.reshape(-1, *shape)
