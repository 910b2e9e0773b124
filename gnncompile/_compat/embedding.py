"""The gradient of an embedding's weights in Inductor's code for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import fallback_handler, lowerings

from gnncompile.device import device_of

_GRADIENT = torch.ops.aten.embedding_dense_backward.default


def _gradient(grad_output: Tensor, *args: Any) -> Any:
    is_cpp = device_of(grad_output.device).is_cpp_in_inductor
    return NotImplemented if is_cpp else decompositions[_GRADIENT](grad_output, *args)


ON_GPUS_ONLY: dict[Any, Callable[..., Any]] = {_GRADIENT: _gradient} if _GRADIENT in decompositions else {}
"""Decompositions that are Inductor's for GPUs alone. On a CPU torch's own kernel computes these operations.

Inductor adds each row of the gradient atomically to a row of the weights. Threads wait for each other at the few rows
of a small table, and the order of the sums differs from run to run. Torch's kernel gives each thread rows of the
weights, and sums in order.
"""


def patch_embedding_gradient() -> None:
    """Lets Inductor call the operations in :data:`ON_GPUS_ONLY`; in other compiles they are decomposed before."""
    for op in ON_GPUS_ONLY:
        lowerings.setdefault(op, fallback_handler(op))
