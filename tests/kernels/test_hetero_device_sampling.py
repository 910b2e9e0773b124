"""The sampler of graphs with several node types for GPUs: against a sampler in plain Python, its draws, its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.sampling import hetero_device, hetero_launch
from gnncompile.sampling.hetero_device import sample_neighbors_hetero
from gnncompile.sampling.neighborhood import EdgeType, HeteroNeighborhood
from tests.sampled import Reference, csc, last_of

pytestmark = triton_regions.INTERPRETED
device_name = triton_regions.device

TYPES = ["paper", "author", "field"]
NUMBERS = {"paper": 40, "author": 30, "field": 5}
CITES, WRITES, WRITTEN, ABOUT = KINDS = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
    ("field", "about", "paper"),
]
"""No edge leads to a field. The sources of two edge types are papers, and the destinations of three."""


def edges(number: int, kinds: list[EdgeType] = KINDS, seed: int = 0) -> dict[EdgeType, Tensor]:
    """Returns edge lists with edges that are given twice, self loops and nodes without edges."""
    random = torch.Generator().manual_seed(seed)
    return {
        (a, kind, b): torch.stack([
            torch.randint(max(NUMBERS[a] - 3, 1), (number,), generator=random),
            torch.randint(max(NUMBERS[b] - 3, 1), (number,), generator=random),
        ])
        for a, kind, b in kinds
    }  # fmt: skip


class Graph:
    """A graph in CSC order, with times of nodes and of edges that ascend among the neighbours of each node."""

    def __init__(self, edge_index: Mapping[EdgeType, Tensor], by: Mapping[EdgeType, Tensor] | None = None) -> None:
        self.colptr, self.row, self.order = {}, {}, {}
        for kind, given in edge_index.items():
            found = csc(given, NUMBERS[kind[2]], None if by is None else by[kind])
            self.colptr[kind], self.row[kind], self.order[kind] = found


def sampled(graph: Graph, seeds: Mapping[str, Tensor], fan_outs: Any, on: str, **how: Any) -> HeteroNeighborhood:
    """Samples on a device."""

    def there(values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: value.to(on) if isinstance(value, Tensor) else value for key, value in values.items()}

    how = {name: there(value) if isinstance(value, dict) else value for name, value in how.items()}
    kinds = list(graph.colptr)
    return sample_neighbors_hetero(
        there(graph.colptr), there(graph.row), there(seeds), _each(fan_outs, kinds), kinds, TYPES,
        num_nodes_dict=NUMBERS, **{"seed": 1, **how},
    )  # fmt: skip


def _each(fan_outs: Any, kinds: list[EdgeType]) -> dict[EdgeType, list[int]]:
    return fan_outs if isinstance(fan_outs, dict) else dict.fromkeys(kinds, fan_outs)


def same(found: HeteroNeighborhood, expected: Reference) -> None:
    """Compares everything that a sampler returns, order included."""
    for name in TYPES:
        batch, node = zip(*expected.node[name], strict=True) if expected.node[name] else ((), ())
        assert found.node[name].tolist() == list(node), name
        assert found.batch is None or found.batch[name].tolist() == list(batch)
        assert found.node[name].dtype == torch.int64
    assert (found.batch is not None) == expected.disjoint
    assert found.edge is not None
    for kind in expected.edge_types:
        columns = (found.row[kind], found.col[kind], found.edge[kind])
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected.edges[kind], kind
    assert found.num_sampled_nodes == expected.nodes_per_hop
    assert found.num_sampled_edges == expected.edges_per_hop


def reference(graph: Graph, seeds: Mapping[str, Tensor], fan_outs: Any, **how: Any) -> Reference:
    """The reference."""
    kinds = list(graph.colptr)
    return Reference(graph.colptr, graph.row, _each(fan_outs, kinds), kinds, TYPES, **how).run(seeds)


SEEDS = {"paper": torch.tensor([3, 7, 3, 39, 0])}


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize(
    "fan_outs",
    [[-1, -1], [9, 9], {CITES: [9, 0], WRITES: [-1, 9], WRITTEN: [9, -1], ABOUT: [0, 9]}, [0, 0], []],
    ids=["all", "bounded", "by type", "none", "no hop"],
)
def test_all_neighbours(fan_outs: Any, disjoint: bool, device_name: str):
    """With fan-outs above all degrees the reference knows every edge."""
    graph = Graph(edges(50))
    found = sampled(graph, SEEDS, fan_outs, device_name, disjoint=disjoint)
    same(found, reference(graph, SEEDS, fan_outs, disjoint=disjoint))


@pytest.mark.parametrize("disjoint", [False, True])
def test_seeds_of_several_types(disjoint: bool, device_name: str):
    graph = Graph(edges(60))
    seeds = {"author": torch.tensor([1, 2, 29]), "paper": torch.tensor([5]), "field": torch.tensor([0, 0])}
    found = sampled(graph, seeds, [-1, 9], device_name, disjoint=disjoint)
    same(found, reference(graph, seeds, [-1, 9], disjoint=disjoint))


@pytest.mark.parametrize("seeds", [{}, {"paper": torch.tensor([], dtype=torch.int64)}, {"field": torch.tensor([4])}])
@pytest.mark.parametrize("number", [0, 60])
def test_nothing_to_find(number: int, seeds: dict[str, Tensor], device_name: str):
    """No seed, a seed without neighbours, and edge types without an edge."""
    graph = Graph(edges(number))
    same(sampled(graph, seeds, [2, -1], device_name), reference(graph, seeds, [2, -1]))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
def test_fan_outs(replace: bool, disjoint: bool, device_name: str):
    """Each node draws the wanted number of its own neighbours, twice with the same seed, otherwise with another."""
    graph, fan_outs = Graph(edges(120)), {CITES: [3, 2], WRITES: [2, 4], WRITTEN: [1, 2], ABOUT: [2, 2]}
    how = dict(replace=replace, disjoint=disjoint)
    one, again, other = (sampled(graph, SEEDS, fan_outs, device_name, **how, seed=seed) for seed in (4, 4, 5))
    assert all(torch.equal(one.node[name], again.node[name]) for name in TYPES)
    assert one.edge is not None and again.edge is not None and other.edge is not None
    assert all(torch.equal(one.edge[kind], again.edge[kind]) for kind in KINDS)
    assert any(one.edge[kind].tolist() != other.edge[kind].tolist() for kind in KINDS)
    assert one.num_sampled_edges is not None
    for kind in KINDS:
        row, col, edge = one.row[kind].cpu(), one.col[kind].cpu(), one.edge[kind].cpu()
        source, target = one.node[kind[0]].cpu(), one.node[kind[2]].cpu()
        assert torch.equal(graph.row[kind][edge], source[row])
        begin, end = graph.colptr[kind][target[col]], graph.colptr[kind][target[col] + 1]
        assert bool(((begin <= edge) & (edge < end)).all())
        if not replace:
            assert len(set(zip(col.tolist(), edge.tolist(), strict=True))) == len(edge)
        at = nodes = 0
        for hop, fan_out in enumerate(fan_outs[kind]):
            number = one.num_sampled_nodes[kind[2]][hop]
            degree = graph.colptr[kind].diff()[target[nodes : nodes + number]]
            wanted = fan_out * (degree > 0) if replace else degree.clamp(max=fan_out)
            drawn = torch.bincount(col[at : at + int(wanted.sum())] - nodes, minlength=number)
            assert torch.equal(drawn, wanted) and one.num_sampled_edges[kind][hop] == int(wanted.sum())
            at, nodes = at + int(wanted.sum()), nodes + number


@pytest.mark.parametrize("of", ["node_time_dict", "edge_time_dict"])
@pytest.mark.parametrize("fan_out", [-1, 2])
def test_times(of: str, fan_out: int, device_name: str):
    """Types without times are not restricted. The latest neighbours are known, so the reference knows every edge."""
    random, kinds = torch.Generator().manual_seed(1), [CITES, WRITES]
    given = edges(150, kinds)
    time = {"paper": torch.randint(20, (NUMBERS["paper"],), generator=random)}
    by = {kind: time["paper"][given[kind][0]] if kind[0] == "paper" else torch.arange(150) for kind in kinds}
    graph = Graph(given, by)
    times: dict[Any, Tensor] = time
    if of == "edge_time_dict":
        times = {CITES: by[CITES][graph.order[CITES]]}
    seeds, limit = {"paper": torch.tensor([1, 2, 1, 9])}, torch.tensor([10, 3, 15, 0])
    fan_outs = {CITES: [fan_out, fan_out], WRITES: [-1, 30]}
    how = {"temporal_strategy": "last", "disjoint": True}
    found = sampled(graph, seeds, fan_outs, device_name, **how, **{of: times}, seed_time_dict={"paper": limit})
    expected = reference(
        graph, seeds, fan_outs, choose=last_of, disjoint=True, seed_time=limit.tolist(),
        **{of.removesuffix("_dict"): times},
    )  # fmt: skip
    same(found, expected)


@pytest.mark.parametrize("disjoint", [False, True])
def test_memory_that_grows_changes_nothing(disjoint: bool, device_name: str, monkeypatch: pytest.MonkeyPatch):
    """Tables by hash and by node, and memory that is known before or grows: the same nodes and edges."""
    graph, found = Graph(edges(60)), []
    for small, largest in ((2**22, 2**25), (4, 2**25), (4, 8)):
        monkeypatch.setattr(hetero_device, "SMALL", small)
        monkeypatch.setattr(hetero_launch, "LARGEST_TABLE", largest)
        found.append(sampled(graph, SEEDS, [3, 2], device_name, disjoint=disjoint))
    for other in found[1:]:
        assert found[0].edge is not None and other.edge is not None
        assert all(torch.equal(found[0].node[name], other.node[name]) for name in TYPES)
        for kind in KINDS:
            assert torch.equal(found[0].edge[kind], other.edge[kind])
            assert torch.equal(found[0].row[kind], other.row[kind])


def drawn(number: int, weight: Tensor | None, where: str) -> Tensor:
    """Returns which of three neighbours each of `number` seeds has drawn by two edge types, ``[2, number]``."""
    kinds: list[EdgeType] = [("field", "about", "paper"), ("author", "writes", "paper")]
    colptr = torch.tensor([0, 3])
    graph = ({kind: colptr.to(where) for kind in kinds}, {kind: torch.arange(3, device=where) for kind in kinds})
    found = sample_neighbors_hetero(
        *graph, {"paper": torch.zeros(number, dtype=torch.int64, device=where)}, {key: [1] for key in kinds},
        kinds, TYPES,
        weight_dict=None if weight is None else {kinds[0]: weight.to(where)}, disjoint=True, seed=3,
        num_nodes_dict={"author": 3, "field": 3},
    )  # fmt: skip
    assert found.edge is not None
    return torch.stack([found.edge[kind].cpu() for kind in kinds])


def fits(number: int, weight: Tensor | None, where: str) -> None:
    """Compares the pairs that two edge types have drawn with independent draws, by Pearson's chi-square test."""
    found = drawn(number, weight, where)
    first = torch.ones(3) if weight is None else weight
    chances = (first / first.sum())[:, None].expand(3, 3) / 3
    counts = torch.bincount(3 * found[0] + found[1], minlength=9).view(3, 3)
    statistic = float(((counts - number * chances) ** 2 / (number * chances)).sum())
    assert 1e-4 < chi2.sf(statistic, 8) < 1 - 1e-4


