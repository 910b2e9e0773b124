"""``gnncompile.loader`` that samples on the device: PyG's mini-batches, padded and laid out there, and their training.

On a CPU, Triton's interpreter runs the same kernels, and tapes stand for CUDA graphs.
"""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, ZipLoader
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.sampler import NegativeSampling

import gnncompile
from gnncompile.batches import device_loader
from gnncompile.batches.buckets import Buckets
from gnncompile.batches.loader import Loader
from gnncompile.batches.prepare import prepare
from gnncompile.cudagraphs.static_inputs import StaticInputs
from gnncompile.exc import ArgumentError, UnsupportedSampling
from gnncompile.layout import csr
from gnncompile.layout.batch_metadata import BatchMetadata, attached
from gnncompile.sampling import ahead
from gnncompile.sampling.pyg import NeighborSampler
from gnncompile.sampling.seeds import SeedsOf
from tests.harness import tune

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, for padded lanes in Triton's interpreter
]


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the reference runs regions: here it's the mini-batches that matter."""
    if "cuda" not in request.node.name and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")


def graph(num_nodes: int = 300, num_edges: int = 2000, dtype: torch.dtype = torch.float32) -> Data:
    """Unsorted, with a hub, self loops, edges that repeat, and nodes without any."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(num_nodes - 20, (2, num_edges), generator=generator)
    edges[0, :150] = 7
    edges[:, 150:160] = edges[:1, 150:160]
    edges[:, 160:170] = edges[:, 170:180]
    return Data(
        x=torch.randn(num_nodes, 6, generator=generator, dtype=dtype),
        edge_index=edges,
        edge_attr=torch.arange(num_edges, dtype=dtype).view(-1, 1),
        y=torch.randint(3, (num_nodes,), generator=generator),
        name="a graph",
        level=torch.tensor([2.5]),
    )


def is_subgraph(batch: Data, data: Data, fan_outs: list[int]) -> None:
    """Checks everything that PyG says of a mini-batch."""
    row, col = batch.edge_index
    node = batch.n_id
    assert torch.equal(data.edge_index[:, batch.e_id], node[batch.edge_index])
    assert torch.equal(batch.x, data.x[node]) and torch.equal(batch.y, data.y[node])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert batch.name == "a graph" and torch.equal(batch.level, data.level)
    assert batch.num_nodes == len(node) == sum(batch.num_sampled_nodes)
    assert batch.num_edges == sum(batch.num_sampled_edges)
    assert batch.num_sampled_nodes[0] == batch.batch_size == len(batch.input_id)
    assert "batch" in batch or len(set(node[batch.batch_size :].tolist())) == len(node) - batch.batch_size
    degree, whole = torch.bincount(col, minlength=len(node)), torch.bincount(data.edge_index[1], minlength=300)
    first = edge = 0
    for hop, fan_out in enumerate(fan_outs):
        end, edges = first + batch.num_sampled_nodes[hop], edge + batch.num_sampled_edges[hop]
        known = end + batch.num_sampled_nodes[hop + 1]
        assert ((col[edge:edges] >= first) & (col[edge:edges] < end)).all() and (row[edge:edges] < known).all()
        expected = whole[node[first:end]] if fan_out < 0 else whole[node[first:end]].clamp(max=fan_out)
        assert torch.equal(degree[first:end], expected)
        first, edge = end, edges
    assert not degree[first:].any()


def cpu(batch: Data) -> Data:
    """A copy on the CPU, of tensors that no loader knows."""
    return copy.copy(batch).apply(lambda value: value.detach().to("cpu", copy=True))


def load(source: Any, device: str, seed: int = 7, sampler: str = "device", **how: Any) -> list[Data]:
    torch.manual_seed(seed)
    return list(gnncompile.loader(source, device, sampler=sampler, **how))


def equal(first: list[Data], second: list[Data]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index) for a, b in pairs)


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("fan_outs", [[4, 3], [-1, 2]], ids=["ahead", "on demand"])
def test_mini_batches(fan_outs: list[int], buckets: bool, device: str) -> None:
    data = graph()
    source = NeighborLoader(data, fan_outs, batch_size=80, shuffle=True)
    batches = load(source, device, buckets=buckets)
    assert [batch.batch_size for batch in batches] == [80, 80, 80, 60]
    for batch in batches:
        assert all(value.device.type == device for value in batch.to_dict().values() if isinstance(value, Tensor))
        is_subgraph(cpu(batch), data, fan_outs)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
    assert sorted(torch.cat([batch.input_id for batch in batches]).tolist()) == list(range(300))
    # The same random seed gives the same bits, whether mini-batches are padded or not.
    assert equal(batches, load(source, device)) and equal(batches, load(source, device, buckets=2))
    assert not equal(batches, load(source, device, seed=8))


def test_what_is_sampled_on_demand_is_what_is_sampled_ahead(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = NeighborLoader(graph(), [4, 3], batch_size=80)
    batches = load(source, device)
    monkeypatch.setattr(ahead, "MOST_EDGES", 10)
    assert equal(batches, load(source, device))


def test_inputs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = graph()
    chosen = torch.zeros(300, dtype=torch.bool)
    chosen[40:75] = True
    for batch in load(NeighborLoader(data, [3], input_nodes=chosen, batch_size=10, drop_last=True), device):
        is_subgraph(cpu(batch), data, [3])
        assert torch.equal(batch.n_id[:10], batch.input_id) and bool((batch.input_id // 35 == 1).all())
    nodes, ids = torch.tensor([7, 7, 299, 5]), torch.tensor([40, 50, 60, 70])
    times = torch.tensor([4, 3, 2, 1], dtype=torch.int32)
    data.time = torch.zeros(300, dtype=torch.long)
    source = NeighborLoader(
        data, [3, 2], nodes, times, time_attr="time", input_id=ids, batch_size=4, disjoint=True, replace=True
    )
    for buckets, most in ((False, 2**23), (True, 2**23), (True, 1)):
        monkeypatch.setattr(ahead, "MOST_EDGES", most)
        (batch,) = load(source, device, buckets=buckets)
        assert batch.n_id[:4].tolist() == nodes.tolist() and batch.input_id.tolist() == ids.tolist()
        assert torch.equal(batch.seed_time.cpu(), times) and batch.seed_time.dtype == torch.int32
        assert batch.batch[:4].tolist() == [0, 1, 2, 3]
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
    order = BatchSampler([3, 1, 0, 2], 3, drop_last=False)

    class Own(BatchSampler):
        """Of any size, and each with the last seed again."""

        def __iter__(self) -> Iterator[list[int]]:
            for found in super().__iter__():
                yield [*found, found[-1]]

    batches = load(NeighborLoader(data, [3], nodes, batch_sampler=order), device)
    assert [batch.n_id[: batch.batch_size].tolist() for batch in batches] == [[5, 7, 7], [299]]
    again = load(NeighborLoader(data, [3], nodes, batch_sampler=Own([3, 1, 0, 2], 3, False)), device, buckets=True)
    assert [batch.n_id[: batch.batch_size].tolist() for batch in again] == [[5, 7, 7, 7], [299, 299]]


def test_seeds_outside_the_graph(device: str) -> None:
    source = NeighborLoader(graph(), [3], input_nodes=torch.tensor([5, 300]), batch_size=2)
    loader = gnncompile.loader(source, device, buckets=True, sampler="device")
    for _ in range(2):
        with pytest.raises(IndexError, match="seeds: found a node outside the graph, expected 0 to 299"):
            next(iter(loader))


def test_times_and_weights(device: str) -> None:
    data = graph()
    data.time = torch.randint(50, (300,), generator=torch.Generator().manual_seed(2))
    few = torch.arange(100, 150)
    how = {"time_attr": "time", "batch_size": 30, "temporal_strategy": "last", "input_nodes": few}
    for times in (None, torch.full((50,), 20)):
        for batch in load(NeighborLoader(data, [3, 2], input_time=times, **how), device, buckets=True):  # type: ignore[arg-type]
            batch = cpu(batch)
            assert torch.equal(data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
            seeds = batch.time[: batch.batch_size] if times is None else times[:1].expand(batch.batch_size)
            assert (batch.time <= seeds[batch.batch])[batch.batch_size :].all() and batch.num_edges > 10
    data.when = torch.arange(2000) % 60
    sampler = NeighborSampler(data, [4, 2], time_attr="when")
    given: dict[str, Any] = {"neighbor_sampler": sampler, "batch_size": 30, "time_attr": "when", "input_nodes": few}
    for batch in load(NeighborLoader(data, [4, 2], input_time=torch.full((50,), 25), **given), device):
        assert batch.num_edges > 50 and int(batch.when.max()) <= 25
    with pytest.raises(ArgumentError, match="input_time: found None, expected the time of each seed"):
        load(NeighborLoader(data, [4, 2], **given), device)
    data.weight = (torch.arange(2000) % 2).to(torch.float16)
    sampler = NeighborSampler(data, [3], weight_attr="weight")
    for batch in load(NeighborLoader(data, [3], few[:20], neighbor_sampler=sampler, batch_size=12), device):
        batch = cpu(batch)
        enough = torch.zeros(300).index_add_(0, data.edge_index[1], data.weight.float()) >= 3
        weights = torch.zeros(batch.num_nodes).index_add_(0, batch.edge_index[1], batch.weight.float())
        assert (weights[: batch.batch_size][enough[batch.n_id[: batch.batch_size]]] == 3).all()


@pytest.mark.parametrize("negatives", [None, NegativeSampling("binary", 1.5), NegativeSampling("triplet", 2)])
@pytest.mark.parametrize("how", [{}, {"disjoint": True}, {"time": True}], ids=str)
def test_links(how: dict[str, Any], negatives: Any, device: str) -> None:
    data = graph()
    data.edge_label = torch.ones(2000)  # of the graph, not of the links
    chosen, given = data.edge_index[:, 200:250], {"disjoint": "disjoint" in how}
    if "time" in how:
        data.time = torch.arange(300) % 40
        given = {"time_attr": "time", "edge_label_time": torch.full((50,), 30), "disjoint": True}
    source = LinkNeighborLoader(data, [2, 2], chosen, neg_sampling=negatives, batch_size=30, shuffle=True, **given)
    for buckets in (False, True):
        batches = load(source, device, buckets=buckets)
        assert sorted(torch.cat([batch.input_id for batch in batches]).tolist()) == list(range(50))
        expected = load(source, "cpu", sampler="cpu")
        for batch, other in zip(map(cpu, batches), expected, strict=True):
            assert set(batch.keys()) == set(other.keys()) and "batch_size" not in batch
            is_sampled_around_links(batch, data, chosen, negatives)
            if how:
                row, col = batch.edge_index
                assert torch.equal(batch.batch[row], batch.batch[col])
                assert int(batch.batch.max()) == len(batch.input_id) - 1
            if "time" in how:
                assert (data.time[batch.n_id[batch.num_sampled_nodes[0] :]] <= 30).all()


def is_sampled_around_links(batch: Data, data: Data, chosen: Tensor, negatives: Any) -> None:
    assert torch.equal(data.edge_index[:, batch.e_id], batch.n_id[batch.edge_index])
    assert torch.equal(batch.x, data.x[batch.n_id]) and batch.num_nodes == sum(batch.num_sampled_nodes)
    positive, number = chosen[:, batch.input_id], len(batch.input_id)
    if negatives is not None and negatives.is_triplet():
        assert torch.equal(batch.n_id[batch.src_index], positive[0])
        assert torch.equal(batch.n_id[batch.dst_pos_index], positive[1])
        assert batch.dst_neg_index.shape == (number, 2)
        return
    assert torch.equal(batch.n_id[batch.edge_label_index[:, :number]], positive)
    assert batch.edge_label_index.size(1) == (1 if negatives is None else 2.5) * number
    assert negatives is None or int(batch.edge_label.sum()) == number


AWKWARD = {
    "no edge": torch.empty(2, 0, dtype=torch.long),
    "self loops": torch.tensor([[0, 1, 1], [0, 1, 1]]),
    "a hub": torch.stack([torch.arange(5).repeat(3), torch.zeros(15, dtype=torch.long)]),
}


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_graphs(name: str, nodes: int, buckets: bool, device: str) -> None:
    edges = AWKWARD[name] % nodes
    data = Data(x=torch.randn(nodes, 2), edge_index=edges, num_nodes=nodes)
    batches = load(NeighborLoader(data, [2, 2], batch_size=2), device, buckets=buckets)
    assert sum(batch.batch_size for batch in batches) == nodes
    for batch in map(cpu, batches):
        assert torch.equal(edges[:, batch.e_id], batch.n_id[batch.edge_index])
        assert torch.equal(batch.x, data.x[batch.n_id]) and batch["num_nodes"] == len(batch.n_id)
        into = torch.isin(edges[1], batch.input_id).sum()
        assert bool(batch.num_edges) == bool(into)
        known = attached(batches[0].edge_index)
        assert known is not None and known.highest == tuple(
            int(end.max()) + 1 if end.numel() else 0 for end in batches[0].edge_index
        )


# -- padding -----------------------------------------------------------------------------------------------------------


def metadata(value: Tensor) -> BatchMetadata:
    found = attached(value)
    assert found is not None and found.batch is not None
    return found


@pytest.mark.parametrize("how", [{}, {"disjoint": True}, {"replace": True}], ids=str)
def test_padding_is_that_of_the_cpu(how: dict[str, Any], device: str) -> None:
    """The same mini-batches, prepared on the CPU, have the same sizes, padded rows, layouts and hop prefixes."""
    buckets = Buckets(3)
    batches = load(NeighborLoader(graph(), [4, 3, 2], batch_size=50, shuffle=True, **how), device, buckets=3)
    for found in batches:
        plain = cpu(found)
        plain.batch_size = int(plain.batch_size)
        ready = prepare(plain, buckets)
        expected = ready.finish(ready.memory)
        theirs, ours = metadata(expected.edge_index), metadata(found.edge_index)
        assert theirs.batch is not None and ours.batch is not None
        assert ours.batch.sizes == theirs.batch.sizes and ours.batch.counts == theirs.batch.counts
        assert ours.batch.kinds == theirs.batch.kinds and ours.batch.things == theirs.batch.things
        assert ours.batch.on_device.tolist() == list(theirs.batch.counts)
        assert (ours.rows, ours.values, ours.highest) == (theirs.rows, theirs.values, theirs.highest)
        for key in ("x", "y", "edge_attr", "n_id", "e_id", "edge_index", *(["batch"] if how.get("disjoint") else [])):
            assert torch.equal(metadata(found[key]).padded.cpu(), metadata(expected[key]).padded), key
        for ours_by, theirs_by in ((ours.layout, theirs.layout), (ours.padded_layout, theirs.padded_layout)):
            assert ours_by is not None and theirs_by is not None
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours_by.by_col, theirs_by.by_col, strict=True))
        assert len(ours.hop_prefixes) == len(theirs.hop_prefixes) == 3
        for a, b in zip(ours.hop_prefixes, theirs.hop_prefixes, strict=True):
            assert a.kinds == b.kinds
            assert all(torch.equal(getattr(a, part).cpu(), getattr(b, part)) for part in ("row", "col", "rowptr"))


@pytest.mark.parametrize("hub_edges", [4, 16])
def test_layouts_without_hubs_say_so(hub_edges: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No destination has more edges than the fan-out; padded destinations may."""
    tune(monkeypatch, hub_edges=hub_edges, hub_share=4096)
    told, missed = 0, 0
    for batch in load(NeighborLoader(graph(), [5, 3], batch_size=40, shuffle=True), device, buckets=1):
        layouts = [metadata(batch.edge_index).padded_layout.by_col[0]]  # type: ignore[union-attr]
        layouts += [prefix.rowptr for prefix in metadata(batch.edge_index).hop_prefixes]
        for rowptr in layouts:
            known = csr.given_hubs(rowptr)
            if known is not None:
                told += 1
                assert known.number == csr.NO_HUBS and int(rowptr.diff().max()) < known.most_edges
            missed += known is None
    assert bool(told) == (hub_edges == 16) and (missed > 0 or hub_edges == 16)


