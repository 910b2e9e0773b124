"""AttachSizes and PadToBucket: mini-batches of no loader of ours, ready like those of one."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import BatchNorm, GATConv, GCNConv, HeteroConv, SAGEConv, global_mean_pool
from torch_geometric.transforms import Compose

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.layout.batch_metadata import attached
from gnncompile.transforms import AttachSizes, GCNNorm, PadToBucket

LIGHT = {"inductor": False}
SIZES = [
    [(5, 20), (3, 9)],
    [(6, 14), (2, 11)],
    [(4, 25), (4, 0)],
    [(7, 12), (1, 8)],
    [(3, 16), (5, 5)],
    [(6, 17), (2, 4)],
]
ODD = {"no edge": [(4, 0), (3, 0)], "one node": [(1, 3)], "one node without edges": [(1, 0)], "a hub": [(300, 9000)]}


class Net(nn.Module):
    """The size of the readout is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = GCNConv(4, 8), BatchNorm(8), GATConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return global_mean_pool(self.second(self.norm(self.first(x, edge_index)).tanh(), edge_index), batch)


def batch_of(sizes: list[tuple[int, int]], seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    graphs = [
        Data(
            x=torch.randn(n, 4, generator=g, dtype=torch.float64),
            edge_index=torch.randint(n, (2, e), generator=g),
            edge_attr=torch.randn(e, 2, generator=g, dtype=torch.float64),
            y=torch.randn(1, 3, generator=g, dtype=torch.float64),
        )
        for n, e in sizes
    ]
    if max(n for n, _ in sizes) >= 300:
        graphs[0].edge_index[1, :5000] = 7
    return Batch.from_data_list(graphs)


def arguments(data: Any) -> tuple[Tensor, Tensor, Tensor]:
    return data.x, data.edge_index, data.batch


def trained(model: Any, data: Any) -> list[Tensor]:
    model.zero_grad()
    out = model(*arguments(data))
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("make", [AttachSizes, PadToBucket])
@pytest.mark.parametrize("odd", ODD)
def test_results_and_gradients(odd: str, make: Any) -> None:
    torch.manual_seed(0)
    model = Net().double().eval()
    compiled = gnncompile.compile(copy.deepcopy(model), options=LIGHT)
    data = batch_of(ODD[odd])
    before = copy.deepcopy(data)
    torch.testing.assert_close(trained(compiled, make()(data)), trained(model, before), rtol=1e-9, atol=1e-9)
    for key in before.keys():  # noqa: SIM118 (Data iterates over pairs)
        assert torch.equal(data[key], before[key]) and attached(data[key]) is None


def test_sizes_and_layouts_are_those_of_the_graph() -> None:
    data = batch_of(SIZES[0])
    out = AttachSizes()(data)
    order = data.edge_index[1].argsort(stable=True)
    assert torch.equal(out.edge_index, data.edge_index[:, order]) and torch.equal(out.edge_attr, data.edge_attr[order])
    known = attached(out.edge_index)
    assert known is not None and known.values is not None and known.layout is not None
    assert known.layout.by_row is not None
    assert all(torch.equal(a.x, b.x) for a, b in zip(out.to_data_list(), data.to_data_list(), strict=True))


def test_nothing_is_asked_of_the_data() -> None:
    """A readout without a size otherwise looks at the data, once for each mini-batch."""
    looks = {}
    for name, transform in (("plain", lambda data: data), ("ready", AttachSizes())):
        compiled = gnncompile.compile(Net().double(), options=LIGHT)
        for k, sizes in enumerate(SIZES):
            compiled(*arguments(transform(batch_of(sizes, k))))
        looks[name] = callable_of(compiled).derived.looks  # type: ignore[union-attr]
    assert looks["plain"] >= len(SIZES) and looks["ready"] == 0


def test_one_recording_for_a_bucket() -> None:
    from tests.tape import tapes

    torch.manual_seed(0)
    model, pad = Net().double(), PadToBucket(buckets=1)
    with tapes():
        compiled = gnncompile.compile(copy.deepcopy(model), mode="reduce-overhead", options=LIGHT)
        for k in range(18):
            data = batch_of(SIZES[k % len(SIZES)], k)
            torch.testing.assert_close(trained(compiled, pad(data)), trained(model, data), rtol=1e-8, atol=1e-8)
    program = callable_of(compiled)
    assert program is not None and not program.backend.notes
    found = [c.recordings for c in program.backend.captured if isinstance(c.recordings, CudaGraphPool)]
    assert [len(one.recorded) for one in found] == [1] and len(pad.sizes) == 1


def test_whole_steps() -> None:
    from tests.tape import tapes

    torch.manual_seed(0)
    model, pad = Net().double(), PadToBucket()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    with tapes():
        step = gnncompile.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.01), options=LIGHT)
        for k in range(12):
            data = batch_of(SIZES[k % 2], k)
            optimizer.zero_grad()
            expected = F.mse_loss(plain(*arguments(data)), data.y)
            torch.autograd.backward(expected)
            optimizer.step()
            ready = pad(data)
            found = step(*arguments(ready), target=ready.y)
            torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("make", [AttachSizes, PadToBucket])
