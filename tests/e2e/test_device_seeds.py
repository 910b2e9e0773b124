"""The seeds of mini-batches that a device samples: any sampler of positions, and attributes that PyG replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.sampler import NegativeSampling

import gnncompile
from tests import triton_regions

pytestmark = [
    *triton_regions.GPU,
    pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, for padded lanes in Triton's interpreter
]
DEVICE = triton_regions.DEVICE


def graph(**more: Any) -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(60, 3, generator=generator),
        edge_index=torch.randint(60, (2, 300), generator=generator),
        **more,
    )


def first(source: Any, sampler: str, **how: Any) -> Data:
    torch.manual_seed(3)
    batch = next(iter(gnncompile.loader(source, DEVICE, sampler=sampler, **how)))
    assert isinstance(batch, Data)
    return batch


class Positions(torch.utils.data.Sampler[int]):
    """A sampler of positions that says less of its length than it yields."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter([0, 1, 2, 3] * 5)


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("is_random", [False, True])
def test_a_mini_batch_may_have_more_seeds_than_the_input(links: bool, is_random: bool):
    """Samplers of positions may draw with replacement: no seed is lost."""
    random = torch.utils.data.RandomSampler(range(6), replacement=True, num_samples=20)
    how: dict[str, Any] = {"batch_size": 20, "sampler": random if is_random else Positions()}
    source: Any
    if links:
        source = LinkNeighborLoader(graph(), [3, 2], edge_label_index=torch.arange(12).view(2, 6), **how)
    else:
        source = NeighborLoader(graph(), [3, 2], input_nodes=torch.arange(10, 16), **how)
    batch = first(source, "device")
    assert batch.input_id.numel() == 20
    if links:
        ends = batch.n_id[batch.edge_label_index]
        assert torch.equal(ends.cpu(), torch.arange(12).view(2, 6)[:, batch.input_id.cpu()])
    else:
        assert batch.batch_size == 20
        assert torch.equal(batch.n_id[:20], batch.input_id + 10)


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
def test_subgraphs_replace_the_graphs_of_a_batch(disjoint: bool, buckets: bool):
    batched = Batch.from_data_list([graph(), graph()])
    source = NeighborLoader(batched, [3, 2], batch_size=8, disjoint=disjoint)
    found, expected = (first(source, sampler, buckets=buckets) for sampler in ("device", "cpu"))
    assert sorted(found.keys()) == sorted(expected.keys())
    assert ("batch" in found) == disjoint
    if disjoint:
        assert torch.equal(found.batch[:8].cpu(), torch.arange(8))
        assert torch.equal(found.batch[found.edge_index[0]], found.batch[found.edge_index[1]])


@pytest.mark.parametrize("negatives", [None, NegativeSampling("triplet", 1)], ids=["nodes", "triplets"])
def test_attributes_that_a_loader_replaces(negatives: Any):
    names = ("input_id", "seed_time", "src_index", "batch_size")
    data = graph(**{name: torch.full((60,), -5) for name in names})
    kind, how = (NeighborLoader, {}) if negatives is None else (LinkNeighborLoader, {"neg_sampling": negatives})
    found, expected = (first(kind(data, [3, 2], batch_size=8, **how), sampler) for sampler in ("device", "cpu"))
    assert sorted(found.keys()) == sorted(expected.keys())
    for name in (name for name in names if name in expected):
        is_kept = [bool((torch.as_tensor(batch[name]) == -5).all()) for batch in (found, expected)]
        assert is_kept[0] == is_kept[1], name
