"""Matrix products with an epilogue (a sum, a bias, an activation), and products and sums over rows.

``gnncompile::add_product(total, left, right)`` is ``total + left @ right``. Torch's ``addmm`` first copies `total`.
Here the caller promises that nobody reads `total` afterwards, and the lowering for Inductor adds in place. Outside
Inductor the op returns a new tensor, so a graph is right with or without Inductor.

``gnncompile::product(left, right, added, gate, relu, in_place)`` is ``left @ right`` with an epilogue, and
``gnncompile::product_over_rows(left, right)`` is ``left.T @ right``, both for many rows. Their kernels compute products
on tensor cores, in float32 and in 16 bits (:mod:`gnncompile.codegen.gemm.kernels`), or float32 products in the vectors
of a CPU (:mod:`gnncompile.codegen.cpp.matrix`). ``gnncompile::sum_of_products`` and
``gnncompile::two_products_over_rows`` compute two products in one launch, and ``gnncompile::products_of_same_rows`` up
to four.

``gnncompile::sums_over_rows(rows, behind)`` is ``rows.sum(0)``, launched after the call that makes `behind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.cpp import matrix
from gnncompile.device import HALVES, device_of

LIBRARY = torch.library.Library("gnncompile", "FRAGMENT")
_own = torch.ops.gnncompile
MOST = 2**31
"""Limit of rows for our kernels, which count rows and the elements of a weight in int32."""


def write_product(
    left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Writes ``left @ right + added`` to `out`, then applies `relu` and `gate`.

    All tensors have one dtype, float32 or of 16 bits.

    Args:
        left: ``[rows, depth]``, contiguous.
        right: ``[depth, columns]``, of any strides.
        added: ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`.
        gate: ``[rows, columns]``, contiguous: where it is not positive, zeros are written.
        relu: Whether to write zeros instead of negative values.
        out: ``[rows, columns]``, contiguous.
    """
    if pays(out, left.size(1)) and _can(left):
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
    if pays(out, left.size(1) + other_left.size(1)) and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.by_rows((left, right), (other_left, other_right), added, gate, relu, out)
        return
    write_product(left, right, added, None, False, out)
    write_product(other_left, other_right, out, gate, relu, out)


def write_products_of_same_rows(
    left: Tensor, rights: Sequence[Tensor], added: Sequence[Tensor | None], outs: Sequence[Tensor]
) -> None:
    """Writes ``left @ right + row`` for each weight; all tensors have one dtype, of 16 bits.

    Args:
        left: ``[rows, depth]``, contiguous.
        rights: ``[depth, columns]`` each, of any strides.
        added: ``[columns]`` each, or None.
        outs: ``[rows, columns]`` each, contiguous.
    """
    if pays(outs[0], left.size(1)) and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.side_by_side(left, rights, added, outs)
        return
    for right, row, out in zip(rights, added, outs, strict=True):
        write_product(left, right, row, None, False, out)


def write_product_over_rows(left: Tensor, right: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
    """Writes ``left.T @ right`` to `out`, and ``left.sum(0)`` to `sums`.

    All tensors are contiguous and have one dtype, float32 or of 16 bits.

    Args:
        left: ``[rows, depth]``.
        right: ``[rows, columns]``.
        out: ``[depth, columns]``.
        sums: ``[depth]``, or None.
    """
    if _pays_over_rows(left, right, sums) and _can(left):
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
    most = MOST if left.dtype in HALVES else tuning.TILES.most_together
    if 0 < left.size(0) <= most and _can(left):
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


def pays(out: Tensor, depth: int) -> bool:
    """Whether our product with a weight is faster than the library's."""
    tiles = tuning.TILES
    return out.numel() >= tiles.least_product and out.numel() * depth >= tiles.least_by_rows


def _pays_over_rows(left: Tensor, right: Tensor, sums: Tensor | None) -> bool:
    """Whether our product over rows is faster than the library's. With sums it is, unless there are no rows."""
    if sums is not None:
        return left.numel() > 0
    if left.dtype in HALVES and not tuning.HALF_PRODUCTS.pays_alone(left.size(1), right.size(1)):
        return False
    return left.numel() * right.size(1) >= tuning.TILES.least_over_rows


def _can(left: Tensor) -> bool:
    return left.size(0) < MOST and (left.is_meta or device_of(left.device).runs_triton)


def product(
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


def sum_of_products(
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
    first = product(left, right, added, None, False, False)
    return product(other_left, other_right, first, gate, relu, False)


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


def _products_of_same_rows(left: Tensor, rights: list[Tensor], added: list[Tensor | None]) -> list[Tensor]:
    """``[n, k] @ [k, m]``, plus ``[m]`` where it is given, for several weights; all of one floating dtype."""
    return [product(left, right, row, None, False, False) for right, row in zip(rights, added, strict=True)]


def _fake_products_of_same_rows(left: Tensor, rights: list[Tensor], added: list[Tensor | None]) -> list[Tensor]:
    return [left.new_empty((left.size(0), right.size(1))) for right in rights]


def product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """``[n, k].T @ [n, m]``, all of one floating dtype."""
    return left.t() @ right


def _fake_product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.size(1), right.size(1)))


def product_and_sums_over_rows(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, k].T @ [n, m]`` and ``[n, k].sum(0)``, all of one floating dtype."""
    return left.t() @ right, left.sum(0)


def _fake_product_and_sums_over_rows(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_product_over_rows(left, right), left.new_empty(left.size(1))


def two_products_over_rows(
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
        product,
        _fake_product,
    ),
    (
        "sum_of_products(Tensor left, Tensor right, Tensor other_left, Tensor other_right, "
        "Tensor? added, Tensor? gate, bool relu, bool in_place) -> Tensor",
        sum_of_products,
        _fake_sum_of_products,
    ),
    (
        "products_of_same_rows(Tensor left, Tensor[] rights, Tensor?[] added) -> Tensor[]",
        _products_of_same_rows,
        _fake_products_of_same_rows,
    ),
    ("product_over_rows(Tensor left, Tensor right) -> Tensor", product_over_rows, _fake_product_over_rows),
    (
        "product_and_sums_over_rows(Tensor left, Tensor right) -> (Tensor, Tensor)",
        product_and_sums_over_rows,
        _fake_product_and_sums_over_rows,
    ),
    (
        "two_products_over_rows(Tensor left, Tensor right, bool sums, "
        "Tensor other_left, Tensor other_right, bool other_sums) -> Tensor[]",
        two_products_over_rows,
        _fake_two_products_over_rows,
    ),
    ("sums_over_rows(Tensor rows, Tensor behind) -> Tensor", _sums_over_rows, _fake_sums_over_rows),
):
    _name = LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _of_fakes, lib=LIBRARY)
