"""``gnncompile.loader`` around loaders of other engines: their mini-batches are taken as they are."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.transforms import ToSparseTensor

import gnncompile
from gnncompile import testing
from gnncompile.batches import edge_layouts
from gnncompile.batches.buckets import Buckets
from gnncompile.batches.prepare import Prepared, prepare, prepare_all
from gnncompile.exc import ArgumentError
from gnncompile.layout.batch_metadata import attached
from tests.engines import LOADERS, CuGraph, Distributed, MiniBatch, sampled
from tests.tape import tapes

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]


def edges(data: Any) -> list[tuple[int, ...]]:
    """Returns the edges of a mini-batch by the nodes of the graph, with their attributes if it has any."""
    ends = data.n_id.cpu()[data.edge_index.cpu().long()].t()
    rows = torch.cat([ends.double(), data.edge_attr.cpu().double()], 1) if "edge_attr" in data else ends
    return sorted(map(tuple, rows.tolist()))


def made(name: str, device: str) -> Any:
    """Returns a loader of another engine. cuGraph's mini-batches are on the device already."""
    loader = LOADERS[name]()
    if isinstance(loader, CuGraph):
        loader.device = device
    return loader


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("name", LOADERS)
def test_mini_batches(name: str, buckets: bool, device: str) -> None:
    found = list(gnncompile.loader(made(name, device), device=device, buckets=buckets))
    expected = [item.to_pyg_data() if isinstance(item, MiniBatch) else item for item in LOADERS[name]()]
    assert len(found) == len(expected) == 4
    for batch, plain in zip(found, expected, strict=True):
        assert type(batch) is Data and batch.x.device.type == device
        assert batch.batch_size == plain.batch_size and batch.num_nodes == plain.num_nodes
        assert batch.edge_index.dtype is plain.edge_index.dtype
        assert bool((batch.edge_index[1].diff() >= 0).all()) and edges(batch) == edges(plain)
        for key in ("x", "y", "n_id", "input_id", "num_sampled_nodes"):
            assert (key in batch) == (key in plain)
            if isinstance(plain.get(key), Tensor):
                assert torch.equal(batch[key].cpu(), plain[key].cpu()), key
        assert (attached(batch.x).batch is not None) == buckets


def loss_of_seeds(out: Tensor, target: Any) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["distributed", "cugraph int32", "graphbolt"])
def test_steps_are_recorded(name: str, device: str) -> None:
    """A step replays one recording for all mini-batches of an engine, and trains as a plain loop does."""
    torch.manual_seed(0)
    plain = GraphSAGE(6, 8, num_layers=2, out_channels=5).double().to(device)
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    step = gnncompile.TrainStep(ours, loss_of_seeds, optimizers[1], options={"inductor": device != "cpu"})
    with tapes() if device == "cpu" else nullcontext():
        loader = gnncompile.loader(made(name, device), device=device, buckets=1)
        for _ in range(2):
            for batch in loader:
                optimizers[0].zero_grad()
                # In int32, torch's own gradient of a gather is wrong on a CPU.
                out = plain(batch.x, batch.edge_index.long())
                expected = loss_of_seeds(out, (batch.y, int(batch.batch_size)))
                expected.backward()
                optimizers[0].step()
                found = step(batch.x, batch.edge_index, target=(batch.y, batch.batch_size))
                torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
    assert step.not_recorded is None
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


def test_worker_processes_of_a_channel() -> None:
    """Worker processes return nothing of use; the main process builds and prepares the mini-batch."""
    (first, *_) = gnncompile.loader(Distributed(), buckets=True)
    assert attached(first.edge_index).padded_layout is not None
    assert isinstance(prepare_all(MiniBatch(sampled()[0]), None), Prepared)


def test_numbers_of_seeds_that_are_tensors() -> None:
    plain = sampled()[0]
    seeds = int(plain.batch_size)
    plain.batch_size = torch.tensor(seeds)
    (batch,) = gnncompile.loader([plain], buckets=True)
    assert batch.batch_size == seeds and isinstance(batch.batch_size, int)
    assert attached(batch.edge_index).hop_prefixes


