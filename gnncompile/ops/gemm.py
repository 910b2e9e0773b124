"""Products of matrices that end in what follows them: sums, biases and activations.

``gnncompile::add_product(total, left, right)``: ``total + left @ right`` in the memory of `total`, once compiled.
Torch's ``addmm`` copies what it adds to before the library adds the product. Here the caller promises that nobody reads
`total` afterwards, and :mod:`gnncompile.ops.gemm_lowering` adds to it in place. Called in any other way the op
returns a new tensor, so that a graph is right with or without Inductor.

``gnncompile::product(left, right, added, gate, relu, in_place)`` and ``gnncompile::product_over_rows(left, right)``:
the same of many rows, by kernels that compute float32 products on tensor cores
(:mod:`gnncompile.codegen.gemm.kernels`). ``gnncompile::sum_of_products`` and ``gnncompile::two_products_over_rows``
are two of them in one launch.

``gnncompile::sums_over_rows(rows, behind)``: sums of rows that wait until another call has been launched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnncompile.runtime.launch import generator

LIBRARY = torch.library.Library("gnncompile", "FRAGMENT")
LEAST, LEAST_BY_ROWS = 2**25, 2**23
"""Multiplications from which on a product is ours, one over rows and one with a weight. Below, the library is as fast,
unless the rows are to be summed as well: to do both at once always pays."""

SMALLEST = 2**17
"""Elements from which on a product with a weight is ours: there are tiles for many multiprocessors of the GPU."""

LEAST_SUMMED = 2**16
"""Elements from which on a sum of rows is ours: below, the library needs one launch, and we two."""

MOST_TOGETHER = 2**14
"""Most rows for which two products over rows are computed together: with more, launches are no matter."""

MOST = 2**31
"""Rows, and elements of a weight, are counted in int32."""

_TUNED_FOR = (9, 0)
"""Compute capability of the GPU on which our kernels were seen to be faster than the library's, an H200; an H100 has
the same multiprocessors."""


def in_parts(device: torch.device) -> bool:
    """Whether float32 products on a device are to be computed in bfloat16 parts: where that is faster, and where the
    user has not chosen the less accurate TensorFloat32 (``torch.backends.cuda.matmul.fp32_precision``).
    """
    if generator(device.type) != "triton" or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == _TUNED_FOR


def write_product(
    left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Writes ``left @ right + added``; all float32.

    Args:
        left: ``[rows, depth]``, contiguous; depth is a multiple of 4.
        right: ``[depth, columns]``.
        added: ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`.
        gate: ``[rows, columns]``, contiguous: zeros are written where it is not positive.
        relu: Whether to write zeros for what is negative.
        out: ``[rows, columns]``, contiguous.
    """
    if out.numel() >= SMALLEST and out.numel() * left.size(1) >= LEAST_BY_ROWS and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.by_rows((left, right), None, added, gate, relu, out)
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
    depth = left.size(1) + other_left.size(1)
    if out.numel() >= SMALLEST and out.numel() * depth >= LEAST_BY_ROWS and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.by_rows((left, right), (other_left, other_right), added, gate, relu, out)
        return
    write_product(left, right, added, None, False, out)
    write_product(other_left, other_right, out, gate, relu, out)


def write_product_over_rows(left: Tensor, right: Tensor, out: Tensor, sums: Tensor | None = None) -> None:
    """Writes ``left.T @ right``; all float32 and contiguous.

    Args:
        left: ``[rows, depth]``; depth is a multiple of 4.
        right: ``[rows, columns]``; columns are a multiple of 4.
        out: ``[depth, columns]``.
        sums: ``[depth]``, for ``left.sum(0)``.
    """
    if left.numel() * right.size(1) >= (LEAST if sums is None else 1) and _can(left):
        from gnncompile.codegen.gemm import launch

        launch.over_rows(launch.OverRows(left, right, out, sums))
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
    """Writes two products over as many rows: see :func:`write_product_over_rows`."""
    if 0 < left.size(0) <= MOST_TOGETHER and _can(left):
        from gnncompile.codegen.gemm import launch

        other = launch.OverRows(other_left, other_right, other_out, other_sums)
        launch.over_rows(launch.OverRows(left, right, out, sums), other)
        return
    write_product_over_rows(left, right, out, sums)
    write_product_over_rows(other_left, other_right, other_out, other_sums)


def write_sums_over_rows(rows: Tensor, out: Tensor) -> None:
    """Writes ``rows.sum(0)``: float32 ``[rows, columns]`` and ``[columns]``, contiguous; columns come in fours."""
    if rows.numel() >= LEAST_SUMMED and _can(rows):
        from gnncompile.codegen.gemm import launch

        launch.sums(rows, out)
    else:
        torch.sum(rows, 0, out=out)


def _can(left: Tensor) -> bool:
    return left.size(0) < MOST and generator(left.device.type) == "triton"


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
    """``[n, k].T @ [n, m]``, and ``[n, k].sum(0)`` if that is wanted, of one pair of matrices and of another."""
    both = (left, right, sums), (other_left, other_right, other_sums)
    return [made for x, y, summed in both for made in ([x.t() @ y, x.sum(0)] if summed else [x.t() @ y])]


def _sums_over_rows(rows: Tensor, behind: Tensor) -> Tensor:
    """``[n, m].sum(0)``, launched when what makes `behind` has been."""
    return rows.sum(0)


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
