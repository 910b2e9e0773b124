"""Index bounds in Inductor's code: which indices it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from gnncompile.device import HALVES, device_of

aten = torch.ops.aten


def _take_along_dim_counts() -> bool:
    try:
        torch.take_along_dim(torch.zeros(1, device="cpu"), torch.tensor([-1], device="cpu"), 0)
    except (IndexError, RuntimeError):
        return False
    return True


TAKE_ALONG_DIM_COUNTS = _take_along_dim_counts()
"""Whether negative indices of :func:`torch.take_along_dim` count from the end, as in newer versions of torch."""


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    if x.dim() == 0 or index.dim() != 1:
        return _THEIRS[aten.index_select.default](x, dim, index)  # type: ignore[no-any-return]
    dim = dim % x.dim()
    shape = [*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]]
    index = index.to(torch.int64)
    return aten.gather(x, dim, index.view([-1 if k == dim else 1 for k in range(x.dim())]).expand(shape))  # type: ignore[no-any-return]


def _written(op: Any) -> Callable[..., Any]:
    """Returns a decomposition of an indexed write that refuses negative indices.

    Inductor adds the size to negative entries. The decomposition subtracts the size first, so that they stay negative.
    """

    def decomposed(x: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() > 0 and index.dim() == 1:
            index = torch.where(index < 0, index - x.shape[dim], index)
        return _THEIRS[op](x, dim, index, *args, **kwargs)

    return decomposed


_add_written = _written(aten.index_add.default)


def _index_add(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Leaves sums in 16 bits whole where Inductor writes C++: its atomic additions take 10 ns per number.

    Torch's own kernel refuses negative indices itself.
    """
    if x.dtype in HALVES and device_of(x.device).is_cpp_in_inductor:
        return NotImplemented
    return _add_written(x, *args, **kwargs)


REFUSING: dict[Any, Callable[..., Any]] = {
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _written(aten.index_copy.default),
}
"""Decompositions that refuse negative indices, as eager does. They replace Inductor's.

Inductor's are ``x[index]``, where negative indices count from the end.
"""

_THEIRS = get_decompositions(list(REFUSING))
