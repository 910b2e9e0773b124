"""How Inductor calls our products of matrices: into its own buffers, or into a matrix that nobody reads afterwards."""

from __future__ import annotations

from typing import Any

import torch

from gnncompile._compat.inductor import V, fallback_handler, ir, lowerings, register_lowering
from gnncompile.capture.inductor_call import Call
from gnncompile.runtime import dense_ops  # noqa: F401  (defines the ops)

_own = torch.ops.gnncompile
_IMPORT = "from gnncompile.runtime import dense_ops as _gnncompile_dense"


class ProductInPlace(Call):
    """Adds ``left @ right`` to `total`: ``[n, m] += [n, k] @ [k, m]``, given in this order."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        total, left, right = self.references()
        wrapper.writeline(f"extern_kernels.addmm({total}, {left}, {right}, alpha=1, beta=1, out={total})")


class Product(Call):
    """Writes ``left @ right``: left, right, what is added, the gate and the result, without those that are None.

    Its constants are which of the five there are, and whether a ReLU follows.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        there, relu = self.constant_args
        references = iter(self.references())
        left, right, added, gate, out = (next(references) if is_there else "None" for is_there in there)
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.write_product({left}, {right}, {added}, {gate}, {relu}, {out})")


class ProductOverRows(Call):
    """Writes ``left.T @ right``: left, right, the result, and the sums of left's rows where they are wanted."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.write_product_over_rows({', '.join(self.references())})")


class SumsOverRows(Call):
    """Writes ``rows.sum(0)``: the rows, what must have been launched before, and the result."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        rows, _, out = self.references()
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.write_sums_over_rows({rows}, {out})")


def _lower_add_product(total: Any, left: Any, right: Any) -> Any:
    if V.graph.cpp_wrapper:
        return fallback_handler(_own.add_product.default, add_to_fallback_set=False)(total, left, right)
    given = [ir.ExternKernel.realize_input(t) for t in (total, left, right)]
    ProductInPlace(given, given[:1])
    return total


def _lower_product(left: Any, right: Any, added: Any, gate: Any, relu: bool, in_place: bool) -> Any:
    if V.graph.cpp_wrapper:
        op = fallback_handler(_own.product.default, add_to_fallback_set=False)
        return op(left, right, added, gate, relu, in_place)
    out = added if in_place else _empty(left, left.get_size()[0], right.get_size()[1])
    extra = [None if t is None else _contiguous(t) for t in (added, gate)]
    given = [_contiguous(left), ir.ExternKernel.realize_input(right), *extra, extra[0] if in_place else out]
    there = tuple(t is not None for t in given)
    Product([t for t in given if t is not None], given[-1:], (there, relu))
    return out


def _lower_product_over_rows(left: Any, right: Any) -> Any:
    if V.graph.cpp_wrapper:
        return fallback_handler(_own.product_over_rows.default, add_to_fallback_set=False)(left, right)
    out = _empty(left, left.get_size()[1], right.get_size()[1])
    ProductOverRows([_contiguous(left), _contiguous(right), out], [out])
    return out


def _lower_product_and_sums(left: Any, right: Any) -> Any:
    if V.graph.cpp_wrapper:
        return fallback_handler(_own.product_and_sums_over_rows.default, add_to_fallback_set=False)(left, right)
    columns = left.get_size()[1]
    made = [_empty(left, columns, right.get_size()[1]), _empty(left, columns)]
    ProductOverRows([_contiguous(left), _contiguous(right), *made], made)
    return made


def _lower_sums_over_rows(rows: Any, behind: Any) -> Any:
    if V.graph.cpp_wrapper:
        return fallback_handler(_own.sums_over_rows.default, add_to_fallback_set=False)(rows, behind)
    out = _empty(rows, rows.get_size()[1])
    SumsOverRows([_contiguous(rows), ir.ExternKernel.realize_input(behind), out], [out])
    return out


def _contiguous(tensor: Any) -> Any:
    return ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(tensor))


def _empty(like: Any, *size: Any) -> Any:
    empty = lowerings[torch.ops.aten.empty_strided.default]
    return empty(list(size), None, dtype=like.get_dtype(), device=like.get_device())


def install() -> None:
    """Tells Inductor."""
    register_lowering(_own.add_product.default, type_promotion_kind=None)(_lower_add_product)
    register_lowering(_own.product.default, type_promotion_kind=None)(_lower_product)
    register_lowering(_own.product_over_rows.default, type_promotion_kind=None)(_lower_product_over_rows)
    register_lowering(_own.product_and_sums_over_rows.default, type_promotion_kind=None)(_lower_product_and_sums)
    register_lowering(_own.sums_over_rows.default, type_promotion_kind=None)(_lower_sums_over_rows)
