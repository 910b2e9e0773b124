"""``gnncompile.loader`` around loaders of ``HeteroData`` that samples on the device: PyG's mini-batches, their padding,
and training.

On a CPU, Triton's interpreter runs the same kernels, and tapes stand for CUDA graphs.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.sampler import NegativeSampling

import gnncompile
from gnncompile.batches.buckets import Buckets
from gnncompile.batches.prepare import prepare
from gnncompile.layout.batch_metadata import attached
from gnncompile.sampling import ahead
from gnncompile.sampling.pyg import NeighborSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, for padded lanes in Triton's interpreter
]

CITES, WRITES, WRITTEN = KINDS = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
]
ALL = [9, 9]
"""Fan-outs above all degrees: the CPU and the device sample the same."""


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the reference runs regions: here it's the mini-batches that matter."""
    if "cuda" not in request.node.name and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")


def graph(dtype: torch.dtype = torch.float32) -> HeteroData:
    """Unsorted, with self loops, edges that repeat, and nodes without any. A node has at most 9 neighbours per type."""
    generator = torch.Generator().manual_seed(0)
    data = HeteroData(name="a graph", level=torch.tensor([2.5]))
    data["paper"].x = torch.randn(60, 6, generator=generator, dtype=dtype)
    data["paper"].y = torch.randint(3, (60,), generator=generator)
    data["author"].x = torch.randn(40, 4, generator=generator, dtype=dtype)
    data["venue"].num_nodes = 3  # no edge leads to it, or from it
    numbers = {"paper": 60, "author": 40}
    for kind in KINDS:
        col = torch.arange(numbers[kind[2]] - 5).repeat_interleave(3)
        row = torch.randint(numbers[kind[0]] - 5, (len(col),), generator=generator)
        order = torch.randperm(len(col), generator=generator)
        data[kind].edge_index = torch.stack([row, col])[:, order]
    data[CITES].edge_index[:, :3] = data[CITES].edge_index[:, 3:6]
    data[CITES].edge_index[0, 6:9] = data[CITES].edge_index[1, 6:9]
    data[CITES].edge_attr = torch.arange(len(data[CITES].edge_index[0])).view(-1, 1)
    return data


def load(source: Any, device: str, seed: int = 7, sampler: str = "device", **how: Any) -> list[HeteroData]:
    torch.manual_seed(seed)
    loader = gnncompile.loader(source, device, sampler=sampler, **how)
    found = list(loader)
    assert (loader.not_on_device is None) == (sampler == "device")
    return found


def cpu(batch: HeteroData) -> HeteroData:
    """A copy on the CPU, of tensors that no loader knows."""
    return copy.copy(batch).apply(lambda value: value.detach().to("cpu", copy=True))


def same(found: HeteroData, expected: HeteroData) -> None:
    """Compares everything that PyG says of a mini-batch."""
    assert found.node_types == expected.node_types and found.edge_types == expected.edge_types
    for one, other in zip(found.stores, expected.stores, strict=True):
        assert set(one.keys()) == set(other.keys()), (one, other)
        for key, value in other.items():
            if isinstance(value, Tensor):
                assert one[key].dtype == value.dtype and torch.equal(one[key].cpu(), value), key
            else:
                assert one[key] == value, key


def is_subgraph(batch: HeteroData, data: HeteroData, fan_outs: dict[Any, list[int]]) -> None:
    """Checks that nodes and edges are those of the graph, and that every hop draws what it may."""
    for name in ("paper", "author"):
        assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])
        assert sum(batch[name].num_sampled_nodes) == batch[name].num_nodes
    for kind in KINDS:
        row, col = batch[kind].edge_index
        source, target = batch[kind[0]].n_id, batch[kind[2]].n_id
        assert torch.equal(data[kind].edge_index[:, batch[kind].e_id], torch.stack([source[row], target[col]]))
        degree = torch.bincount(data[kind].edge_index[1], minlength=data[kind[2]].num_nodes)
        first = edge = 0
        for hop, fan_out in enumerate(fan_outs[kind]):
            end = first + batch[kind[2]].num_sampled_nodes[hop]
            number = batch[kind].num_sampled_edges[hop]
            drawn = torch.bincount(col[edge : edge + number], minlength=len(target))
            wanted = degree[target[first:end]]
            assert torch.equal(drawn[first:end], wanted if fan_out < 0 else wanted.clamp(max=fan_out))
            assert int(drawn.sum()) == int(drawn[first:end].sum())
            first, edge = end, edge + number
        assert edge == batch[kind].num_edges


