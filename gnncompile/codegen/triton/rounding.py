"""Converts values to the dtype of memory. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """Returns `value` as TYPE. Triton's interpreter can't convert float64 to bfloat16 in one step."""
    if TYPE.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    return value.to(TYPE)
