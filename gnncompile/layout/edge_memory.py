"""Edge lists whose two rows begin at aligned addresses. Compiled models read such rows where they are."""

from __future__ import annotations

from torch import Tensor

from gnncompile.device import ALIGNMENT, aligned_length, device_of


def is_aligned(row: Tensor) -> bool:
    """Whether Inductor reads a tensor at its own address."""
    return not device_of(row.device).copies_unaligned or row.data_ptr() % ALIGNMENT == 0


def with_aligned_rows(edge_index: Tensor) -> Tensor:
    """Returns an edge list whose rows are aligned: the same tensor if they are, else a copy with a gap between them.

    In a contiguous int64 edge list with an odd number of edges, the second row is not aligned.

    Args:
        edge_index: The edge list ``[2, num_edges]``.
    """
    if all(map(is_aligned, edge_index.unbind(0))):
        return edge_index
    rows, edges = edge_index.shape
    copy = edge_index.new_empty(rows, aligned_length(edges, edge_index.element_size()))[:, :edges]
    return copy.copy_(edge_index)
