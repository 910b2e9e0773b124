"""Lowers the ops of :mod:`gnncompile.ops.gemm_arithmetic` for Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import inductor_call
from gnncompile._compat.inductor_call import Call, Result, contiguous, node_now, realized, tensor_of, writable
from gnncompile.ir.region import parse
from gnncompile.ops import gemm_arithmetic as arithmetic
from gnncompile.ops import on_meta

_own = torch.ops.gnncompile

_IMPORT = "from gnncompile.ops import gemm_arithmetic as _gnncompile_gemm_arithmetic"


class ProductWithEpilogue(Call):
    """Writes the outputs of a region on a product, or on the sum of two, to new buffers or to the input `added`.

    The inputs are up to four factors, `added`, and what else the region reads. The constants are:

    - for each factor and `added`, whether it is given;
    - whether a ReLU follows the sum;
    - the region;
    - whether the first output is written to `added`.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        there, relu, spec, in_place = self.constant_args
        references = iter(self.references())
        given = [next(references) if is_there else "None" for is_there in there]
        outs = [*([given[-1]] if in_place else []), *self.filled(wrapper)]
        wrapper.add_import_once(_IMPORT)
        texts = [*given, str(relu), _list(references), repr(spec), _list(outs)]
        wrapper.writeline(f"_gnncompile_gemm_arithmetic.write_product_with_epilogue({', '.join(texts)})")


class ProductsOverRows(Call):
    """Fills buffers with products over rows, each followed by ``left.sum(0)`` if that is wanted.

    The inputs are the left matrices, and what the right ones are computed from. The constants are the regions of the
    right matrices, and whether the sums are wanted.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        specs, sums = self.constant_args
        given = self.references()
        wrapper.add_import_once(_IMPORT)
        lefts, reads = _list(given[: len(specs)]), _list(given[len(specs) :])
        texts = [lefts, reads, repr(list(specs)), repr(list(sums)), _list(self.filled(wrapper))]
        wrapper.writeline(f"_gnncompile_gemm_arithmetic.write_products_over_rows({', '.join(texts)})")


def _list(names: Any) -> str:
    return f"[{', '.join(names)}]"


def _lower_product_with_epilogue(
    left: Any,
    right: Any,
    other_left: Any,
    other_right: Any,
    added: Any,
    relu: bool,
    in_place: bool,
    read: Sequence[Any],
    spec: str,
) -> list[Any]:
    if in_place:
        added = writable(added, node_now().args[4])
    factors = [_ready(left, contiguous), _ready(right, realized)]
    factors += [_ready(other_left, contiguous), _ready(other_right, realized)]
    given = [*factors, _ready(added, contiguous)]
    there = tuple(one is not None for one in given)
    inputs = [*(one for one in given if one is not None), *map(contiguous, read)]
    size = left.get_size()[0], right.get_size()[1]
    outputs = parse(spec).outputs[in_place:]
    outs = [Result(size, getattr(torch, out.dtype), left.get_device()) for out in outputs]
    written = [given[-1]] if in_place else []
    ProductWithEpilogue(inputs, outs, written=written, constants=(there, relu, spec, in_place))
    return [*([tensor_of(added)] if in_place else []), *map(tensor_of, outs)]


def _ready(tensor: Any, how: Any) -> Any:
    return None if tensor is None else how(tensor)


def _lower_products_over_rows(
    lefts: Sequence[Any], reads: Sequence[Any], specs: Sequence[str], sums: Sequence[bool]
) -> list[Any]:
    outs = []
    for left, given, spec, summed in zip(lefts, arithmetic.by_product(reads, specs), specs, sums, strict=True):
        columns = arithmetic.columns(spec) if spec else given[0].get_size()[1]
        depth = left.get_size()[1]
        sizes = [(depth, columns), (depth,)] if summed else [(depth, columns)]
        outs += [Result(size, left.get_dtype(), left.get_device()) for size in sizes]
    ProductsOverRows([contiguous(one) for one in (*lefts, *reads)], outs, constants=(tuple(specs), tuple(sums)))
    return [tensor_of(out) for out in outs]


# On tensors of the device "meta", an op makes its results without computing them.


def _begin_product_with_epilogue(
    left: Tensor,
    right: Tensor,
    other_left: Tensor | None,
    other_right: Tensor | None,
    added: Tensor | None,
    relu: bool,
    in_place: bool,
    read: list[Tensor],
    spec: str,
) -> None:
    factors = left, right, other_left, other_right
    outs = _own.product_with_epilogue(*factors, added, relu, in_place, read, spec)
    arithmetic.write_product_with_epilogue(*factors, added, relu, read, spec, outs)


def _begin_products_over_rows(lefts: list[Tensor], reads: list[Tensor], specs: list[str], sums: list[bool]) -> None:
    outs = _own.products_over_rows(lefts, reads, specs, sums)
    arithmetic.write_products_over_rows(lefts, reads, specs, sums, outs)


def install() -> None:
    """Registers the lowerings with Inductor."""
    for op, lower, begin in (
        (_own.product_with_epilogue, _lower_product_with_epilogue, _begin_product_with_epilogue),
        (_own.products_over_rows, _lower_products_over_rows, _begin_products_over_rows),
    ):
        inductor_call.install(op.default, lower, partial(on_meta.begin, launch=begin))
