"""Lowers the ops of :mod:`gnncompile.ops.gemm` for Inductor.

Results are written to buffers of Inductor's, or to a matrix that nobody reads afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnncompile._compat import aoti, inductor_call
from gnncompile._compat.inductor_call import Call, Result, contiguous, node_now, realized, tensor_of, writable
from gnncompile.ops import gemm, on_meta

_own = torch.ops.gnncompile

_IMPORT = "from gnncompile.ops import gemm as _gnncompile_gemm"


class ProductInPlace(Call):
    """Adds ``left @ right`` to `total`: ``[n, m] += [n, k] @ [k, m]``. The inputs are total, left, right."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        total, left, right = self.references()
        if aoti.current_build() is not None:
            aoti.write_addmm(wrapper, self.device.type, total, left, right)
            return
        wrapper.writeline(f"extern_kernels.addmm({total}, {left}, {right}, alpha=1, beta=1, out={total})")


class Product(Call):
    """Writes a product, or the sum of two products, to a new buffer or to the input `added`.

    The inputs are the matrices, `added` and `gate`; an input may be left out as None. The constants are:

    - for each input, whether it is given;
    - whether a ReLU follows;
    - the position of the input that is written to; None for a new buffer.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        there, relu, in_place = self.constant_args
        references = iter(self.references())
        given = [next(references) if is_there else "None" for is_there in there]
        out = given[in_place] if in_place is not None else self.filled(wrapper)[0]
        name = "write_product" if len(given) == 4 else "write_sum_of_products"
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_gemm.{name}({', '.join(given)}, {relu}, {out})")


class ProductsOfSameRows(Call):
    """Fills buffers with products of one matrix and several weights.

    The inputs are the matrix, the weights, and the rows to add. The constant tells for each weight whether a row is
    added.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        (biased,) = self.constant_args
        left, *others = self.references()
        rights, rows = others[: len(biased)], iter(others[len(biased) :])
        added = [next(rows) if is_there else "None" for is_there in biased]
        given = ", ".join(f"[{', '.join(group)}]" for group in (rights, added, self.filled(wrapper)))
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_gemm.write_products_of_same_rows({left}, {given})")


class ProductOverRows(Call):
    """Fills buffers with ``left.T @ right``, and with ``left.sum(0)`` if there is a second buffer."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        wrapper.add_import_once(_IMPORT)
        given = ", ".join([*self.references(), *self.filled(wrapper)])
        wrapper.writeline(f"_gnncompile_gemm.write_product_over_rows({given})")


class TwoProductsOverRows(Call):
    """Fills buffers with two products over rows, each followed by ``left.sum(0)`` if that is wanted.

    The constants are two flags: whether ``left.sum(0)`` is wanted for the first product, and for the second.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        matrices, results = iter(self.references()), iter(self.filled(wrapper))
        given: list[str] = []
        for sums in self.constant_args:
            given += [next(matrices), next(matrices), next(results), next(results) if sums else "None"]
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_gemm.write_two_products_over_rows({', '.join(given)})")


class SumsOverRows(Call):
    """Fills a buffer with ``rows.sum(0)``. The second input only orders the call after another call."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call into Inductor's wrapper."""
        (rows, _), (out,) = self.references(), self.filled(wrapper)
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_gemm.write_sums_over_rows({rows}, {out})")


def _lower_add_product(total: Any, left: Any, right: Any) -> Any:
    total = writable(total, node_now().args[0])
    ProductInPlace([total, *map(realized, (left, right))], written=[total])
    return tensor_of(total)


def _lower_product(*args: Any) -> Any:
    *factors, added, gate, relu, in_place = args
    if in_place:
        added = writable(added, node_now().args[-4])
    left, right = factors[:2]
    matrices = [realized(t) if k % 2 else contiguous(t) for k, t in enumerate(factors)]
    extra = [None if t is None else contiguous(t) for t in (added, gate)]
    given = [*matrices, *extra]
    there, inputs = tuple(t is not None for t in given), [t for t in given if t is not None]
    if in_place:
        Product(inputs, written=[extra[0]], constants=(there, relu, len(matrices)))
        return tensor_of(added)
    out = _result(left, left.get_size()[0], right.get_size()[1])
    Product(inputs, [out], constants=(there, relu, None))
    return tensor_of(out)


