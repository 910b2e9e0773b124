"""Losses over the rows of all parts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gnncompile.capture.parts import group_name
from gnncompile.device import HALVES
from gnncompile.exc import ArgumentError


def mean_over_parts(values: Tensor, mesh: DeviceMesh, mask: Tensor | None = None) -> Tensor:
    """Returns the mean of values per row over the rows of all parts, the same number in each process.

    The gradient of a process is that of its own rows. A model that was compiled with the same mesh sums the gradients
    of its parameters over processes, so they are those of the mean over the whole graph.

    Args:
        values: A value for each row of this part, floating-point ``[rows, ...]``, such as losses with
            ``reduction="none"``.
        mesh: The mesh of the compiled model.
        mask: Which rows count, bool ``[rows]``; None for all rows.

    Returns:
        The mean, without dimensions, of the dtype of `values`; NaN if no row counts in any process.

    Raises:
        TypeError: `mesh` is no ``DeviceMesh``.
        ValueError: `values` are no floating-point rows, the mask has another number of rows or is not boolean, or the
            mesh has several dimensions.
        PartitionError: The exchange failed.
    """
    if not values.is_floating_point() or values.dim() == 0:
        raise ArgumentError(
            f"values: found {values.dtype} {tuple(values.shape)}, expected floating-point values for each row. Pass "
            'losses with reduction="none", and convert others, as in (out == y).float().'
        )
    rows = torch.full((), values.size(0), device=values.device)  # torch.tensor would wait for the device
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != values.shape[:1]:
            raise ArgumentError(
                f"mask: found {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(values.shape[:1])}."
            )
        values = torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, values.new_zeros(()))
        rows = mask.sum()
    count = rows * math.prod(values.shape[1:])
    wide = values.float() if values.dtype in HALVES else values  # a sum of many halves would overflow
    mean: Tensor = _Mean.apply(wide.sum(), count, group_name(mesh, None))  # type: ignore[no-untyped-call]
    return mean.to(values.dtype)


class _Mean(torch.autograd.Function):
    """Divides the sum of all parts by the count of all parts. The gradient is that of this part's sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, group: str) -> Tensor:
        """Returns the quotient of the sums over all parts."""
        both = torch.stack([total.double(), count.double()])
        whole, counted = torch.ops.gnncompile.all_reduce(both, "sum", group, [])
        ctx.save_for_backward(counted)
        return (whole / counted).to(total.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns the gradient of this part's sum."""
        (counted,) = ctx.saved_tensors
        return (gradient / counted).to(gradient.dtype), None, None
