"""Matrix products with an epilogue (a sum, a bias, an activation), and products and sums over rows.

``gnncompile::add_product(total, left, right)`` is ``total + left @ right``. Torch's ``addmm`` first copies `total`.
Here the caller promises that nobody reads `total` afterwards, and the lowering for Inductor adds in place. Outside
Inductor the op returns a new tensor, so a graph is right with or without Inductor.

``gnncompile::product(left, right, added, gate, relu, in_place)`` is ``left @ right`` with an epilogue, and
``gnncompile::product_over_rows(left, right)`` is ``left.T @ right``, both for many rows. Their kernels compute float32
products on tensor cores (:mod:`gnncompile.codegen.gemm.kernels`), or in the vectors of a CPU
(:mod:`gnncompile.codegen.cpp.matrix`). ``gnncompile::sum_of_products`` and
``gnncompile::two_products_over_rows`` compute two products in one launch.

``gnncompile::sums_over_rows(rows, behind)`` is ``rows.sum(0)``, launched after the call that makes `behind`.

The last part of this file lowers the ops for Inductor: into its own buffers, or into a matrix that nobody reads
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile._compat import aoti, inductor_call
from gnncompile._compat.inductor_call import Call, Result, contiguous, node_now, realized, tensor_of, writable
from gnncompile.codegen.cpp import matrix
from gnncompile.device import device_of
from gnncompile.ops import on_meta

LIBRARY = torch.library.Library("gnncompile", "FRAGMENT")
_own = torch.ops.gnncompile
MOST = 2**31
"""Limit of rows for our kernels, which count rows and the elements of a weight in int32."""


def write_product(
    left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Writes ``left @ right + added`` to `out`, then applies `relu` and `gate`; all tensors are float32.

    Args:
        left: ``[rows, depth]``, contiguous.
        right: ``[depth, columns]``, of any strides.
        added: ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`.
        gate: ``[rows, columns]``, contiguous: where it is not positive, zeros are written.
        relu: Whether to write zeros instead of negative values.
        out: ``[rows, columns]``, contiguous.
    """
    if _pays(out, left.size(1)) and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.by_rows((left, right), None, added, gate, relu, out)
        return
    if matrix.pays(left, right.size(1)):
        matrix.by_rows(left, right, added, gate, relu, out)
        return
    if added is None:
        torch.mm(left, right, out=out)
    elif relu and added.dim() == 1:
        torch.ops.aten._addmm_activation.out(added, left, right, out=out)
    else:
        torch.addmm(added, left, right, out=out)
    if relu and (added is None or added.dim() == 2):
        out.relu_()
    if gate is not None:
        torch.ops.aten.threshold_backward.grad_input(out, gate, 0, grad_input=out)


def write_sum_of_products(
    left: Tensor,
    right: Tensor,
    other_left: Tensor,
    other_right: Tensor,
    added: Tensor | None,
    gate: Tensor | None,
    relu: bool,
    out: Tensor,
) -> None:
    """Writes ``left @ right + other_left @ other_right + added``; see :func:`write_product`."""
    if _pays(out, left.size(1) + other_left.size(1)) and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.by_rows((left, right), (other_left, other_right), added, gate, relu, out)
        return
    write_product(left, right, added, None, False, out)
    write_product(other_left, other_right, out, gate, relu, out)