@pytest.mark.parametrize("how", [{}, {"disjoint": True}, {"time_attr": "time"}], ids=str)
def test_mini_batches_are_those_of_the_cpu(how: dict[str, Any], device: str) -> None:
    data = graph()
    if "time_attr" in how:
        data["paper"].time = torch.arange(60) % 7
        how = {**how, "temporal_strategy": "last"}
    seeds = ("paper", torch.tensor([3, 7, 3, 59, 0]))
    source = NeighborLoader(data, ALL, input_nodes=seeds, batch_size=3, **how)
    expected = load(source, "cpu", sampler="cpu")
    for buckets in (False, True):
        for found, other in zip(load(source, device, buckets=buckets), expected, strict=True):
            same(found, other)
            assert all(value.device.type == device for value in found["paper"].values() if isinstance(value, Tensor))


def test_fan_outs_by_type(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled ahead and on demand, padded or not: the same random seed gives the same bits."""
    data, fan_outs = graph(), {CITES: [2, 1], WRITES: [1, 2], WRITTEN: [0, 2]}
    source = NeighborLoader(data, fan_outs, input_nodes="paper", batch_size=40, shuffle=True)
    batches = load(source, device)
    assert sorted(torch.cat([batch["paper"].input_id for batch in batches]).tolist()) == list(range(60))
    for batch in map(cpu, batches):
        is_subgraph(batch, data, fan_outs)
        assert batch["paper"].batch_size == len(batch["paper"].input_id)
    for most, buckets in ((2**23, True), (1, False)):
        monkeypatch.setattr(ahead, "MOST_EDGES", most)
        for one, other in zip(load(source, device, buckets=buckets), batches, strict=True):
            same(cpu(one), cpu(other))
    for kind in (CITES, WRITES):
        fan_outs[kind] = [-1, 2]
    source = NeighborLoader(data, fan_outs, input_nodes=("author", torch.arange(5)), batch_size=5)
    for batch in load(source, device, buckets=True):
        is_subgraph(cpu(batch), data, fan_outs)


@pytest.mark.parametrize("kind", [CITES, WRITES])
@pytest.mark.parametrize("how", [{}, {"disjoint": True}], ids=str)
def test_links(how: dict[str, Any], kind: Any, device: str) -> None:
    data = graph()
    links = (kind, data[kind].edge_index[:, 10:16])
    source = LinkNeighborLoader(data, ALL, links, batch_size=6, edge_label=torch.arange(6), **how)
    for found, other in zip(load(source, device), load(source, "cpu", sampler="cpu"), strict=True):
        same(found, other)


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_negative_links(mode: str, device: str) -> None:
    data, chosen = graph(), graph()[WRITES].edge_index[:, :5]
    source = LinkNeighborLoader(data, [2], (WRITES, chosen), batch_size=5, neg_sampling=NegativeSampling(mode, 2))
    for batch in map(cpu, load(source, device, buckets=True)):
        positive = chosen[:, batch[WRITES].input_id]
        if mode == "binary":
            row, col = batch[WRITES].edge_label_index
            assert batch[WRITES].edge_label.tolist() == [1.0] * 5 + [0.0] * 10
        else:
            row, col = batch["author"].src_index, batch["paper"].dst_pos_index
            assert batch["paper"].dst_neg_index.shape == (5, 2)
        assert torch.equal(batch["author"].n_id[row[:5]], positive[0])
        assert torch.equal(batch["paper"].n_id[col[:5]], positive[1])


def test_weights_and_times_of_edges(device: str) -> None:
    data = graph()
    for kind in KINDS:
        data[kind].weight = (torch.arange(data[kind].num_edges) % 2).float()
        data[kind].when = torch.arange(data[kind].num_edges) % 40
    given: dict[str, Any] = {"input_nodes": ("paper", torch.arange(20)), "batch_size": 20}
    sampler = NeighborSampler(data, [1], weight_attr="weight")
    for batch in load(NeighborLoader(data, [1], neighbor_sampler=sampler, **given), device):
        for kind in (CITES, WRITES):
            enough = torch.zeros(60).index_add_(0, data[kind].edge_index[1], data[kind].weight) > 0
            into = enough[batch[kind[2]].n_id.cpu()[batch[kind].edge_index[1].cpu()]]
            assert bool((batch[kind].weight.cpu()[into] == 1).all())
    sampler = NeighborSampler(data, [2, 2], time_attr="when")
    source = NeighborLoader(data, [2, 2], neighbor_sampler=sampler, input_time=torch.full((20,), 25),
                            time_attr="when", **given)  # fmt: skip
    for batch in load(source, device):
        assert max(int(batch[kind].when.max()) for kind in KINDS) <= 25 and batch[CITES].num_edges
    with pytest.raises(ValueError, match="input_time: found None, expected the time of each seed, as nodes of type"):
        load(NeighborLoader(data, [2], neighbor_sampler=sampler, time_attr="when", **given), device)


@pytest.mark.parametrize("number", [0, 1])
def test_awkward_graphs(number: int, device: str) -> None:
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.randn(1, 2), 2
    data["a", "to", "b"].edge_index = torch.zeros(2, number, dtype=torch.long)
    data["b", "to", "b"].edge_index = torch.ones(2, number, dtype=torch.long)
    for name in ("a", "b"):
        source = NeighborLoader(data, [2, -1], input_nodes=name, batch_size=1)
        for buckets in (False, True):
            expected = load(source, "cpu", sampler="cpu")
            for found, other in zip(load(source, device, buckets=buckets), expected, strict=True):
                same(found, other)


def test_features_on_the_host(device: str) -> None:
    source = NeighborLoader(graph(), [2, 2], input_nodes="paper", batch_size=40)
    expected = load(source, device)
    for how in ({"features": "host"}, {"features": {"x": "host"}, "buckets": True}):
        for found, other in zip(load(source, device, **how), expected, strict=True):
            same(cpu(found), cpu(other))
    loader = gnncompile.loader(source, device, sampler="device", features="host")
    expected_names = [f"edge_attr of {CITES}", "x of author", "x of paper", "y of paper"]
    assert sorted(one.name for one in loader.report()) == expected_names


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("buckets", [False, True])
def test_node_types_share_a_cache(links: bool, buckets: bool, device: str) -> None:
    """Mini-batches are the same, and the report counts the rows and the hits of each type."""
    data = graph()
    data["venue"].x = torch.randn(3, 100)
    source = NeighborLoader(data, [2, 2], input_nodes=("paper", torch.arange(20)), batch_size=10)
    if links:
        source = LinkNeighborLoader(
            data, [2, 2], edge_label_index=(WRITES, data[WRITES].edge_index[:, :20]), batch_size=5
        )
    expected = load(source, device, buckets=buckets)
    torch.manual_seed(7)
    loader = gnncompile.loader(source, device, sampler="device", buckets=buckets, features="host", cache=1000)
    for found, other in zip(loader, expected, strict=True):
        same(cpu(found), cpu(other))
    report = {one.name: one for one in loader.report()}
    bytes_of = {"paper": 6 * 4 + 8, "author": 4 * 4}
    for name in ("paper", "author"):
        x, read = report[f"x of {name}"], sum(batch[name].num_nodes for batch in expected)
        assert x.reads == read and x.hits is not None and 0 < x.hits < read
        assert x.hits / read > x.cached_rows / data[name].num_nodes  # the rows that are read most
    assert report["x of paper"].hits == report["y of paper"].hits
    rows = {name: report[f"x of {name}"].cached_rows for name in bytes_of}
    assert 1000 - 32 < sum(rows[name] * size for name, size in bytes_of.items()) <= 1000
    assert report["x of venue"].cached_rows == 0 and report[f"edge_attr of {CITES}"].reads is None


def test_a_cache_that_is_too_small(device: str) -> None:
    source = NeighborLoader(graph(), [2], input_nodes="paper", batch_size=40)
    with pytest.raises(ValueError, match="cache: found 9 bytes, expected at least 16, which a row of the"):
        load(source, device, features="host", cache=9)


def test_padding_is_that_of_the_cpu(device: str) -> None:
    """The same mini-batches, prepared on the CPU, have the same sizes, padded rows and layouts."""
    learned, data = Buckets(3), graph()
    for found in load(NeighborLoader(data, [2, 2], input_nodes="paper", batch_size=30), device, buckets=3):
        ready = prepare(cpu(found), learned)
        expected = ready.finish(ready.memory)
        for kind in KINDS:
            theirs, ours = attached(expected[kind].edge_index), attached(found[kind].edge_index)
            assert theirs is not None and ours is not None and theirs.batch is not None and ours.batch is not None
            assert ours.batch.sizes == theirs.batch.sizes and ours.batch.kinds == theirs.batch.kinds
            assert ours.batch.on_device.tolist() == list(theirs.batch.counts) == list(ours.batch.counts)
            assert (ours.rows, ours.values, ours.highest) == (theirs.rows, theirs.values, theirs.highest)
            for ours_by, theirs_by in ((ours.layout, theirs.layout), (ours.padded_layout, theirs.padded_layout)):
                assert ours_by is not None and theirs_by is not None
                assert all(torch.equal(a.cpu(), b) for a, b in zip(ours_by.by_col, theirs_by.by_col, strict=True))
        for one, other in zip(found.stores, expected.stores, strict=True):
            for key in ("x", "y", "n_id", "edge_index", "edge_attr", "e_id"):
                if key in one:
                    ours, theirs = attached(one[key]), attached(other[key])
                    assert ours is not None and theirs is not None and torch.equal(ours.padded.cpu(), theirs.padded)


def test_a_mini_batch_that_is_not_padded_is_told_once(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("buckets", "device_loader"):
        monkeypatch.setattr(f"gnncompile.batches.{module}.MOST_KINDS", 5)
    source = NeighborLoader(graph(), [2], input_nodes=("paper", torch.arange(40)), batch_size=20)
    with caplog.at_level(logging.WARNING, logger="gnncompile"):
        load(source, device, buckets=True)
    (message,) = [record.message for record in caplog.records]
    assert "and the step over it is not recorded: it has 6 node types and edge types, expected at most 5;" in message


class Model(nn.Module):
    """Two layers over three edge types."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"paper": 6, "author": 4}
        self.first = HeteroConv({kind: SAGEConv((widths[kind[0]], widths[kind[2]]), 8) for kind in KINDS})
        self.second = HeteroConv({kind: SAGEConv((8, 8), 3) for kind in KINDS})

    def forward(self, x: dict[str, Tensor], edge_index: dict[Any, Tensor]) -> Tensor:
        x = {name: value.tanh() for name, value in self.first(x, edge_index).items()}
        return self.second(x, edge_index)["paper"]  # type: ignore[no-any-return]


def loss(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def test_training_steps(device: str, recording: None) -> None:
    """Losses and parameters are those of a plain loop over the mini-batches without padding."""
    torch.manual_seed(0)
    model, data = Model().double().to(device), graph(torch.float64)
    reference = copy.deepcopy(model)
    step = gnncompile.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), options={"inductor": False})
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    source = NeighborLoader(data, [2, 2], input_nodes=("paper", torch.arange(40)), batch_size=40, shuffle=True)
    loader = gnncompile.loader(source, device, buckets=1, sampler="device")
    for _ in range(8):
        for batch in loader:
            found = step(batch.x_dict, batch.edge_index_dict, target=(batch["paper"].y, batch["paper"].batch_size))
            other = cpu(batch).to(device)
            plain.zero_grad()
            expected = loss(
                reference(other.x_dict, other.edge_index_dict), (other["paper"].y, other["paper"].batch_size)
            )
            expected.backward()
            plain.step()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-8)
            assert attached(batch["paper"].x).batch is not None  # type: ignore[union-attr]
    assert step.not_recorded is None and not step._program.backend.notes and len(step._program.backend.captured) == 1
    assert step._plans and [one for plan in step._plans for one in plan.recordings.recorded]


def test_what_is_left_to_the_cpu(device: str, caplog: pytest.LogCaptureFixture) -> None:
    data = graph()
    data["paper"].batch = torch.zeros(60, dtype=torch.long)
    source = NeighborLoader(data, [2], input_nodes="paper", batch_size=20)
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="an attribute batch, which loaders set"):
        gnncompile.loader(source, device, sampler="device")
