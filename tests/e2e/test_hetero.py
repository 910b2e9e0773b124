"""Graphs of several types of nodes and edges: one graph for every size, without a sync; outputs and all gradients equal
eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, HeteroConv, HGTConv, SAGEConv, to_hetero

import gnncompile
from gnncompile.ir.region import parse
from gnncompile.runtime import launch
from gnncompile.substitutes.nn import conv
from tests.e2e.test_end_to_end import compare
from tests.e2e.test_typed import one_graph
from tests.harness import launched, light, needs_interpreter

NODES = ["paper", "author", "venue"]
EDGES = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
    ("venue", "prints", "paper"),
]
"""Nothing arrives at a venue."""
WIDTHS = {"paper": 6, "author": 4, "venue": 6}
SIZES = [
    ((12, 9, 3), (40, 30, 30, 20)),
    ((12, 9, 3), (40, 0, 30, 0)),
    ((5, 1, 1), (0, 0, 0, 0)),
    ((1, 1, 1), (1, 1, 1, 1)),
    ((30, 12, 7), (64, 150, 12, 5)),
]


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


def graph(nodes: tuple[int, ...], edges: tuple[int, ...], widths: dict[str, int] = WIDTHS) -> tuple[Any, Any]:
    """Features and unsorted edges of each type, with duplicates, a hub and nodes without edges."""
    generator = torch.Generator().manual_seed(sum(nodes) + sum(edges))
    count = dict(zip(NODES, nodes, strict=True))
    x_dict = {key: torch.randn(count[key], widths[key], generator=generator).requires_grad_() for key in NODES}
    edge_index_dict = {}
    for kind, number in zip(EDGES, edges, strict=True):
        ends = [torch.randint(count[kind[end]], (number,), generator=generator) for end in (0, 2)]
        if number >= 16:
            ends[1][: number // 4] = 1 % count[kind[2]]
            ends[0][-1], ends[1][-1] = ends[0][-2], ends[1][-2]
        edge_index_dict[kind] = torch.stack(ends)
    return x_dict, edge_index_dict


class Joined(nn.Module):
    """A layer or model whose results for all types stand behind each other."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Tensor:
        out = self.conv(x_dict, edge_index_dict)
        return torch.cat([out[key] for key in NODES if key in out])


def nothing_per_edge(specs: list[str], width: int = 0) -> bool:
    """Whether no region stores more than `width` numbers per edge."""
    regions = [parse(spec) for spec in specs]
    sizes = [out.trailing for r in regions for out in r.outputs if r.per_edge(out)]
    return all(torch.Size(size).numel() <= width for size in sizes)


# -- HGT ----------------------------------------------------------------------------------------------------------


