"""The tiles of products with weights."""

import pytest
import torch

pytest.importorskip("triton")
from gnncompile.codegen.gemm.launch import plan_by_rows

NOTHING_FOLLOWS = ("nothing", False, False)
EPILOGUE = ("nothing", False, None, 32)


@pytest.mark.parametrize(
    ("columns", "ends", "tile", "programs"),
    [
        (16, NOTHING_FOLLOWS, 16, 1),
        (17, NOTHING_FOLLOWS, 64, 1),
        (64, NOTHING_FOLLOWS, 64, 1),
        (65, NOTHING_FOLLOWS, 128, 1),
        (128, NOTHING_FOLLOWS, 128, 1),
        (192, NOTHING_FOLLOWS, 64, 3),  # half of the last wide tile would be empty
        (200, NOTHING_FOLLOWS, 128, 2),
        (128, EPILOGUE, 64, 2),  # an epilogue needs the registers
        (16, EPILOGUE, 16, 1),
    ],
)
def test_columns_of_a_tile(columns: int, ends: tuple[object, ...], tile: int, programs: int) -> None:
    plan = plan_by_rows(torch.float32, False, ((32, columns, columns, 1),), ends)
    assert plan.across == programs
    assert plan.constants[-2] == tile
