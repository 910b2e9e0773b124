"""What users pass to a compiled model: every kind of edge list and container, one captured graph for all sizes."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINEConv,
    HeteroConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.utils.num_nodes import maybe_num_nodes

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.support.case import CHANNELS, EDGE_CHANNELS, LADDER, Graph
from tests.harness import kernels, light
from tests.ladder import climb


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(CHANNELS, 4),
    "SAGE": lambda: SAGEConv(CHANNELS, 4),
    "GAT": lambda: GATConv(CHANNELS, 4, heads=2),
}

# -- edge lists ---------------------------------------------------------------------------------------------------

EDGE_LISTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda e: e.t().contiguous().t(),
    "every other column": lambda e: e.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda e: e[:, :1].expand(2, 5) if e.size(1) else e,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", EDGE_LISTS)
def test_views(kind: str, layer: str):
    climb(LAYERS[layer], lambda g: (g.x, EDGE_LISTS[kind](g.edge_index)))


@pytest.mark.parametrize("layer", LAYERS)
def test_int32(layer: str):
    """Against int64: torch's own gradient of ``index_select`` by int32 is wrong on a CPU."""
    climb(LAYERS[layer], lambda g: (g.x, g.edge_index.int()), expected=lambda g: (g.x, g.edge_index))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(CHANNELS, 4), GATConv(CHANNELS, 4)

    def forward(self, named: Any, listed: Any) -> Tensor:
        return self.first(named["x"], named["edges"]["all"]) + self.second(*listed)


def test_in_dicts_and_lists():
    climb(Nested, lambda g: ({"x": g.x, "edges": {"all": g.edge_index}}, [g.x, g.other_edge_index]))


def test_an_index_that_is_a_view_of_another_tensor():
    def arguments(g: Graph) -> Any:
        both = torch.stack([g.batch, g.batch])
        return g.x, g.edge_index, (both[0], g.batch, torch.cat([g.batch, g.batch])[: g.nodes])[g.nodes % 3]

    climb(Pooled, arguments)


# -- EdgeIndex and Index ------------------------------------------------------------------------------------------


def edge_index_of(g: Graph, order: str | None, sized: bool, undirected: bool = False) -> EdgeIndex:
    edges = torch.cat([g.edge_index, g.edge_index.flip(0)], 1) if undirected else g.edge_index
    if order is not None:
        edges = edges[:, edges[0 if order == "row" else 1].argsort(stable=True)]
    size = (g.nodes, g.nodes) if sized else None
    return EdgeIndex(edges.contiguous(), sort_order=order, sparse_size=size, is_undirected=undirected)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("order", [None, "row", "col"])
def test_edge_index(order: str | None, sized: bool, layer: str):
    # Eager takes an unsized list sorted by column for as many nodes as its largest number.
    sizes = [s for s in LADDER if sized or order != "col" or s[1] > 0]
    climb(LAYERS[layer], lambda g: (g.x, edge_index_of(g, order, sized)), sizes=sizes)


@pytest.mark.parametrize("layer", LAYERS)
def test_undirected_edge_index(layer: str):
    climb(LAYERS[layer], lambda g: (g.x, edge_index_of(g, "row", True, True)))