def write_product_over_rows(left: Tensor, right: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
    """Writes ``left.T @ right`` to `out`, and ``left.sum(0)`` to `sums`; all tensors are float32 and contiguous.

    Args:
        left: ``[rows, depth]``.
        right: ``[rows, columns]``.
        out: ``[depth, columns]``.
        sums: ``[depth]``, or None.
    """
    if left.numel() * right.size(1) >= (tuning.TILES.least_over_rows if sums is None else 1) and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.over_rows(launch.OverRows(left, right, out, sums))
        return
    if matrix.pays(left, right.size(1)):
        matrix.over_rows(left, right, out, sums)
        return
    torch.mm(left.t(), right, out=out)
    if sums is not None:
        torch.sum(left, 0, out=sums)


def write_two_products_over_rows(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    sums: Tensor | None,
    other_left: Tensor,
    other_right: Tensor,
    other_out: Tensor,
    other_sums: Tensor | None,
) -> None:
    """Writes two products over the same number of rows: see :func:`write_product_over_rows`."""
    if 0 < left.size(0) <= tuning.TILES.most_together and _can(left):
        from gnncompile.codegen.gemm import launch

        other = launch.OverRows(other_left, other_right, other_out, other_sums)
        launch.over_rows(launch.OverRows(left, right, out, sums), other)
        return
    write_product_over_rows(left, right, out, sums)
    write_product_over_rows(other_left, other_right, other_out, other_sums)


def write_sums_over_rows(rows: Tensor, out: Tensor) -> None:
    """Writes ``rows.sum(0)`` to `out`.

    Args:
        rows: ``[rows, columns]``, float32, contiguous; columns are a multiple of 4.
        out: ``[columns]``, float32, contiguous.
    """
    if rows.numel() >= tuning.TILES.least_summed and _can(rows):
        from gnncompile.codegen.gemm import launch

        launch.sums(rows, out)
    else:
        torch.sum(rows, 0, out=out)


def _pays(out: Tensor, depth: int) -> bool:
    """Whether our product with a weight is faster than the library's."""
    tiles = tuning.TILES
    return out.numel() >= tiles.least_product and out.numel() * depth >= tiles.least_by_rows


def _can(left: Tensor) -> bool:
    return left.size(0) < MOST and (left.is_meta or device_of(left.device).runs_triton)


def _product(
    left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, in_place: bool
) -> Tensor:
    """``[n, k] @ [k, m]``, plus ``[m]`` or ``[n, m]``, all of one floating dtype."""
    result = left @ right if added is None else torch.addmm(added, left, right)
    result = result.relu() if relu else result
    return result if gate is None else result.masked_fill(gate <= 0, 0)


def _fake_product(
    left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, in_place: bool
) -> Tensor:
    return left.new_empty((left.size(0), right.size(1)))


def _sum_of_products(
    left: Tensor,
    right: Tensor,
    other_left: Tensor,
    other_right: Tensor,
    added: Tensor | None,
    gate: Tensor | None,
    relu: bool,
    in_place: bool,
) -> Tensor:
    """``[n, k] @ [k, m] + [n, j] @ [j, m]``, plus ``[m]`` or ``[n, m]``, all of one floating dtype."""
    first = _product(left, right, added, None, False, False)
    return _product(other_left, other_right, first, gate, relu, False)


def _fake_sum_of_products(
    left: Tensor,
    right: Tensor,
    other_left: Tensor,
    other_right: Tensor,
    added: Tensor | None,
    gate: Tensor | None,
    relu: bool,
    in_place: bool,
) -> Tensor:
    return left.new_empty((left.size(0), right.size(1)))


def _product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """``[n, k].T @ [n, m]``, all of one floating dtype."""
    return left.t() @ right


def _fake_product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.size(1), right.size(1)))


def _product_and_sums_over_rows(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, k].T @ [n, m]`` and ``[n, k].sum(0)``, all of one floating dtype."""
    return left.t() @ right, left.sum(0)


def _fake_product_and_sums_over_rows(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_product_over_rows(left, right), left.new_empty(left.size(1))


def _two_products_over_rows(
    left: Tensor, right: Tensor, sums: bool, other_left: Tensor, other_right: Tensor, other_sums: bool
) -> list[Tensor]:
    """``[n, k].T @ [n, m]`` of two pairs of matrices, each followed by ``[n, k].sum(0)`` if its flag is set."""
    both = (left, right, sums), (other_left, other_right, other_sums)
    return [made for x, y, summed in both for made in ([x.t() @ y, x.sum(0)] if summed else [x.t() @ y])]


def _sums_over_rows(rows: Tensor, behind: Tensor) -> Tensor:
    """``[n, m].sum(0)``; compiled, it is launched after the call that makes `behind`."""
    return rows.sum(0)


def only_follows(user: Any, node: Any) -> bool:
    """Whether a node of a graph runs after another one without reading it."""
    return user.target is _own.sums_over_rows.default and user.args[0] is not node


def _fake_two_products_over_rows(
    left: Tensor, right: Tensor, sums: bool, other_left: Tensor, other_right: Tensor, other_sums: bool
) -> list[Tensor]:
    both = (left, right, sums), (other_left, other_right, other_sums)
    return [made for x, y, summed in both for made in _fake_product_and_sums_over_rows(x, y)[: 2 if summed else 1]]


def _fake_sums_over_rows(rows: Tensor, behind: Tensor) -> Tensor:
    return rows.new_empty(rows.size(1))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``[n, m] + [n, k] @ [k, m]``, all of one floating dtype."""
    return torch.addmm(total, left, right)


