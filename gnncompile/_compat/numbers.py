"""The numbers that Inductor's code computes otherwise than torch, as far as a compile can be told so.

The rest is written out by a pass, :mod:`gnncompile.passes.post_grad.exact_numbers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

aten = torch.ops.aten

EXACT_SETTINGS: dict[str, Any] = {"joint_graph_constant_folding": False}
"""Inductor settings that keep signed zeros and NaN.

Inductor would drop sums with a tensor of zeros, which turn negative zeros into positive zeros, and products with an
integer 0, which are NaN for NaN and infinity. What else the setting does for a graph, to write single numbers as
``aten.full``, is done by a decomposition.
"""


def most_unrolled() -> int:
    """Returns the number of elements up to which Inductor writes a reduction out, instead of a loop."""
    return int(inductor_config.unroll_reductions_threshold)


def most_reads() -> int:
    """Returns from how many tensors Inductor computes a value for each of its readers, instead of storing it."""
    return int(inductor_config.realize_reads_threshold)


def _remainder(dividend: Any, divisor: Any) -> Any:
    """Computes ``aten.remainder`` of floats by the library's ``fmod``.

    Inductor's ``x - floor(x / y) * y`` loses the digits and the sign of small numbers, and is no remainder at all for
    large numbers.
    """
    dtype = torch.result_type(dividend, divisor)
    if not dtype.is_floating_point:
        return NotImplemented
    if not isinstance(dividend, Tensor):
        dividend = torch.full((), dividend, dtype=dtype, device=divisor.device)
    if isinstance(divisor, Tensor):
        divisor = divisor.to(dtype)
    rest = torch.fmod(dividend.to(dtype), divisor)
    if not isinstance(divisor, Tensor):
        return torch.where(rest < 0 if divisor > 0 else rest > 0, rest + divisor, rest)
    below, above = (rest < 0) & (divisor > 0), (rest > 0) & (divisor < 0)
    return torch.where(below | above, rest + divisor, rest)


def _scalar_tensor(
    number: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    if not isinstance(number, (bool, int, float)):
        return NotImplemented
    return torch.full((), number, dtype=dtype or torch.get_default_dtype(), device=device)


def _scaled(combine: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the decomposition of a sum or a difference whose second operand has a factor.

    Inductor's patterns leave out keyword arguments. It computes ``add(x, a @ b, alpha=0.1)`` as ``addmm(x, a, b)``.
    """

    def decomposed(left: Any, right: Any, *, alpha: Any = 1) -> Any:
        if not isinstance(alpha, torch.SymFloat | torch.SymInt) and alpha == 1:
            return NotImplemented
        if not isinstance(right, Tensor):
            return combine(left, right * alpha)
        dtype = torch.result_type(left, right)
        return combine(left, (right.to(dtype) * alpha).to(dtype))

    return decomposed


def _running_sum(summed: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Converts before it sums. Inductor's pattern for running sums of a constant leaves out ``dtype``."""
    return NotImplemented if dtype is None else summed.to(dtype).cumsum(dim)


EXACT: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor), _remainder),
    aten.scalar_tensor.default: _scalar_tensor,
    aten.add.Tensor: _scaled(torch.add),
    aten.sub.Tensor: _scaled(torch.sub),
    aten.cumsum.default: _running_sum,
}
"""Decompositions of operations whose numbers are not torch's in Inductor's code."""
