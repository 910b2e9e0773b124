"""Gradients that stay whole operations until the graph is differentiated, where Inductor writes C++ for a device.

Inductor would decompose them before. :mod:`gnncompile.passes.post_grad.cpu_gradients` writes them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions

from gnncompile.device import Device, device_of

aten = torch.ops.aten


def _is_cpp(device: Device) -> bool:
    return device.is_cpp_in_inductor


def _is_cpp_throughout(device: Device) -> bool:
    """Leaves out Triton's interpreter, which stands for a GPU: it shall run the graphs that a GPU runs."""
    return device.is_cpp_in_inductor and not device.runs_triton


_STAYS: dict[Any, Callable[[Device], bool]] = {
    aten.embedding_dense_backward.default: _is_cpp,
    aten.threshold_backward.default: _is_cpp_throughout,
    aten.leaky_relu_backward.default: _is_cpp_throughout,
}
"""Whether a device keeps an operation. Other devices get Inductor's decomposition."""


def _decomposed_elsewhere(op: Any) -> Callable[..., Any]:
    def decomposed(gradient: Tensor, *args: Any) -> Any:
        stays = _STAYS[op](device_of(gradient.device))
        return NotImplemented if stays else decompositions[op](gradient, *args)

    return decomposed


WHOLE_ON_CPUS: dict[Any, Callable[..., Any]] = {op: _decomposed_elsewhere(op) for op in _STAYS if op in decompositions}
"""The decompositions of these gradients, for devices that do not keep them."""