def test_rows_of_seeds() -> None:
    """Labels of seeds only are padded with the seeds; counts for each hop are not taken for rows of seeds."""
    plain = sampled(batch_size=3)[0]
    plain.y, plain.num_sampled_nodes = plain.y[:3], torch.tensor(plain.num_sampled_nodes)
    assert len(plain.num_sampled_nodes) == 3
    plain.importance = torch.ones(3)  # of three classes
    (batch,) = gnncompile.loader([plain], buckets=True)
    whole = attached(batch.y).padded
    assert len(whole) > 3 and torch.equal(whole[:3], plain.y) and len(batch.y) == 3
    assert attached(batch.num_sampled_nodes).rows is None and attached(batch.importance).rows is None


# -- what can't be prepared is told ---------------------------------------------------------------------------------


def sparse(key: str) -> Data:
    plain = sampled()[0]
    if key == "adj_t":
        return ToSparseTensor(remove_edge_index=True, layout=torch.sparse_csr)(plain)
    plain.edge_index = EdgeIndex(plain.edge_index, sparse_size=(plain.num_nodes, plain.num_nodes))
    return plain


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("key", ["adj_t", "edge_index"])
def test_edges_of_other_classes(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (batch,) = gnncompile.loader([sparse(key)], buckets=True)
    assert f"list yields edges as {key} (" in caplog.text and "mini-batches are not padded" in caplog.text
    assert attached(batch.x).batch is None and torch.equal(batch.x, sampled()[0].x)
    model = GraphSAGE(6, 8, num_layers=2, out_channels=5)
    plain = sparse(key)
    found = gnncompile.compile(model, options={"inductor": False})(batch.x.float(), batch[key])
    torch.testing.assert_close(found, model(plain.x.float(), plain[key]))


def test_items_without_a_mini_batch(caplog: pytest.LogCaptureFixture) -> None:
    items = [(torch.zeros(3), 7), (torch.ones(3), 8)]
    with caplog.at_level(logging.WARNING):
        found = list(gnncompile.loader(items, buckets=True))
    assert found == items and caplog.text.count("list yields tuple, expected Data or HeteroData") == 1


def test_a_device_that_mini_batches_are_not_on() -> None:
    on_device = Data(x=torch.zeros(3, 2), edge_index=torch.zeros(2, 1, dtype=torch.long)).to("meta")
    with pytest.raises(ArgumentError, match=r"device: found cpu for mini-batches that meta holds; pass device='meta'"):
        list(gnncompile.loader([on_device]))
    assert prepare_all(on_device, None) is on_device, "worker processes leave it to the main process"


# -- on the device --------------------------------------------------------------------------------------------------


def awkward() -> Iterator[Any]:
    for name, data in testing.awkward().items():
        yield pytest.param(data, id=name)
    yield pytest.param(sampled()[0], id="sampled")
    yield pytest.param(Batch.from_data_list([sampled()[0], sampled()[1]]), id="batched")
    typed = HeteroData()
    typed["a"].x, typed["b"].x = torch.randn(9, 2), torch.randn(7, 3)
    typed["a", "to", "b"].edge_index = torch.tensor([[8, 0, 3, 3], [6, 0, 2, 0]])
    yield pytest.param(typed, id="typed")
    wrong = Data(x=torch.zeros(3, 2), edge_index=torch.tensor([[0, -1], [2, 1]]))
    yield pytest.param(wrong, id="negative")


def parts(data: Any, buckets: bool, device: str) -> dict[str, Tensor]:
    made = prepare(data.to(device), Buckets(2) if buckets else None)
    assert made.memory.device.type == device
    return {name: place.on(made.memory, padded=True).cpu() for name, place in made.places.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("data", list(awkward()))
def test_torch_prepares_as_numpy(data: Any, buckets: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mini-batches on a GPU are sorted and laid out by torch, to the same bits. A CPU can do it by torch too."""
    expected = parts(copy.copy(data), buckets, "cpu")
    monkeypatch.setattr(edge_layouts, "_is_on_gpu", lambda index: True)
    found = parts(copy.copy(data), buckets, device)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.gpu
def test_mini_batches_in_two_places() -> None:
    """cuGraph holds the nodes of typed graphs on the CPU, and their edges on the GPU."""
    source = [data for data in CuGraph("cuda")]
    for data in source:
        data.n_id = data.n_id.cpu()
    for batch, plain in zip(gnncompile.loader(source, device="cuda", buckets=True), source, strict=True):
        assert batch.n_id.is_cuda and torch.equal(batch.n_id.cpu(), plain.n_id) and edges(batch) == edges(plain)
        assert attached(batch.x).batch is not None
    with pytest.raises(ArgumentError, match="device='cuda:0'"):
        list(gnncompile.loader(source))
