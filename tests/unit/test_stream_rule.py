"""Tensors that cross streams are recorded and waited for, on streams that a CPU only plays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader

import gnncompile
from gnncompile.batches import loader as loading
from gnncompile.batches.device_loader import DeviceLoader
from gnncompile.batches.memories import tensors_in
from tests import fake_streams
from tests.fake_streams import Stream, Streams

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, for padded lanes in Triton's interpreter
]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensors_of_an_item() -> None:
    edges = torch.tensor([[0, 1, 2], [0, 0, 1]])
    sparse = torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc(), torch.eye(3).to_sparse_coo().coalesce()
    typed = HeteroData(level=torch.ones(1))
    typed["a"].x, typed["a", "to", "a"].edge_index = torch.ones(2, 1), edges
    index = EdgeIndex(edges.clone(), sparse_size=(3, 3), sort_order="col")
    index.get_csc()
    data = Data(x=torch.ones(3), adj_t=sparse[0], more={"one": [torch.ones(1), "text"]}, edge_index=index)
    found = {memory(tensor) for tensor in tensors_in((data, sparse, typed, 3, None))}
    parts: list[Tensor] = [data.x, data.more["one"][0], typed.level, typed["a"].x, edges, index.as_tensor()]
    parts += [part for one in sparse[:2] for part in (one.values(),)]
    parts += [sparse[0].crow_indices(), sparse[0].col_indices(), sparse[1].ccol_indices(), sparse[1].row_indices()]
    parts += [sparse[2].indices(), sparse[2].values(), index.get_csc()[0][0]]
    assert {memory(part) for part in parts} <= found


def test_tensors_of_a_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    found = {memory(tensor) for tensor in tensors_in(Data(x=nested))}
    assert found == {memory(nested.values()), memory(nested.offsets())}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return fake_streams.install(monkeypatch)


def test_what_a_loader_copies_ahead(fake: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse edges and tensors beside a mini-batch are used on the reader's stream, as the mini-batch's memory is."""
    monkeypatch.setattr(loading, "_with_index", lambda device: device)

    def engine() -> Iterator[Any]:
        for _ in range(3):
            adjacency = torch.eye(4).to_sparse_csr()
            yield Data(x=torch.randn(4, 2), adj_t=adjacency), {"weight": torch.ones(3)}

    reader = Stream("reader")
    with fake.on(reader):
        found = []
        for item in gnncompile.loader(engine(), device="cpu"):
            every = list(tensors_in(item))
            assert len(every) == 5 and all(reader in fake.readers[one.untyped_storage()._cdata] for one in every)
            found.append(item)
    assert len(found) == 3


def graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(60, 3, generator=generator),
        edge_index=torch.randint(60, (2, 200), generator=generator),
        edge_attr=torch.randn(200, 2, generator=generator),
        y=torch.randint(3, (60,), generator=generator),
        weight=torch.ones(3),
    )


def typed() -> HeteroData:
    data, plain = HeteroData(), graph()
    data["a"].x, data["b"].x = plain.x[:30], plain.x[:20]
    data["a", "to", "b"].edge_index = torch.stack([plain.edge_index[0] % 30, plain.edge_index[1] % 20])
    data["b", "to", "a"].edge_index = torch.stack([plain.edge_index[1] % 20, plain.edge_index[0] % 30])
    return data


SOURCES = {
    "nodes": lambda: NeighborLoader(graph(), [3, 2], batch_size=20),
    "on demand": lambda: NeighborLoader(graph(), [-1], batch_size=20),
    "links": lambda: LinkNeighborLoader(graph(), [3], batch_size=70, neg_sampling="binary"),
    "types": lambda: NeighborLoader(typed(), [3, 2], input_nodes="a", batch_size=10),
}


@pytest.mark.parametrize("buckets", [0, 1])
@pytest.mark.parametrize("name", SOURCES)
def test_a_loader_that_samples_on_the_device(
    name: str, buckets: int, fake: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs and iterators on several streams: no memory is read where the allocator does not know of it."""
    monkeypatch.setattr("gnncompile.batches.device_loader._check_room", lambda *_: None)
    source, second, third = SOURCES[name](), Stream("second"), Stream("third")
    learned = loading.Buckets(1) if buckets else None
    with fake:
        loader = DeviceLoader(source, torch.device("cpu"), learned)
        for held in (*loader._graph.tensors(), *loader._columns.held()):
            fake.own(held)  # a GPU has copies of the source's tensors
        if not loader._seeds.are_nodes:
            order = loader._seeds._sampler.perm = loader._seeds._sampler.perm.clone()
            fake.host.add(fake.own(order))
        for stream in (fake.now, second):
            with fake.on(stream):
                for batch in loader:
                    sums = [
                        value.sum() for store in batch.stores for value in store.values() if isinstance(value, Tensor)
                    ]
                    assert all(bool(one.isfinite()) for one in sums)
                    del batch, sums
        with fake.on(second):
            one = iter(loader)
            next(one)
        with fake.on(third):
            for batch in loader:
                assert batch.num_nodes
        with fake.on(second):
            one.close()
    assert not fake.problems, "\n".join(dict.fromkeys(fake.problems))
    sampled = [place for one in loader._idle for place in getattr(one, "_places", [])]
    assert all(fake.owners[place._given.untyped_storage()._cdata] is fake.side for place in sampled)
    assert fake.of_side <= fake.side.done | fake.seen_by_host, (
        "memory of the side stream may be used again while it is read"
    )