def test_a_copied_layout_has_no_hubs_either() -> None:
    """A recording that copies row pointers need not look for hubs, and takes no layout that may have some."""
    rowptr, nothing = torch.arange(5, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    csr.give_hubs(rowptr, nothing.view(0, 3), nothing, csr.NO_HUBS, 64)
    static = StaticInputs([rowptr, rowptr + 1], [0, 1])
    known = csr.given_hubs(static.tensors[0])
    assert known is not None and known.number == csr.NO_HUBS and csr.given_hubs(static.tensors[1]) is None
    assert static.fits([rowptr, rowptr.clone()]) and not static.fits([rowptr.clone(), rowptr.clone()])


def test_memory_is_used_again_when_nothing_reads_it(device: str) -> None:
    source, addresses, kept = NeighborLoader(graph(), [3], batch_size=30, shuffle=True), [], []
    loader = gnncompile.loader(source, device, buckets=1, sampler="device")
    torch.manual_seed(0)
    for batch in loader:
        addresses.append(batch.x.data_ptr())
    assert len(set(addresses[-6:])) == 2
    assert len(loader._on_device._memories) == len(loader.buckets.sizes()) == 1  # type: ignore[union-attr]
    for batch in loader:
        kept.append((batch.x[:2], batch.x[:2].clone(), batch.edge_index, batch.edge_index.clone()))
    del batch
    assert len({rows.data_ptr() for rows, *_ in kept}) == len(kept) == 10
    assert all(torch.equal(a, b) and torch.equal(c, d) for a, b, c, d in kept)
    for one, other in zip(loader, loader, strict=True):  # two iterators at once
        is_subgraph(cpu(one), source.data, [3]), is_subgraph(cpu(other), source.data, [3])
    assert len(loader) == 10


def test_inference_mode(device: str) -> None:
    """What the loader keeps from a loop in inference mode serves later loops too."""
    source = NeighborLoader(graph(), [3], batch_size=60)
    loader, batches = gnncompile.loader(source, device, buckets=1, sampler="device"), []
    for mode in (True, False):
        torch.manual_seed(7)
        with torch.inference_mode(mode):
            batches.append([cpu(batch) for batch in loader])
    assert equal(*batches)
    for batch in loader:
        is_subgraph(cpu(batch), source.data, [3])


def test_a_loop_that_is_left(device: str) -> None:
    source = NeighborLoader(graph(), [3], batch_size=60)
    loader = gnncompile.loader(source, device, buckets=1, sampler="device")
    for _ in range(3):
        for batch in loader:
            is_subgraph(cpu(batch), source.data, [3])
            break
    torch.manual_seed(7)
    assert equal(list(loader), load(source, device))


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [True, False])
def test_threads_move_the_graph_once(fits: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock each thread would move the graph, and the memory of one copy would be lost."""
    made: list[threading.Thread] = []

    class Slow(device_loader.DeviceLoader):
        def __init__(self, *args: Any) -> None:
            made.append(threading.current_thread())
            time.sleep(0.1)
            if not fits:
                raise UnsupportedSampling("the graph is too large")
            super().__init__(*args)

    monkeypatch.setattr(device_loader, "DeviceLoader", Slow)
    loader = gnncompile.loader(NeighborLoader(graph(), [3], batch_size=60), device, sampler="device")
    loader._sampler = "gnncompile"  # it may fall to the CPU
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: type(iter(loader)).__name__ == "generator", range(2)))
    assert found == [True, True] and len(made) == 1
    assert (loader.not_on_device is None) == fits == (loader._on_device is not None)
    assert len(pickle.dumps(gnncompile.loader(NeighborLoader(graph(), [3]), device)))


def test_threads_do_not_share_seeds(device: str) -> None:
    """While the labels of one mini-batch of links are made, another iterator may ask for its seeds."""
    data = graph()
    source = LinkNeighborLoader(data, [3], edge_label_index=data.edge_index[:, :40], batch_size=10)
    seeds, expected = SeedsOf(source), [SeedsOf(source)([at]).node for at in range(2)]
    others: list[Tensor] = []

    def label(out: Any) -> Data:
        if not others:
            others.append(out)
            with ThreadPoolExecutor(1) as pool:
                others[0] = pool.submit(seeds, [1]).result().node
        return LinkNeighborLoader.filter_fn(seeds._links, out)

    seeds._links.filter_fn = label
    assert torch.equal(seeds([0]).node, expected[0]) and torch.equal(others[0], expected[1])


# -- training ----------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Three layers, as many as there are hops."""

    def __init__(self, make: Callable[[int, int], nn.Module], norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(width, 8) for width in (6, 8, 8)])
        self.last, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(8) if norm else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
            x = (x if self.norm is None else self.norm(x)).tanh()
        return self.last(x)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: Layers(SAGEConv),
    "gcn": lambda: Layers(GCNConv),
    "batch norm": lambda: Layers(SAGEConv, norm=True),
}


