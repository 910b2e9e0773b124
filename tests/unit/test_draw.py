"""The graphs of a report: what became of each operation, how they are made small, laid out and drawn."""

from __future__ import annotations

import random
import sys
from itertools import pairwise, product
from xml.etree import ElementTree

import networkx as nx
import pytest
import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, GCNConv, TransformerConv
from torch_geometric.nn.models import GAT, GCN, PNA

import gnncompile
from gnncompile.report.collapse import collapsed
from gnncompile.report.layered import GAP, LAYER_GAP, _apart, layered
from gnncompile.report.look import FAR, pictured
from gnncompile.report.model_graph import STRUCTURE, TIMES, Box, Operation, input_name

LIGHT = {"inductor": False}


def explained(model, *args, **kwargs):
    torch._dynamo.reset()
    return gnncompile.explain(gnncompile.compile(model, options=LIGHT), *args, **kwargs)


def edges(nodes: int, number: int) -> torch.Tensor:
    """A hub, duplicates and self loops among them, unsorted."""
    made = torch.randint(nodes, (2, number))
    made[1, : number // 3] = nodes - 1
    made[:, -2:] = made[:, :2]
    return made


@pytest.fixture(scope="module")
def gat():
    torch.manual_seed(0)
    return explained(GAT(8, 8, 2, out_channels=3, heads=2), torch.randn(20, 8), edges(20, 90))


def boxes(graph: nx.DiGraph) -> dict[str, Box]:
    return dict(graph.nodes(data="box"))


# -- what became of each operation ------------------------------------------------------------------------------------


def test_operations_of_a_message_are_in_its_region(gat):
    before = boxes(gat.graphs[0].before)
    for region in (0, 1):
        names = sorted(b.operations[0].name for b in before.values() if b.regions == (region,))
        gathers, arithmetic = 3 * ["index_select"], ["add", "leaky_relu", "dropout", "unsqueeze", "mul"]
        assert names == sorted([*gathers, *arithmetic, "segment softmax", "segment sum"])
    dense = [b.operations[0].name for b in before.values() if b.kind == "dense"]
    assert dense.count("linear") == 2 and "relu" in dense and "index_select" not in dense
    assert {b.operations[0].name for b in before.values() if b.kind == STRUCTURE} >= {"arange", "mark_dead", "cat"}
    assert {b.label for b in before.values() if b.kind == "input"} == {"x", "edge_index.row", "edge_index.col"}


def test_after_has_a_node_for_each_region(gat):
    after = gat.graphs[0].after
    regions = {b.regions: n for n, b in boxes(after).items() if b.kind == "region"}
    assert sorted(regions) == [(0,), (1,)] and nx.has_path(after, regions[0,], regions[1,])
    assert all(after.has_edge(STRUCTURE, n) for n in regions.values())
    assert len(boxes(after)[STRUCTURE].operations) == gat.structure_nodes
    assert boxes(after)[regions[0,]].operations[0].result == f"float32 20 {TIMES} 2 {TIMES} 4"
    assert all(nx.is_directed_acyclic_graph(g) for g in (after, gat.graphs[0].before))


def test_lines_are_the_users(gat):
    lines = {o.line for b in boxes(gat.graphs[0].before).values() if b.regions for o in b.operations}
    assert any("self.propagate(" in line for line in lines)


def test_operations_that_shared_a_walk_are_in_one_region():
    torch.manual_seed(0)
    deg = torch.tensor([1, 4, 8])
    model = PNA(8, 8, 1, aggregators=["mean", "min", "max", "std"], scalers=["identity"], deg=deg)
    report = explained(model, torch.randn(20, 8), edges(20, 90))
    assert len(report.regions) == 1
    names = {b.operations[0].name for b in boxes(report.graphs[0].before).values() if b.regions == (0,)}
    assert {"segment mean", "segment min", "segment max"} <= names


def test_normalisation_that_is_written_in_another_way_is_structure():
    torch.manual_seed(0)
    report = explained(GCNConv(8, 4), torch.randn(20, 8), edges(20, 90))
    before = boxes(report.graphs[0].before).values()
    assert [b.kind for b in before if b.label == "index"] == 2 * [STRUCTURE]


def test_layers_of_edge_features_that_move_to_nodes_are_in_the_region():
    torch.manual_seed(0)
    layer = TransformerConv(8, 4, heads=2, edge_dim=5)
    report = explained(layer, torch.randn(20, 8), edges(20, 90), torch.randn(90, 5))
    before = boxes(report.graphs[0].before).values()
    assert [b.module for b in before if b.label == "linear" and b.regions] == ["lin_edge"]
    assert not [b.label for b in before if b.kind == "gone"]


def test_regions_of_several_graphs_are_numbered_through():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = GCNConv(8, 8, normalize=False), GATv2Conv(8, 4)

        def forward(self, x, edge_index):
            x = self.a(x, edge_index)
            torch._dynamo.graph_break()
            return self.b(x, edge_index)

    report = explained(Broken(), torch.randn(9, 8), edges(9, 40))
    shown = [sorted(r for b in boxes(g.after).values() for r in b.regions) for g in report.graphs]
    assert [r for graph in shown for r in graph] == list(range(len(report.regions))) and len(report.graphs) > 1
    labels = [b.label for g in report.graphs for b in boxes(g.after).values() if b.kind == "region"]
    assert [label.split(":")[0] for label in labels] == [f"region {k}" for k in range(len(report.regions))]


def test_a_model_without_edges_has_no_region():
    report = explained(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(5, 4))
    assert {b.kind for b in boxes(report.graphs[0].before).values()} == {"input", "dense", "output"}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("L['args'][0]", "x"),
        ("L['args'][1].row", "edge_index.row"),
        ("L['args'][2]", "args[2]"),
        ("L['kwargs']['batch']['a']", "batch['a']"),
        ("G['table']", "G['table']"),
    ],
)
def test_inputs_have_the_names_of_parameters(source: str, expected: str):
    assert input_name(source, ["x", "edge_index"]) == expected


