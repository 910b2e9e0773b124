"""Layers with typed edges: one graph for every size, no loop over masks; outputs and all gradients equal eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import FastRGCNConv, FiLMConv, RGCNConv

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.runtime import launch
from gnncompile.substitutes import relation_tables
from tests.e2e.test_end_to_end import compare
from tests.harness import light

RELATIONS, CHANNELS = 4, 6
SIZES = [(12, 40), (7, 0), (1, 1), (1, 0), (30, 64)]


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


def graph(nodes: int, edges: int, num_relations: int = RELATIONS) -> tuple[Tensor, Tensor, Tensor]:
    """Features, unsorted edges with duplicates, self loops and a hub, and their types, the last of which has none."""
    generator = torch.Generator().manual_seed(nodes + edges)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    edge_type = torch.randint(num_relations - 1, (edges,), generator=generator)
    if edges >= 16:
        edge_index[1, : edges // 4] = 3
        edge_index[:, -3], edge_type[-3] = edge_index[:, -4], edge_type[-4]
        edge_index[0, -2] = edge_index[1, -2]
    x = torch.randn(nodes, CHANNELS, generator=generator)
    return x.requires_grad_(), edge_index, edge_type


def one_graph(model: nn.Module, inputs: Callable[..., Any] = graph, sizes: Any = SIZES, skipped: bool = False) -> Any:
    """Compares at all sizes, with one capture and without a break, and returns what was captured."""
    compiled = gnncompile.compile(model)
    breaks = _compat.graph_breaks()
    for size in sizes:
        compare(compiled, model, inputs(*size))
    backend = callable_of(compiled).backend
    assert len(backend.captured) == 1 and _compat.graph_breaks() == breaks
    (one,) = backend.captured
    assert backend.notes == [] and (one.log.skipped == []) is not skipped
    return one


# -- RGCN ---------------------------------------------------------------------------------------------------------

RGCN: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "mean": (lambda **k: RGCNConv(CHANNELS, 5, RELATIONS, **k), 2),
    "bases": (lambda **k: RGCNConv(CHANNELS, 5, RELATIONS, num_bases=2, **k), 2),
    "blocks": (lambda **k: RGCNConv(CHANNELS, 4, RELATIONS, num_blocks=2, **k), 2),
    "sum": (lambda **k: RGCNConv(CHANNELS, 5, RELATIONS, aggr="sum", **k), 1),
    "max": (lambda **k: RGCNConv(CHANNELS, 5, RELATIONS, aggr="max", **k), 1),
    "max of blocks": (lambda **k: RGCNConv(CHANNELS, 4, RELATIONS, num_blocks=2, aggr="max", **k), 1),
    "wider behind": (lambda **k: RGCNConv(CHANNELS, 3 * CHANNELS, RELATIONS, **k), 1),
    "neither root nor bias": (lambda **k: RGCNConv(CHANNELS, 5, RELATIONS, root_weight=False, bias=False, **k), 2),
    "against the edges": (lambda **k: RGCNConv(CHANNELS, 5, RELATIONS, flow="target_to_source", **k), 2),
    "fast": (lambda **k: FastRGCNConv(CHANNELS, 5, RELATIONS, **k), 2),
}


@pytest.mark.parametrize("name", RGCN)
def test_rgcn(name: str):
    torch.manual_seed(0)
    layer, regions = RGCN[name]
    one = one_graph(layer())
    assert len(one.log.regions) == regions


@pytest.mark.parametrize("aggr", ["var", "softmax", "powermean"])
def test_rgcn_of_other_aggregations(aggr: str):
    torch.manual_seed(0)
    one_graph(RGCNConv(CHANNELS, 5, RELATIONS, aggr=aggr))
    one_graph(RGCNConv(CHANNELS, 5, RELATIONS, num_bases=2, root_weight=False, aggr=aggr))


def test_relations_in_groups(monkeypatch: pytest.MonkeyPatch):
    """Edges of other groups are neither counted nor walked."""
    monkeypatch.setattr(relation_tables, "TABLE_WIDTH", 12)
    torch.manual_seed(0)
    for aggr, count in (("sum", 2), ("mean", 4), ("max", 2)):
        one = one_graph(RGCNConv(CHANNELS, CHANNELS, RELATIONS, aggr=aggr), sizes=SIZES[:3])
        assert len(one.log.regions) == count


def test_two_layers_share_their_structure():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([RGCNConv(CHANNELS, 5, RELATIONS), RGCNConv(5, 3, RELATIONS)])

        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            return self.convs[1](self.convs[0](x, edge_index, edge_type).relu(), edge_index, edge_type)

    torch.manual_seed(0)
    one = one_graph(Net())
    assert len(one.log.regions) == 3  # of which one makes the shares of both layers' means
    assert len(one.structure.program.results) == 8 and one.structure.cache.misses == len(SIZES)
    assert all("relations" not in r.line for r in one.log.regions[1:])


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_rgcn_of_embeddings(aggr: str):
    def inputs(nodes: int, edges: int) -> Any:
        _, edge_index, edge_type = graph(nodes, edges)
        return torch.randint(9, (nodes,)), edge_index, edge_type

    torch.manual_seed(0)
    one_graph(RGCNConv(9, 5, RELATIONS, aggr=aggr), inputs)
    one_graph(RGCNConv(12, 5, RELATIONS, num_bases=2, aggr=aggr), lambda n, e: (None, *graph(12, e)[1:]), SIZES[:2])
    one_graph(FastRGCNConv(12, 5, RELATIONS), lambda n, e: (None, *graph(12, e)[1:]), SIZES[:2])


def test_rgcn_between_two_kinds_of_nodes():
    class Bipartite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = RGCNConv((CHANNELS, 3), 5, RELATIONS)

        def forward(self, x: Tensor, x_r: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            return self.conv((x, x_r), edge_index, edge_type)

    def inputs(nodes: int, edges: int) -> Any:
        x, edge_index, edge_type = graph(nodes, edges)
        return x, torch.randn(nodes + 3, 3).requires_grad_(), edge_index + torch.tensor([[0], [3]]), edge_type

    torch.manual_seed(0)
    one_graph(Bipartite(), inputs)


def test_types_outside_the_relations():
    """They have no edge where PyG only asks which edges have a type, and are an error where it counts them."""
    torch.manual_seed(0)
    x, edge_index, edge_type = graph(12, 40)
    edge_type[::3] = -1
    edge_type[1::3] = RELATIONS
    model = RGCNConv(CHANNELS, 4, RELATIONS, num_blocks=2)
    compare(gnncompile.compile(model), model, (x, edge_index, edge_type))
    with pytest.raises(IndexError, match="edge_type against num_relations"):
        gnncompile.compile(RGCNConv(CHANNELS, 4, RELATIONS))(x, edge_index, edge_type)


def test_types_of_numbers():
    torch.manual_seed(0)
    x, edge_index, edge_type = graph(12, 40)
    for dtype, tol in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        model = RGCNConv(CHANNELS, 5, RELATIONS).to(dtype)
        found, expected = (m(x.to(dtype), edge_index, edge_type) for m in (gnncompile.compile(model), model))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def test_other_edge_types_are_noticed():
    """The structure is remembered by the edge types as well."""
    model = RGCNConv(CHANNELS, 5, RELATIONS)
    compiled = gnncompile.compile(model)
    x, edge_index, edge_type = graph(12, 40)
    x = x.detach()
    for _ in range(3):
        compare(compiled, model, (x, edge_index, edge_type))
        edge_type = edge_type.flip(0)
        compare(compiled, model, (x, edge_index, edge_type))
        edge_type.add_(1).remainder_(RELATIONS)


def test_an_end_outside_the_graph_is_an_error():
    compiled = gnncompile.compile(RGCNConv(CHANNELS, 5, RELATIONS))
    x, edge_index, edge_type = graph(12, 40)
    for wrong in (-1, 12):
        for end in (0, 1):
            bad = edge_index.clone()
            bad[end, 5] = wrong
            with pytest.raises(IndexError, match="edge_index"):
                compiled(x, bad, edge_type)


# -- FiLM ---------------------------------------------------------------------------------------------------------

FILM: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: FiLMConv(CHANNELS, 5, RELATIONS),
    "sum": lambda: FiLMConv(CHANNELS, 5, RELATIONS, aggr="sum"),
    "max without activation": lambda: FiLMConv(CHANNELS, 5, RELATIONS, act=None, aggr="max"),
    "own network": lambda: FiLMConv(
        CHANNELS, 5, RELATIONS, nn=nn.Sequential(nn.Linear(CHANNELS, 7), nn.Tanh(), nn.Linear(7, 10)), act=nn.SiLU()
    ),
}


@pytest.mark.parametrize("name", FILM)
def test_film(name: str):
    torch.manual_seed(0)
    one = one_graph(FILM[name]())
    assert len(one.log.regions) == 1


def test_film_in_groups(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relation_tables, "TABLE_WIDTH", 15)
    torch.manual_seed(0)
    assert len(one_graph(FiLMConv(CHANNELS, 5, RELATIONS), sizes=SIZES[:3]).log.regions) == 2


# -- what is not PyG's own layer ------------------------------------------------------------------------------------


class Louder(RGCNConv):
    def message(self, x_j: Tensor, edge_type_ptr: Any) -> Tensor:
        return 2 * x_j


def test_a_subclass_with_another_message_is_traced_as_written():
    torch.manual_seed(0)
    model = Louder(CHANNELS, 5, RELATIONS)
    compare(gnncompile.compile(model), model, graph(12, 40))


def test_other_compilers_trace_pyg_itself():
    seen: list[str] = []

    def other(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    gnncompile.compile(RGCNConv(CHANNELS, 5, RELATIONS))(*graph(12, 40))
    torch._dynamo.reset()
    model = RGCNConv(CHANNELS, 5, RELATIONS)
    torch.compile(model, backend=other)(*graph(12, 40))
    assert seen and not any("gnncompile" in target for target in seen)


def test_by_generated_kernels_and_without_a_sync():
    torch.manual_seed(0)
    model = RGCNConv(CHANNELS, 5, RELATIONS)
    with light("cpp"):
        one_graph(model, sizes=[(12, 40), (1, 0), (500, 4000)])
        assert launch.fallbacks == {}
        report = gnncompile.explain(model, *graph(12, 40))
    assert (report.captured_graphs, report.graph_breaks, report.host_syncs, len(report.regions)) == (1, 0, 0, 2)
