"""The benchmark of products in 16 bits: its checks and its table. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from benchmarks.commands import products
from benchmarks.commands.products import Shape
from gnncompile.codegen.gemm import launch
from tests.triton_regions import DEVICE

pytestmark = triton_regions.INTERPRETED


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_are_right_and_compared(dtype: str):
    records = products.measure_products(Shape(70, 32, 64, dtype), torch.device(DEVICE), 0.001, 1)
    assert len(records) == 12 and {one["status"] for one in records} == {"ok"}
    assert len(products.format_shape(records).splitlines()) == 8


def test_wrong_products_are_told(monkeypatch: pytest.MonkeyPatch):
    ours = launch.over_rows

    def wrong(*given: launch.OverRows) -> None:
        ours(*given)
        given[-1].out.mul_(1.1)

    monkeypatch.setattr(launch, "over_rows", wrong)
    records = products.measure_products(Shape(70, 32, 64, "bf16"), torch.device(DEVICE), 0.001, 1)
    assert [one["row"] for one in records if one["status"] == "WRONG"] == ["ours", "ours"]
    assert products.format_shape(records).count("WRONG") == 2