def _fake_add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return total.new_empty((left.size(0), right.size(1)))


for _schema, _op, _of_fakes in (
    ("add_product(Tensor total, Tensor left, Tensor right) -> Tensor", _add_product, _fake_add_product),
    (
        "product(Tensor left, Tensor right, Tensor? added, Tensor? gate, bool relu, bool in_place) -> Tensor",
        _product,
        _fake_product,
    ),
    (
        "sum_of_products(Tensor left, Tensor right, Tensor other_left, Tensor other_right, "
        "Tensor? added, Tensor? gate, bool relu, bool in_place) -> Tensor",
        _sum_of_products,
        _fake_sum_of_products,
    ),
    ("product_over_rows(Tensor left, Tensor right) -> Tensor", _product_over_rows, _fake_product_over_rows),
    (
        "product_and_sums_over_rows(Tensor left, Tensor right) -> (Tensor, Tensor)",
        _product_and_sums_over_rows,
        _fake_product_and_sums_over_rows,
    ),
    (
        "two_products_over_rows(Tensor left, Tensor right, bool sums, "
        "Tensor other_left, Tensor other_right, bool other_sums) -> Tensor[]",
        _two_products_over_rows,
        _fake_two_products_over_rows,
    ),
    ("sums_over_rows(Tensor rows, Tensor behind) -> Tensor", _sums_over_rows, _fake_sums_over_rows),
):
    _name = LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _of_fakes, lib=LIBRARY)


# -- lowerings --------------------------------------------------------------------------------------------------------

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


def _begin_product(left: Tensor, right: Tensor, *ends: Any) -> None:
    added, gate, relu, _ = ends
    write_product(left, right, added, gate, relu, _fake_product(left, right, *ends))


def _begin_sum_of_products(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor, *ends: Any) -> None:
    added, gate, relu, _ = ends
    out = _fake_product(left, right, *ends)
    write_sum_of_products(left, right, other_left, other_right, added, gate, relu, out)


def _begin_product_over_rows(left: Tensor, right: Tensor) -> None:
    write_product_over_rows(left, right, _fake_product_over_rows(left, right))


def _begin_product_and_sums(left: Tensor, right: Tensor) -> None:
    write_product_over_rows(left, right, *_fake_product_and_sums_over_rows(left, right))


def _begin_two_products(*given: Any) -> None:
    left, right, sums, other_left, other_right, other_sums = given
    out, summed = _fake_product_and_sums_over_rows(left, right)
    other_out, other_summed = _fake_product_and_sums_over_rows(other_left, other_right)
    first = left, right, out, summed if sums else None
    write_two_products_over_rows(*first, other_left, other_right, other_out, other_summed if other_sums else None)


def _begin_sums_over_rows(rows: Tensor, behind: Tensor) -> None:
    write_sums_over_rows(rows, _fake_sums_over_rows(rows, behind))


_LOWERINGS: tuple[tuple[Any, Callable[..., Any], Callable[..., None]], ...] = (
    (_own.product, _lower_product, _begin_product),
    (_own.sum_of_products, _lower_product, _begin_sum_of_products),
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
