"""Which values dropout keeps: the same bits in torch, Triton and C++, so that no mask is ever stored.

A decision is a function of (seed, edge, feature): Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011) with the seed's 64 bits as its key and (edge, feature, 0, 0) as its counter. The gradient walks edges
in another order and finds the same decisions, because an edge goes by its number in the original list.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

LARGEST_SEED = 2**63 - 1
"""Seeds are drawn from 0 up to this, exclusive."""


def threshold(p: float) -> int:
    """The smallest 32-bit word that is kept: a share `p` of all words, to a precision of 2**-33, is below it."""
    return min(max(round(p * 2**32), 0), _WORD)


def scale(p: float) -> float:
    """What a value is multiplied by if it is kept, for ``0 <= p < 1``."""
    return 1.0 / (1.0 - p)


def factors(seed: Tensor, edge: Tensor, feature: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies with: ``1 / (1 - p)`` where a value is kept, 0 elsewhere.

    Args:
        seed: int64, one element.
        edge: Numbers of edges, int64 below 2**32, broadcast against `feature`.
        feature: Positions within an edge's row, int64 below 2**32.
        p: Probability of a zero, between 0 and 1.
        dtype: Of the result.
    """
    return (words(seed, edge, feature) >= threshold(p)).to(dtype) * scale(p)


def words(seed: Tensor, edge: Tensor, feature: Tensor) -> Tensor:
    """The first word of Philox-4x32-10, in ``[0, 2**32)`` as int64."""
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
    """The upper and the lower word of a product of two words, by halves: int64 must not overflow."""
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
