"""Random bits for dropout. torch, Triton and C++ compute the same bits, so no mask is ever stored.

Whether dropout keeps a value is a function of (seed, edge, feature): Philox-4x32-10 (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011). Its key is the seed's 64 bits, and its counter is (edge, feature, 0, 0). The
gradient walks the edges in another order and keeps the same values, because an edge is its index in the edge list.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

LARGEST_SEED = 2**63 - 1
"""Seeds are drawn from ``[0, LARGEST_SEED)``."""


def threshold(p: float) -> int:
    """Returns the smallest 32-bit word whose value is kept. A share `p` of all words is smaller, to within 2**-33."""
    return min(max(round(p * 2**32), 0), _WORD)


def scale(p: float) -> float:
    """Returns the factor of a value that is kept, for ``0 <= p < 1``."""
    return 1.0 / (1.0 - p)


def factors(seed: Tensor, edge: Tensor, feature: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Returns the factors of dropout: ``1 / (1 - p)`` where a value is kept, 0 elsewhere.

    Args:
        seed: int64, one element.
        edge: Indices of edges in the edge list, int64 below 2**32, broadcast against `feature`.
        feature: Positions within an edge's row, int64 below 2**32.
        p: Probability of a zero, ``0 <= p < 1``.
        dtype: The dtype of the result.
    """
    return (words(seed, edge, feature) >= threshold(p)).to(dtype) * scale(p)


def words(seed: Tensor, edge: Tensor, feature: Tensor) -> Tensor:
    """Returns the first word of Philox-4x32-10 for each (edge, feature), in ``[0, 2**32)`` as int64."""
    seed = seed.reshape(())
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    zero = torch.zeros_like(seed)
    counter = [edge, feature, zero, zero]
    for _ in range(ROUNDS):
        high_a, low_a = _product(MULTIPLIERS[0], counter[0])
        high_b, low_b = _product(MULTIPLIERS[1], counter[2])
        counter = [high_b ^ counter[1] ^ keys[0], low_b, high_a ^ counter[3] ^ keys[1], low_a]
        keys = [(key + step) & _WORD for key, step in zip(keys, KEY_STEPS, strict=True)]
    return counter[0]


def _product(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper and the lower word of a product of two words. Works on halves, so that int64 can't overflow."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
