"""``gnncompile.loader``: what models see of its mini-batches, and that padding to buckets changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader, DynamicBatchSampler
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphNorm,
    HeteroConv,
    LayerNorm,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

import gnncompile
from gnncompile.batches import prepare
from gnncompile.batches.buckets import Buckets
from gnncompile.batches.edge_layouts import order_of
from gnncompile.batches.row_types import row_types_of
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs import native
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.layout import csr
from gnncompile.layout.batch_metadata import attached


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features behind the true ones are large numbers of their own."""
    original = prepare._Preparation._padding

    def padding(self: Any, value: Tensor, attribute: Any) -> list[Tensor]:
        found = original(self, value, attribute)
        return [p + 1e3 * torch.randn_like(p) for p in found] if value.is_floating_point() else found

    monkeypatch.setattr(prepare._Preparation, "_padding", padding)


def graphs(number: int = 60, seed: int = 0, hub: bool = False) -> list[Data]:
    """Graphs of 1 to 8 nodes, some without an edge, unsorted, with self loops and edges that repeat."""
    made, g = [], torch.Generator().manual_seed(seed)
    for k in range(number):
        n = 1 + k % 8 if not hub or k % 4 else 150
        e = 0 if k % 5 == 2 else 3 * n
        edges = torch.randint(n, (2, e), generator=g)
        if hub and n == 150:
            edges[1, : e // 2] = 3
        made.append(
            Data(
                x=torch.randn(n, 6, generator=g, dtype=torch.float64),
                edge_index=edges,
                edge_attr=torch.randn(e, 2, generator=g, dtype=torch.float64),
                y=torch.randint(3, (1,), generator=g),
                target=torch.randn(1, 3, generator=g, dtype=torch.float64),
                labels=torch.randint(3, (n,), generator=g),
            )
        )
    return made


def loader(device: str = "cpu", size: int = 8, buckets: bool | int = True, **more: Any) -> gnncompile.Loader:
    return gnncompile.loader(DataLoader(graphs(**more), batch_size=size), device, buckets)  # type: ignore[arg-type]


class Net(nn.Module):
    """Two layers, a norm between them, a readout."""

    def __init__(self, conv: Callable[..., nn.Module], norm: Callable[[], nn.Module], pool: Any) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = conv(6, 8), norm(), conv(8, 4), nn.Linear(4, 3)
        self.pool = pool

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int | None = None) -> Tensor:
        x = self.first(x, edge_index)
        x = self.norm(x, batch, size) if isinstance(self.norm, (GraphNorm, LayerNorm)) else self.norm(x)
        x = x.tanh()  # no kink: in a graph of one node what GraphNorm makes is zero but for rounding
        return self.last(self.pool(self.second(x, edge_index), batch, size))


def gin(inputs: int, outputs: int) -> nn.Module:
    return GINConv(nn.Linear(inputs, outputs))


def gat(inputs: int, outputs: int) -> nn.Module:
    return GATConv(inputs, outputs // 2, heads=2)


NETS: dict[str, Callable[[], nn.Module]] = {
    "gin": lambda: Net(gin, lambda: nn.BatchNorm1d(8), global_add_pool),
    "sage": lambda: Net(SAGEConv, lambda: LayerNorm(8), global_max_pool),
    "gcn": lambda: Net(GCNConv, lambda: GraphNorm(8), global_mean_pool),
    "gat": lambda: Net(gat, lambda: nn.LayerNorm(8), global_mean_pool),
}


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def step(model: nn.Module, loss: Tensor) -> list[Any]:
    model.zero_grad()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach().clone(), gradients, [b.clone() for b in model.buffers()]]


def recorded(model: Any) -> list[CudaGraphPool]:
    program = callable_of(model)
    assert program is not None
    return [c.recordings for c in program.backend.captured if isinstance(c.recordings, CudaGraphPool)]