def test_heterogeneous_graphs(make: Any) -> None:
    torch.manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(5, 4), torch.randn(3, 4)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2, 0], [4, 0, 4, 2]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1, 1], [3, 2, 2]])
    model = HeteroConv({kind: SAGEConv((4, 4), 3) for kind in data.edge_types})
    compiled = gnncompile.compile(model, options=LIGHT)
    out = make()(data)
    found, expected = compiled(out.x_dict, out.edge_index_dict), model(data.x_dict, data.edge_index_dict)
    torch.testing.assert_close(found["paper"], expected["paper"])
    assert attached(out["author", "writes", "paper"].edge_index) is not None


def test_graphs_without_edges_or_tensors() -> None:
    for make in (AttachSizes, PadToBucket):
        assert make()(Data(num_nodes=3)).num_nodes == 3
        assert torch.equal(make()(Data(x=torch.ones(2, 2))).x, torch.ones(2, 2))


def test_after_other_transforms() -> None:
    data = Data(x=torch.randn(6, 4), edge_index=torch.randint(6, (2, 20)))
    made = Compose([GCNNorm(), AttachSizes()])(data)
    conv = GCNConv(4, 3, normalize=False)
    expected = GCNConv(4, 3)
    expected.load_state_dict(conv.state_dict())
    found = gnncompile.compile(conv, options=LIGHT)(made.x, made.edge_index, made.edge_weight)
    torch.testing.assert_close(found, expected(data.x, data.edge_index))


def test_names_and_descriptions() -> None:
    assert repr(AttachSizes()) == "AttachSizes()" and repr(AttachSizes("cpu")) == "AttachSizes(device='cpu')"
    assert repr(PadToBucket()) == "PadToBucket(buckets=4)"
    with pytest.raises(ValueError, match="buckets: found 0, expected at least 1"):
        PadToBucket(buckets=0)


@pytest.mark.parametrize("kind", [AttachSizes, PadToBucket])
def test_documented_examples(kind: Any) -> None:
    names = {"Data": Data, "torch": torch, kind.__name__: kind}
    (example,) = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__, globs=names)
    found = doctest.DocTestRunner().run(example)
    assert found.attempted and not found.failed


@pytest.mark.gpu
@pytest.mark.parametrize("make", [AttachSizes, PadToBucket])
def test_to_a_device_and_from_one(make: Any) -> None:
    data = batch_of(SIZES[0])
    for start in ("cpu", "cuda"):
        out = make("cuda")(copy.copy(data).to(start))
        assert out.x.is_cuda and attached(out.x) is not None
    assert make()(copy.copy(data).cuda()).x.is_cuda