def hgt(channels: Any = None, out: int = 6, **options: Any) -> HGTConv:
    """A layer whose parameters are all random: PyG starts skips and priors at 1."""
    layer = HGTConv(channels or dict(WIDTHS), out, (NODES, EDGES), **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("heads", [1, 3])
def test_hgt(heads: int):
    torch.manual_seed(0)
    with launched() as specs:
        one = one_graph(Joined(hgt(heads=heads)), graph, SIZES)
    assert len(one.log.regions) == 1 and nothing_per_edge(specs, heads)


def test_two_layers_of_hgt_share_their_structure():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([hgt(out=8, heads=2), hgt({"paper": 8, "author": 8, "venue": 6}, heads=2)])

        def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
            hidden = self.convs[0](x_dict, edge_index_dict)
            return self.convs[1]({**x_dict, **hidden}, edge_index_dict)

    torch.manual_seed(0)
    one = one_graph(Joined(Net()), graph, SIZES[:3])
    assert len(one.log.regions) == 2 and len(one.structure.program.results) == 6


def test_hgt_without_some_types():
    """Features may come in another order than the metadata's, and types of edges may be left out."""
    torch.manual_seed(0)

    def inputs(nodes: Any, edges: Any) -> Any:
        x_dict, edge_index_dict = graph(nodes, edges)
        chosen = {kind: edge_index_dict[kind] for kind in (EDGES[0], EDGES[2])}
        return {key: x_dict[key] for key in ("author", "venue", "paper")}, chosen

    one = one_graph(Joined(hgt()), inputs, SIZES[:3])
    assert len(one.log.regions) == 1


def test_hgt_of_other_types_of_numbers():
    torch.manual_seed(0)
    x_dict, edge_index_dict = graph(*SIZES[0])
    for dtype, tol in ((torch.float64, 1e-12), (torch.bfloat16, 1e-1)):
        model = Joined(hgt(heads=2)).to(dtype)
        x = {key: value.to(dtype) for key, value in x_dict.items()}
        found, expected = (m(x, edge_index_dict) for m in (gnncompile.compile(model, fullgraph=True), model))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def test_hgt_with_an_edge_to_a_node_of_another_type_is_an_error():
    compiled = gnncompile.compile(Joined(hgt()))
    for end in (0, 1):
        x_dict, edge_index_dict = graph(*SIZES[0])
        edge_index_dict[EDGES[0]][end, 5] = 12
        with pytest.raises(IndexError, match="edge_index"):
            compiled(x_dict, edge_index_dict)


@pytest.mark.filterwarnings("ignore:gnncompile.*PendingUnbacked")  # slices of selected edges are not followed
def test_other_hgt_layers_are_traced_as_written():
    """Two types of edges: PyG's own code takes torch seconds per type to capture."""
    torch.manual_seed(0)
    x_dict, edge_index_dict = graph(*SIZES[0])
    kinds = EDGES[0], EDGES[2]
    layer: Any = HGTConv({"paper": 6, "author": 4}, 6, (["paper", "author"], list(kinds)))
    layer.kqv_lin.lins["paper"].register_forward_hook(lambda layer, inputs, out: 2 * out)
    inputs = {key: x_dict[key] for key in ("paper", "author")}, {kind: edge_index_dict[kind] for kind in kinds}
    model = Joined(layer)
    compare(gnncompile.compile(model), model, inputs)


def test_hgt_of_edges_in_another_order_than_the_metadata():
    """PyG then takes other weights for them; that is not ours to change."""
    _, edge_index_dict = graph(*SIZES[0])
    assert conv.hgt._takes(hgt(), edge_index_dict)
    assert not conv.hgt._takes(hgt(), dict(reversed(edge_index_dict.items())))


@pytest.mark.parametrize("which", ["cpp", "triton"])
def test_hgt_by_generated_kernels(which: str):
    needs_interpreter(which)
    torch.manual_seed(0)
    model = Joined(hgt(heads=2))
    with light(which):
        one_graph(model, graph, SIZES[:3])
        assert launch.fallbacks == {}
        report = gnncompile.explain(model, *graph(*SIZES[0]))
    assert (report.captured_graphs, report.graph_breaks, report.host_syncs, len(report.regions)) == (1, 0, 0, 1)


# -- a layer per type of edges --------------------------------------------------------------------------------------

MIXED = {
    EDGES[0]: lambda: GCNConv(6, 5),
    EDGES[1]: lambda: SAGEConv((4, 6), 5, aggr="max"),
    EDGES[2]: lambda: GATConv((6, 4), 5, heads=2, concat=False, add_self_loops=False),
    EDGES[3]: lambda: GATv2Conv((6, 6), 5, add_self_loops=False),
}
PER_TYPE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "SAGE": (lambda: HeteroConv({kind: SAGEConv((-1, -1), 5) for kind in EDGES}), 4),
    "SAGE, mean of types": (lambda: HeteroConv({kind: SAGEConv((-1, -1), 5) for kind in EDGES}, aggr="mean"), 4),
    "GAT": (lambda: HeteroConv({kind: GATConv((-1, -1), 5, add_self_loops=False) for kind in EDGES}), 4),
    "GAT, max of types": (
        lambda: HeteroConv({kind: GATConv((-1, -1), 5, heads=2, add_self_loops=False) for kind in EDGES}, aggr="max"),
        4,
    ),
    "one of each": (lambda: HeteroConv({kind: make() for kind, make in MIXED.items()}), 5),
}
"""GCN takes a second region, for degrees; it is structure."""


def lazy(make: Callable[[], nn.Module]) -> nn.Module:
    """A model that has seen its widths."""
    model = make()
    with torch.no_grad():
        model(*graph(*SIZES[0]))
    return model


@pytest.mark.parametrize("name", PER_TYPE)
def test_a_layer_per_type(name: str):
    torch.manual_seed(0)
    make, regions = PER_TYPE[name]
    model = Joined(lazy(make))
    with launched() as specs:
        one = one_graph(model, graph, SIZES)
    assert len(one.log.regions) == regions and nothing_per_edge(specs, width=2)


class TwoLayers(nn.Module):
    def __init__(self, conv: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first, self.second = conv(8), conv(3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


CONVERTED: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "SAGE": (lambda out: SAGEConv((-1, -1), out), 7),
    "GAT": (lambda out: GATConv((-1, -1), out, add_self_loops=False), 6),
}
"""Layers, and what each relation needs of structure: the edges of each row, both ways, and degrees for means."""
BOTH_WAYS = [*EDGES, ("paper", "printed_in", "venue")]


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_models(name: str):
    def inputs(nodes: tuple[int, ...], edges: tuple[int, ...]) -> Any:
        x_dict, edge_index_dict = graph(nodes, edges)
        return x_dict, {**edge_index_dict, BOTH_WAYS[-1]: edge_index_dict[EDGES[3]].flip(0)}

    torch.manual_seed(0)
    layer, structure = CONVERTED[name]
    model = to_hetero(TwoLayers(layer), (NODES, BOTH_WAYS))
    with torch.no_grad():
        model(*inputs(*SIZES[0]))
    one = one_graph(Joined(model), inputs, SIZES)
    assert len(one.log.regions) == 2 * len(BOTH_WAYS)
    assert len(one.structure.program.results) == structure * len(BOTH_WAYS)


def test_a_layer_per_type_without_a_sync():
    torch.manual_seed(0)
    model = Joined(lazy(PER_TYPE["one of each"][0]))
    with light("cpp"):
        one_graph(model, graph, SIZES[:3])
        assert launch.fallbacks == {}
        report = gnncompile.explain(model, *graph(*SIZES[0]))
    assert (report.captured_graphs, report.graph_breaks, report.host_syncs, len(report.regions)) == (1, 0, 0, 5)