def loss_of_seeds(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def loss_of_all(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    return F.cross_entropy(out, target[0])


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def sources(dtype: torch.dtype = torch.float64) -> NeighborLoader:
    return NeighborLoader(graph(dtype=dtype), [3, 2, 2], batch_size=40, shuffle=True)


@pytest.mark.parametrize("loss", [loss_of_seeds, loss_of_all])
@pytest.mark.parametrize("name", MODELS)
def test_training_steps(name: str, loss: Any, device: str, recording: None) -> None:
    """Losses and parameters are those of a plain loop over the mini-batches without padding."""
    torch.manual_seed(0)
    model = MODELS[name]().double().to(device)
    reference = copy.deepcopy(model)
    step = gnncompile.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), options={"inductor": False})
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    loader, addresses = gnncompile.loader(sources(), device, buckets=2, sampler="device"), set()
    for _ in range(2):
        for batch in loader:
            addresses.add(batch.x.data_ptr())
            other = cpu(batch).to(device)
            found = step(batch.x, batch.edge_index, target=(batch.y, batch.batch_size))
            plain.zero_grad()
            expected = loss(reference(other.x, other.edge_index), (other.y, other.batch_size))
            expected.backward()
            plain.step()
            same(found, expected.detach())
    same(list(model.state_dict().values()), list(reference.state_dict().values()))
    assert step.not_recorded is None and not step._program.backend.notes
    assert len(step._program.backend.captured) == 1
    recordings = [one for plan in step._plans for one in plan.recordings.recorded]
    assert 1 <= len(recordings) <= 4
    places = {place for _, recording in recordings for _, place in recording._places}
    assert addresses & places or name == "batch norm", "features are read where the loader has written them"
    (captured,) = step._program.backend.captured
    rows = {record.shape.strip("()").split(",")[0] for record in captured.log.regions}
    assert (len(rows) >= 3) == (name == "sage" and loss is loss_of_seeds)