def refusals(model: Any) -> list[str]:
    program = callable_of(model)
    assert program is not None
    return [note.reason for note in program.backend.notes]


def compiled(model: nn.Module) -> Any:
    on_gpu = next(model.parameters()).is_cuda
    return gnncompile.compile(copy.deepcopy(model), mode="reduce-overhead", options={"inductor": on_gpu})


def test_mini_batches_are_those_of_the_loader_sorted() -> None:
    plain, ours = DataLoader(graphs(), batch_size=8), loader(buckets=False)
    for expected, found in zip(plain, ours, strict=True):
        order = expected.edge_index[1].argsort(stable=True)
        assert torch.equal(found.edge_index, expected.edge_index[:, order])
        assert torch.equal(found.edge_attr, expected.edge_attr[order])
        for key in ("x", "batch", "ptr", "y", "labels"):
            assert torch.equal(found[key], expected[key]), key
        assert isinstance(found, Batch) and found.num_graphs == expected.num_graphs
        assert all(torch.equal(a.x, b.x) for a, b in zip(found.to_data_list(), expected.to_data_list(), strict=True))
        assert not attached(found.x).batch  # type: ignore[union-attr]


@pytest.mark.parametrize("buckets", [False, True])
def test_layouts_are_those_that_would_be_built(buckets: bool) -> None:
    for data in loader(buckets=buckets, hub=True):
        known = attached(data.edge_index)
        assert known is not None
        for padded in (False, True) if buckets else (False,):
            ours = known.padded_layout if padded else known.layout
            n = known.batch.sizes[0] if padded and known.batch else data.num_nodes
            assert ours is not None and ours.by_row is not None
            for found, index, other in ((ours.by_col, ours.col, ours.row), (ours.by_row, ours.row, ours.col)):
                expected = csr.csr(index, other, n, n, None)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                given = csr.given_hubs(found[0])
                if given is not None:
                    assert given.number == csr.hubs(found[0].clone(), index.numel()).number  # type: ignore[union-attr]


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_nothing_is_sorted_or_asked_in_a_step(name: str, buckets: bool, device: str, recording: None) -> None:
    """Neither for self loops that a layer adds, nor for the graphs whose number a norm or a readout asks for."""
    mode = {"mode": "reduce-overhead"} if buckets else {}
    model = NETS[name]().double().to(device)
    compiled = gnncompile.compile(model, **mode, options={"inductor": False})  # type: ignore[call-overload]
    reference = copy.deepcopy(model)
    for batch in list(loader(device, buckets=buckets))[:3]:
        same(compiled(batch.x, batch.edge_index, batch.batch), reference(batch.x, batch.edge_index, batch.batch))
    program = callable_of(compiled)
    assert program is not None
    captured = program.backend.captured[-1]
    nodes = list(captured.structure.program.module.graph.nodes) if captured.structure is not None else []
    waiting = (
        torch.ops.gnncompile.csr.default,
        torch.ops.aten.item.default,
        torch.ops.aten._local_scalar_dense.default,
    )
    assert not any(node.target in waiting for node in nodes)
    looped = [node for node in nodes if node.target is torch.ops.gnncompile.csr_with_loops.default]
    assert len(looped) == (2 if name in ("gcn", "gat") else 0)


@pytest.mark.parametrize("buckets", [False, True])
def test_nothing_is_remembered_of_a_mini_batch_that_is_taken_as_it_comes(buckets: bool, device: str) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (GINConv(nn.Linear(6, 6)) for _ in range(2))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    model = Sums().double().to(device)
    compiled = gnncompile.compile(model)
    for batch in list(loader(device, buckets=buckets))[:3]:
        same(
            step(compiled, compiled(batch.x, batch.edge_index).square().mean()),
            step(model, model(batch.x, batch.edge_index).square().mean()),
        )
    program = callable_of(compiled)
    assert program is not None
    assert all(captured.structure is None for captured in program.backend.captured)


