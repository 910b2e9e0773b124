"""Backwards that run more than once (``retain_graph=True``), though they write over tensors that their forward saved.

AOTAutograd lets Inductor write over saved tensors that nobody else can see ("donated buffers"), and so refuses a
backward that keeps its graph. Here such a backward writes over copies, and the next backward finds what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import clone_preserve_strides


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph for another backward (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def let_keep_graph(kind: Any) -> None:
    """Makes the backward of code that AOTAutograd compiled run as often as eager's.

    Args:
        kind: The :class:`torch.autograd.Function` that AOTAutograd has made.
    """
    original, written = kind._backward_impl, list[int]()

    def backward(ctx: Any, args: list[Any]) -> Any:
        if keeps_graph():
            if kind.metadata.bw_donated_idxs != []:  # None if torch knows none
                written[:] = kind.metadata.bw_donated_idxs or []
                kind.metadata.bw_donated_idxs = []  # only copies are written over from now on, so nothing is refused
            for position in written:
                args[position] = clone_preserve_strides(args[position])
        return original(ctx, args)

    kind._backward_impl = staticmethod(backward)
