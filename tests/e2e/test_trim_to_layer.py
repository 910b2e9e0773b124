"""Sampled mini-batches: layers work out the rows that something reads, and the numbers are those of all rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv, GINEConv, GraphConv, ResGatedGraphConv, SAGEConv, TransformerConv

import gnncompile
from gnncompile.batches.hops import MOST, HopPrefix, hop_prefixes
from gnncompile.batches.prepare import prepare
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.layout.batch_metadata import attached

NODES = 400


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU regions are run by the reference, but for one model: it's their sizes that matter here."""
    if "cuda" not in request.node.name and "cpu-sage]" not in request.node.name:
        monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")


def graph(seed: int = 0) -> Data:
    """Unsorted, with a hub, self loops, edges that repeat and nodes without any."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.randint(NODES - 20, (2, 1600), generator=g)
    edges[0, :200] = 7
    edges[:, 200:210] = edges[:1, 200:210]
    edges[:, 210:220] = edges[:, 220:230]
    return Data(
        x=torch.randn(NODES, 6, generator=g, dtype=torch.float64),
        edge_index=edges,
        edge_attr=torch.randn(1600, 3, generator=g, dtype=torch.float64),
        y=torch.randint(3, (NODES,), generator=g),
    )


def sampled(data: Data, seeds: Tensor, hops: int, fan_out: int, generator: torch.Generator) -> Data:
    """What ``NeighborLoader`` makes: seeds first, then what each hop finds; edges of a hop in any order."""
    nodes, frontier, chosen = seeds, seeds, []
    for _ in range(hops):
        into = torch.isin(data.edge_index[1], frontier).nonzero().flatten()
        into = into[torch.randperm(into.numel(), generator=generator)][: fan_out * frontier.numel()]
        chosen.append(into)
        new = data.edge_index[0, into].unique()
        frontier = new[~torch.isin(new, nodes)]
        nodes = torch.cat([nodes, frontier])
    edges, local = torch.cat(chosen), torch.full((NODES,), -1)
    local[nodes] = torch.arange(nodes.numel())
    made = Data(
        x=data.x[nodes], edge_index=local[data.edge_index[:, edges]], edge_attr=data.edge_attr[edges], y=data.y[nodes]
    )
    made.batch_size = seeds.numel()
    return made


def batches(sizes: tuple[int, ...] = (12, 12, 9, 12, 14, 12, 3, 12), hops: int = 3) -> list[Data]:
    data, g = graph(), torch.Generator().manual_seed(1)
    return [sampled(data, torch.randperm(NODES, generator=g)[:size], hops, 2, g) for size in sizes]


class Layers(nn.Module):
    """Layers with what users put between them."""

    def __init__(self, make: Callable[[int, int], nn.Module], number: int = 3, norm: nn.Module | None = None) -> None:
        super().__init__()
        widths = [6, *[8] * (number - 1)]
        self.layers = nn.ModuleList([make(width, 8) for width in widths])
        self.skip, self.last, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), norm

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            given = (edge_attr,) if takes_attributes(layer) else ()
            h = layer(h, edge_index, *given)
            h = h.tanh() if self.norm is None else self.norm(h).tanh()
        h = h + self.skip(x).view(-1, 2, 4).softmax(-1).flatten(1)
        return self.last(torch.cat([h[:, :4], h[:, 4:].sigmoid()], 1))


class RowByRow(nn.Module):
    """Reductions of rows, one of which makes two tensors."""

    def forward(self, h: Tensor) -> Tensor:
        greatest, place = h.view(-1, 4, 2).max(-1)
        h = F.normalize(h + h.prod(1, keepdim=True), dim=1) / (1 + h.std(1, keepdim=True) + h.var(1, keepdim=True))
        return h * (h > 0).any(1, keepdim=True) + torch.cat([greatest, place + h.argmin(1, keepdim=True)], 1)


def takes_attributes(layer: nn.Module) -> bool:
    return isinstance(layer, (GINEConv, GATv2Conv, ResGatedGraphConv, TransformerConv))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: Layers(SAGEConv),
    "sage max": lambda: Layers(lambda i, o: SAGEConv(i, o, aggr="max")),
    "graph": lambda: Layers(GraphConv, 2),
    "gine": lambda: Layers(lambda i, o: GINEConv(nn.Linear(i, o), edge_dim=3)),
    "gatv2": lambda: Layers(lambda i, o: GATv2Conv(i, o // 2, heads=2, edge_dim=3, add_self_loops=False)),
    "transformer": lambda: Layers(lambda i, o: TransformerConv(i, o // 2, heads=2, edge_dim=3, beta=True)),
    "gated": lambda: Layers(lambda i, o: ResGatedGraphConv(i, o, edge_dim=3)),
    "layer norm": lambda: Layers(SAGEConv, norm=nn.LayerNorm(8)),
    "batch norm": lambda: Layers(SAGEConv, norm=nn.BatchNorm1d(8)),
    "row by row": lambda: Layers(SAGEConv, norm=RowByRow()),
    "more layers than hops": lambda: Layers(SAGEConv, 5),
}


def loss_of_seeds(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def train(model: nn.Module, data: list[Data], seeds: Callable[[Data], int]) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in data:
        optimizer.zero_grad()
        loss = loss_of_seeds(model(one.x, one.edge_index, one.edge_attr), (one.y, seeds(one)))
        loss.backward()
        optimizer.step()
        yield loss.detach()


def rows_of(step: gnncompile.TrainStep) -> list[str]:
    """How many rows the regions of the only captured graph have, as symbols."""
    (captured,) = step._program.backend.captured
    return [record.shape.strip("()").split(",")[0] for record in captured.log.regions]


def trained_alike(make: Callable[[], nn.Module], device: str) -> gnncompile.TrainStep:
    """Steps of a model on padded mini-batches, which are those of its copy in a plain loop."""
    torch.manual_seed(0)
    model = make().double().to(device)
    reference, data = copy.deepcopy(model), [one.to(device) for one in batches()]
    step = gnncompile.TrainStep(
        model, loss_of_seeds, torch.optim.SGD(model.parameters(), lr=0.1), options={"inductor": False}
    )
    expected = train(reference, data, lambda one: one.batch_size)
    for one in gnncompile.loader(batches(), device, buckets=2):
        loss = step(one.x, one.edge_index, one.edge_attr, target=(one.y, one.batch_size))
        same(loss, next(expected))
    same(list(model.state_dict().values()), list(reference.state_dict().values()))
    return step


@pytest.mark.parametrize("name", MODELS)
def test_training_steps(device: str, recording: None, name: str) -> None:
    step = trained_alike(MODELS[name], device)
    assert step.not_recorded is None and not step._program.backend.notes
    layers = len(step.model.layers)  # type: ignore[arg-type]
    # There are three hop prefixes of edges; a layer below these needs everything.
    most = 1 if name == "batch norm" else min(layers, 4)
    assert len(set(rows_of(step)[-layers:])) == most, "each layer has rows of its own"


def test_a_plain_number_of_seeds(device: str, recording: None) -> None:
    """It is another symbol than the loader's, so it is compared with that of the seeds before each call."""
    torch.manual_seed(0)
    model = MODELS["sage"]().double().to(device)
    reference, data = copy.deepcopy(model), [one.to(device) for one in batches()]
    numbers = [12, 12, 9, 5, 14, 12, 3, 13]  # the last has 12: more rows are wanted than the hop prefix has
    step = gnncompile.TrainStep(
        model, loss_of_seeds, torch.optim.SGD(model.parameters(), lr=0.1), options={"inductor": False}
    )
    given, wanted = iter(numbers), iter(numbers)
    expected = train(reference, data, lambda one: next(given))
    for one in gnncompile.loader(batches(), device, buckets=2):
        same(step(one.x, one.edge_index, one.edge_attr, target=(one.y, next(wanted))), next(expected))
    same(list(model.state_dict().values()), list(reference.state_dict().values()))


