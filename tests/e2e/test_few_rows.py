"""Mini-batches in which a type has one row or none are padded and recorded as others are, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.batches.padding_rows import padding_rows
from gnncompile.capture.compile import callable_of
from gnncompile.layout.batch_metadata import attached

KINDS = TO, BACK, SELF = [("a", "to", "b"), ("b", "to", "a"), ("b", "to", "b")]


def typed(number: int, edges: int, seed: int = 0) -> HeteroData:
    """A graph with `number` nodes of type b, and at most `edges` edges of each type."""
    generator = torch.Generator().manual_seed(seed)
    sizes, data = {"a": 12 + seed, "b": number}, HeteroData()
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        data[name].index = torch.randint(3, (size,), generator=generator)
    for kind in KINDS:
        exist = edges if min(sizes[kind[0]], sizes[kind[2]]) else 0
        ends = [torch.randint(max(sizes[end], 1), (exist,), generator=generator) for end in kind[::2]]
        data[kind].edge_index = torch.stack(ends)
    data["a"].y = torch.randn(sizes["a"], 3, generator=generator, dtype=torch.float64)
    return data


class Typed(nn.Module):
    """A layer or two over three edge types, and what `reduce` makes of the rows of type b."""

    def __init__(self, reduce: Any = None, norm: bool = False, layers: int = 2) -> None:
        super().__init__()
        width = 8 if layers > 1 else 4
        self.first = HeteroConv({kind: SAGEConv((4, 4), 8) for kind in KINDS}) if layers > 1 else None
        self.second = HeteroConv({kind: SAGEConv((width, width), 3) for kind in KINDS})
        self.table, self.norm = nn.Embedding(3, 4), nn.BatchNorm1d(width) if norm else nn.Identity()
        self.reduce = reduce

    def forward(self, x: dict[str, Tensor], index: dict[str, Tensor], edge_index: dict[Any, Tensor]) -> Tensor:
        x = {name: value + self.table(index[name]) for name, value in x.items()}
        if self.first is not None:
            x = {name: value.tanh() for name, value in self.first(x, edge_index).items()}
        out = self.second({**x, "b": self.norm(x["b"])}, edge_index)
        return out["a"] + (0 if self.reduce is None else self.reduce(out["b"]))  # type: ignore[no-any-return]


def squared(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def trained(model: nn.Module, items: Sequence[HeteroData], device: str) -> Any:
    """Trains on mini-batches, and compares with a plain loop: losses, parameters and buffers. Returns the step."""
    model = model.double().to(device)
    reference, optimizer = copy.deepcopy(model), torch.optim.SGD
    step = gnncompile.TrainStep(model, squared, optimizer(model.parameters(), lr=1e-3), options={"inductor": False})
    plain = optimizer(reference.parameters(), lr=1e-3)
    loader = gnncompile.loader(items, device=device, buckets=1)
    for _ in range(-(-12 // len(items))):
        for batch, item in zip(loader, items, strict=True):
            other = copy.copy(item).to(device)
            found = step(batch.x_dict, batch.index_dict, batch.edge_index_dict, target=batch["a"].y)
            plain.zero_grad()
            out = reference(other.x_dict, other.index_dict, other.edge_index_dict)
            expected = squared(out, other["a"].y)
            expected.backward()
            plain.step()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-9)
    return step


def is_recorded(step: Any) -> bool:
    return step.not_recorded is None and any(plan.recordings.recorded for plan in step._plans)


FEW = [(5, 9), (0, 0), (1, 1), (2, 0), (1, 6), (9, 1)]


@pytest.mark.parametrize("items", [FEW, FEW[1:2], FEW[2:3]], ids=["all", "none", "one"])
def test_training_steps(items: list[tuple[int, int]], device: str, recording: None) -> None:
    step = trained(Typed(), [typed(*sizes, seed) for seed, sizes in enumerate(items)], device)
    assert is_recorded(step) and not step._program.backend.notes and len(step._program.backend.captured) == 1


@pytest.mark.parametrize("first", [1, 0, 5])
def test_batch_norm(first: int, device: str, recording: None) -> None:
    """One row is an error, as in PyTorch. It says so in this call, and later calls are padded as ever."""
    torch.manual_seed(0)
    model = Typed(norm=True, layers=1).double().to(device)
    loader = [typed(n, 3, n).to(device) for n in (first, 5, 0, 3)]
    compiled = gnncompile.compile(copy.deepcopy(model), mode="reduce-overhead", options={"inductor": False})
    for _ in range(2):
        for batch, other in zip(gnncompile.loader(loader, device=device, buckets=1), loader, strict=True):
            args = (batch.x_dict, batch.index_dict, batch.edge_index_dict)
            plain = (other.x_dict, other.index_dict, other.edge_index_dict)
            if other["b"].num_nodes == 1:
                for call, given in ((model, plain), (compiled, args)):
                    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
                        call(*given)
                continue
            torch.testing.assert_close(compiled(*args), model(*plain), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        dict(compiled.named_buffers()), dict(model.named_buffers()), rtol=1e-9, atol=1e-9, check_device=False
    )
    program = callable_of(compiled)
    assert program is not None and program.pads
    assert {note.reason for note in program.backend.notes} <= {"the model takes any number but 1 of 'nodes b'"}


def largest(out: Tensor) -> Tensor:
    return out.amax(0) if out.size(0) else out.new_zeros(3)


def branching(out: Tensor) -> Tensor:
    return out.sum(0) if out.size(0) > 1 else out.sum(0) * 2


def weighed(out: Tensor) -> Tensor:
    return (out.softmax(0) * out).sum(0)


REDUCED = {
    "sum": lambda out: out.sum(0),
    "largest": largest,
    "branching": branching,
    "softmax": weighed,
    "squeeze": lambda out: out.squeeze(0).sum(0).sum(-1, keepdim=True),
    "first rows": lambda out: out[:2].sum(0),
}


@pytest.mark.parametrize("order", [(5, 0, 1, 2, 3), (0, 1, 5, 2, 3)], ids=["many first", "none first"])
@pytest.mark.parametrize("name", REDUCED)
def test_models_that_see_the_difference(name: str, order: tuple[int, ...], device: str, recording: None) -> None:
    """Where a graph for several rows would do something else, the call runs unpadded; the others are recorded."""
    step = trained(Typed(REDUCED[name], layers=1), [typed(number, 4, number) for number in order], device)
    assert step._program.pads and is_recorded(step)
    reasons = [note.reason for note in step._program.backend.notes]
    assert all(reason.startswith("the model takes ") for reason in reasons) and (not reasons) == (name == "sum")


class Distances(nn.Module):
    """Moves nodes by learned numbers, and reads distances between moved nodes: the root of 0 has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        row, col = edge_index
        for layer in (self.first, self.last):
            between = pos[row] - pos[col]
            distance = between.square().sum(1, keepdim=True).sqrt()
            weight = layer(distance)
            pos = pos + scatter(weight * between, col, 0, pos.size(0))
        return scatter(pos, batch, 0, size)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_padded_nodes_are_apart(one_by_one: bool, device: str, recording: None) -> None:
    """Gradients of graphs of one node, which padded edges join with its copies, have no NaN."""
    model = Distances().double().to(device)
    items = [
        Data(pos=torch.zeros(n, 3, dtype=torch.float64), edge_index=torch.empty(2, 0, dtype=torch.long))
        for n in (1, 1, 2)
    ]
    items[-1].pos[0], items[-1].edge_index = 1.5, torch.tensor([[0, 1], [1, 0]])
    compiled = gnncompile.compile(copy.deepcopy(model), mode="reduce-overhead", options={"inductor": False})
    for _ in range(3):
        for batch in gnncompile.loader(DataLoader(items, batch_size=1 if one_by_one else 3), device=device, buckets=1):
            assert attached(batch.pos).batch is not None  # type: ignore[union-attr]
            results = []
            for call in (compiled, model):
                model.zero_grad(), compiled.zero_grad()
                out = call(batch.pos, batch.edge_index, batch.batch, batch.num_graphs)
                out.square().sum().backward()
                results.append([out, *(one.grad for one in call.parameters())])
            torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)
    program = callable_of(compiled)
    assert program is not None and program.pads and not program.backend.notes


