"""Matrix products that compute arithmetic on their result, or a factor of theirs, in the same kernel.

The arithmetic is a region without edges, whose rows are those of a matrix; `spec` is its string form
(:attr:`gnncompile.ir.region.Region.spec`).

``gnncompile::product_with_epilogue(left, right, other_left, other_right, added, relu, in_place, read, spec)`` computes
a product, or the sum of two, and from it the outputs of a region. ``gnncompile::products_over_rows(lefts, reads, specs,
sums)`` computes one or two products ``left.T @ right``. A region computes `right`, or `spec` is empty and `right` is
read. See :mod:`gnncompile.ops.gemm` for the products, and :mod:`gnncompile.codegen.gemm.arithmetic` for the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.ir import reference
from gnncompile.ir.region import parse
from gnncompile.ops import gemm
from gnncompile.ops.gemm import LIBRARY, MOST

T = TypeVar("T")


def write_product_with_epilogue(
    left: Tensor,
    right: Tensor,
    other_left: Tensor | None,
    other_right: Tensor | None,
    added: Tensor | None,
    relu: bool,
    read: Sequence[Tensor],
    spec: str,
    outs: Sequence[Tensor],
) -> None:
    """Writes the outputs of a region whose first tensor is ``left @ right + other_left @ other_right + added``.

    Args:
        left: ``[rows, depth]``, contiguous.
        right: ``[depth, columns]``, of any strides.
        other_left: The factors of a second product, or None.
        other_right: See `other_left`.
        added: ``[columns]`` or ``[rows, columns]``, contiguous, or None; may be the first of `outs`.
        relu: Whether a ReLU comes between the sum and the region.
        read: The other tensors of the region, contiguous.
        spec: The region.
        outs: ``[rows, columns]`` each, contiguous.
    """
    if not outs[0].numel():
        return
    if left.size(0) < MOST and (left.is_meta or device_of(left.device).runs_triton):
        from gnncompile.codegen.gemm import launch

        other = None if other_left is None or other_right is None else (other_left, other_right)
        if gemm.pays(outs[0], left.size(1) + (0 if other is None else other[0].size(1))):
            launch.by_rows_with_epilogue((left, right), other, added, relu, read, spec, outs)
        else:  # the library multiplies few rows faster
            product = _sum(left, right, other, added, False)
            launch.epilogue(product, relu, read, spec, outs)
        return
    made = _product_with_epilogue(left, right, other_left, other_right, added, relu, False, list(read), spec)
    for out, result in zip(outs, made, strict=True):
        out.copy_(result)


def write_products_over_rows(
    lefts: Sequence[Tensor], reads: Sequence[Tensor], specs: Sequence[str], sums: Sequence[bool], outs: Sequence[Tensor]
) -> None:
    """Writes one or two products ``left.T @ right`` over the same number of rows, each followed by ``left.sum(0)``.

    Args:
        lefts: ``[rows, depth]`` each, contiguous.
        reads: What the right matrices are computed from, one product after the other, contiguous.
        specs: The region of each right matrix; ``""`` if the matrix is read.
        sums: Whether the sum of each left matrix is wanted.
        outs: The products and the sums, in order, contiguous.
    """
    if 0 < lefts[0].size(0) < MOST and (lefts[0].is_meta or device_of(lefts[0].device).runs_triton):
        from gnncompile.codegen.gemm import launch

        results = iter(outs)
        products = [
            launch.OverRows(left, given[0], next(results), next(results) if summed else None, *_computed(given, spec))
            for left, given, spec, summed in zip(lefts, by_product(reads, specs), specs, sums, strict=True)
        ]
        launch.over_rows(*products)
        return
    for out, result in zip(outs, _products_over_rows(list(lefts), list(reads), list(specs), list(sums)), strict=True):
        out.copy_(result)


def _sum(left: Tensor, right: Tensor, other: tuple[Tensor, Tensor] | None, added: Tensor | None, relu: bool) -> Tensor:
    """``left @ right``, plus the product of two other matrices, plus `added`."""
    if other is None:
        return gemm.product(left, right, added, None, relu, False)
    return gemm.sum_of_products(left, right, *other, added, None, relu, False)


def _computed(given: Sequence[Tensor], spec: str) -> tuple[Tensor | None, str | None]:
    return (given[1] if len(given) > 1 else None, spec) if spec else (None, None)


def by_product(reads: Sequence[T], specs: Sequence[str]) -> Iterator[Sequence[T]]:
    """Yields what each right matrix is computed from."""
    at = 0
    for spec in specs:
        count = parse(spec).count if spec else 1
        yield reads[at : at + count]
        at += count


def columns(spec: str) -> int:
    """Returns the number of columns of the right matrix that a region computes."""
    return parse(spec).outputs[0].trailing[0]


def _product_with_epilogue(
    left: Tensor,
    right: Tensor,
    other_left: Tensor | None,
    other_right: Tensor | None,
    added: Tensor | None,
    relu: bool,
    in_place: bool,
    read: list[Tensor],
    spec: str,
) -> list[Tensor]:
    """The outputs of a region on ``[n, k] @ [k, m]``, on another product, and on what is added."""
    other = None if other_left is None or other_right is None else (other_left, other_right)
    product = _sum(left, right, other, added, relu)
    return reference.run_rows(parse(spec), [product, *read], left.size(0), left.device)


def _fake_product_with_epilogue(
    left: Tensor,
    right: Tensor,
    other_left: Tensor | None,
    other_right: Tensor | None,
    added: Tensor | None,
    relu: bool,
    in_place: bool,
    read: list[Tensor],
    spec: str,
) -> list[Tensor]:
    size = left.size(0), right.size(1)
    return [left.new_empty(size, dtype=getattr(torch, out.dtype)) for out in parse(spec).outputs]


def _products_over_rows(lefts: list[Tensor], reads: list[Tensor], specs: list[str], sums: list[bool]) -> list[Tensor]:
    """``[n, k].T @ [n, m]`` for each left matrix, followed by ``[n, k].sum(0)`` if its flag is set."""
    results = []
    for left, given, spec, summed in zip(lefts, by_product(reads, specs), specs, sums, strict=True):
        right = reference.run_rows(parse(spec), given, left.size(0), left.device)[0] if spec else given[0]
        results += [left.t() @ right, left.sum(0)] if summed else [left.t() @ right]
    return results


def _fake_products_over_rows(
    lefts: list[Tensor], reads: list[Tensor], specs: list[str], sums: list[bool]
) -> list[Tensor]:
    results = []
    for left, given, spec, summed in zip(lefts, by_product(reads, specs), specs, sums, strict=True):
        results.append(left.new_empty((left.size(1), columns(spec) if spec else given[0].size(1))))
        results += [left.new_empty(left.size(1))] if summed else []
    return results


for _schema, _op, _of_fakes in (
    (
        "product_with_epilogue(Tensor left, Tensor right, Tensor? other_left, Tensor? other_right, Tensor? added, "
        "bool relu, bool in_place, Tensor[] read, str spec) -> Tensor[]",
        _product_with_epilogue,
        _fake_product_with_epilogue,
    ),
    (
        "products_over_rows(Tensor[] lefts, Tensor[] reads, str[] specs, bool[] sums) -> Tensor[]",
        _products_over_rows,
        _fake_products_over_rows,
    ),
):
    _name = LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gnncompile::{_name}", _of_fakes, lib=LIBRARY)
