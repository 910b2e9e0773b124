"""``gnncompile.loader`` around PyG's loaders that sample neighbours: mini-batches are those that PyG describes."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_geometric.sampler
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, ZipLoader
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.testing import MyFeatureStore, MyGraphStore

import gnncompile
from gnncompile import testing
from gnncompile.exc import ArgumentError, ArgumentTypeError, MissingLibraryError
from gnncompile.layout.batch_metadata import attached
from gnncompile.sampling import loaders
from gnncompile.sampling.pyg import NeighborSampler, replaced
from tests.harness import light

pytestmark = pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation")


def graph(num_nodes: int = 400, num_edges: int = 3000) -> Data:
    data = testing.power_law(num_nodes, num_edges, max_degree=90, channels=4, seed=1)
    data.y = torch.arange(num_nodes)
    data.edge_attr = torch.arange(data.num_edges).float().view(-1, 1)
    data.time = torch.randint(50, (num_nodes,), generator=torch.Generator().manual_seed(2))
    return data


def typed() -> HeteroData:
    generator = torch.Generator().manual_seed(3)
    data = HeteroData()
    sizes = {"paper": 60, "author": 40, "venue": 9}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 3, generator=generator)
        data[name].time = torch.randint(9, (size,), generator=generator)
    for kind in (("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")):
        ends = [torch.randint(sizes[kind[end]], (150,), generator=generator) for end in (0, 2)]
        data[kind].edge_index = torch.stack(ends)
        data[kind].edge_attr = torch.arange(150.0)
    return data


def is_subgraph(batch: Data, data: Data) -> None:
    """Every tensor of a mini-batch is what the graph has for its nodes and edges."""
    assert torch.equal(data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
    assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)


def load(source: Any, **how: Any) -> list[Any]:
    torch.manual_seed(7)
    return list(gnncompile.loader(source, **how))


def equal(first: list[Any], second: list[Any]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index) for a, b in pairs)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_mini_batches(workers: int, replace: bool) -> None:
    data = graph()
    source = NeighborLoader(data, [4, 3], batch_size=150, num_workers=workers, replace=replace, shuffle=False)
    batches = load(source)
    assert [batch.batch_size for batch in batches] == [150, 150, 100]
    for batch in batches:
        is_subgraph(batch, data)
        assert sum(batch.num_sampled_nodes) == batch.num_nodes and sum(batch.num_sampled_edges) == batch.num_edges
        assert batch.num_sampled_nodes[0] == batch.batch_size
        degree = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
        first, second = batch.num_sampled_nodes[:2]
        assert degree[:first].max() == 4 and degree[first : first + second].max() == 3
        assert not degree[first + second :].any()
    assert equal(batches, load(source))
    assert not equal(batches, list(gnncompile.loader(source)))


def test_every_neighbour() -> None:
    data = graph()
    batch = load(NeighborLoader(data, [-1], input_nodes=torch.tensor([7]), batch_size=1))[0]
    into = data.edge_index[1] == 7
    assert sorted(batch.e_id.tolist()) == into.nonzero().view(-1).tolist()


def test_the_source_keeps_its_sampler() -> None:
    source = NeighborLoader(graph(), [3], batch_size=50)
    before, collate = source.node_sampler, source.collate_fn
    load(source)
    assert source.node_sampler is before and source.collate_fn == collate
    assert type(before) is torch_geometric.sampler.NeighborSampler


def test_buckets_transforms_and_pickles() -> None:
    data = graph()

    def mark(batch: Data) -> Data:
        batch.mark = batch.x.sum()
        return batch

    batches = load(NeighborLoader(data, [4, 3], batch_size=64, transform=mark), buckets=2)
    for batch in batches:
        is_subgraph(batch, data)
        assert torch.equal(batch.mark, batch.x.sum())

    def cut(batch: Data) -> Data:
        batch.y = torch.arange(batch.num_nodes)[: batch.batch_size]
        return batch

    data.y = torch.arange(data.num_nodes)
    for batch in load(NeighborLoader(data, [4, 3], batch_size=64, transform=cut), buckets=1):
        found = attached(batch.y)
        assert found is not None and found.rows is not None  # a row for each seed
    sampling = loaders.with_own_sampler(NeighborLoader(data, [4, 3], batch_size=64))
    again = pickle.loads(pickle.dumps(sampling))
    assert type(again.node_sampler) is NeighborSampler
    torch.manual_seed(3)
    first = [batch.n_id for batch in again]
    torch.manual_seed(3)
    assert all(torch.equal(a, b.n_id) for a, b in zip(first, sampling, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_the_graph(workers: int) -> None:
    """A mini-batch of 6 nodes, 6 edges and 6 classes: only the graph tells which rows are which."""
    row = torch.arange(6)
    edges = torch.stack([torch.cat([row, row[:1]]), torch.cat([row.roll(1), row[5:] + 2])])
    data = Data(x=torch.randn(9, 2), edge_index=edges)
    data.strength, data.importance = torch.randn(7), torch.randn(6)
    source = NeighborLoader(data, [1], input_nodes=row, batch_size=6, num_workers=workers)
    for buckets in (False, True):
        (batch,) = load(source, buckets=buckets)
        assert batch.num_nodes == batch.num_edges == 6 and torch.equal(batch.strength, data.strength[batch.e_id])
        found = {key: attached(batch[key]) for key in ("x", "n_id", "strength", "importance")}
        assert found["importance"].is_shared and torch.equal(batch.importance, data.importance)  # type: ignore[union-attr]
        assert [one.rows for one in found.values()] == [0, 0, 1, None]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["directional", "bidirectional", "induced"])
def test_kinds_of_subgraphs(kind: str) -> None:
    data = graph()
    data.edge_index = torch.unique(data.edge_index, dim=1)
    data.edge_attr = torch.arange(data.num_edges).float().view(-1, 1)
    for batch in load(NeighborLoader(data, [3, 2], batch_size=80, subgraph_type=kind)):
        is_subgraph(batch, data) if kind != "bidirectional" else None
        edges = set(map(tuple, batch.n_id[batch.edge_index].t().tolist()))
        if kind == "induced":
            among = torch.isin(data.edge_index, batch.n_id).all(0)
            assert edges == set(map(tuple, data.edge_index[:, among].t().tolist()))
            assert "num_sampled_nodes" not in batch and "num_sampled_edges" not in batch
        if kind == "bidirectional":
            assert edges == {(b, a) for a, b in edges}
    with pytest.raises(ArgumentError, match="subgraph_type: found 'induced' for disjoint"):
        load(NeighborLoader(data, [3], batch_size=80, subgraph_type="induced", disjoint=True))


def test_disjoint_subgraphs() -> None:
    data = graph()
    for batch in load(NeighborLoader(data, [3, 2], batch_size=80, disjoint=True)):
        is_subgraph(batch, data)
        assert torch.equal(batch.batch[: batch.batch_size], torch.arange(batch.batch_size))
        row, col = batch.edge_index
        assert torch.equal(batch.batch[row], batch.batch[col])


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_times(strategy: str) -> None:
    data = graph()
    how = {"time_attr": "time", "temporal_strategy": strategy, "batch_size": 100}
    for times in (None, torch.full((400,), 20)):
        for batch in load(NeighborLoader(data, [3, 2], input_time=times, **how)):  # type: ignore[arg-type]
            is_subgraph(batch, data)
            seeds = batch.time[: batch.batch_size] if times is None else times[batch.input_id]
            assert (batch.time <= seeds[batch.batch])[batch.batch_size :].all()
            assert batch.num_edges > 50
    if strategy == "last":
        one = load(NeighborLoader(data, [2], input_nodes=torch.arange(3), input_time=torch.full((3,), 30), **how))[0]  # type: ignore[arg-type]
        for seed in range(3):
            sources = data.edge_index[0][data.edge_index[1] == seed]
            earlier = data.time[sources][data.time[sources] <= 30].sort().values
            found = one.time[one.edge_index[0][one.edge_index[1] == seed]].sort().values
            assert torch.equal(found, earlier[-2:])


def test_times_that_can_not_be_used() -> None:
    data = graph()
    data.edge_index = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
    with pytest.raises(ArgumentError, match=r"time_attr: found time .* expected ascending times"):
        gnncompile.loader(NeighborLoader(data, [2], time_attr="time", is_sorted=True))
    data.time = data.time.float()
    with pytest.raises(ArgumentTypeError, match=r"time_attr: found times of torch.float32"):
        gnncompile.loader(NeighborLoader(data, [2], time_attr="time"))
    data.time = data.time.int()
    assert len(load(NeighborLoader(data, [2], time_attr="time", batch_size=200))) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_weights(dtype: torch.dtype) -> None:
    data = graph()
    data.weight = (torch.arange(data.num_edges) % 2).to(dtype)
    sampler = NeighborSampler(data, [3], weight_attr="weight")
    for batch in load(NeighborLoader(data, [3], neighbor_sampler=sampler, batch_size=100)):
        is_subgraph(batch, data)
        enough = torch.zeros(400).index_add_(0, data.edge_index[1], data.weight.float()) >= 3
        weights = torch.zeros(batch.num_nodes).index_add_(0, batch.edge_index[1], batch.weight.float())
        assert (weights[: batch.batch_size][enough[batch.input_id]] == 3).all()


def test_times_of_edges() -> None:
    data = graph()
    data.when = torch.arange(data.num_edges) % 60
    sampler = NeighborSampler(data, [4, 2], time_attr="when", temporal_strategy="last", subgraph_type="bidirectional")
    assert sampler.subgraph_type.value == "bidirectional" and sampler.disjoint and not sampler.replace
    sampler = NeighborSampler(data, [4, 2], time_attr="when", temporal_strategy="last")
    source = NeighborLoader(
        data, [4, 2], neighbor_sampler=sampler, input_time=torch.full((400,), 25), time_attr="when", batch_size=100
    )
    for batch in load(source):
        is_subgraph(batch, data)
        assert batch.num_edges > 50 and int(batch.when.max()) <= 25


def test_pyg_makes_our_sampler_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = NeighborSampler(graph(), [2, 2], replace=True, subgraph_type="induced")
    assert sampler.replace and sampler.subgraph_type.value == "induced" and replaced(sampler) is sampler


# -- several types -----------------------------------------------------------------------------------------------------


def is_typed_subgraph(batch: HeteroData, data: HeteroData) -> None:
    for kind in data.edge_types:
        source, _, target = kind
        row, col = batch[kind].edge_index
        ends = torch.stack([batch[source].n_id[row], batch[target].n_id[col]])
        assert torch.equal(data[kind].edge_index[:, batch[kind].e_id], ends)
        assert torch.equal(batch[kind].edge_attr, data[kind].edge_attr[batch[kind].e_id])
    for name in data.node_types:
        assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])


@pytest.mark.parametrize("workers", [0, 2])
def test_mini_batches_of_several_types(workers: int) -> None:
    data = typed()
    fan_outs = {kind: [3, -1] if kind[1] == "writes" else [2, 2] for kind in data.edge_types}
    source = NeighborLoader(data, fan_outs, input_nodes="paper", batch_size=20, num_workers=workers)
    batches = load(source)
    for batch in batches:
        is_typed_subgraph(batch, data)
        assert torch.equal(batch["paper"].n_id[: batch["paper"].batch_size], batch["paper"].input_id)
        assert sum(batch["author"].num_sampled_nodes) == batch["author"].num_nodes
        assert sum(batch["paper", "cites", "paper"].num_sampled_edges) == batch["paper", "cites", "paper"].num_edges
    again = load(source)
    assert all(torch.equal(a["author"].n_id, b["author"].n_id) for a, b in zip(batches, again, strict=True))


def test_times_of_several_types() -> None:
    data = typed()
    source = NeighborLoader(data, [3, 3], input_nodes="paper", time_attr="time", batch_size=20)
    for batch in load(source):
        is_typed_subgraph(batch, data)
        seeds = batch["paper"].time[: batch["paper"].batch_size]
        assert (batch["author"].time <= seeds[batch["author"].batch]).all()


def test_induced_subgraphs_of_several_types() -> None:
    data = typed()
    for batch in load(NeighborLoader(data, [2, 2], input_nodes="venue", subgraph_type="induced", batch_size=3)):
        is_typed_subgraph(batch, data)
        cites = data["paper", "cites", "paper"].edge_index
        among = torch.isin(cites, batch["paper"].n_id).all(0)
        assert int(among.sum()) == batch["paper", "cites", "paper"].num_edges


def test_graphs_in_stores() -> None:
    data, types = graph(), typed()
    features, edges = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    edges.put_edge_index(data.edge_index, edge_type=None, layout="coo", size=(400, 400))
    for batch in load(NeighborLoader((features, edges), [3, 2], input_nodes=torch.arange(90), batch_size=30)):
        assert torch.equal(data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
        assert torch.equal(batch.x, data.x[batch.n_id])
    for mixed in load(NeighborLoader((types, types), [3, 2], input_nodes="paper", batch_size=30)):
        assert torch.equal(mixed["author"].x, types["author"].x[mixed["author"].n_id])
        for kind in types.edge_types:
            row, col = mixed[kind].edge_index
            ends = torch.stack([mixed[kind[0]].n_id[row], mixed[kind[2]].n_id[col]])
            assert torch.equal(types[kind].edge_index[:, mixed[kind].e_id], ends)


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("negatives", [None, NegativeSampling("binary", 2.0), NegativeSampling("triplet", 1)])
@pytest.mark.parametrize("disjoint", [False, True])
def test_links(disjoint: bool, negatives: Any) -> None:
    data = graph()
    source = LinkNeighborLoader(data, [3, 2], neg_sampling=negatives, batch_size=500, disjoint=disjoint)
    for batch in load(source):
        assert torch.equal(data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
        positive = data.edge_index[:, batch.input_id]
        if negatives is not None and negatives.is_triplet():
            assert torch.equal(batch.n_id[batch.src_index], positive[0])
            assert torch.equal(batch.n_id[batch.dst_pos_index], positive[1])
            assert len(batch.dst_neg_index) == len(batch.input_id)
            continue
        assert torch.equal(batch.n_id[batch.edge_label_index[:, : len(batch.input_id)]], positive)
        if negatives is not None:
            assert batch.edge_label_index.size(1) == 3 * len(batch.input_id)
            assert int(batch.edge_label.sum()) == len(batch.input_id)


@pytest.mark.parametrize("workers", [0, 2])
def test_links_between_types(workers: int) -> None:
    data, kind = typed(), ("author", "writes", "paper")
    for time_attr in (None, "time"):
        source = LinkNeighborLoader(
            data,
            [2, 2],
            edge_label_index=kind,
            edge_label_time=None if time_attr is None else torch.full((150,), 5),
            time_attr=time_attr,
            neg_sampling="binary",
            batch_size=50,
            num_workers=workers,
        )
        for batch in load(source):
            is_typed_subgraph(batch, data)
            row, col = batch[kind].edge_label_index[:, :50]
            ends = torch.stack([batch["author"].n_id[row], batch["paper"].n_id[col]])
            assert torch.equal(ends, data[kind].edge_index[:, batch[kind].input_id])


def test_zipped_loaders() -> None:
    data = graph()
    sources = [NeighborLoader(data, [n], batch_size=1) for n in (2, 3)]
    batches = load(ZipLoader(sources, batch_size=64))
    assert len(batches) == 7
    for pair in batches:
        for batch in pair:
            is_subgraph(batch, data)
    assert all(type(one.node_sampler) is torch_geometric.sampler.NeighborSampler for one in sources)


# -- other samplers ----------------------------------------------------------------------------------------------------


def backwards() -> bool:
    return hasattr(torch_geometric.sampler, "BidirectionalNeighborSampler")


@pytest.mark.skipif(not backwards(), reason="this PyG samples forwards only")
def test_directions() -> None:
    data = graph()
    sampler = torch_geometric.sampler.NeighborSampler(data, [3, 2], sample_direction="backward")
    for batch in load(NeighborLoader(data, [3, 2], neighbor_sampler=sampler, batch_size=100)):
        row, col = batch.n_id[batch.edge_index]
        pairs = set(map(tuple, data.edge_index.t().tolist()))
        assert set(zip(row.tolist(), col.tolist(), strict=True)) <= pairs
        assert (torch.bincount(batch.edge_index[0])[: batch.batch_size] <= 3).all()
    both = torch_geometric.sampler.BidirectionalNeighborSampler(data, [3])
    made = replaced(both)
    assert type(made.forward_sampler) is NeighborSampler and type(both.forward_sampler) is not NeighborSampler


class Chosen(torch_geometric.sampler.NeighborSampler):
    """A sampler of a user."""

    def _sample(self, seed: Any, seed_time: Any = None, **kwargs: Any) -> Any:
        nothing = torch.empty(0, dtype=torch.long)
        return torch_geometric.sampler.SamplerOutput(node=seed, row=nothing, col=nothing, edge=nothing)


def test_other_samplers_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    data = graph()
    loaders._warned.clear()
    with caplog.at_level(logging.WARNING, logger="gnncompile"):
        batches = load(NeighborLoader(data, [3], neighbor_sampler=Chosen(data, [3]), batch_size=200))
        load(NeighborLoader(data, [3], neighbor_sampler=Chosen(data, [3]), batch_size=200))
    assert [batch.num_edges for batch in batches] == [0, 0]
    assert [r.message for r in caplog.records] == [
        "NeighborLoader samples with Chosen, since gnncompile replaces only PyG's NeighborSampler"
    ]


def can_sample() -> bool:
    return bool(torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE)


@pytest.mark.skipif(can_sample(), reason="PyG can sample here")
def test_a_library_that_is_missing() -> None:
    source = NeighborLoader(graph(), [2], batch_size=10)
    with pytest.raises(MissingLibraryError, match=r"expected pyg-lib or torch-sparse\. PyPI has no pyg-lib"):
        load(source, sampler="pyg")


@pytest.mark.skipif(not can_sample(), reason="needs pyg-lib or torch-sparse")
def test_pyg_samples_the_same_neighbourhoods() -> None:
    data = graph()
    source = NeighborLoader(data, [-1, -1], batch_size=100)
    for ours, theirs in zip(load(source), load(source, sampler="pyg"), strict=True):
        assert torch.equal(ours.n_id, theirs.n_id)
        assert torch.equal(ours.e_id.sort().values, theirs.e_id.sort().values)


@pytest.mark.parametrize("pyg_can", [False, True])
def test_without_a_compiler_pyg_samples_if_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pyg_can: bool
) -> None:
    def fail() -> None:
        raise MissingLibraryError("sampler: no C++ compiler found")

    source = NeighborLoader(graph(), [2], batch_size=10)
    monkeypatch.setattr(loaders, "library", fail)
    monkeypatch.setattr(loaders.typing, "WITH_PYG_LIB", pyg_can)
    monkeypatch.setattr(loaders.typing, "WITH_TORCH_SPARSE", False)
    if pyg_can:
        assert loaders.with_own_sampler(source) is source
        assert "can't be compiled: sampler: no C++ compiler found" in caplog.text
    else:
        with pytest.raises(MissingLibraryError, match="no C\\+\\+ compiler found"):
            gnncompile.loader(source)


def test_an_unknown_sampler() -> None:
    with pytest.raises(ArgumentError, match="sampler: found 'dgl', expected one of gnncompile, device, cpu, pyg"):
        gnncompile.loader([], sampler="dgl")


def neighbours(data: HeteroData, num_neighbors: Any = (2,), input_nodes: Any = "paper") -> NeighborLoader:
    given = num_neighbors if isinstance(num_neighbors, dict) else list(num_neighbors)
    return NeighborLoader(data, given, input_nodes=input_nodes, batch_size=5)


@pytest.mark.filterwarnings("ignore:There exist node types", "ignore:Unable to accurately infer")
@pytest.mark.parametrize("sampler", ["cpu", "device"])
def test_types_that_the_graph_does_not_have(sampler: str) -> None:
    """An error names the argument when the loader is made, not the type alone in a worker process."""
    data, wrong = typed(), typed()
    first, *others = data.edge_types
    wrong["paper", "at", "place"].edge_index = torch.tensor([[0, 1], [0, 0]])
    every = {kind: [2] for kind in data.edge_types}
    unknown = ("paper", "at", "place"), data[first].edge_index
    for source, message in (
        (neighbours(data, {first: [2]}), r"num_neighbors: found \('author', .*; add a value for \('paper', 'cites'"),
        (neighbours(data, {**every, ("a", "b", "c"): [2]}), r"num_neighbors: found \('a', 'b', 'c'\), expected edge"),
        (neighbours(data, {**every, first: [2, 2]}), r"num_neighbors: found lists of \[1, 2\] hops, expected"),
        (
            neighbours(data, input_nodes=("book", torch.arange(3))),
            "input_nodes: found type 'book', expected one of p",
        ),
        (neighbours(wrong), "data: found .*, whose nodes of type 'place' the graph does not have, expected ends among"),
        (
            LinkNeighborLoader(data, [2], edge_label_index=unknown),
            r"edge_label_index: found \('paper', 'at', 'place'\)",
        ),
        (ZipLoader([neighbours(data), neighbours(data, {first: [2]})]), "num_neighbors: found "),
    ):
        with pytest.raises(ArgumentError, match=message):
            gnncompile.loader(source, sampler=sampler)
    default = NumNeighbors({first: [1]}, default=[2])
    assert others and load(neighbours(data, input_nodes="venue"))
    unused = NumNeighbors(every, default=[2, 2])
    for given in (default, unused):
        assert load(NeighborLoader(data, given, input_nodes="paper", batch_size=30))


@pytest.fixture
def lightly() -> Iterator[None]:
    with light():
        yield


@pytest.mark.usefixtures("lightly")
def test_training_needs_no_library() -> None:
    """A model learns from sampled mini-batches what it can't know without its neighbours."""
    data = graph()
    data.y = torch.zeros(400).index_add_(0, data.edge_index[1], data.x[data.edge_index[0], 0]).gt(0).long()
    torch.manual_seed(0)
    compiled = gnncompile.compile(torch_geometric.nn.GraphSAGE(4, 16, 2, 2, aggr="sum"))
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.02)
    losses: list[Tensor] = []
    for _ in range(12):
        for batch in gnncompile.loader(NeighborLoader(data, [-1, 5], batch_size=100, shuffle=True)):
            out = compiled(batch.x, batch.edge_index)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