@pytest.mark.parametrize("sampler", ["device", "cpu"])
def test_tensors_that_mini_batches_share(sampler: str, device: str, recording: None) -> None:
    """Weights of classes are no rows of nodes or seeds, also where their number is the same; steps are recorded."""

    def weighted(out: Tensor, target: Any) -> Tensor:
        labels, seeds, weight = target
        return F.cross_entropy(out[:seeds], labels[:seeds], weight=weight)

    torch.manual_seed(0)
    data = graph(dtype=torch.float64)
    data.weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    model = SAGEConv(6, 3).double().to(device)
    reference = copy.deepcopy(model)
    step = gnncompile.TrainStep(
        model, weighted, torch.optim.SGD(model.parameters(), lr=0.1), options={"inductor": False}
    )
    plain, seeds = torch.optim.SGD(reference.parameters(), lr=0.1), []
    source = NeighborLoader(data, [3], input_nodes=torch.arange(202), batch_size=199)
    for batch in [batch for _ in range(3) for batch in gnncompile.loader(source, device, buckets=1, sampler=sampler)]:
        other = cpu(batch).to(device)
        found = step(batch.x, batch.edge_index, target=(batch.y, batch.batch_size, batch.weight))
        plain.zero_grad()
        expected = weighted(reference(other.x, other.edge_index), (other.y, other.batch_size, other.weight))
        expected.backward()
        plain.step()
        same(found, expected.detach())
        assert torch.equal(other.weight.cpu(), data.weight)
        seeds.append(int(batch.batch_size))
    assert len(data.weight) in seeds
    assert step.not_recorded is None and not step._program.backend.notes
    assert [one for plan in step._plans for one in plan.recordings.recorded]


