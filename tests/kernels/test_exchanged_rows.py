"""Rows that leave are packed, and rows that arrive are added, by kernels as by torch."""

from __future__ import annotations

import pytest
import torch

from gnncompile.codegen import exchanged_rows
from tests.triton_regions import DEVICE, GPU, INTERPRETED

SHAPES = [(7, 5), (4, 1, 3), (6,), (3, 1300), (5, 0), (2000, 4)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@INTERPRETED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=GPU)])
def test_rows_are_packed_and_added(shape: tuple[int, ...], number: int, dtype: torch.dtype, device: str) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=made).to(dtype)
    index = torch.randperm(shape[0], generator=made)[: min(number * shape[0] // 3, shape[0])]
    rows = torch.randn(len(index), *shape[1:], generator=made).to(dtype)
    there, at = x.clone().to(device), index.to(device)
    found = torch.full((len(index), *shape[1:]), 7, dtype=dtype, device=device)
    exchanged_rows.move(found, there, at, adds=False)
    assert torch.equal(found.cpu(), x[index])
    exchanged_rows.move(there, rows.to(device), at, adds=True)
    # Triton's interpreter rounds to bfloat16 by cutting bits off.
    limit = 1e-2 if dtype is torch.bfloat16 and device == "cpu" else 0
    torch.testing.assert_close(there.cpu(), x.index_add(0, index, rows), rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
def test_on_a_gpu_the_kernel_takes_what_torch_takes(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 2, 6, device="cuda") * 4).to(dtype)
    index = torch.randperm(50, device="cuda")[:20]
    assert torch.equal(exchanged_rows.packed(x, index), x[index])
    assert torch.equal(exchanged_rows.packed(x.transpose(1, 2), index), x.transpose(1, 2)[index])
    if dtype is not torch.bool:
        rows, before = exchanged_rows.packed(x, index), x.clone()
        exchanged_rows.add_rows(x, index, rows)
        assert torch.equal(x, before.index_add(0, index, rows))