class Angles(nn.Module):
    """Sums of angles over the edges of each node, times layers: an angle of more than 1 or less than -1 is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x: Tensor, pos: Tensor, cosine: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        between = torch.acos(0.99 * (pos[source] * pos[target]).sum(-1, keepdim=True)) + torch.acos(cosine)
        return scatter(self.lin(x)[source] * between, target, 0, x.size(0))


def directed(number: int, edges: int) -> Data:
    """Unit vectors on nodes, and cosines on edges."""
    generator = torch.Generator().manual_seed(number)
    pos = torch.tensor([1.0, 1.0, 1.0]) + 0.3 * torch.randn(number, 3, generator=generator)
    edge_index = torch.randint(number, (2, edges), generator=generator)
    cosine = torch.full((edges, 1), 0.95 if edges == 1 else -0.8)
    data = Data(x=torch.randn(number, 2, generator=generator), edge_index=edge_index, cosine=cosine)
    data.pos, data.y = nn.functional.normalize(pos, dim=1), torch.rand(number, 2, generator=generator)
    return data


def test_padded_rows_stay_in_the_range_of_the_values(device: str, recording: None) -> None:
    """Cosines, unit vectors and probabilities have gradients along padded edges that are no NaN."""
    model = Angles().to(device)
    items = [directed(*sizes) for sizes in ((4, 9), (7, 1), (6, 8), (1, 1))]
    loss = lambda out, target: nn.functional.binary_cross_entropy(out.sigmoid(), target)  # noqa: E731
    step = gnncompile.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), options={"inductor": False})
    for _ in range(4):
        for batch, item in zip(gnncompile.loader(items, device=device, buckets=1), items, strict=True):
            args = [item.to(device)[name] for name in ("x", "pos", "cosine", "edge_index")]
            expected = loss(model(*args), item.y).detach()
            found = step(batch.x, batch.pos, batch.cosine, batch.edge_index, target=batch.y)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert is_recorded(step)


@pytest.mark.parametrize("place", [[300.0, 200.0, 100.0], [5.5e6, 9e6, 5e6], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_padded_positions_are_apart(place: list[float], dtype: torch.dtype) -> None:
    value = torch.tensor([place], dtype=dtype)
    rows = torch.cat([value, *padding_rows(value, 7, True)])
    assert len(rows.unique(dim=0)) == 8


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padded_rows_of_the_device_and_of_the_host(rows: int, device: str) -> None:
    """Both write the same bits, whatever was in the memory; padded floats differ where they should."""
    from gnncompile.batches import device_kernels  # imports Triton, so not before TRITON_INTERPRET is set

    for dtype in DTYPES:
        for shape in ((rows,), (rows, 3), (rows, 2, 600)):
            for always in (False, True):
                value = (torch.randn(shape) * 4).to(dtype)
                expected = torch.cat([value, *padding_rows(value, 6, always)])
                repeated = value.repeat(7, *[1] * (len(shape) - 1))[: rows + 6] if rows else expected.clone().fill_(7)
                counts, found = torch.tensor([99, rows], device=device), repeated.to(device)
                device_kernels.spread_rows(found, counts, 1, always)
                # Triton's interpreter cuts bfloat16 off, where a GPU rounds.
                rtol = 2**-7 if dtype is torch.bfloat16 else 0
                torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=0)
                apart = dtype in (torch.float32, torch.float64) and (always or rows < 2)
                assert not apart or len(expected.view(rows + 6, -1).unique(dim=0)) == rows + 6
                assert dtype.is_floating_point or rows > 0 or not expected.any()


@pytest.mark.parametrize("sampler", ["device", "cpu"])
@pytest.mark.parametrize("features", ["device", "host"])
@pytest.mark.filterwarnings("ignore:.*without a 'pyg-lib' installation")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sampled(features: str, sampler: str, device: str, recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of which a sampler finds one row or none, and a type that the graph has no row of."""
    if device == "cpu":
        monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")
    data = typed(6, 0)
    data["c"].x = torch.empty(0, 4, dtype=torch.float64)
    for at, kind in enumerate(KINDS):
        data[kind].edge_index = torch.tensor([[at], [0]])
    how = {"features": features} if sampler == "device" else {}
    source = NeighborLoader(data, [2, 2], input_nodes=("a", torch.arange(6)), batch_size=1)
    model = Typed(layers=1).double().to(device)
    compiled = gnncompile.compile(copy.deepcopy(model), mode="reduce-overhead", options={"inductor": False})
    found = []
    for _ in range(2):
        for batch in gnncompile.loader(source, device=device, buckets=1, sampler=sampler, **how):
            x, index = ({name: batch[name][key] for name in ("a", "b")} for key in ("x", "index"))
            for name in ("a", "b"):
                assert torch.equal(batch[name].x.cpu(), data[name].x[batch[name].n_id.cpu()])
                whole = attached(batch[name].x).padded  # type: ignore[union-attr]
                assert len(whole) >= 8 and bool(whole.isfinite().all())
                assert bool((whole[1:] - whole[:-1]).abs().amax(1).gt(0).all()) or batch[name].num_nodes > 1
                assert int(attached(batch[name].index).padded.max()) < 3  # type: ignore[union-attr]
            plain = [{key: value.clone() for key, value in one.items()} for one in (x, index, batch.edge_index_dict)]
            torch.testing.assert_close(compiled(x, index, batch.edge_index_dict), model(*plain), rtol=1e-9, atol=1e-9)
            found.append((batch["b"].num_nodes, sum(batch[kind].num_edges for kind in KINDS)))
    assert {0, 1} <= {nodes for nodes, _ in found} and min(found)[1] == 0
    program = callable_of(compiled)
    assert program is not None and program.pads and not program.backend.notes