class Sources(nn.Module):
    """Rows of sources only; the number of destinations is the edge list's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv((CHANNELS, CHANNELS), 4, root_weight=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv((x, None), edge_index)


def test_sizes_of_an_edge_index_are_read():
    def arguments(g: Graph) -> Any:
        return g.x, EdgeIndex(g.edge_index, sparse_size=(g.nodes, g.nodes + 3))

    compiled = climb(Sources, arguments)
    assert callable_of(compiled).derived.looks == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [(True, True), (True, False), (False, True), (False, False)])
def test_number_of_nodes_of_an_edge_index(size: tuple[bool, bool]):
    def nodes(x: Tensor, edge_index: Tensor) -> Tensor:
        return x.sum() * x.new_ones(maybe_num_nodes(edge_index))

    def arguments(g: Graph) -> Any:
        known = [count if wanted else None for count, wanted in zip((g.nodes + 2, g.nodes + 1), size, strict=True)]
        return g.x, EdgeIndex(g.edge_index, sparse_size=tuple(known))

    climb(lambda: nodes, arguments)


def test_number_of_nodes_of_data_with_an_edge_index():
    climb(
        lambda: lambda x, data: x.sum() * x.new_ones(data.num_nodes),
        lambda g: (g.x, Data(edge_index=edge_index_of(g, None, True))),
    )


@pytest.mark.parametrize("attribute", ["num_rows", "sparse_size"])
def test_what_only_an_edge_index_has(attribute: str):
    def fn(x: Tensor, edge_index: Any) -> Tensor:
        rows = edge_index.num_rows if attribute == "num_rows" else edge_index.sparse_size(0)
        return x.sum() * x.new_ones(rows)

    graph = Graph(12, 40)
    compiled = gnncompile.compile(fn)
    args = graph.x, edge_index_of(graph, "row", True)
    with pytest.warns(UserWarning, match=f"`{attribute}` of an input that is a EdgeIndex.*Pass a plain edge_index"):
        found = compiled(*args)
    torch.testing.assert_close(found, fn(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(*args), fn(*args))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(CHANNELS, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return global_mean_pool(self.conv(x, edge_index), batch)


@pytest.mark.parametrize("size", [None, 5])
def test_index_as_batch(size: int | None):
    climb(Pooled, lambda g: (g.x, g.edge_index, Index(g.batch, dim_size=size, is_sorted=True)))


class OnItsOwnGraph(nn.Module):
    """Reads a graph that is no input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(CHANNELS, 4)
        self.register_buffer("edges", EdgeIndex([[0, 1, 2, 3], [1, 0, 2, 5]], sparse_size=(6, 6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, self.edges)


GRAPHS = Index([0, 0, 1, 1, 2, 2], dim_size=3, is_sorted=True)


@pytest.mark.parametrize("generator", ["cpp", "reference"])
@pytest.mark.parametrize("model", [OnItsOwnGraph, lambda: lambda x: global_mean_pool(x, GRAPHS, 3)])
def test_graphs_that_are_no_inputs(model: Callable[[], Any], generator: str):
    """Such an ``EdgeIndex`` reaches the code that sorts edges as it is, and has no memory of its own."""
    target, x = model(), torch.randn(6, CHANNELS)
    with kernels(generator):
        compiled = gnncompile.compile(target)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), target(x))


# -- objects ------------------------------------------------------------------------------------------------------


class OfData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(CHANNELS, CHANNELS)
        self.second = GINEConv(nn.Linear(CHANNELS, 4), edge_dim=EDGE_CHANNELS)

    def forward(self, data: Any) -> Tensor:
        x = self.second(self.first(data.x, data.edge_index).relu(), data.edge_index, data.edge_attr)
        return x if data.batch is None else global_add_pool(x, data.batch, size=data.num_graphs)


def data_of(g: Graph) -> Data:
    return Data(x=g.x, edge_index=g.edge_index, edge_attr=g.edge_attr)


