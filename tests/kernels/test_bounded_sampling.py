"""The sampler that writes into memory of a fixed size: its padding, its random seed, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.batches.padding_edges import Ring, shared
from gnncompile.sampling import bounded
from gnncompile.sampling.bounded import BoundedNeighborhood, BoundedSampler
from gnncompile.sampling.device import sample_neighbors
from gnncompile.sampling.gather import gather
from tests.kernels.test_device_sampling import SMALL, Csc, hub, random_graph

pytestmark = triton_regions.INTERPRETED
device_name = triton_regions.device

FIELDS = ("node", "row", "col", "edge")


def on(graph: Csc, where: str) -> Csc:
    return graph[0].to(where), graph[1].to(where)


def check_padding(made: BoundedNeighborhood, batch_size: int) -> None:
    """Padding follows the rules of padded mini-batches: see gnncompile/batches/prepare.py."""
    found, node, edge_index = made.unpad(), made.node.cpu(), made.edge_index.cpu()
    assert found.edge is not None
    nodes, edges, seeds = found.node.numel(), found.row.numel(), found.num_sampled_nodes[0]
    assert node.numel() - nodes >= 2
    again = torch.arange(node.numel() - nodes) % max(min(nodes, 1024), 1)
    assert torch.equal(node[nodes:], node[again] if nodes else torch.zeros_like(again))
    ring = Ring(edge_index.size(1) - edges, (nodes, node.numel()), (nodes, node.numel()))
    assert torch.equal(edge_index[:, edges:], torch.stack([ring.row, ring.col]))
    edge, again = made.edge.cpu(), torch.arange(edge_index.size(1) - edges) % max(edges, 1)
    assert torch.equal(edge[edges:], edge[again] if edges else torch.zeros_like(again))
    if made.batch is not None:
        padded = made.batch[nodes:].cpu()
        assert torch.equal(padded, shared(padded.numel(), seeds, batch_size + 1))
        assert set(padded.tolist()) == set(range(seeds, batch_size + 1))


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("name", list(SMALL))
def test_padding_of_awkward_graphs(name: str, disjoint: bool, device_name: str):
    graph, seeds = on(SMALL[name], device_name), torch.tensor([0, 0], device=device_name)
    sampler = BoundedSampler(*graph, [2, 1], 2, disjoint=disjoint, seed=3)
    made, expected = sampler(seeds), sample_neighbors(*graph, seeds, [2, 1], disjoint=disjoint, seed=3)
    found = made.unpad()
    assert all(torch.equal(getattr(found, one), getattr(expected, one)) for one in FIELDS)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert (made.node.numel(), made.edge.numel()) == (sampler.max_nodes, sampler.max_edges)
    check_padding(made, 2)


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"disjoint": True}], ids=str)
def test_each_call_draws_anew(options: dict[str, Any], hashes: bool, device_name: str, monkeypatch: pytest.MonkeyPatch):
    """Call k draws with the seed plus k, and nothing is left of the call before."""
    monkeypatch.setattr(bounded, "needs_hash", lambda graph: hashes or graph.disjoint)
    graph = on(random_graph(50, 600), device_name)
    sampler = BoundedSampler(*graph, [4, 2], 3, seed=10, **options)
    for call, seeds in enumerate(torch.tensor([[3, 4, 5], [3, 4, 5], [40, 3, 40]], device=device_name)):
        found, expected = sampler(seeds).unpad(), sample_neighbors(*graph, seeds, [4, 2], seed=10 + call, **options)
        assert all(torch.equal(getattr(found, one), getattr(expected, one)) for one in FIELDS)
    sampler.check()
    assert sampler.seed.tolist() == [13]


@pytest.mark.parametrize("disjoint", [False, True])
def test_fewer_seeds(disjoint: bool, device_name: str):
    """The last mini-batch of an epoch: fewer seeds, or entries of -1."""
    graph = on(random_graph(50, 600), device_name)
    sampler = BoundedSampler(*graph, [3], 4, disjoint=disjoint, seed=0)
    for seeds in ([7, 8], [7, 8, -1, -1], [7], [-1, -1, -1, -1], []):
        sampler.seed.fill_(5)
        made = sampler(torch.tensor(seeds, dtype=torch.int64, device=device_name))
        valid = torch.tensor([node for node in seeds if node >= 0], dtype=torch.int64, device=device_name)
        found, expected = made.unpad(), sample_neighbors(*graph, valid, [3], disjoint=disjoint, seed=5)
        assert all(torch.equal(getattr(found, one), getattr(expected, one)) for one in FIELDS)
        check_padding(made, 4)
    sampler.check()
    with pytest.raises(ValueError, match="seeds: found 5 seeds, expected at most batch_size, 4"):
        sampler(torch.arange(5, device=device_name))


def test_padding_repeats_few_nodes(device_name: str):
    """Of more than 1,024 nodes, padding repeats the first 1,024."""
    sampler = BoundedSampler(*on(random_graph(2000, 3000), device_name), [2], 1100, seed=0)
    made = sampler(torch.arange(1100, device=device_name))
    assert 1024 < made.unpad().node.numel() < made.node.numel() - 1024
    check_padding(made, 1100)


def test_times_and_fewer_seeds(device_name: str):
    colptr, row = on(hub(6), device_name)
    time = torch.arange(6, device=device_name)
    sampler = BoundedSampler(colptr, row, [4], 3, edge_time=time, disjoint=True, temporal_strategy="last", seed=0)
    found = sampler(torch.tensor([0, 0], device=device_name), torch.tensor([2, 5], device=device_name)).unpad()
    assert found.edge is not None and found.edge.tolist() == [0, 1, 2, 2, 3, 4, 5]
    assert found.col.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_bounds(device_name: str):
    """A hop of a subgraph finds each node at most once, so a small graph needs less than all products."""
    graph = on(random_graph(20, 100), device_name)
    sampler = BoundedSampler(*graph, [5, 4, 3], 6, seed=0)
    assert (sampler.max_nodes, sampler.max_edges) == (6 + 20 + 2, 6 * 5 + 20 * 4 + 20 * 3 + 6)
    large = BoundedSampler(*on(random_graph(10**4, 100), device_name), [5, 4], 6, seed=0)
    assert (large.max_nodes, large.max_edges) == (6 + 30 + 120 + 2, 152)


def test_problems_are_kept_until_they_are_read(device_name: str):
    sampler = BoundedSampler(*on(random_graph(20, 100), device_name), [3], 2, seed=0)
    sampler(torch.tensor([3, 20], device=device_name))
    made = sampler(torch.tensor([3, 4], device=device_name))
    check_padding(made, 2)
    with pytest.raises(IndexError, match="seeds: found a node outside the graph, expected 0 to 19"):
        sampler.check()
    sampler.check()


def test_arguments(device_name: str):
    graph = on(random_graph(20, 100), device_name)
    with pytest.raises(ValueError, match=r"num_neighbors: found \[3, -1\], expected numbers from 0 to 1024"):
        BoundedSampler(*graph, [3, -1], 2, seed=0)
    with pytest.raises(ValueError, match=r"num_neighbors: found \[1025\], expected numbers from 0 to 1024"):
        BoundedSampler(*graph, [1025], 2, seed=0)
    with pytest.raises(ValueError, match="batch_size: found 0 seeds"):
        BoundedSampler(*graph, [3], 0, seed=0)


def test_gather_repeats_the_first_rows(device_name: str):
    graph, x = on(random_graph(20, 100), device_name), torch.randn(20, 3, device=device_name)
    made = BoundedSampler(*graph, [3], 2, seed=0)(torch.tensor([3, 4], device=device_name))
    rows, nodes = gather(x, made.node), made.unpad().node.numel()
    assert torch.equal(rows[:nodes], x[made.node[:nodes]])
    assert torch.equal(rows[nodes : nodes + 2], rows[:2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"replace": True}, {"disjoint": True}, {"weight": True}, {"edge_time": True}], ids=str
)
def test_cuda_graph(options: dict[str, Any]):
    """A replay reads the seeds anew and draws anew; the same random seed gives the same bits."""
    graph = on(random_graph(3000, 60000), "cuda")
    seeds, limit = torch.arange(64, device="cuda"), None
    given: dict[str, Any] = dict(options)
    if "weight" in options:
        given["weight"] = torch.rand(60000, device="cuda") + 0.1
    if "edge_time" in options:
        given.update(edge_time=torch.arange(60000, device="cuda"), disjoint=True)
        limit = torch.full((64,), 50000, device="cuda")
    sampler = BoundedSampler(*graph, [5, 4], 64, seed=0, **given)
    sampler(seeds, limit)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        made = sampler(seeds, limit)
    for seed, first in ((5, 0), (6, 0), (5, 100)):
        seeds.copy_(torch.arange(first, first + 64))
        sampler.seed.fill_(seed)
        for call in range(2):
            recorded.replay()
            extra = {} if limit is None else {"seed_time": limit}
            expected: Any = sample_neighbors(*graph, seeds, [5, 4], seed=seed + call, **given, **extra)
            found: Any = made.unpad()
            assert all(torch.equal(getattr(found, one), getattr(expected, one)) for one in FIELDS)
            check_padding(made, 64)
    sampler.check()


def test_rows_stay_within_the_graph(device_name: str):
    """Every padded position can be read: of a graph without edges, and of an empty mini-batch."""
    graph: tuple[Tensor, Tensor] = on(SMALL["one node"], device_name)
    made = BoundedSampler(*graph, [3], 2, seed=0)(torch.tensor([-1, -1], device=device_name))
    assert made.node.tolist() == [0] * made.node.numel()
    assert made.unpad().num_sampled_nodes == [0, 0]