class Seeds(nn.Module):
    """A model that returns what it found of the seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MODELS["gine"]()

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, seeds: int) -> Tensor:
        return self.layers(x, edge_index, edge_attr)[:seeds]  # type: ignore[no-any-return]


def test_results_of_seeds(device: str, recording: None) -> None:
    torch.manual_seed(0)
    model = Seeds().double().to(device)
    compiled = gnncompile.compile(model, mode="reduce-overhead", options={"inductor": False})
    for one, plain in zip(gnncompile.loader(batches(), device, buckets=2), batches(), strict=True):
        plain = plain.to(device)
        x, other = one.x.clone(), plain.x.clone().requires_grad_()
        found = compiled(one.x, one.edge_index, one.edge_attr, one.batch_size)
        expected = model(other, plain.edge_index, plain.edge_attr, plain.batch_size)
        assert found.shape == expected.shape
        same(found, expected)
        gradients = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (found, expected)]
        same(*gradients)
        same(x, one.x)
    program = callable_of(compiled)
    assert program is not None and not program.backend.notes
    (captured,) = program.backend.captured
    assert len({record.shape.strip("()").split(",")[0] for record in captured.log.regions}) >= 3


@pytest.mark.parametrize("name", ["gine", "gatv2", "batch norm"])
def test_a_loop_that_reads_only_seeds(device: str, recording: None, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().to(device)
    reference, data = copy.deepcopy(model), [one.to(device) for one in batches()]
    options = {"inductor": False, "only_seeds": True}
    compiled = gnncompile.compile(model, mode="reduce-overhead", options=options)
    loader = list(gnncompile.loader(batches(), device, buckets=2))
    expected = train(reference, data, lambda one: one.batch_size)
    for loss in train(compiled, loader, lambda one: one.batch_size):
        same(loss, next(expected))
    same(list(model.state_dict().values()), list(reference.state_dict().values()))
    program = callable_of(compiled)
    assert program is not None and not program.backend.notes
    (captured,) = program.backend.captured
    assert isinstance(captured.recordings, CudaGraphPool) and captured.recordings.recorded
    rows = {record.shape.strip("()").split(",")[0] for record in captured.log.regions}
    assert len(rows) == (1 if name == "batch norm" else 3)
    one = loader[0]
    assert compiled(one.x, one.edge_index, one.edge_attr).size(0) == one.batch_size
    # All rows, where nothing is known of seeds.
    assert compiled(data[0].x, data[0].edge_index, data[0].edge_attr).size(0) == data[0].num_nodes


class Several(nn.Module):
    """Results of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(6, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> dict[str, Any]:
        h = self.conv(x, edge_index)
        edges = h[edge_index[0]] * 2
        return {"nodes": h, "classes": h.argmax(1), "edges": edges, "mean": h.mean(0), "none": None}


def test_only_rows_of_nodes_are_cut(device: str, recording: None) -> None:
    model = Several().double().to(device)
    options = {"inductor": False, "only_seeds": True}
    compiled = gnncompile.compile(model, mode="reduce-overhead", options=options)
    for one in gnncompile.loader(batches(), device, buckets=2):
        found, expected = compiled(one.x, one.edge_index), model(one.x, one.edge_index)
        for key in ("nodes", "classes"):
            same(found[key], expected[key][: one.batch_size])
        same([found[key] for key in ("edges", "mean", "none")], [expected[key] for key in ("edges", "mean", "none")])
        found["mean"].sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("plain", [False, True], ids=["number of the loader's", "plain number"])
def test_model_and_loss_take_the_seeds(device: str, recording: None, plain: bool) -> None:
    """The second time there are no other rows."""
    torch.manual_seed(0)
    model = Seeds().double().to(device)
    reference, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = gnncompile.TrainStep(model, loss_of_seeds, optimizer, options={"inductor": False})
    for one, true in zip(gnncompile.loader(batches(), device, buckets=2), batches(), strict=True):
        seeds = true.batch_size if plain else one.batch_size
        loss = step(one.x, one.edge_index, one.edge_attr, seeds, target=(one.y, one.batch_size))
        other.zero_grad()
        true = true.to(device)
        out = reference(true.x, true.edge_index, true.edge_attr, true.batch_size)
        expected = loss_of_seeds(out, (true.y, true.batch_size))
        expected.backward()
        other.step()
        same(loss, expected.detach())
    same(list(model.state_dict().values()), list(reference.state_dict().values()))
    if not plain:
        assert not step._program.backend.notes and len(set(rows_of(step))) == 3


class Shared(nn.Module):
    """What the seeds and all nodes need is worked out for all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = SAGEConv(6, 8), SAGEConv(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h = self.first(x, edge_index).tanh()
        return self.last(self.second(h, edge_index) + h.mean(0))  # type: ignore[no-any-return]


def test_what_is_read_as_a_whole(device: str, recording: None) -> None:
    step = trained_alike(Shared, device)
    first, second = rows_of(step)
    assert first != second and step.not_recorded is None


class Halves(nn.Module):
    """Of two tensors that are made together, more rows are read of one than of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = SAGEConv(6, 16), SAGEConv(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        one, other = self.first(x, edge_index).tanh().chunk(2, 1)
        return self.last(self.second(one, edge_index) + other)  # type: ignore[no-any-return]


def test_other_rows_of_tensors_that_are_made_together(device: str, recording: None) -> None:
    step = trained_alike(Halves, device)
    assert len(set(rows_of(step))) == 2 and step.not_recorded is None and not step._program.backend.notes


def closure(edges: Tensor, seeds: int, num_nodes: int) -> tuple[HopPrefix, ...]:
    found, reached = [], set(range(seeds))
    while len(reached) < num_nodes and len(found) < MOST:
        into = [k for k, end in enumerate(edges[1].tolist()) if end in reached]
        more = {*reached, *range(max((int(edges[0, k]) for k in into), default=-1) + 1)}
        if more == reached:
            break
        found.append(HopPrefix(len(reached), len(into), len(more)))
        reached = more
    return tuple(found)


@pytest.mark.parametrize("seed", range(8))
def test_fronts_are_closures(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    nodes, number = int(torch.randint(1, 30, (1,), generator=g)), int(torch.randint(0, 40, (1,), generator=g))
    edges = torch.randint(nodes, (2, number), generator=g)
    edges = edges[:, edges[1].argsort(stable=True)]
    edges[0] = torch.minimum(edges[0], edges[1] + 2)  # few edges reach far
    for seeds in (1, nodes // 2, nodes):
        if seeds:
            assert hop_prefixes(edges, seeds, nodes) == closure(edges, seeds, nodes)


def test_padded_edges_of_a_front_join_what_nobody_reads() -> None:
    one = next(iter(gnncompile.loader(batches((12,)), buckets=True)))
    what = attached(one.edge_index)
    assert what is not None and what.batch is not None and len(what.hop_prefixes) >= 2
    row, col = one.edge_index
    for front in what.hop_prefixes:
        nodes, edges, sources = (what.batch.counts[kind] for kind in front.kinds)
        sizes = tuple(what.batch.sizes[kind] for kind in front.kinds)
        assert front.row.numel() == front.col.numel() == sizes[1] and front.rowptr.numel() == sizes[0] + 1
        assert torch.equal(front.row[:edges].long(), row[:edges]) and torch.equal(front.col[:edges].long(), col[:edges])
        assert int(col[:edges].max()) < nodes and (edges == row.numel() or int(col[edges]) >= nodes)
        assert int(front.row[:edges].max()) < sources
        more = front.row[edges:], front.col[edges:]
        assert all(int(ends.min()) >= true for ends, true in zip(more, (sources, nodes), strict=True))
        assert all(int(ends.max()) < size for ends, size in zip(more, (sizes[2], sizes[0]), strict=True))
        assert torch.equal(front.rowptr.long(), torch.searchsorted(front.col.long(), torch.arange(sizes[0] + 1)))


def test_what_was_not_sampled_has_none() -> None:
    plain = graph()
    assert prepare(plain, None).kinds.hop_prefixes == ()
    plain.batch_size = NODES
    one = next(iter(gnncompile.loader([plain], buckets=True)))
    what = attached(one.edge_index)
    assert what is not None and what.batch is not None and not any("front" in name for name in what.batch.kinds)
    plain.batch_size = 1  # fewer than two are never padded, but the rest of the mini-batch is
    one = next(iter(gnncompile.loader([plain], buckets=True)))
    what = attached(one.edge_index)
    assert one.batch_size == 1 and what is not None and what.batch is not None
