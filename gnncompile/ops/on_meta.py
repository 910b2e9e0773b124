"""Calls a function on tensors of the device "meta", in place of the arguments of a node that Inductor lowers.

Kernels that are launched on such tensors are only compiled: see :class:`gnncompile.codegen.triton.launcher.Kernel`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from gnncompile import _compat
from gnncompile.device import device_of


def begin(node: fx.Node, launch: Callable[..., None]) -> None:
    """Starts to compile the Triton kernels of a node, for the sizes of the graph that is compiled for.

    Nothing is done on devices without Triton, or if a size is unknown.

    Args:
        node: A call whose inputs are all tensors.
        launch: Launches the kernels, given the arguments of the node.
    """
    fakes = {given: given.meta["val"] for given in node.all_input_nodes}
    if not all(device_of(fake.device).runs_triton for fake in fakes.values()):
        return
    metas = {given: _empty(fake) for given, fake in fakes.items()}
    if all(meta is not None for meta in metas.values()):
        launch(*fx.map_arg(node.args, metas.__getitem__))


def _empty(fake: Tensor) -> Tensor | None:
    """Returns a tensor of the device "meta" with the sizes and strides of now; None if one is unknown."""
    sizes, strides = ([_compat.size_now(s) for s in given] for given in (fake.shape, fake.stride()))
    known = [[s for s in given if s is not None] for given in (sizes, strides)]
    if known != [sizes, strides]:
        return None
    return torch.empty_strided(*known, dtype=fake.dtype, device="meta")
