"""How Inductor calls our products of matrices: into its own buffers, or into a matrix that nobody reads afterwards."""

from __future__ import annotations

from typing import Any

import torch

from gnncompile._compat.inductor import ir, lowerings
from gnncompile.capture import inductor_call
from gnncompile.capture.inductor_call import Call, contiguous
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
    """Writes a product or the sum of two: the matrices, what is added, the gate and the result, without those that are
    None.

    Its constants are which of these there are, and whether a ReLU follows.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        there, relu = self.constant_args
        references = iter(self.references())
        *given, out = (next(references) if is_there else "None" for is_there in there)
        name = "write_product" if len(given) == 4 else "write_sum_of_products"
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.{name}({', '.join(given)}, {relu}, {out})")


class ProductOverRows(Call):
    """Writes ``left.T @ right``: left, right, the result, and the sums of left's rows where they are wanted."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.write_product_over_rows({', '.join(self.references())})")


class TwoProductsOverRows(Call):
    """Two of them: of each left, right, the result, and the sums of left's rows, without those that are not wanted.

    Its constants are whether the sums of the first are wanted, and of the second.
    """

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        references = iter(self.references())
        there = (is_there for sums in self.constant_args for is_there in (True, True, True, sums))
        given = ", ".join(next(references) if is_there else "None" for is_there in there)
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.write_two_products_over_rows({given})")


class SumsOverRows(Call):
    """Writes ``rows.sum(0)``: the rows, what must have been launched before, and the result."""

    def codegen(self, wrapper: Any) -> None:
        """Writes the call."""
        rows, _, out = self.references()
        wrapper.add_import_once(_IMPORT)
        wrapper.writeline(f"_gnncompile_dense.write_sums_over_rows({rows}, {out})")


def _lower_add_product(total: Any, left: Any, right: Any) -> Any:
    given = [ir.ExternKernel.realize_input(t) for t in (total, left, right)]
    ProductInPlace(given, given[:1])
    return total


def _lower_product(*args: Any) -> Any:
    *factors, added, gate, relu, in_place = args
    left, right = factors[:2]
    out = added if in_place else _empty(left, left.get_size()[0], right.get_size()[1])
    matrices = [ir.ExternKernel.realize_input(t) if k % 2 else contiguous(t) for k, t in enumerate(factors)]
    extra = [None if t is None else contiguous(t) for t in (added, gate)]
    given = [*matrices, *extra, extra[0] if in_place else out]
    there = tuple(t is not None for t in given)
    Product([t for t in given if t is not None], given[-1:], (there, relu))
    return out


def _lower_product_over_rows(left: Any, right: Any) -> Any:
    out = _empty(left, left.get_size()[1], right.get_size()[1])
    ProductOverRows([contiguous(left), contiguous(right), out], [out])
    return out


def _lower_product_and_sums(left: Any, right: Any) -> Any:
    made = _results(left, right, sums=True)
    ProductOverRows([contiguous(left), contiguous(right), *made], made)
    return made


def _lower_two_products(
    left: Any, right: Any, sums: bool, other_left: Any, other_right: Any, other_sums: bool
) -> list[Any]:
    first, second = _results(left, right, sums), _results(other_left, other_right, other_sums)
    given = [contiguous(left), contiguous(right), *first, contiguous(other_left), contiguous(other_right), *second]
    TwoProductsOverRows(given, [*first, *second], (sums, other_sums))
    return [*first, *second]


def _results(left: Any, right: Any, sums: bool) -> list[Any]:
    """Memory for a product over rows, and for the sums of its left matrix's rows."""
    columns = left.get_size()[1]
    product = _empty(left, columns, right.get_size()[1])
    return [product, _empty(left, columns)] if sums else [product]


def _lower_sums_over_rows(rows: Any, behind: Any) -> Any:
    out = _empty(rows, rows.get_size()[1])
    SumsOverRows([contiguous(rows), ir.ExternKernel.realize_input(behind), out], [out])
    return out


def _empty(like: Any, *size: Any) -> Any:
    empty = lowerings[torch.ops.aten.empty_strided.default]
    return empty(list(size), None, dtype=like.get_dtype(), device=like.get_device())


def install() -> None:
    """Tells Inductor."""
    inductor_call.install(_own.add_product.default, _lower_add_product)
    inductor_call.install(_own.product.default, _lower_product)
    inductor_call.install(_own.sum_of_products.default, _lower_product)
    inductor_call.install(_own.product_over_rows.default, _lower_product_over_rows)
    inductor_call.install(_own.product_and_sums_over_rows.default, _lower_product_and_sums)
    inductor_call.install(_own.two_products_over_rows.default, _lower_two_products)
    inductor_call.install(_own.sums_over_rows.default, _lower_sums_over_rows)