def test_results_have_no_padding(device: str, recording: None) -> None:
    model = MODELS["sage"]().double().to(device)
    compiled = gnncompile.compile(copy.deepcopy(model), mode="reduce-overhead", options={"inductor": False})
    for batch in gnncompile.loader(sources(), device, buckets=2, sampler="device"):
        found, expected = compiled(batch.x, batch.edge_index), model(batch.x, batch.edge_index)
        assert len(found) == batch.num_nodes
        same(found, expected)


def test_without_buckets_nothing_is_sorted_by_destination(device: str, recording: None) -> None:
    model = MODELS["gcn"]().double().to(device)
    compiled = gnncompile.compile(copy.deepcopy(model), options={"inductor": False})
    for batch in gnncompile.loader(sources(), device, sampler="device"):
        known = attached(batch.edge_index)
        assert known is not None and known.batch is None and known.layout is not None
        index, other = batch.edge_index[1], batch.edge_index[0]
        expected = csr.csr(index, other, batch.num_nodes, batch.num_nodes, None)
        assert all(torch.equal(a, b) for a, b in zip(known.layout.by_col, expected, strict=True))
        same(compiled(batch.x, batch.edge_index), model(batch.x, batch.edge_index))


# -- transforms, and what is left to the CPU ---------------------------------------------------------------------------


