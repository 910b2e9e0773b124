"""Sums of rows by index, as the models of this folder write them."""

from torch import Tensor


def sum_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Returns sums of rows by index, `[num_rows, ...]`."""
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_add(0, index, rows)
