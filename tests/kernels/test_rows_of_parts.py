"""A region that runs on its halo rows and then on its own rows gives what it gives at once, for all kernels."""

from __future__ import annotations

import pytest
import torch

from gnncompile.layout.halo import joined_rows, own_and_halo, with_room
from gnncompile.ops.exchange import run_rows, splits_by_rows
from gnncompile.runtime import launch
from tests.harness import kernels
from tests.triton_regions import CASES, GENERATORS, GRAPHS, INTERPRETED, Case, S, home, poisoned, random_tensors

SHAPE = "float32", 2, 3
SPLIT = [case for case in CASES if splits_by_rows(case(S, *SHAPE).spec)]


FEW = {"mean", "attention", "several"}
"""The regions that run in Triton's interpreter, which is slow."""


@INTERPRETED
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.__name__)
def test_halo_rows_then_own_rows(case: Case, generator: str) -> None:
    region, device = case(S, *SHAPE), home(generator)
    if generator == "triton" and device == "cpu" and case.__name__ not in FEW:
        pytest.skip("is tested with C++ and on GPUs")
    with kernels(generator):
        kernel = launch.Call(region.spec, torch.device(device).type)
        for name, graph in GRAPHS.items():
            tensors = [t.to(device) for t in random_tensors(region, graph)]
            layout, whole = graph.layout(device), poisoned(region, graph, device)
            kernel(tensors, layout, whole)
            for num_halo in {0, graph.num_rows // 2, graph.num_rows}:
                halo, found = torch.empty(num_halo, 0, device=device), poisoned(region, graph, device)
                for which in (1, 0):
                    run_rows(kernel, region.spec, tensors, layout, found, halo, which)
                for one, wanted in zip(found, whole, strict=True):
                    torch.testing.assert_close(one, wanted, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


def test_some_regions_are_not_split() -> None:
    names = {case.__name__ for case in CASES} - {case.__name__ for case in SPLIT}
    assert names == {"attention_gradient", "edge_values", "vector_dots", "weighed_sums"}  # all give values per edge


def test_layouts_are_split_once() -> None:
    rowptr = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    own, halo = own_and_halo(rowptr, 3)
    assert own.rowptr.tolist() == [0, 2, 2, 5] and own[1:] == (0, 5)
    assert halo.rowptr.tolist() == [0, 1] and halo[1:] == (5, 6)
    assert own_and_halo(rowptr, 3)[0].rowptr is own.rowptr
    assert own_and_halo(rowptr, 1)[0].rowptr.tolist() == [0, 2]


def test_rows_with_room_are_their_own_tensor() -> None:
    x = torch.arange(6.0).view(3, 2)
    rows, halo = with_room(x, 2), torch.empty(2, 0)
    version, joined = rows._version, joined_rows(rows, halo)
    joined[3:] = 7
    assert rows._version == version and torch.equal(rows, x) and joined.data_ptr() == rows.data_ptr()
    assert joined_rows(rows, torch.empty(1, 0)).data_ptr() != rows.data_ptr()  # another halo
    rows.data = x + 1  # other memory: the room does not belong to it
    assert torch.equal(joined_rows(rows, halo)[:3], x + 1) and torch.equal(joined[:3], x)
