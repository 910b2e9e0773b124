"""Edge lists with aligned rows: the same edges, at addresses that Inductor reads without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

import gnncompile
from gnncompile import testing
from gnncompile.device import ALIGNMENT, device_of
from gnncompile.layout import edge_memory
from gnncompile.layout.edge_memory import with_aligned_rows

GPU_LIKE: list[Any] = [pytest.param("cpu", id="as on a GPU"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_memory, "device_of", lambda place: replace(device_of(place), copies_unaligned=True))


def addresses(edge_index: torch.Tensor) -> list[int]:
    return [row.data_ptr() % ALIGNMENT for row in edge_index]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("edges", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("device", GPU_LIKE)
def test_rows_are_aligned(edges: int, dtype: torch.dtype, device: str) -> None:
    edge_index = torch.arange(2 * edges, dtype=dtype, device=device).view(2, edges)
    found = with_aligned_rows(edge_index)
    assert torch.equal(found, edge_index) and not any(addresses(found))
    assert (found is edge_index) == (edges * dtype.itemsize % ALIGNMENT == 0)


@pytest.mark.parametrize("device", GPU_LIKE)
def test_parts_have_aligned_rows(device: str, tmp_path: Any) -> None:
    whole = testing.uniform(20, 61, channels=4)
    parts = gnncompile.partition(whole, 2)
    assert any(part.edges[""].numel() % 2 for part in parts)
    for part in parts:
        moved = part.to(device)
        assert torch.equal(moved.data.edge_index.cpu(), part.data.edge_index.cpu())
        saved = gnncompile.load_part(moved.save(tmp_path).parent, part.rank, 2)
        assert torch.equal(saved.data.edge_index, part.data.edge_index.cpu())
        assert not any(addresses(moved.data.edge_index)) and not any(addresses(saved.data.edge_index))


def test_parts_of_typed_graphs_have_aligned_rows() -> None:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(6, 2), torch.randn(5, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2, 5, 4], [0, 0, 4, 3, 2]])
    data["b", "to", "a"].edge_index = torch.tensor([[0], [5]])
    for part in gnncompile.partition(data, 2):
        for store in part.data.edge_stores:
            assert not any(addresses(store.edge_index))
