"""Our ops as launches of Triton kernels and operations of torch's, in a program that is traced for a package on a GPU.

No decision depends on the entries of a tensor, so a traced program serves any graph. Edges outside of the graph are
treated as masked out, and refused when the results of the call are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.ir.region import parse
from gnncompile.layout import csr
from gnncompile.ops import gemm
from gnncompile.ops.degree import edges_per_row
from gnncompile.ops.launch import launch

_own = torch.ops.gnncompile


def _region(tensors: Sequence[Tensor], layout: Sequence[Tensor], spec: str) -> list[Tensor]:
    from gnncompile.codegen.triton.sized import run_region

    degree, given = edges_per_row(layout[0], layout[1]), [one.contiguous() for one in tensors]
    return run_region(parse(spec), degree, given, [one.contiguous() for one in layout[:3]], launch)


def _with_hubs(rowptr: Tensor, hubs: Tensor, pieces: Tensor) -> Tensor:
    from gnncompile.codegen.triton.sized import give_hubs

    give_hubs(rowptr, hubs, pieces)
    return rowptr


def _csr(
    index: Tensor,
    other: Tensor,
    num_rows: int,
    num_columns: int,
    alive: Tensor | None,
    wrap_rows: bool = False,
    wrap_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    rowptr, col, edge = _own.sorted_edges(index, other, alive, num_rows, num_columns, wrap_rows, wrap_columns)
    return rowptr, col, edge


def _csr_with_loops(
    rowptr: Tensor, col: Tensor, edge: Tensor, index: Tensor, alive: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    # The rows of a layout are within the graph, those of the index may not be.
    row = csr.find_rows(rowptr, edge.size(0))
    starts, places, columns, edges = csr.loops_added(rowptr, col, edge, row, alive)
    # What is traced for a package writes to no tensor.
    new_col, new_edge = (torch.empty_like(one).scatter(0, places, one) for one in (columns, edges))
    return starts, new_col, new_edge


def _seal(tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Tensor:
    from gnncompile.codegen.triton.seals import seal

    return seal(tensors, sizes, launch)


def _same_or_empty(
    tensors: Sequence[Tensor], sizes: Sequence[Any], expected: Tensor, copied: Sequence[int], fills: Sequence[int]
) -> list[Tensor]:
    from gnncompile.codegen.triton.seals import same_or_empty

    return same_or_empty(tensors, sizes, expected, dict(zip(copied, fills, strict=True)), launch)


def _bounded(index: Tensor, size: int, wraps: bool) -> Tensor:
    from gnncompile.codegen.triton.sized import bounded

    base, sizes, strides = index, list[Any](index.shape), list[Any](index.stride())
    for axis, (entries, stride) in enumerate(zip(sizes, strides, strict=True)):
        if stride == 0 and isinstance(entries, int) and entries > 1:  # an index that is expanded is checked before
            base = base.narrow(axis, 0, 1)
    found: Tensor = _own.nonempty(bounded(base, size, wraps, launch), size, base.numel())
    return found.expand(index.shape)


def _product(*given: Any) -> Tensor:
    """A product with a weight, or the sum of two. None is added in place: a traced program makes new tensors."""
    from gnncompile.codegen.gemm import sized

    *matrices, added, gate, relu, _in_place = given
    factors = list(zip(matrices[::2], matrices[1::2], strict=True))
    return sized.product(factors, added, gate, relu, _compat.size_now(matrices[0].size(0)), launch)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _own.region.default: _region,
    _own.with_hubs.default: _with_hubs,
    _own.csr.default: _csr,
    _own.csr_with_loops.default: _csr_with_loops,
    _own.inverse_degree.default: csr.inverse_degree,
    _own.bounded.default: _bounded,
    _own.seal.default: _seal,
    _own.same_or_empty.default: _same_or_empty,
    _own.product.default: _product,
    _own.sum_of_products.default: _product,
    _own.product_over_rows.default: gemm.product_over_rows,
    _own.product_and_sums_over_rows.default: gemm.product_and_sums_over_rows,
    _own.two_products_over_rows.default: gemm.two_products_over_rows,
}
"""Our ops that are traced as launches and as operations of torch's."""

HELD = {
    *DECOMPOSITIONS,
    *(getattr(_own, name).default for name in ("stored", "rounded", "embedding_gradient", "add_product")),
}
"""Our ops that a package on a GPU can hold."""
