"""The sizes of products of 16-bit matrices on GPUs, which :mod:`gnncompile.tuning` uses."""

from __future__ import annotations

from dataclasses import dataclass

from gnncompile.tile_sizes import ProductTile


@dataclass(frozen=True)
class HalfProductTable:
    """The numbers of one kind of GPU (codegen/gemm, ops/gemm.py). The widths of matrices are their columns.

    The other numbers about products are in :class:`gnncompile.tuning.TileTable`.
    """

    library_unit: int
    """Divides the widths that the library multiplies at full speed. With other widths, ours are faster also for small
    weights, and for products over rows that are alone."""

    least_weight: int
    """Least elements of a weight that the library multiplies fast. With fewer, both kernels are bound by memory."""

    widest: int
    """Most columns of both matrices of a product with a weight. Beyond, the library is faster."""

    widest_over_rows: int
    """Most columns of both matrices of a product over rows."""

    widest_alone: int
    """The same for one product over rows that sums no rows besides, if the library multiplies these widths fast."""

    tiles: tuple[tuple[int, ProductTile], ...]
    """The tiles of products with a weight, by the columns of the weight. A shallow weight has a shallower tile."""

    warps: int
    """Warps of all tiles."""

    over_rows_step: int
    """Rows that a program of a product over rows sums per step."""

    over_rows_stages: tuple[tuple[int, int], ...]
    """Triton's ``num_stages`` of this program, by the sum of both sides of its largest tile: shared memory has to hold
    the steps of two products."""

    over_rows_warps: tuple[tuple[int, int], ...]
    """Warps of this program, by the same sum."""

    most_together: int
    """Most of this sum for which two products that share a launch have as many programs each as one alone. The programs
    of wider ones fill a multiprocessor."""

    def library_is_slow(self, *widths: int) -> bool:
        """Whether the library multiplies matrices of these widths slowly."""
        return any(width % self.library_unit for width in widths)

    def pays_alone(self, *widths: int) -> bool:
        """Whether one product over rows of these widths, which sums no rows besides, is faster than the library's."""
        return max(widths) <= (self.widest_over_rows if self.library_is_slow(*widths) else self.widest_alone)


H200_HALVES = HalfProductTable(
    library_unit=8,
    least_weight=2048,
    widest=128,
    widest_over_rows=256,
    widest_alone=64,
    tiles=((0, ProductTile(128, 16, 64, 3)), (17, ProductTile(128, 64, 64, 3)), (65, ProductTile(128, 128, 64, 3))),
    warps=4,
    over_rows_step=64,
    over_rows_stages=((0, 4), (192, 3)),
    over_rows_warps=((0, 4), (192, 8)),
    most_together=128,
)
"""NVIDIA H200. ``python -m benchmarks products`` compares these kernels with the library's; its times are in
``benchmarks/results/nvidia-h200/products-cuda.json``."""
