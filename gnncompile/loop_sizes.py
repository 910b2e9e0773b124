"""The names of the numbers of :mod:`gnncompile.tuning` for C++ kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoopTable:
    """The numbers of one kind of processor, for the C++ kernels (codegen/cpp). No times were kept."""

    prefetch_edges: int
    """A loop prefetches the rows of the edge that is this many edges ahead."""

    prefetch_bytes: int
    """Most bytes of a row that are prefetched. The hardware prefetches the rest."""

    buffered_heads: int
    """Most heads of a softmax, with one logit per head, that keeps its logits in scratch memory between loops."""

    shares: int
    """Most partial sums of a sum over all edges."""

    tile_edges: int
    """Edges of a tile of a region with layers of any width. Its buffers stay in a core's second-level cache."""

    serial_work: int
    """Feature elements below which a thread costs more time than it saves."""

    small_product: int
    """Most multiplications per matrix of a product of many matrices that is written out. With 256, the library is as
    fast. Measured."""

    # -- products of matrices in vectors of our own (codegen/cpp/matrix.py) --------------------------------------------

    product_elements: int
    """Elements of the left matrix that a core multiplies at a time. They stay in its second-level cache."""

    least_product: int
    """Least multiplications of a product. Below, the library is as fast."""

    least_product_in_halves: int
    """The same on a processor that computes vectors of 512 bits in two halves, such as AMD's Zen 4. Measured."""

    least_rows: int
    """Least rows of a product. With fewer, copying the weight takes longer than the library takes for the product."""

    least_weight: int
    """Least elements of a weight."""

    narrowest_product: int
    """Least columns of a matrix. With fewer, most lanes of a vector are empty."""

    widest_product: int
    """Most columns of a matrix."""

    rows_of_share: int
    """Rows of a partial sum of a product over rows."""

    product_shares: int
    """Most partial sums of a product over rows."""

    widest_pairs: int
    """Most channels of a region with layers in bfloat16. A backward computes products of the forward again; with more
    channels, that takes longer than reading stored rows. Measured."""


XEON = LoopTable(
    prefetch_edges=16,
    prefetch_bytes=1024,
    buffered_heads=64,
    shares=64,
    tile_edges=128,
    serial_work=2**14,
    small_product=64,
    product_elements=3 * 2**14,
    least_product=2**18,
    least_product_in_halves=2**19,
    least_rows=64,
    least_weight=256,
    narrowest_product=4,
    widest_product=2048,
    rows_of_share=4096,
    product_shares=32,
    widest_pairs=64,
)
"""Intel Xeon; its results are in ``benchmarks/results/cpu-xeon-2-cores``. The numbers about products of our own are
those of an AMD EPYC 9005."""
