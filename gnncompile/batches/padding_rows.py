"""Padded rows of attributes, which follow the valid rows of a padded mini-batch.

Padded rows repeat the first rows. The floats of positions, and of attributes with one row or none, are scaled towards
0, so that padded rows differ. Padded edges join these rows, and the gradient of a distance of 0 would be NaN. Zeros,
and rows where there are none, become small numbers. So probabilities, cosines and unit vectors stay in the range that a
model expects, and large coordinates differ too. Without a row, integers are 0, a row of every embedding.
:mod:`gnncompile.batches.device_kernels` computes the same on a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPREAD = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of which padded rows differ if there is one row or none."""

ROW, COLUMN, PERIOD, LEAST, SCALE = 619, 353, 1024, 256, 4096
"""Element (i, j) loses the fraction ``(LEAST + (ROW * i + COLUMN * j) % PERIOD) / SCALE``, an exact number from 1/16
to 5/16. A zero becomes a quarter of the number.
"""


def is_position(key: str) -> bool:
    """Whether an attribute holds positions, by PyG's name for them."""
    return key == "pos"


def padding_rows(value: Tensor, number: int, spreads: bool = False) -> list[Tensor]:
    """Returns `number` padded rows for a tensor of valid rows, ``[num_rows, ...]``, as tensors to append.

    `spreads` says that they differ even if the valid rows do not.
    """
    rows = value.size(0)
    whole, rest = divmod(number, max(rows, 1))
    repeated = [*[value] * whole, value[:rest]]
    if not number or (rows > 1 and not (spreads and value.dtype in SPREAD)):
        return repeated
    made = torch.cat(repeated) if rows else value.new_zeros(number, *value.shape[1:])
    if value.dtype not in SPREAD:
        return [made]
    row = torch.arange(rows, rows + number, device=value.device).view(-1, 1)
    column = torch.arange(made[0].numel(), device=value.device)
    more = (LEAST + (ROW * row + COLUMN * column) % PERIOD).view(made.shape)
    exact = torch.float64 if value.dtype is torch.float64 else torch.float32
    more = more.to(exact) / SCALE
    made = made.to(exact)
    return [torch.where(made != 0, made * (1 - more), more / 4).to(value.dtype)]