def test_many_edges_are_laid_out_by_destination_only(
    device: str, recording: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "MANY_EDGES", 30)
    eager = NETS["sage"]().double().to(device)
    model = compiled(eager)
    seen = set()
    for data in loader(device):
        known = attached(data.edge_index)
        assert known is not None and known.layout is not None
        seen.add(known.layout.by_row is None)
        args = (data.x, data.edge_index, data.batch, data.num_graphs)
        same(step(model, model(*args).square().mean()), step(eager, eager(*args).square().mean()))
    assert True in seen and refusals(model) == []


def test_padding_joins_padded_nodes_only() -> None:
    for data in loader():
        edges, batch = attached(data.edge_index), attached(data.batch)
        assert edges is not None and batch is not None and edges.batch is not None
        (n, e, g), (nodes, all_edges, all_graphs) = edges.batch.counts, edges.batch.sizes
        assert (n, e, g) == (data.num_nodes, data.num_edges, data.num_graphs)
        whole = edges.padded
        assert whole.shape == (2, all_edges) and torch.equal(whole[:, :e], data.edge_index)
        assert bool((whole[:, e:] >= n).all()) and bool((whole < nodes).all())
        assert bool((whole[1, 1:] >= whole[1, :-1]).all())
        assert (
            batch.padded.bincount(minlength=all_graphs).min() > 0 or int((data.batch.bincount(minlength=g)).min()) == 0
        )


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("garbage")
def test_padding_changes_nothing(device: str, recording: None, name: str) -> None:
    eager = NETS[name]().double().to(device)
    model = compiled(eager)
    source = loader(device, size=6)
    for epoch in range(2):
        for data in source:
            args = (data.x, data.edge_index, data.batch, data.num_graphs)
            same(step(model, F.cross_entropy(model(*args), data.y)), step(eager, F.cross_entropy(eager(*args), data.y)))
        assert epoch == 0 or source.buckets is not None
    assert refusals(model) == []
    (found,) = recorded(model)
    assert 0 < len(found.recorded) <= len(source.buckets.sizes())  # type: ignore[union-attr]
    model.eval(), eager.eval()
    with torch.no_grad():
        same(model(*args), eager(*args))


def test_sizes_that_the_model_asks_for(device: str, recording: None) -> None:
    eager = NETS["gin"]().double().to(device)
    model = compiled(eager)
    for data in loader(device):
        args = (data.x, data.edge_index, data.batch)
        same(step(model, model(*args).square().mean()), step(eager, eager(*args).square().mean()))
    assert refusals(model) == [] and any(r.recorded for r in recorded(model))


class Edges(nn.Module):
    """Edge features, several results, some of nodes and some of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = GINEConv(nn.Linear(6, 4), edge_dim=2), nn.Linear(10, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Tensor]:
        scores = self.lin(torch.cat([x[edge_index[0]], self.conv(x, edge_index, edge_attr)[edge_index[1]]], 1))
        return {"nodes": self.conv(x, edge_index, edge_attr), "edges": scores.view(-1), "mean": x.mean()}


OF_RESULTS: list[Callable[[dict[str, Tensor]], Tensor]] = [
    lambda out: out["nodes"].square().sum() + out["edges"].sigmoid().mean(),
    lambda out: out["edges"].square().sum(),
    lambda out: out["nodes"].sum() + out["mean"],
]


@pytest.mark.parametrize("host", ["native", "python"])
@pytest.mark.usefixtures("garbage")
def test_results_of_nodes_and_edges(device: str, recording: None, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them differentiated; what a replay returns is of the true size."""
    if host == "python":
        monkeypatch.setattr(native, "module", lambda: None)
    eager = Edges().double().to(device)
    model, replays = compiled(eager), set[str]()
    # Each size must come often enough to be recorded, wherever in memory its mini-batches happen to stand.
    for k, data in enumerate(loader(device, number=160)):
        results = []
        for m in (model, eager):
            out = m(data.x, data.edge_index, data.edge_attr)
            replays |= {out["nodes"].grad_fn.name()} if m is model else set()
            results += [[out, step(m, OF_RESULTS[k % 3](out))]]
        same(*results)
    assert refusals(model) == [] and any(r.recorded for r in recorded(model))
    assert ("GnncompileReplayBackward" if host == "native" else "_ReplayBackward") in replays


LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cross entropy": (F.cross_entropy, "y"),
    "weighted, smoothed": (
        lambda o, y: F.cross_entropy(
            o, y, torch.tensor([1.0, 2.0, 3.0], dtype=o.dtype, device=o.device), label_smoothing=0.1
        ),
        "y",
    ),
    "probabilities": (lambda o, y: F.cross_entropy(o, y.softmax(1)), "target"),
    "squares": (F.mse_loss, "target"),
    "sum of distances": (lambda o, y: F.l1_loss(o, y, reduction="sum"), "target"),
    "logits": (lambda o, y: F.binary_cross_entropy_with_logits(o, y.sigmoid()), "target"),
    "by hand": (lambda o, y: ((o - y) ** 2).sum(1).sqrt().mean() + o.std() + o.amax(), "target"),
    "with a size": (lambda o, y: (o - y).abs().sum() / o.size(0), "target"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("garbage")
def test_losses_of_training_steps(device: str, recording: None, name: str) -> None:
    loss, key = LOSSES[name]
    plain = NETS["gin"]().double().to(device)
    ours = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    train = gnncompile.TrainStep(
        ours, loss, torch.optim.SGD(ours.parameters(), lr=1e-3), options={"inductor": device != "cpu"}
    )
    for data in [*loader(device, number=96)]:
        args = (data.x, data.edge_index, data.batch, data.num_graphs)
        optimizer.zero_grad()
        expected = loss(plain(*args), data[key])
        expected.backward()
        optimizer.step()
        same(train(*args, target=data[key]), expected.detach())
        same(ours.state_dict(), plain.state_dict())
    assert train.not_recorded is None
    if name == "probabilities" and torch.__version__.startswith("2.11"):
        return  # there the cross entropy with probabilities takes the number of graphs for a fixed one
    assert train._program.backend.notes == []
    assert sum(len(plan.recordings.recorded) for plan in train._plans) > 0


def test_the_first_rows_only(device: str, recording: None) -> None:
    """As a neighbour loader's seeds; where there are fewer nodes, the true sizes are used."""
    plain = SAGEConv(6, 3).double().to(device)
    ours = copy.deepcopy(plain)
    train = gnncompile.TrainStep(
        ours,
        lambda out, target: F.cross_entropy(out[: target[1]], target[0][: target[1]]),
        torch.optim.SGD(ours.parameters(), lr=1e-3),
        options={"inductor": device != "cpu"},
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for k, data in enumerate(loader(device, number=96, size=8)):
        seeds = 20 if k < 10 else 1000
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(data.x, data.edge_index)[:seeds], data.labels[:seeds])
        expected.backward()
        optimizer.step()
        same(train(data.x, data.edge_index, target=(data.labels, seeds)), expected.detach())
        same(ours.state_dict(), plain.state_dict())
    assert 1 <= sum(len(plan.recordings.recorded) for plan in train._plans) <= 2


NUMBERS = torch.arange(5994.0, dtype=torch.float64).view(999, 6)

UNSAFE: dict[str, Callable[..., Any]] = {
    "an order": lambda x, e, b, n: x.sort(0).values,
    "rows of other nodes": lambda x, e, b, n: x.flip(0),
    "one row": lambda x, e, b, n: x - x[-1],
    "sums so far": lambda x, e, b, n: x.cumsum(0),
    "a size": lambda x, e, b, n: (x, x.size(0)),
    "a size as a number": lambda x, e, b, n: x * torch.full((1,), x.size(0), dtype=x.dtype, device=x.device),
    "its own index": lambda x, e, b, n: x[(e[0] * 7) % x.size(0)],
    "nodes sent elsewhere": lambda x, e, b, n: x.new_zeros(5, 6).index_add_(0, e[0] % 5, x[e[1]]),
    "two as one": lambda x, e, b, n: torch.cat([x, x]),
    "a product over nodes": lambda x, e, b, n: x.t() @ x.sort(0).values,
    "places": lambda x, e, b, n: x[x[:, 0] > 0],
    "windows": lambda x, e, b, n: x.unfold(0, 2, 1).sum(0),
    "rows by their places": lambda x, e, b, n: x.as_strided(x.shape, (1, 2)),
    "rows for columns": lambda x, e, b, n: x.reshape(6, -1).sum(1),
    "columns for rows": lambda x, e, b, n: x.t().reshape(x.size(0), 6),
    "a parity": lambda x, e, b, n: x * (2 if e.size(1) % 2 else 3),
    "two sizes": lambda x, e, b, n: x * (2 if e.size(1) > 2 * x.size(0) else 3),
    "a size everywhere": lambda x, e, b, n: x * torch.full_like(x, x.size(0)),
    "a size to fill with": lambda x, e, b, n: x.masked_fill(x > 0, x.size(0)),
    "as many from the end": lambda x, e, b, n: x + NUMBERS.to(x.device)[-x.size(0) :],
    "the one with that number": lambda x, e, b, n: x + torch.arange(999)[x.size(0)],
    "twice as many segments": lambda x, e, b, n: (
        global_add_pool(x, b, n).view(-1, 3).sum() + global_add_pool(x, b, 2 * n).square().sum(0)
    ),
}


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.lin = function, nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Any:
        return self.function(self.lin(x), edge_index, batch, size)


@pytest.mark.parametrize("name", UNSAFE)
def test_what_can_not_be_padded_has_its_true_size(device: str, recording: None, name: str) -> None:
    eager = Function(UNSAFE[name]).double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        args = (data.x, data.edge_index, data.batch, data.num_graphs)
        same(model(*args), eager(*args))
    assert len(refusals(model)) >= 1


SAFE: dict[str, Callable[..., Any]] = {
    "sum": lambda x, e, b, n: x.sum(0),
    "mean of all": lambda x, e, b, n: x - x.mean(),
    "mean of nodes": lambda x, e, b, n: x - x.mean(0, keepdim=True),
    "greatest": lambda x, e, b, n: x.amax(0) - x.amin(0),
    "deviation": lambda x, e, b, n: x / (x.std(0) + x.var(0, unbiased=False)),
    "a product over nodes": lambda x, e, b, n: x.t() @ x,
    "softmax of nodes": lambda x, e, b, n: x.softmax(0),
    "all features": lambda x, e, b, n: x.reshape(-1).mean() + x.view(-1, 3).sum(1).mean(),
    "a size": lambda x, e, b, n: x.sum(0) / x.size(0),
    "heads": lambda x, e, b, n: x.view(-1, 2, 3).transpose(1, 2).sum(-1),
    "numbers of all features": lambda x, e, b, n: x.reshape(-1).sum() / x.reshape(-1).size(0),
    "attention": lambda x, e, b, n: ((x @ x.t()).softmax(-1) * x.sum()) @ x,
    "logarithms": lambda x, e, b, n: (x.log_softmax(0) * x.sum()).sum(0),
    "graphs of edges": lambda x, e, b, n: global_mean_pool(x[e[0]], b[e[1]], n),
    "graphs of nodes and edges": lambda x, e, b, n: global_add_pool(
        torch.cat([x, x[e[0]]]), torch.cat([b, b[e[1]]]), n
    ),
    "parts": lambda x, e, b, n: torch.cat(x.chunk(2, 1)[::-1], 1),
}


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.usefixtures("garbage")
def test_what_can_be_masked_is(device: str, recording: None, name: str) -> None:
    eager = Function(SAFE[name]).double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        args = (data.x, data.edge_index, data.batch, data.num_graphs)
        found, expected = model(*args), eager(*args)
        same(found, expected)
        same(step(model, found.square().sum()), step(eager, expected.square().sum()))
    assert refusals(model) == []


def test_branches_by_size(device: str, recording: None) -> None:
    eager = Function(lambda x, e, b, n: x * (2 if x.size(0) > 85 else 3)).double().to(device)
    model, sizes = compiled(eager), []
    for data in 2 * [*loader(device, size=20)]:
        args = (data.x, data.edge_index, data.batch, data.num_graphs)
        same(model(*args), eager(*args))
        sizes.append((data.num_nodes > 85, attached(data.x).batch.sizes[0] > 85))  # type: ignore[union-attr]
    assert (False, True) in sizes and (True, True) in sizes


def test_numbers_of_which_the_loader_knows_nothing(device: str, recording: None) -> None:
    """Padded rows of ``y`` number true nodes: so does what is gathered with it."""
    eager = Function(lambda x, e, y, b: global_add_pool(x[y], b[y], y.size(0))).double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        args = (data.x, data.edge_index, data.y, data.batch)
        same(model(*args), eager(*args))
    assert refusals(model) == ["reduces by an index that the loader does not know"]


def test_a_size_and_a_number(device: str, recording: None) -> None:
    """The number is the size of the bucket, but not that of the mini-batch."""
    eager = Function(lambda x, e, b, n: x * (2 if x.size(0) == n else 3)).double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        args = (data.x, data.edge_index, data.batch, attached(data.x).batch.sizes[0])  # type: ignore[union-attr]
        same(model(*args), eager(*args))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "sources": lambda data: data.edge_index[0].copy_(data.edge_index[1]),
    "both ends": lambda data: data.edge_index.copy_(data.edge_index.flip(0)),
    "graphs": lambda data: data.batch[3:9].fill_(7),
    "features": lambda data: data.x.mul_(2),
    "memory": lambda data: setattr(data.x, "data", data.x * 2),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("buckets", [False, True])
def test_tensors_that_were_changed(device: str, recording: None, name: str, buckets: bool) -> None:
    eager = NETS["sage"]().double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20, buckets=buckets):
        CHANGES[name](data)
        args = (data.x, data.edge_index, data.batch, data.num_graphs)
        same(step(model, model(*args).square().sum()), step(eager, eager(*args).square().sum()))


