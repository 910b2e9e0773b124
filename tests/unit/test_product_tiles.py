"""The tiles of products with weights."""

import pytest
import torch

pytest.importorskip("triton")
from gnncompile.codegen.gemm.launch import ending, plan_by_rows

NOTHING_FOLLOWS = ("nothing", False, ending(gated=False))
GATE = ("nothing", False, ending(gated=True))
MATRIX = ("matrix", False, ending(gated=False))
EPILOGUE = ("nothing", False, "a function")


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
        (128, EPILOGUE, 128, 1),
        (16, EPILOGUE, 16, 1),
    ],
)
def test_columns_of_a_tile(columns: int, ends: tuple[object, ...], tile: int, programs: int) -> None:
    plan = plan_by_rows(torch.float32, False, ((32, columns, columns, 1),), ends)
    assert plan.across == programs
    assert plan.constants[-2] == tile


@pytest.mark.parametrize(("dtype", "few"), [(torch.float32, 64), (torch.bfloat16, 32)])
@pytest.mark.parametrize(
    ("ends", "reads"),
    [(NOTHING_FOLLOWS, False), (("row", *NOTHING_FOLLOWS[1:]), False), (GATE, True), (MATRIX, True), (EPILOGUE, True)],
)
def test_columns_that_are_finished_at_a_time(ends: tuple[object, ...], reads: bool, dtype: torch.dtype, few: int):
    """Few of them if another matrix is read."""
    constants = plan_by_rows(dtype, False, ((32, 128, 128, 1),), ends).constants
    assert constants[-4] == (few if reads else constants[-2])
