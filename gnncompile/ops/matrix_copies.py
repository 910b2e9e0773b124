"""``gnncompile::matrix_copies(sources, views, dtype)`` copies views of matrices, such as transposed slices of weights.

A view is five numbers: see :class:`gnncompile.codegen.matrix_view.View`. Each copy is contiguous. On a GPU one launch
makes all copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import inductor_call
from gnncompile._compat.inductor_call import Call, Result, realized, tensor_of, tuple_text
from gnncompile.codegen.matrix_view import View
from gnncompile.ops.region import LIBRARY

LIBRARY.define(
    "matrix_copies(Tensor[] sources, int[] views, ScalarType dtype) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_OP = torch.ops.gnncompile.matrix_copies.default
_IMPORTS = (
    "from gnncompile.codegen.matrix_view import View as _gnncompile_view",
    "from gnncompile.codegen.triton.matrix_copies import MatrixCopies as _gnncompile_matrix_copies",
)


def _views(numbers: Sequence[int]) -> list[View]:
    return [View(*numbers[at : at + 5]) for at in range(0, len(numbers), 5)]


def _run(sources: list[Tensor], views: list[int], dtype: torch.dtype) -> list[Tensor]:
    found = []
    for source, given in zip(sources, _views(views), strict=True):
        strides = given.row_stride, given.column_stride
        view = source.as_strided(given[:2], strides, source.storage_offset() + given.offset)
        found.append(view.to(dtype, memory_format=torch.contiguous_format, copy=True))
    return found


def _fake(sources: list[Tensor], views: list[int], dtype: torch.dtype) -> list[Tensor]:
    sizes = [view[:2] for view in _views(views)]
    return [source.new_empty(size, dtype=dtype) for source, size in zip(sources, sizes, strict=True)]


LIBRARY.impl("matrix_copies", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gnncompile::matrix_copies", _fake, lib=LIBRARY)


class _Copies(Call):
    """Fills buffers with copies of views. The constants are the views."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper. The kernel is made once, when the wrapper is imported."""
        inputs: Sequence[Any] = self.inputs
        types = tuple(one.get_dtype() for one in (*inputs, *self.results))
        views = ", ".join(f"_gnncompile_view{tuple(view)!r}" for view in self.constant_args)
        told = f"[{views}], {types!r}"
        name = f"copies_{hashlib.sha256(told.encode()).hexdigest()[:12]}"
        for line in _IMPORTS:
            wrapper.add_import_once(line)
        wrapper.add_import_once(f"{name} = _gnncompile_matrix_copies({told})")
        wrapper.writeline(f"{name}({tuple_text(self.references())}, {tuple_text(self.filled(wrapper))})")


def _lower(sources: Sequence[Any], views: Sequence[int], dtype: torch.dtype) -> list[Any]:
    found = tuple(_views(views))
    results = [Result(view[:2], dtype, source.get_device()) for source, view in zip(sources, found, strict=True)]
    _Copies([realized(source) for source in sources], results, constants=found)
    return [tensor_of(result) for result in results]


def install() -> None:
    """Registers the lowering with Inductor."""
    inductor_call.install(_OP, _lower)
