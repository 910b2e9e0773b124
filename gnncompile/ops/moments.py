"""``gnncompile::var_mean_over_rows(matrix, correction)`` is ``torch.var_mean(matrix.float(), 0, correction=...)``.

On a GPU a kernel of ours computes both (:mod:`gnncompile.codegen.triton.moments`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import inductor_call
from gnncompile._compat.inductor_call import Call, Result, contiguous, tensor_of
from gnncompile.ops import on_meta
from gnncompile.ops.region import LIBRARY

LIBRARY.define(
    "var_mean_over_rows(Tensor matrix, int correction) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
_OP = torch.ops.gnncompile.var_mean_over_rows.default
_IMPORT = "from gnncompile.codegen.triton.moments import write_moments as _gnncompile_write_moments"


def _run(matrix: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    return torch.var_mean(matrix.float(), 0, correction=correction)


def _fake(matrix: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    columns = matrix.new_empty(matrix.size(1), dtype=torch.float32)
    return columns, torch.empty_like(columns)


LIBRARY.impl("var_mean_over_rows", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::var_mean_over_rows", _fake, lib=LIBRARY)


class _Moments(Call):
    """Fills two buffers, with the variance and the mean of each column. The constant is the correction."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        (matrix,), (var, mean) = self.references(), self.filled(wrapper)
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_write_moments({matrix}, {self.constant_args[0]}, {var}, {mean})")


def _lower(matrix: Any, correction: int) -> list[Any]:
    results = [Result([matrix.get_size()[1]], torch.float32, matrix.get_device()) for _ in range(2)]
    _Moments([contiguous(matrix)], results, constants=(correction,))
    return [tensor_of(result) for result in results]


def _begin(matrix: Tensor, correction: int) -> None:
    from gnncompile.codegen.triton.moments import write_moments

    write_moments(matrix, correction, *_fake(matrix, correction))


def install() -> None:
    """Registers the lowering with Inductor."""
    inductor_call.install(_OP, _lower, lambda node: on_meta.begin(node, launch=_begin))
