"""The gradients of ReLU and leaky ReLU in Inductor's code for a CPU: they read values, not masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings

from gnncompile.device import device_of

aten = torch.ops.aten


def _relu(gradient: Any, value: Any, threshold: float) -> Any:
    return lowerings[aten.where.self](lowerings[aten.le.Scalar](value, threshold), 0, gradient)


def _leaky_relu(gradient: Any, value: Any, slope: float, self_is_result: bool) -> Any:
    smaller = lowerings[aten.mul.Tensor](gradient, slope)
    return lowerings[aten.where.self](lowerings[aten.gt.Scalar](value, 0), gradient, smaller)


_LOWERED: dict[Any, Callable[..., Any]] = {
    aten.threshold_backward.default: _relu,
    aten.leaky_relu_backward.default: _leaky_relu,
}


def _whole(op: Any) -> Callable[..., Any]:
    def decomposed(gradient: Tensor, *args: Any) -> Any:
        device = device_of(gradient.device)
        keeps = device.is_cpp_in_inductor and not device.runs_triton  # Triton's epilogues take masks in
        return NotImplemented if keeps else decompositions[op](gradient, *args)

    return decomposed


WHOLE_ON_CPUS: dict[Any, Callable[..., Any]] = {op: _whole(op) for op in _LOWERED if op in decompositions}
"""Decompositions that are Inductor's for GPUs alone. On a CPU these gradients stay one operation up to the lowering.

Decomposed, they read a mask ``value > 0``, which AOTAutograd would have the forward write, since a mask is smaller than
the value. But vector code for a CPU writes masks one element after the other, in more time than a product takes. The
value is in memory anyway, for the gradient of the next layer's weight.
"""


def patch_activation_gradients() -> None:
    """Lets Inductor lower the operations in :data:`WHOLE_ON_CPUS`; in other compiles they are decomposed before."""
    for op in WHOLE_ON_CPUS:
        lowerings.setdefault(op, _LOWERED[op])