def _lower_products_of_same_rows(left: Any, rights: list[Any], added: list[Any]) -> list[Any]:
    outs = [_result(left, left.get_size()[0], right.get_size()[1]) for right in rights]
    rows = [contiguous(row) for row in added if row is not None]
    biased = tuple(row is not None for row in added)
    ProductsOfSameRows([contiguous(left), *map(realized, rights), *rows], outs, constants=(biased,))
    return [tensor_of(out) for out in outs]


def _lower_product_over_rows(left: Any, right: Any) -> Any:
    results = _results(left, right, sums=False)
    ProductOverRows([contiguous(left), contiguous(right)], results)
    return tensor_of(results[0])


def _lower_product_and_sums(left: Any, right: Any) -> list[Any]:
    results = _results(left, right, sums=True)
    ProductOverRows([contiguous(left), contiguous(right)], results)
    return [tensor_of(result) for result in results]


def _lower_two_products(
    left: Any, right: Any, sums: bool, other_left: Any, other_right: Any, other_sums: bool
) -> list[Any]:
    results = [*_results(left, right, sums), *_results(other_left, other_right, other_sums)]
    given = [contiguous(t) for t in (left, right, other_left, other_right)]
    TwoProductsOverRows(given, results, constants=(sums, other_sums))
    return [tensor_of(result) for result in results]


def _results(left: Any, right: Any, sums: bool) -> list[Result]:
    """Buffers for a product over rows and, if `sums`, for the sum of its left matrix's rows."""
    columns = left.get_size()[1]
    product = _result(left, columns, right.get_size()[1])
    return [product, _result(left, columns)] if sums else [product]


def _lower_sums_over_rows(rows: Any, behind: Any) -> Any:
    out = _result(rows, rows.get_size()[1])
    SumsOverRows([contiguous(rows), realized(behind)], [out])
    return tensor_of(out)


def _result(like: Any, *size: Any) -> Result:
    return Result(size, like.get_dtype(), like.get_device())


# On tensors of the device "meta", an op makes its results without computing them.


def _begin_product(left: Tensor, right: Tensor, *ends: Any) -> None:
    added, gate, relu, _ = ends
    gemm.write_product(left, right, added, gate, relu, _own.product(left, right, *ends))


def _begin_sum_of_products(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor, *ends: Any) -> None:
    (added, gate, relu, _), factors = ends, (left, right, other_left, other_right)
    gemm.write_sum_of_products(*factors, added, gate, relu, _own.sum_of_products(*factors, *ends))


def _begin_products_of_same_rows(left: Tensor, rights: list[Tensor], added: list[Tensor | None]) -> None:
    gemm.write_products_of_same_rows(left, rights, added, _own.products_of_same_rows(left, rights, added))


def _begin_product_over_rows(left: Tensor, right: Tensor) -> None:
    gemm.write_product_over_rows(left, right, _own.product_over_rows(left, right))


def _begin_product_and_sums(left: Tensor, right: Tensor) -> None:
    gemm.write_product_over_rows(left, right, *_own.product_and_sums_over_rows(left, right))


def _begin_two_products(*given: Any) -> None:
    results, both = iter(_own.two_products_over_rows(*given)), (given[:3], given[3:])
    written = [(left, right, next(results), next(results) if sums else None) for left, right, sums in both]
    gemm.write_two_products_over_rows(*written[0], *written[1])


def _begin_sums_over_rows(rows: Tensor, behind: Tensor) -> None:
    gemm.write_sums_over_rows(rows, _own.sums_over_rows(rows, behind))


_LOWERINGS: tuple[tuple[Any, Callable[..., Any], Callable[..., None]], ...] = (
    (_own.product, _lower_product, _begin_product),
    (_own.sum_of_products, _lower_product, _begin_sum_of_products),
    (_own.products_of_same_rows, _lower_products_of_same_rows, _begin_products_of_same_rows),
    (_own.product_over_rows, _lower_product_over_rows, _begin_product_over_rows),
    (_own.product_and_sums_over_rows, _lower_product_and_sums, _begin_product_and_sums),
    (_own.two_products_over_rows, _lower_two_products, _begin_two_products),
    (_own.sums_over_rows, _lower_sums_over_rows, _begin_sums_over_rows),
)
"""The ops with kernels of ours, their lowerings, and functions that start to compile the kernels.

The functions launch the kernels on tensors of the device "meta": see :mod:`gnncompile.ops.on_meta`.
"""


def install() -> None:
    """Registers the lowerings with Inductor."""
    inductor_call.install(_own.add_product.default, _lower_add_product)
    for op, lower, begin in _LOWERINGS:
        inductor_call.install(op.default, lower, partial(on_meta.begin, launch=begin))