def test_tensors_that_are_not_of_the_loader(device: str, recording: None) -> None:
    eager = NETS["sage"]().double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        args = (data.x * 2, data.edge_index, data.batch, data.num_graphs)
        same(model(*args), eager(*args))
    assert any("not of the loader's mini-batch" in reason for reason in refusals(model))


def test_numbers_that_may_be_sizes(device: str, recording: None) -> None:
    eager = NETS["sage"]().double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        args = (data.x, data.edge_index, data.batch, int(data.num_graphs))
        same(model(*args), eager(*args))
    assert any("as there are graphs" in reason for reason in refusals(model))


def test_objects_as_arguments(device: str, recording: None) -> None:
    class OfData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = NETS["gin"]()

        def forward(self, data: Data) -> Tensor:
            return self.net(data.x, data.edge_index, data.batch, data.num_graphs)

    eager = OfData().double().to(device)
    model = compiled(eager)
    for data in loader(device, size=20):
        same(step(model, model(data).square().sum()), step(eager, eager(data).square().sum()))


def hetero(seed: int) -> HeteroData:
    g, data = torch.Generator().manual_seed(seed), HeteroData()
    n, m = 3 + seed % 4, 2 + seed % 3
    data["a"].x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    data["b"].x = torch.randn(m, 6, generator=g, dtype=torch.float64)
    for source, target, number in (("a", "b", 2 * n), ("b", "a", 5), ("a", "a", seed % 3)):
        limits = torch.tensor([[data[source].num_nodes], [data[target].num_nodes]])
        data[source, "to", target].edge_index = (torch.rand(2, number, generator=g) * limits).long()
    return data


