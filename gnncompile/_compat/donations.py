"""Backwards that run more than once (``retain_graph=True``), though they write over tensors that their forward saved.

AOTAutograd lets Inductor write over saved tensors that nobody else can see ("donated buffers"), and so refuses a
backward that keeps its graph. Here such a backward writes over copies, and the next backward finds what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._prims_common import clone_preserve_strides


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph for another backward (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def let_keep_graph(kind: Any) -> None:
    """Makes the backward of code that AOTAutograd compiled run as often as eager's.

    Args:
        kind: The :class:`torch.autograd.Function` that AOTAutograd has made.
    """
    original = kind._backward_impl

    def backward(ctx: Any, args: list[Any]) -> Any:
        if not keeps_graph():
            return original(ctx, args)
        for position in kind.metadata.bw_donated_idxs or ():
            args[position] = clone_preserve_strides(args[position])
        with functorch_config.patch(donated_buffer=False):  # only copies are written over, so nothing is refused
            return original(ctx, args)

    kind._backward_impl = staticmethod(backward)