def test_draws_of_edge_types_are_independent(device_name: str):
    """The interpreter is too slow for draws by weight."""
    fits(3000, None, device_name)


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_many_draws_of_edge_types_are_independent(weighted: bool):
    fits(10**5, torch.tensor([1.0, 2.0, 3.0]) if weighted else None, "cuda")


def test_errors(device_name: str):
    graph = Graph(edges(60))
    with pytest.raises(IndexError, match=r"seed_dict\['paper'\]: found a node outside the graph, expected 0 to 39"):
        sampled(graph, {"paper": torch.tensor([40])}, [2], device_name)
    with pytest.raises(ValueError, match="seed_dict: found type 'x', expected one of paper, author, field"):
        sampled(graph, {"x": torch.tensor([0])}, [2], device_name)
    with pytest.raises(ValueError, match="num_neighbors_dict: found lists of different lengths"):
        sampled(graph, SEEDS, {**{key: [2] for key in KINDS}, CITES: [2, 2]}, device_name)
    with pytest.raises(ValueError, match=r"weight_dict\[\('paper', 'cites', 'paper'\)\]: found a negative"):
        sampled(graph, SEEDS, [1], device_name, replace=True, weight_dict={CITES: torch.full((60,), -1.0)})
    with pytest.raises(TypeError, match=r"row_dict\[\('author', 'writes', 'paper'\)\]: found dtype torch.float32"):
        graph.row[WRITES] = graph.row[WRITES].float()
        sampled(graph, SEEDS, [2], device_name)
    graph.row[WRITES] = graph.row[WRITES].long() + NUMBERS["author"]
    with pytest.raises(IndexError, match=r"row_dict\[\('author', 'writes', 'paper'\)\] or .* outside of 0 to 29"):
        sampled(graph, {"paper": torch.arange(36)}, [2], device_name)