def batch_of(g: Graph, empty: bool = False) -> Batch:
    cuts = [0, g.nodes // 3, 2 * g.nodes // 3, g.nodes] if g.nodes > 2 else [0, g.nodes]
    graphs = []
    for start, end in itertools.pairwise(cuts):
        x, edge_attr = g.x.detach()[start:end], g.edge_attr.detach()
        graphs.append(Data(x=x, edge_index=g.edge_index % (end - start), edge_attr=edge_attr))
        if empty:
            graphs.append(Data(x=x[:0], edge_index=g.edge_index[:, :0], edge_attr=edge_attr[:0]))
    batch = Batch.from_data_list(graphs)
    batch.x.requires_grad_(), batch.edge_attr.requires_grad_()
    return batch


@pytest.mark.parametrize("kind", ["Data", "Batch", "Batch with empty graphs"])
def test_data(kind: str):
    make = {"Data": data_of, "Batch": batch_of}.get(kind, lambda g: batch_of(g, empty=True))
    climb(OfData, lambda g: (make(g),))


class Reader(OfData):
    """Reads everything that a batch knows."""

    def forward(self, data: Any) -> Any:
        x = self.first(data.x, data["edge_index"]).relu()
        pooled = global_mean_pool(x, data.batch) * data.num_graphs
        counts = (data.ptr[1:] - data.ptr[:-1]).view(-1, 1)
        sizes = x.new_ones(data.num_nodes).sum() + data.num_edges + data.num_node_features + data.ptr.sum()
        named = 2 if "edge_attr" in data and not hasattr(data, "missing") else 1
        return pooled * counts * named, sizes


def test_what_a_batch_knows():
    climb(Reader, lambda g: (batch_of(g),))


def test_a_batch_of_one_graph_first():
    compiled = gnncompile.compile(OfData().double(), options={"inductor": False})
    for parts in (1, 4, 2, 0):
        batch = Batch.from_data_list([data_of(Graph(5, 9))] * max(parts, 1))
        torch.testing.assert_close(compiled(batch), callable_of(compiled).target(batch))  # type: ignore[union-attr]
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


class OfHeteroData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = ("a", "to", "b"), ("b", "back", "a")
        convs: Any = {kind: SAGEConv((CHANNELS, CHANNELS), 4) for kind in kinds}
        self.conv = HeteroConv({**convs, ("a", "self", "a"): GCNConv(CHANNELS, 4)})

    def forward(self, data: Any) -> Any:
        out = self.conv(data.x_dict, data.edge_index_dict)
        return out["a"] * data["a", "self", "a"].edge_index.size(1), out["b"] * data["a"].num_nodes


def hetero_of(g: Graph) -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = g.x, g.x0
    data["a", "to", "b"].edge_index, data["b", "back", "a"].edge_index = g.edge_index, g.edge_index.flip(0)
    data["a", "self", "a"].edge_index = g.other_edge_index
    return data


def test_hetero_data():
    climb(OfHeteroData, lambda g: (hetero_of(g),))


def test_dicts_of_types():
    class OfDicts(OfHeteroData):
        def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
            return self.conv(x_dict, edge_index_dict)

    climb(OfDicts, lambda g: (hetero_of(g).x_dict, hetero_of(g).edge_index_dict))


class InTurn(nn.Module):
    """As in PyG's example of DMGI."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(CHANNELS, 4), SAGEConv(CHANNELS, 4)])

    def forward(self, x: Tensor, edge_indices: Any) -> Tensor:
        results = [conv(x, edge_index) for conv, edge_index in zip(self.convs, edge_indices, strict=True)]
        return torch.stack(results).sum(0) * len(edge_indices)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_values_of_a_dict(kind: Any):
    climb(InTurn, lambda g: (g.x, kind(first=g.edge_index, second=g.other_edge_index).values()))


@dataclasses.dataclass
class Record:
    x: Tensor
    edge_index: Tensor
    count: int
    batch: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    edge_index: Tensor
    count: int


class Tuple(NamedTuple):
    x: Tensor
    edge_index: Tensor
    count: int


class OfRecord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(CHANNELS, 4)

    def forward(self, record: Any) -> Tensor:
        return self.conv(record.x, record.edge_index) * record.x.new_ones(record.count, 4).sum()


@pytest.mark.parametrize("kind", [Record, Frozen, Tuple])
def test_records(kind: Any):
    climb(OfRecord, lambda g: (kind(g.x, g.edge_index, g.edges),))


# -- what a model writes to its inputs -----------------------------------------------------------------------------


class Writer(OfData):
    def forward(self, data: Any) -> Any:
        data.x = self.first(data.x, data.edge_index)
        data.edge_index = data.edge_index.flip(0)
        data.extra = data.x.sum()
        return data, data.x


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_writes_to_its_data(nested: bool):
    model = Writer().double()
    compiled = gnncompile.compile(lambda held: model(held["data"] if nested else held), options={"inductor": False})
    for size in LADDER:
        given, expected = data_of(Graph(*size)), data_of(Graph(*size))
        edge_attr = given.edge_attr
        out, x = compiled({"data": given} if nested else given)
        model(expected)
        assert out is given and x is given.x and given.edge_attr is edge_attr
        assert sorted(given.keys()) == sorted(expected.keys())
        for key in expected.keys():  # noqa: SIM118
            torch.testing.assert_close(given[key], expected[key])
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


def test_a_model_writes_to_its_record():
    def fn(record: Any) -> Tensor:
        record.edge_index, record.count = record.edge_index.flip(0), record.count + 1
        return record.x.sum() * record.count

    compiled = gnncompile.compile(fn)
    for size in LADDER:
        g = Graph(*size)
        record = Record(g.x, g.edge_index, 3)
        torch.testing.assert_close(compiled(record), g.x.sum() * 4)
        assert torch.equal(record.edge_index, g.edge_index.flip(0)) and record.count == 4
        assert record.batch is None


class WritesToCollections(nn.Module):
    """New, changed, moved and deleted items of a dict and of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv = nn.Embedding(9, 4), SAGEConv(4, 4)

    def forward(self, x: dict[str, Tensor], edges: dict[str, Tensor], rows: list[Any]) -> Tensor:
        x["user"] = self.embedding(x["user"])
        x["more"] = 2 * x["user"]
        del x["old"]
        edges["back"] = edges["to"].flip(0)
        out: Tensor = self.conv(x["user"], edges["to"])
        rows.append(out)
        rows[0] = out * rows[0]
        rows.insert(0, rows.pop(1))
        return out


@pytest.mark.parametrize("training", [True, False])
def test_a_model_writes_to_a_dict_and_a_list(training: bool):
    model = WritesToCollections().double()
    compiled = gnncompile.compile(model, options={"inductor": False})
    for size in LADDER:
        calls = []
        for run in (model, compiled):
            g = Graph(*size)
            x = {"user": torch.arange(9), "old": g.x, "kept": g.x}
            edges, kept = {"to": g.edge_index % 9}, torch.ones(3)
            rows = [g.x.sum(), kept, 5]
            with torch.set_grad_enabled(training):
                run(x, edges, rows)
            assert rows[0] is kept and x["kept"] is g.x
            calls.append((x, edges, rows))
        assert [list(part) for part in calls[1][:2]] == [["user", "kept", "more"], ["to", "back"]]
        torch.testing.assert_close(calls[1], calls[0])
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


def test_inputs_stay_as_they_are():
    data = batch_of(Graph(12, 40))
    before = {key: (value, value.clone()) for key, value in data.to_dict().items() if isinstance(value, Tensor)}
    compiled = gnncompile.compile(OfData().double())
    compiled(data), compiled(data)
    assert set(data.keys()) >= set(before) and data.num_graphs == 3
    for key, (value, copied) in before.items():
        assert data[key] is value and torch.equal(value, copied)


# -- two kinds of nodes, sizes, optional arguments, numbers -----------------------------------------------------------


class Bipartite(nn.Module):
    def __init__(self, root: bool) -> None:
        super().__init__()
        self.conv = SAGEConv((CHANNELS, CHANNELS), 4, root_weight=root)

    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        return self.conv(x, edge_index, size=size)


def test_a_pair_of_features():
    climb(lambda: Bipartite(True), lambda g: ((g.x, g.x0), g.edge_index))
    climb(lambda: Bipartite(True), lambda g: ((g.x, g.x0), g.edge_index, (g.nodes, g.nodes)))


def test_features_of_sources_only():
    climb(lambda: Bipartite(False), lambda g: ((g.x, None), g.edge_index, (g.nodes, g.nodes + g.edges // 20)))


def test_optional_weights_come_and_go():
    """One graph with, one without."""
    climb(
        lambda: GCNConv(CHANNELS, 4),
        lambda g: (g.x, g.edge_index, g.edge_weight if g.nodes % 2 else None),
        graphs=2,
    )


@pytest.mark.parametrize("counts", [(5, 7, 0, 1, 3), (1, 4, 0), (0, 1, 2)])
def test_numbers_of_graphs(counts: tuple[int, ...]):
    model = GCNConv(CHANNELS, 4).double()

    def forward(x: Tensor, edge_index: Tensor, batch: Tensor, *, num_graphs: int, num_nodes: int) -> Any:
        return global_add_pool(model(x, edge_index), batch, num_graphs), x.new_ones(num_nodes).cumsum(0) / num_nodes

    compiled = gnncompile.compile(forward, options={"inductor": False})
    for count in counts:
        g = Graph(3 * count + 1, 5) if count else Graph(2, 0)
        x, batch = (g.x, g.batch % count) if count else (g.x.detach()[:0].clone().requires_grad_(), g.batch[:0])
        given = {"num_graphs": count, "num_nodes": count}
        for found, expected in zip(
            compiled(x, g.edge_index, batch, **given), forward(x, g.edge_index, batch, **given), strict=True
        ):
            torch.testing.assert_close(found, expected)
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]