# -- made small -------------------------------------------------------------------------------------------------------


def random_graph(nodes: int, seed: int) -> nx.DiGraph:
    """Operations of a few modules and regions, with edges at random and a few inputs."""
    rng = random.Random(seed)
    graph = nx.DiGraph()
    for k in range(nodes):
        kind = rng.choice(["dense", "dense", "region", "gone"]) if k >= 3 else "input"
        module = f"convs.{3 * k // nodes}" + rng.choice(["", ".lin"])
        regions = (3 * k // nodes,) if kind == "region" else ()
        box = Box(kind, f"op{k}", (Operation(f"op{k}", "float32 3", "?"),), regions, module, rng.random() < 0.2, k)
        graph.add_node(f"n{k}", box=box)
        graph.add_edges_from((f"n{j}", f"n{k}") for j in range(k) if k >= 3 and rng.random() < 2 / (k + 1))
    return graph


@pytest.mark.parametrize("nodes, seed", [(1, 0), (4, 1), (30, 2), (200, 3), (200, 4)])
def test_collapsed_graphs_hold_every_operation_once(nodes: int, seed: int):
    graph = random_graph(nodes, seed)
    small = collapsed(graph, most=20)
    assert nx.is_directed_acyclic_graph(small) and len(small) <= len(graph)
    held = [o.name for b in boxes(small).values() for o in b.operations]
    assert sorted(held) == sorted(f"op{k}" for k in range(nodes))
    assert sum(b.bytes for b in boxes(small).values()) == sum(range(nodes))
    at = {o.name: n for n, b in boxes(small).items() for o in b.operations}
    met = {(at[f"op{a[1:]}"], at[f"op{b[1:]}"]) for a, b in graph.edges}
    assert {(a, b) for a, b in met if a != b} == set(small.edges)
    for box in boxes(small).values():
        assert len({graph.nodes[f"n{o.name[2:]}"]["box"].regions for o in box.operations}) == 1


def test_a_chain_is_one_box_up_to_the_next_linear_layer():
    graph = nx.DiGraph()
    names = ["linear", "view", "relu", "linear", "mul", "add", "sub", "exp"]
    for k, name in enumerate(names):
        graph.add_node(k, box=Box("dense", name, (Operation(name, "float32 3", "?"),), free=name == "view"))
    nx.add_path(graph, range(len(names)))
    assert [b.label for b in boxes(collapsed(graph)).values()] == ["linear, relu", "linear, mul, add, +2"]


def test_hundreds_of_operations_are_a_few_dozen_boxes():
    torch.manual_seed(0)
    report = explained(GCN(8, 8, 7, norm="batch", jk="cat"), torch.randn(20, 8), edges(20, 90))
    assert len(report.graphs[0].before) > 100
    assert all(len(pictured(g).graph) <= 45 for g in (report.graphs[0].before, report.graphs[0].after))


# -- laid out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes, seed", [(0, 0), (1, 0), (2, 1), (12, 2), (40, 3), (40, 4)])
def test_boxes_do_not_overlap_and_edges_go_down(nodes: int, seed: int):
    graph, rng = random_graph(nodes, seed), random.Random(seed)
    sizes = {n: (rng.uniform(30, 200), rng.choice([26.0, 40.0])) for n in graph}
    found = layered(graph, sizes.__getitem__)
    assert set(found.places) == set(graph) and set(found.routes) == set(graph.edges)
    places = list(found.places.values())
    for k, a in enumerate(places):
        assert a.x - a.width / 2 >= -1e-6 and a.x + a.width / 2 <= found.width + 1e-6
        assert a.y - a.height / 2 >= -1e-6 and a.y + a.height / 2 <= found.height + 1e-6
        for b in places[k + 1 :]:
            aside = abs(a.x - b.x) >= (a.width + b.width) / 2 + GAP - 1e-6
            assert aside or abs(a.y - b.y) >= (a.height + b.height) / 2 + LAYER_GAP - 1e-6
    for (a, b), route in found.routes.items():
        assert route[0] == (found.places[a].x, found.places[a].y + found.places[a].height / 2)
        assert route[-1] == (found.places[b].x, found.places[b].y - found.places[b].height / 2)
        assert all(y0 < y1 for (_, y0), (_, y1) in pairwise(route))


def test_edges_pass_between_boxes():
    graph = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d"), ("a", "c")])
    found = layered(graph, lambda _: (80.0, 40.0))
    for (a, b), route in found.routes.items():
        for n, place in found.places.items():
            inside = [abs(x - place.x) < place.width / 2 and abs(y - place.y) < place.height / 2 for x, y in route]
            assert n in (a, b) or not any(inside)


def test_a_chain_stands_upright_and_a_ladder_does_not_cross():
    chain = layered(nx.path_graph(6, create_using=nx.DiGraph), lambda n: (40.0 + 10 * n, 26.0))
    assert max(p.x for p in chain.places.values()) - min(p.x for p in chain.places.values()) < 1e-6
    ladder = nx.DiGraph([("a", "y"), ("b", "x"), ("x", "q"), ("y", "p")])
    found = layered(ladder, lambda _: (50.0, 26.0)).places
    assert (found["a"].x < found["b"].x) == (found["y"].x < found["x"].x) == (found["p"].x < found["q"].x)


def test_a_cycle_is_an_error():
    with pytest.raises(nx.NetworkXUnfeasible):
        layered(nx.DiGraph([(0, 1), (1, 0)]), lambda _: (50.0, 26.0))


def test_places_are_the_nearest_that_keep_their_distance():
    wanted, weights, apart = [3.0, 0.0, 1.0], [1.0, 2.0, 1.0], [1.0, 2.0]

    def cost(xs):
        return sum(w * (x - t) ** 2 for x, t, w in zip(xs, wanted, weights, strict=True))

    found = _apart(wanted, weights, apart)
    assert all(b - a >= gap - 1e-9 for a, b, gap in zip(found[:-1], found[1:], apart, strict=True))
    grid = [k / 10 for k in range(-30, 60)]
    assert cost(found) <= min(cost(t) for t in product(grid, repeat=3) if t[1] - t[0] >= 1 and t[2] - t[1] >= 2) + 1e-9


def test_boxes_far_below_structure_are_marked(gat):
    picture = pictured(gat.graphs[0].after)
    box = {b.label.split(":")[0]: n for n, b in boxes(picture.graph).items()}
    assert picture.graph.has_edge(STRUCTURE, box["region 0"])
    assert picture.notched[box["region 1"]] == [STRUCTURE] and not picture.graph.has_edge(STRUCTURE, box["region 1"])
    assert FAR >= 1


# -- drawn ------------------------------------------------------------------------------------------------------------


def test_png_and_svg(gat, tmp_path):
    gat.draw(tmp_path / "gat.png")
    data = (tmp_path / "gat.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
    gat.draw(str(tmp_path / "gat.SVG"))
    root = ElementTree.parse(tmp_path / "gat.SVG").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) > 40


def test_regions_have_colours_in_the_picture(gat, tmp_path):
    from matplotlib import image

    gat.draw(tmp_path / "gat.png")
    found = image.imread(tmp_path / "gat.png")[:, :, :3]
    for colour in ((0x2F, 0x6F, 0xDE), (0xD9, 0x68, 0x0F)):
        assert (abs(found * 255 - torch.tensor(colour).numpy()).max(-1) < 2).sum() > 500


def test_names_are_no_mathematics(gat, tmp_path):
    from dataclasses import replace

    replace(gat, model=r"$\frac{$ \x").draw(tmp_path / "odd.png")
    assert (tmp_path / "odd.png").stat().st_size > 10_000


def test_nothing_captured_is_drawn_as_a_title(gat, tmp_path):
    from dataclasses import replace

    replace(gat, graphs=(), regions=()).draw(tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 1_000


@pytest.mark.parametrize("name", ["report", "report.html", "png"])
def test_other_endings_are_refused(gat, tmp_path, name: str):
    with pytest.raises(ValueError, match=r"path: found .*expected a name that ends in \.png, \.svg, \.pdf"):
        gat.draw(tmp_path / name)


def test_without_matplotlib(gat, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        gat.draw(tmp_path / "gat.png")
    gat.to_html(tmp_path / "gat.html")  # needs none
    assert (tmp_path / "gat.html").exists()
