"""Gradients that Inductor decomposes, but that its code for a CPU computes as whole operations.

The gradient of an embedding's weights is torch's own kernel. Inductor adds each row of the gradient atomically to a row
of the weights. Threads wait for each other at the few rows of a small table, and the order of the sums differs from run
to run. Torch's kernel gives each thread rows of the weights, and sums in order.

The gradients of ReLU and leaky ReLU read values. Decomposed, they read a mask ``value > 0``, which AOTAutograd would
have the forward write, since a mask is smaller than the value. But vector code for a CPU writes masks one element after
the other, in more time than a product takes. The value is in memory anyway, for the next layer's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import fallback_handler, lowerings

from gnncompile.device import Device, device_of

aten = torch.ops.aten


class _Whole(NamedTuple):
    """How an operation is kept.

    Attributes:
        lower: Lowers the operation in Inductor; None if Inductor calls torch's own kernel.
        stays: Whether a device keeps the operation. Other devices get Inductor's decomposition.
    """

    lower: Callable[..., Any] | None
    stays: Callable[[Device], bool]


def _relu(gradient: Any, value: Any, threshold: float) -> Any:
    return lowerings[aten.where.self](lowerings[aten.le.Scalar](value, threshold), 0, gradient)


def _leaky_relu(gradient: Any, value: Any, slope: float, self_is_result: bool) -> Any:
    smaller = lowerings[aten.mul.Tensor](gradient, slope)
    return lowerings[aten.where.self](lowerings[aten.gt.Scalar](value, 0), gradient, smaller)


def _is_cpp(device: Device) -> bool:
    return device.is_cpp_in_inductor


def _is_cpp_throughout(device: Device) -> bool:
    """Leaves out Triton's interpreter, which stands for a GPU: it shall run the graphs that a GPU runs."""
    return device.is_cpp_in_inductor and not device.runs_triton


_WHOLE: dict[Any, _Whole] = {
    aten.embedding_dense_backward.default: _Whole(None, _is_cpp),
    aten.threshold_backward.default: _Whole(_relu, _is_cpp_throughout),
    aten.leaky_relu_backward.default: _Whole(_leaky_relu, _is_cpp_throughout),
}


def _decomposed_elsewhere(op: Any) -> Callable[..., Any]:
    def decomposed(gradient: Tensor, *args: Any) -> Any:
        stays = _WHOLE[op].stays(device_of(gradient.device))
        return NotImplemented if stays else decompositions[op](gradient, *args)

    return decomposed


WHOLE_ON_CPUS: dict[Any, Callable[..., Any]] = {op: _decomposed_elsewhere(op) for op in _WHOLE if op in decompositions}
"""The decompositions of these gradients, for devices that do not keep them."""


def patch_cpu_gradients() -> None:
    """Lets Inductor lower the operations in :data:`WHOLE_ON_CPUS`; in other compiles they are decomposed before."""
    for op in WHOLE_ON_CPUS:
        lowerings.setdefault(op, _WHOLE[op].lower or fallback_handler(op))