def test_transforms(device: str) -> None:
    def mark(batch: Data) -> Data:
        batch.mark = batch.x.sum()
        return batch

    source = NeighborLoader(graph(), [3], batch_size=100, transform=mark)
    for batch in load(source, device):
        assert batch.mark.device.type == device and torch.equal(batch.mark, batch.x.sum())
    with pytest.raises(ArgumentError, match=r"sampler: found 'device', .* \(a transform may change sizes"):
        gnncompile.loader(source, device, buckets=True, sampler="device")


class Chosen(NeighborSampler):
    """A sampler of a user."""


def typed() -> HeteroData:
    data = HeteroData()
    data["a"].x = torch.randn(9, 2)
    data["a", "to", "a"].edge_index = torch.randint(9, (2, 30))
    return data


def collated() -> NeighborLoader:
    source = NeighborLoader(graph(), [3])
    source.collate_fn = list
    return source


def sparse() -> Data:
    data = graph()
    data.table = torch.eye(300).to_sparse()
    return data


REASONS: dict[str, tuple[Callable[[], Any], str]] = {
    "types": (
        lambda: NeighborLoader(typed(), [3], input_nodes="a", subgraph_type="induced"),
        "subgraph_type is 'induced'",
    ),
    "two": (lambda: ZipLoader([NeighborLoader(graph(), [3])]), "ZipLoader is no loader of nodes or links"),
    "induced": (lambda: NeighborLoader(graph(), [3], subgraph_type="induced"), "subgraph_type is 'induced'"),
    "many": (lambda: NeighborLoader(graph(), [2000]), r"num_neighbors is \[2000\], where a device takes hops of"),
    "sampler": (
        lambda: NeighborLoader(graph(), [3], neighbor_sampler=Chosen(graph(), [3])),
        "the sampler is a Chosen",
    ),
    "rows": (lambda: NeighborLoader(sparse(), [3]), "table is a Tensor with a row for each node or edge"),
    "collate": (collated, "the loader was given another collate_fn"),
    "one": (lambda: NeighborLoader(graph(), [3], batch_size=None), "batch_size is None"),
    "output": (
        lambda: NeighborLoader(graph(), [3], transform_sampler_output=lambda out: out),
        "transform_sampler_output or custom_cls is given",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_a_device_does_not_sample(name: str, device: str) -> None:
    make, reason = REASONS[name]
    with pytest.raises(ArgumentError, match=rf"sampler: found 'device', which can't sample .* \({reason}"):
        gnncompile.loader(make(), device, sampler="device")
    assert gnncompile.loader(make(), device, sampler="cpu").not_on_device == "sampler is 'cpu'"


def test_arguments() -> None:
    source = NeighborLoader(graph(), [3])
    with pytest.raises(ArgumentError, match="sampler: found 'gpu', expected one of gnncompile, device, cpu, pyg"):
        gnncompile.loader(source, sampler="gpu")
    assert gnncompile.loader(source).not_on_device == "mini-batches go to cpu, which is no GPU"
    assert gnncompile.loader(source, "cuda").not_on_device is None


def test_a_graph_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedSampling("the graph needs 9.0 GiB, and cpu has 1.0 GiB free")

    monkeypatch.setattr(device_loader, "_check_room", refuse)
    source = NeighborLoader(graph(), [3], batch_size=100)
    with pytest.raises(ArgumentError, match=r"the graph needs 9\.0 GiB"):
        load(source, "cpu")
    monkeypatch.setattr(Loader, "_why_not_on_device", lambda *_: None)
    loader = gnncompile.loader(source, buckets=True)
    with caplog.at_level(logging.WARNING, logger="gnncompile"):
        for batch in loader:
            is_subgraph(cpu(batch), source.data, [3])
    assert loader.not_on_device is not None and loader.not_on_device.startswith("the graph needs 9.0 GiB")


@pytest.mark.gpu
def test_a_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gnncompile"):
        source = NeighborLoader(typed(), [3], input_nodes="a", batch_size=3, subgraph_type="induced")
        loader = gnncompile.loader(source, "cuda")
        assert len(list(loader)) == len(list(loader)) == 3
        gnncompile.loader([graph()], "cuda")
    assert [r.message for r in caplog.records] == ["NeighborLoader samples on the CPU: subgraph_type is 'induced'"]


# -- recordings --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_no_sync_no_recompile_and_flat_memory() -> None:
    """A thousand mini-batches: the host never waits for a stream, nothing is captured anew, memory does not grow."""
    torch._dynamo.reset()
    data = graph(20000, 200000)
    model = Layers(SAGEConv).cuda()
    step = gnncompile.TrainStep(model, loss_of_seeds, torch.optim.Adam(model.parameters()))
    source = NeighborLoader(data, [5, 4, 3], batch_size=256, shuffle=True, drop_last=True)
    loader = gnncompile.loader(source, "cuda", buckets=1)
    losses: list[Tensor] = []

    def epoch() -> None:
        for batch in loader:
            losses.append(step(batch.x, batch.edge_index, target=(batch.y, batch.batch_size)))

    epoch()
    assert step.not_recorded is None and loader.not_on_device is None
    captured = step._program.backend.captured
    torch.cuda.synchronize()
    before, number = torch.cuda.memory_allocated(), len(captured)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(13):
                epoch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(losses) > 1000 and len(captured) == number == 1
    assert torch.isfinite(torch.stack(losses)).all()
    losses.clear()
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.gpu
def test_recorded_mini_batches_are_those_that_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = NeighborLoader(graph(), [4, 3], batch_size=40, shuffle=True)

    def epochs() -> list[Data]:
        loader = gnncompile.loader(source, "cuda", buckets=2)
        torch.manual_seed(3)
        return [cpu(batch) for _ in range(4) for batch in loader]

    recorded = epochs()
    for batch in recorded:
        is_subgraph(batch, source.data, [4, 3])
    monkeypatch.setattr(device_loader._Memory, "_write", lambda self, sampled: self._batch.fill(self._memory, sampled))
    assert equal(recorded, epochs())
