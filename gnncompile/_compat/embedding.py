"""The gradient of an embedding's weights in Inductor's code for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.lowering import fallback_handler, lowerings

GRADIENT = torch.ops.aten.embedding_dense_backward.default


def on_gpus_only(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Inductor's decomposition of the gradient for GPUs alone. On a CPU torch's own kernel computes it.

    The decomposition adds each row of the gradient atomically to a row of the weights. Threads wait for each other at
    the few rows of a small table, and the order of the sums differs from run to run. Torch's kernel gives each thread
    rows of the weights, and sums in order.
    """
    lowerings.setdefault(GRADIENT, fallback_handler(GRADIENT))

    def decomposed(grad_output: Tensor, *args: Any) -> Any:
        return NotImplemented if grad_output.device.type == "cpu" else theirs(grad_output, *args)

    return decomposed