class Hetero(nn.Module):
    KINDS = ("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")

    def __init__(self) -> None:
        super().__init__()
        self.conv = HeteroConv({kind: SAGEConv((6, 6), 4) for kind in self.KINDS})

    def forward(self, x: dict[str, Tensor], edges: Any) -> dict[str, Tensor]:
        return self.conv(x, edges if isinstance(edges, dict) else dict(zip(self.KINDS, edges, strict=True)))


@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize("values_only", [False, True])
def test_typed_graphs(device: str, recording: None, values_only: bool) -> None:
    eager = Hetero().double().to(device)
    model = compiled(eager)
    source = gnncompile.loader(DataLoader([hetero(k) for k in range(40)], batch_size=5), device, True)  # type: ignore[arg-type]
    for data in source:
        results = []
        for m in (model, eager):
            edges = data.edge_index_dict
            out = m(data.x_dict, edges.values() if values_only else edges)
            results += [[out, step(m, sum(v.square().sum() for v in out.values()))]]
        same(*results)
    assert refusals(model) == [] and any(r.recorded for r in recorded(model))


def test_workers_and_batch_samplers() -> None:
    sampler = DynamicBatchSampler(graphs(), max_num=60, mode="node")  # type: ignore[arg-type]
    alone = gnncompile.loader(DataLoader(graphs(), batch_sampler=sampler), buckets=2)  # type: ignore[arg-type]
    many = gnncompile.loader(DataLoader(graphs(), batch_sampler=sampler, num_workers=2), buckets=2)  # type: ignore[arg-type]
    for found, expected in zip(many, alone, strict=True):
        assert torch.equal(found.x, expected.x) and torch.equal(found.edge_index, expected.edge_index)
    assert many.buckets is not None and 1 <= len(many.buckets.sizes()) <= 2


