"""Padding of mini-batches: worked out as if it were sorted and counted."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

import gnncompile
from gnncompile.batches import prepare
from gnncompile.batches.edge_layouts import highest, is_sorted, pointers
from gnncompile.batches.padding_edges import Ring, evenly, shared
from gnncompile.layout.batch_metadata import attached


@pytest.mark.parametrize(("number", "size"), [(0, 0), (0, 3), (1, 1), (2, 5), (5, 2), (7, 7), (100, 9), (9, 100)])
def test_evenly(number: int, size: int) -> None:
    starts = torch.from_numpy(evenly(number, size))
    lengths = starts.diff()
    assert (starts[0], starts[-1], starts.numel()) == (0, number if size else 0, size + 1)
    assert size == 0 or int(lengths.max() - lengths.min()) <= 1
    owners = shared(number, 4, 4 + size)
    assert torch.equal(owners, torch.arange(4, 4 + size).repeat_interleave(lengths))


@pytest.mark.parametrize("number", [0, 1, 5, 64])
@pytest.mark.parametrize(("sources", "destinations"), [((3, 7), (3, 7)), ((0, 1), (5, 9)), ((2, 9), (1, 2))])
def test_rings(number: int, sources: tuple[int, int], destinations: tuple[int, int]) -> None:
    ring = Ring(number, sources, destinations)
    assert ring.row.shape == ring.col.shape == (number,) and is_sorted(ring.col)
    assert torch.equal(ring.rowptr.int(), pointers(ring.col - destinations[0], destinations[1] - destinations[0]))
    behind = (ring.col - destinations[0] + 1) % (sources[1] - sources[0])
    assert torch.equal(ring.row, sources[0] + behind)
    order, rowptr = ring.by_source()
    assert torch.equal(order, ring.row.argsort(stable=True))
    assert torch.equal(rowptr.int(), pointers(ring.row - sources[0], sources[1] - sources[0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_highest(dtype: torch.dtype) -> None:
    index = torch.tensor([[3, 0, 5], [2, 2, -1]], dtype=dtype)
    assert highest(index, 2) == (6, None) and highest(index.t()[0], 1) == (4,)
    assert highest(index[0, :0], 1) == (0,) and highest(index.double(), 2) == (None, None)
    assert highest(torch.tensor([torch.iinfo(dtype).min], dtype=dtype), 1) == (None,)


@pytest.mark.parametrize("padded", [False, True])
def test_what_a_device_makes_is_what_a_worker_made(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    data = Data(torch.randn(40, 3), torch.randint(40, (2, 150)))

    def layout(many: int) -> list[torch.Tensor]:
        monkeypatch.setattr(prepare, "MANY_EDGES", many)
        (ready,) = gnncompile.loader([data.clone()], buckets=padded)
        known = attached(ready.edge_index)
        assert known is not None
        found = known.padded_layout if padded else known.layout
        assert found is not None and (found.by_row is None) == (many == 0)
        return [found.row, found.col, *found.by_col]

    for made, shipped in zip(layout(0), layout(1000), strict=True):
        assert made.dtype == shipped.dtype and torch.equal(made, shipped)