def test_who_pins() -> None:
    """The thread that copies to a GPU has pinned memory; where mini-batches stay on the CPU, the loader's own wish."""
    for pin in (False, True):
        source = DataLoader(graphs(), batch_size=8, pin_memory=pin)  # type: ignore[arg-type]
        assert gnncompile.loader(source, "cuda")._prepared.pin_memory is False  # type: ignore[attr-defined]
        assert gnncompile.loader(source)._prepared.pin_memory is pin  # type: ignore[attr-defined]
        assert source.pin_memory is pin


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("buckets", [False, True])
def test_pinned_mini_batches_on_the_cpu(workers: int, buckets: bool) -> None:
    source = DataLoader(graphs(), batch_size=8, pin_memory=True, num_workers=workers)  # type: ignore[arg-type]
    for found, expected in zip(gnncompile.loader(source, buckets=buckets), loader(buckets=buckets), strict=True):
        assert found.x.is_pinned() and found.edge_index.is_pinned()
        assert torch.equal(found.x, expected.x) and torch.equal(found.edge_index, expected.edge_index)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pin", [False, True])
def test_what_stands_beside_a_mini_batch_is_pinned(workers: int, pin: bool) -> None:
    def collate(items: list[Data]) -> Any:
        return Batch.from_data_list(items), torch.ones(3), {"names": "abc", "more": [torch.ones(2)]}  # type: ignore[arg-type]

    source = torch.utils.data.DataLoader(graphs(16), 8, collate_fn=collate, pin_memory=pin, num_workers=workers)  # type: ignore[arg-type]
    for batch, beside, more in gnncompile.loader(source, "cuda"):
        assert batch.x.is_cuda and beside.is_pinned() is pin and more["more"][0].is_pinned() is pin
        assert beside.tolist() == [1, 1, 1] and more["names"] == "abc"


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="source: found int, expected a loader"):
        gnncompile.loader(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buckets: found -1"):
        gnncompile.loader([], buckets=-1)


def test_a_loop_that_is_left_and_data_that_stays() -> None:
    source, before = graphs(), graphs()
    for data in gnncompile.loader(DataLoader(source, batch_size=8), buckets=True):  # type: ignore[arg-type]
        data.x.zero_()
        break
    assert all(
        torch.equal(a.x, b.x) and torch.equal(a.edge_index, b.edge_index) for a, b in zip(source, before, strict=True)
    )


def test_buckets_are_few_and_grow() -> None:
    buckets = Buckets(3)
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 400, (4,), generator=g).tolist()
        batch = Batch.from_data_list(
            [Data(num_nodes=n, edge_index=torch.zeros(2, 2 * n, dtype=torch.long)) for n in sizes]
        )
        kinds = row_types_of(batch)
        found = buckets.choose(kinds)
        assert found is not None
        room = [size - count for size, count in zip(found, kinds.counts, strict=True)]
        assert min(room) >= 0 and room[0] >= max(room[2], 1) and room[2] >= 1
    assert len(buckets.sizes()) <= 3


@pytest.mark.parametrize("most", [5, 70_000, 2**33])
def test_order(most: int) -> None:
    index = torch.randint(most, (1000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(order_of(index), index.argsort(stable=True))
    assert order_of(index[:0]).numel() == 0


def test_attributes_of_one_length() -> None:
    """As many nodes as graphs, or as edges: names and the slices of graphs tell; else nothing is padded."""
    loop = torch.zeros(2, 1, dtype=torch.long)
    batch = Batch.from_data_list([Data(x=torch.ones(1, 2), edge_index=loop, y=torch.ones(1)) for _ in range(4)])
    assert not row_types_of(batch).certain
    mixed = [
        Data(x=torch.ones(n, 2), edge_index=torch.zeros(2, 3 - n, dtype=torch.long), y=torch.ones(1)) for n in (1, 2)
    ]
    found = row_types_of(Batch.from_data_list(mixed))
    assert found.counts == (3, 3, 2) and found.certain
    assert found.rows[0] == {"x": 0, "edge_index": 1, "y": 2, "batch": 0}


def test_attributes_that_happen_to_be_as_many_as_edges() -> None:
    """Neither their length nor their name makes rows of edges of them: they are not sorted with these."""
    three = torch.tensor([[0, 1, 2], [2, 1, 0]])
    pairs = [
        Data(x=torch.ones(3, 2), edge_index=three, edge_ratio=torch.ones(1), words=torch.arange(1)),
        Data(x=torch.ones(2, 2), edge_index=three[:, :0], edge_ratio=torch.zeros(1), words=torch.arange(2)),
        Data(x=torch.ones(2, 2), edge_index=three[:, :0], edge_ratio=torch.zeros(1), words=torch.arange(0)),
    ]
    (found,) = gnncompile.loader([Batch.from_data_list(pairs)])  # type: ignore[arg-type]
    assert found.edge_index.tolist() == [[2, 1, 0], [0, 1, 2]]
    assert found.words.tolist() == [0, 0, 1] and found.edge_ratio.tolist() == [1, 0, 0]


def test_padded_edges_are_no_self_loops() -> None:
    """Where the model divides by a distance, they would be infinite, and gradients no numbers."""
    buckets, edges = Buckets(1), torch.zeros(2, 9, dtype=torch.long)
    first = prepare.prepare(Data(x=torch.ones(40, 1), edge_index=edges), buckets)
    assert first.sizes is not None
    made = prepare.prepare(Data(x=torch.ones(first.sizes[0] - 1, 1), edge_index=edges), buckets)
    found = attached(made.finish(made.memory).edge_index)
    assert found is not None
    row, col = found.padded[:, 9:]
    assert row.numel() and not bool((row == col).any())
