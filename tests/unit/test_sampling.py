"""Samplers of neighbourhoods against plain references, and the distribution of what they draw."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from gnncompile import testing
from gnncompile.codegen.cpp.compiler import load
from gnncompile.exc import ArgumentError, ArgumentTypeError, IndexOutOfRangeError
from gnncompile.sampling import cpu, hetero_device
from gnncompile.sampling.neighborhood import Neighborhood
from gnncompile.sampling.neighbors import sample_neighbors, sample_neighbors_hetero
from tests.sampled import KIND, Reference, all_of, check, csc, last_of, reference, same

AWKWARD = {
    "unsorted, duplicates, hub": torch.tensor([[3, 0, 2, 0, 1, 4, 4, 0, 2], [0, 1, 0, 1, 0, 0, 2, 0, 3]]),
    "no edge": torch.empty(2, 0, dtype=torch.long),
    "self loops": torch.tensor([[0, 1, 1, 2, 2, 2], [0, 1, 1, 2, 1, 0]]),
    "one edge": torch.tensor([[2], [2]]),
    "path": torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]),
    "hub": torch.stack([torch.arange(300) % 5, torch.zeros(300, dtype=torch.long)]),
}
SEEDS = {"one": [0], "all": [4, 2, 0, 1, 3], "twice": [2, 0, 2, 2], "none": []}


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def power_law(num_nodes: int = 3000, num_edges: int = 40000) -> tuple[Tensor, Tensor, Tensor]:
    return csc(testing.power_law(num_nodes, num_edges, max_degree=900, channels=None, seed=3).edge_index, num_nodes)


def equal(a: Neighborhood, b: Neighborhood) -> bool:
    tensors = ("node", "row", "col", "edge", "batch")
    return all(
        (x is None and y is None) or torch.equal(x, y) for x, y in ((getattr(a, n), getattr(b, n)) for n in tensors)
    ) and (a.num_sampled_nodes, a.num_sampled_edges) == (b.num_sampled_nodes, b.num_sampled_edges)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("graph", AWKWARD)
def test_all_neighbours(graph: str, seeds: str, disjoint: bool, dtype: torch.dtype) -> None:
    colptr, row, _ = csc(AWKWARD[graph], 5)
    nodes = torch.tensor(SEEDS[seeds], dtype=dtype)
    for fan_outs in ([-1], [-1, -1, -1], [0, -1], [-1, 0], []):
        found = sample_neighbors(colptr.to(dtype), row.to(dtype), nodes, fan_outs, disjoint=disjoint, seed=1)
        same(found, reference(colptr, row, nodes, fan_outs, disjoint=disjoint))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("graph", AWKWARD)
def test_samples_are_subgraphs(graph: str, seeds: str, replace: bool) -> None:
    colptr, row, _ = csc(AWKWARD[graph], 5)
    nodes = torch.tensor(SEEDS[seeds], dtype=torch.long)
    for seed in range(5):
        for fan_outs in ([1], [2, 3], [30, 2], [-1, 1, 1]):
            for disjoint in (False, True):
                how = {"replace": replace, "disjoint": disjoint, "seed": seed}
                check(sample_neighbors(colptr, row, nodes, fan_outs, **how), colptr, row, nodes, fan_outs, replace)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_a_large_graph_on_any_number_of_threads(threads: Any, number: int, replace: bool, disjoint: bool) -> None:
    colptr, row, _ = power_law()
    seeds, fan_outs = torch.arange(0, 2000, 7), [10, 30, 2]
    threads(number)
    found = sample_neighbors(colptr, row, seeds, fan_outs, replace=replace, disjoint=disjoint, seed=11)
    check(found, colptr, row, seeds, fan_outs, replace)
    assert len(found.row) > 20_000
    threads(1)
    assert equal(found, sample_neighbors(colptr, row, seeds, fan_outs, replace=replace, disjoint=disjoint, seed=11))
    other = sample_neighbors(colptr, row, seeds, fan_outs, replace=replace, disjoint=disjoint, seed=12)
    assert not equal(found, other)


@pytest.mark.parametrize("number", [1, 2])
def test_all_neighbours_of_a_large_graph(threads: Any, number: int) -> None:
    colptr, row, _ = power_law()
    threads(number)
    for seeds in (torch.tensor([5]), torch.arange(500)):
        same(sample_neighbors(colptr, row, seeds, [-1, -1], seed=0), reference(colptr, row, seeds, [-1, -1]))


@pytest.mark.slow
def test_local_ids_in_an_array_and_in_a_hash_table(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of up to 2**26 nodes have an array of local ids, larger ones a hash table, and results are the same.

    Entries of the array are of many calls, and of several graphs. It is cleared when its numbers run out.
    """
    graphs = [power_law(), power_law(500, 3000), csc(AWKWARD["hub"], 5)]

    def results() -> list[Neighborhood]:
        found = []
        for k in range(60):
            colptr, row, _ = graphs[k % 3]
            seeds = torch.arange(k % 5, 5)
            threads(1 if k % 4 else 3)
            found.append(sample_neighbors(colptr, row, seeds, [20, 30], directed=k % 7 > 0, seed=k))
        return found

    expected, source = results(), cpu._SOURCE.read_text(encoding="utf-8")
    changed = {"MOST_KEYS = i64(1) << 26": "MOST_KEYS = 3", "MOST_IDS = Word(1) << 31": "MOST_IDS = Word(1) << 13"}
    for old, new in changed.items():
        assert source.count(old) == 1
        made = cpu.declared(load(source.replace(old, new), contract=False))
        monkeypatch.setattr(cpu, "library", lambda made=made: made)
        assert all(map(equal, results(), expected))
    colptr, row, _ = power_law()
    with pytest.raises(ArgumentError, match="seeds: found a subgraph of"):
        sample_neighbors(colptr, row, torch.arange(3000), [30], seed=1)


@pytest.mark.slow
def test_edges_are_drawn_in_lanes_and_streamed(monkeypatch: pytest.MonkeyPatch, threads: Any) -> None:
    """Nodes that draw at once, and edges that are written past the caches, give the bits of plain loops.

    Degrees reach from 0 to 900, so some nodes take all edges, and some draw two positions of one bit.
    """
    colptr, row, _ = power_law()
    hub = csc(AWKWARD["hub"], 5)[:2]
    changes: list[dict[str, str]] = [
        {"&& hop.fan_out <= FEW &&": "&& false &&"},
        {"STREAMED = 1 << 16": "STREAMED = 1"},
        {"STREAMED = 1 << 16": "STREAMED = 1", "KEPT = 64 * STEP": "KEPT = 7 * STEP"},
        {"(i64(1) << 32) - FEW": "0"},
    ]

    def results() -> list[Neighborhood]:
        threads(1)
        found = []
        for k, fan_outs in enumerate(([1, 2], [15, 10], [24, 5], [25, 3], [0, 4], [-1, 6], [9, 9])):
            for kind in (torch.int32, torch.int64):
                for seeds in (torch.arange(k, 1003 + k), torch.arange(3)):
                    found.append(sample_neighbors(colptr.to(kind), row.to(kind), seeds, fan_outs, seed=k))
                found.append(sample_neighbors(*hub, torch.arange(5), fan_outs, disjoint=True, seed=k))
        return found

    expected, source = results(), cpu._SOURCE.read_text(encoding="utf-8")
    for change in changes:
        text = source
        for old, new in change.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        made = cpu.declared(load(text, contract=False))
        monkeypatch.setattr(cpu, "library", lambda made=made: made)
        assert all(map(equal, results(), expected))


def test_a_source_that_does_not_exist_in_a_large_hop() -> None:
    colptr, row, _ = power_law()
    for number, position in ((3000, 39_999), (-1, 20_000)):
        wrong = row.clone()
        wrong[position] = number
        with pytest.raises(IndexOutOfRangeError, match=f"found {number} at position {position}"):
            sample_neighbors(colptr, wrong, torch.arange(3000), [-1], seed=1)


def test_memory_is_used_again_only_after_its_tensor() -> None:
    colptr, row, _ = power_law()
    made = [sample_neighbors(colptr, row, torch.arange(k, k + 50), [5, 5], seed=k) for k in range(6)]
    views = [found.node[3:9] for found in made]
    expected = [view.clone() for view in views]
    del made
    gc.collect()
    for k in range(20):
        sample_neighbors(colptr, row, torch.arange(k, k + 90), [5, 5], seed=k)
    assert all(torch.equal(view, value) for view, value in zip(views, expected, strict=True))


def test_huge_pages_keep_values() -> None:
    for number in (0, 10, 5_000_000):
        tensor = torch.arange(number)
        address = tensor.data_ptr()
        cpu.prefer_huge_pages(tensor)
        assert tensor.data_ptr() == address and torch.equal(tensor, torch.arange(number))


# -- induced subgraphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("graph", [*AWKWARD, "power law"])
def test_induced_subgraphs(threads: Any, graph: str, number: int) -> None:
    threads(number)
    colptr, row, _ = power_law(500, 9000) if graph == "power law" else csc(AWKWARD[graph], 5)
    seeds = torch.tensor([4, 2, 0])
    directed = sample_neighbors(colptr, row, seeds, [2, 2], seed=3)
    found = sample_neighbors(colptr, row, seeds, [2, 2], directed=False, seed=3)
    assert torch.equal(found.node, directed.node) and found.num_sampled_nodes == directed.num_sampled_nodes
    assert found.num_sampled_edges is None and found.edge is not None
    local = {node: at for at, node in enumerate(found.node.tolist())}
    expected = [
        (local[int(row[edge])], at, edge)
        for node, at in local.items()
        for edge in range(int(colptr[node]), int(colptr[node + 1]))
        if int(row[edge]) in local
    ]
    assert list(zip(found.row.tolist(), found.col.tolist(), found.edge.tolist(), strict=True)) == expected


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed_time", [None, [3, 9, 0, 5]])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("graph", AWKWARD)
def test_times_of_nodes(graph: str, strategy: str, seed_time: list[int] | None) -> None:
    time = torch.tensor([4, 0, 7, 5, 5])
    colptr, row, _ = csc(AWKWARD[graph], 5, time[AWKWARD[graph][0]])
    seeds = torch.tensor([0, 2, 1, 0])
    for count in (-1, 2) if strategy == "last" else (-1, 400):
        found = sample_neighbors(
            colptr,
            row,
            seeds,
            [count, count],
            node_time=time,
            seed_time=None if seed_time is None else torch.tensor(seed_time),
            disjoint=True,
            temporal_strategy=strategy,
            seed=5,
        )
        times = time[seeds].tolist() if seed_time is None else seed_time
        choose = last_of if strategy == "last" else all_of
        how = {"node_time": time, "seed_time": times, "disjoint": True, "choose": choose}
        same(found, reference(colptr, row, seeds, [count, count], **how))


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("graph", AWKWARD)
def test_times_of_edges(graph: str, strategy: str) -> None:
    generator = torch.Generator().manual_seed(1)
    time = torch.randint(0, 6, (AWKWARD[graph].size(1),), generator=generator)
    colptr, row, order = csc(AWKWARD[graph], 5, time)
    time, seeds, seed_time = time[order], torch.tensor([0, 2, 1, 0]), torch.tensor([2, 9, 3, 4])
    for count in (-1, 2) if strategy == "last" else (-1, 400):
        found = sample_neighbors(
            colptr,
            row,
            seeds,
            [count, count],
            edge_time=time,
            seed_time=seed_time,
            disjoint=True,
            temporal_strategy=strategy,
            seed=5,
        )
        choose = last_of if strategy == "last" else all_of
        how = {"edge_time": time, "seed_time": seed_time.tolist(), "disjoint": True, "choose": choose}
        same(found, reference(colptr, row, seeds, [count, count], **how))


# -- node types --------------------------------------------------------------------------------------------------------

TYPES = ("paper", "author", "venue")
KINDS = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "by", "author"),
    ("venue", "has", "paper"),
)
SIZES = {"paper": 40, "author": 25, "venue": 6}


def typed(by: dict[str, Tensor] | None = None) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    colptr, row = {}, {}
    for kind in KINDS:
        ends = [torch.randint(SIZES[kind[end]], (90,), generator=generator) for end in (0, 2)]
        sort_by = by[kind[0]][ends[0]] if by is not None and kind[0] in by else None
        colptr[kind], row[kind], _ = csc(torch.stack(ends), SIZES[kind[2]], sort_by)
    return colptr, row


def same_types(found: Any, expected: Reference) -> None:
    for name in TYPES:
        assert found.node[name].tolist() == [node for _, node in expected.node[name]]
        if expected.disjoint:
            assert found.batch[name].tolist() == [batch for batch, _ in expected.node[name]]
    for kind in KINDS:
        edges = zip(found.row[kind].tolist(), found.col[kind].tolist(), found.edge[kind].tolist(), strict=True)
        assert list(edges) == expected.edges[kind]
    assert found.num_sampled_nodes == expected.nodes_per_hop
    assert found.num_sampled_edges == expected.edges_per_hop


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize("disjoint", [False, True])
def test_all_neighbours_of_several_types(disjoint: bool, sizes: dict[str, int] | None) -> None:
    colptr, row = typed()
    fan_outs = {kind: [-1, 0 if kind[1] == "cites" else -1] for kind in KINDS}
    for seeds in ({"paper": torch.tensor([3, 1])}, {"author": torch.tensor([7, 7]), "paper": torch.tensor([0])}):
        how = {"disjoint": disjoint, "num_nodes_dict": sizes, "seed": 0}
        found = sample_neighbors_hetero(colptr, row, seeds, fan_outs, KINDS, TYPES, **how)  # type: ignore[arg-type]
        assert (found.batch is not None) == disjoint
        same_types(found, Reference(colptr, row, fan_outs, KINDS, TYPES, disjoint=disjoint).run(seeds))


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_times_of_several_types(strategy: str) -> None:
    generator = torch.Generator().manual_seed(4)
    time = {name: torch.randint(9, (SIZES[name],), generator=generator) for name in ("paper", "author")}
    colptr, row = typed(time)
    seeds = {"paper": torch.tensor([3, 1, 3]), "author": torch.tensor([7])}
    count = 2 if strategy == "last" else -1
    fan_outs = {kind: [count if kind[0] != "venue" else -1] * 2 for kind in KINDS}
    for given in (None, {"paper": torch.tensor([5, 2, 8]), "author": torch.tensor([4])}):
        found = sample_neighbors_hetero(
            colptr,
            row,
            seeds,
            fan_outs,
            KINDS,
            TYPES,
            node_time_dict=time,
            seed_time_dict=given,
            disjoint=True,
            temporal_strategy=strategy,
            seed=0,
        )
        times = [t for name, nodes in seeds.items() for t in (given[name] if given else time[name][nodes]).tolist()]
        choose = last_of if strategy == "last" else all_of
        how: Any = {"disjoint": True, "node_time": time, "seed_time": times, "choose": choose}
        same_types(found, Reference(colptr, row, fan_outs, KINDS, TYPES, **how).run(seeds))


def test_samples_of_several_types() -> None:
    colptr, row = typed()
    seeds, fan_outs = {"paper": torch.arange(10)}, {kind: [2, 2] for kind in KINDS}
    found = sample_neighbors_hetero(colptr, row, seeds, fan_outs, KINDS, TYPES, seed=0)
    assert found.edge is not None
    for kind in KINDS:
        edge, col = found.edge[kind], found.col[kind]
        assert torch.equal(row[kind][edge], found.node[kind[0]][found.row[kind]])
        assert torch.equal(torch.bucketize(edge, colptr[kind], right=True) - 1, found.node[kind[2]][col])
        degree = colptr[kind].diff()[found.node[kind[2]]].clamp(max=2)
        drawn = torch.bincount(col, minlength=len(degree))
        reached = sum(found.num_sampled_nodes[kind[2]][:-1])
        assert torch.equal(drawn[:reached], degree[:reached]) and not drawn[reached:].any()
    again = sample_neighbors_hetero(colptr, row, seeds, fan_outs, KINDS, TYPES, seed=0)
    assert all(torch.equal(found.edge[kind], again.edge[kind]) for kind in KINDS if again.edge is not None)


def test_induced_subgraphs_of_several_types() -> None:
    colptr, row = typed()
    seeds, fan_outs = {"paper": torch.arange(4)}, {kind: [2, 2] for kind in KINDS}
    found = sample_neighbors_hetero(colptr, row, seeds, fan_outs, KINDS, TYPES, directed=False, seed=0)
    assert found.edge is not None
    for kind in KINDS:
        local = {node: at for at, node in enumerate(found.node[kind[0]].tolist())}
        expected = [
            (local[int(row[kind][edge])], at, edge)
            for at, node in enumerate(found.node[kind[2]].tolist())
            for edge in range(int(colptr[kind][node]), int(colptr[kind][node + 1]))
            if int(row[kind][edge]) in local
        ]
        edges = zip(found.row[kind].tolist(), found.col[kind].tolist(), found.edge[kind].tolist(), strict=True)
        assert list(edges) == expected


# -- distributions -----------------------------------------------------------------------------------------------------

DRAWS = 100_000


def likely(found: Sequence[int], expected: Sequence[float], scale: float = 1.0) -> None:
    """Asserts that counts are as expected, by a chi-square test. Seeds are fixed, so the test has one outcome."""
    assert min(expected) > 5
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True)) * scale
    assert 1e-4 < chi2.sf(statistic, len(found) - 1) < 1 - 1e-4


def star(degree: int, before: int = 0) -> tuple[Tensor, Tensor]:
    """Node `before` has `degree` neighbours; a path of single edges leads there from node 0."""
    edges = [(k + 1, k) for k in range(before)] + [(before + 1 + k, before) for k in range(degree)]
    colptr, row, _ = csc(torch.tensor(edges).t(), before + 1 + degree)
    return colptr, row


def draws(degree: int, count: int, hop: int, **how: Any) -> Tensor:
    """The positions that `DRAWS / count` sampled nodes of one degree draw in a hop, ``[nodes, count]``."""
    colptr, row = star(degree, hop)
    seeds = torch.zeros(DRAWS // count, dtype=torch.long)
    how = {"disjoint": True, "seed": 17, **how}
    found = sample_neighbors(colptr, row, seeds, [1] * hop + [count], **how)
    assert found.edge is not None
    return found.edge[hop * len(seeds) :].view(len(seeds), count) - hop


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize(("degree", "count"), [(6, 2), (20, 5), (64, 9), (100, 3), (400, 24), (70, 50), (3000, 25)])
def test_draws_without_replacement(degree: int, count: int, hop: int) -> None:
    found = draws(degree, count, hop)
    assert all(len(set(row)) == count for row in found[:500].tolist())
    # The counts of a sample without replacement vary less than independent ones.
    share = count / degree
    scale = (degree - 1) / (degree * (1 - share))
    number = torch.bincount(found.reshape(-1), minlength=degree).tolist()
    likely(number, [len(found) * share] * degree, scale)


@pytest.mark.parametrize(("degree", "count"), [(6, 3), (70, 2)])
def test_all_subsets_are_equally_likely(degree: int, count: int) -> None:
    found = Counter(tuple(sorted(row)) for row in draws(degree, count, 0).tolist())
    subsets = list(combinations(range(degree), count))
    likely([found[subset] for subset in subsets], [DRAWS / count / len(subsets)] * len(subsets))


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize(("degree", "count"), [(3, 5), (20, 4), (400, 10)])
def test_draws_with_replacement(degree: int, count: int, hop: int) -> None:
    found = draws(degree, count, hop, replace=True)
    likely(torch.bincount(found.reshape(-1), minlength=degree).tolist(), [found.numel() / degree] * degree)
    # Draws of one node, and of nodes side by side, don't depend on each other.
    if degree <= 20:
        for pair in (found[:, 0] * degree + found[:, 1], found[:-1, 0] * degree + found[1:, 0]):
            number = torch.bincount(pair, minlength=degree**2).tolist()
            likely(number, [len(pair) / degree**2] * degree**2)


def test_draws_of_two_hops_do_not_depend_on_each_other() -> None:
    degree = 10
    edges = [(1 + k, 0) for k in range(degree)] + [(11 + k, 1 + n) for n in range(degree) for k in range(degree)]
    colptr, row, _ = csc(torch.tensor(edges).t(), 11 + degree)
    seeds = torch.zeros(DRAWS, dtype=torch.long)
    found = sample_neighbors(colptr, row, seeds, [1, 1], disjoint=True, seed=23)
    nodes = found.node.view(3, DRAWS)
    pairs = (nodes[1] - 1) * degree + nodes[2] - 11
    likely(torch.bincount(pairs, minlength=degree**2).tolist(), [DRAWS / degree**2] * degree**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_draws_without_replacement(dtype: torch.dtype) -> None:
    weight = torch.tensor([1.0, 5.0, 0.5, 2.0, 3.0], dtype=dtype)
    found = Counter(map(tuple, draws(5, 2, 0, weight=weight).tolist()))
    pairs, total = list(permutations(range(5), 2)), float(weight.sum())
    chance = [float(weight[a] / total * weight[b] / (total - weight[a])) for a, b in pairs]
    likely([found[pair] for pair in pairs], [DRAWS / 2 * p for p in chance])


def test_weighted_draws_with_replacement() -> None:
    weight = torch.tensor([1.0, 5.0, 0.0, 2.0, 3.0, 0.0])
    found = torch.bincount(draws(6, 4, 0, weight=weight, replace=True).reshape(-1), minlength=6).tolist()
    assert found[2] == found[5] == 0
    some = [0, 1, 3, 4]
    likely([found[k] for k in some], [DRAWS * float(weight[k] / weight.sum()) for k in some])


def test_edges_of_weight_zero_come_last() -> None:
    weight = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert {frozenset(row) for row in draws(4, 2, 0, weight=weight).tolist()} == {frozenset({1, 3})}
    assert all({1, 3} < set(row) for row in draws(4, 3, 0, weight=weight)[:1000].tolist())
    assert draws(4, 4, 0, weight=weight)[0].tolist() == [0, 1, 2, 3]


def test_draws_by_time() -> None:
    time = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 8, 8])
    colptr, row = star(10)
    seeds = torch.zeros(DRAWS // 2, dtype=torch.long)
    node_time = torch.cat([torch.tensor([3]), time])
    found = sample_neighbors(colptr, row, seeds, [2], node_time=node_time, disjoint=True, seed=2)
    by_edge = sample_neighbors(
        colptr, row, seeds, [2], edge_time=time, seed_time=torch.full_like(seeds, 3), disjoint=True, seed=2
    )
    for one in (found, by_edge):
        assert one.edge is not None and int(one.edge.max()) == 6
        number = torch.bincount(one.edge, minlength=7).tolist()
        likely(number, [DRAWS / 7] * 7, 6 / (7 * (1 - 2 / 7)))


def test_another_seed_draws_other_numbers() -> None:
    seen = {tuple(draws(50, 1, 0, seed=seed).view(-1)[:40].tolist()) for seed in (0, 1, 2**63, 2**64 - 1, -7)}
    assert len(seen) == 5


# -- errors ------------------------------------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    colptr, row, _ = csc(AWKWARD["unsorted, duplicates, hub"], 5)
    seeds, time = torch.tensor([0]), torch.arange(5)
    edge_time, weight = torch.arange(9), torch.ones(9)

    def wrong(error: type[Exception], message: str, *given: Any, **how: Any) -> None:
        with pytest.raises(error, match=message):
            sample_neighbors(*(given or (colptr, row, seeds, [2])), seed=0, **how)

    wrong(ArgumentError, "temporal_strategy: found 'first'", temporal_strategy="first")
    wrong(ArgumentError, "directed: found False with disjoint=True", directed=False, disjoint=True)
    wrong(ArgumentError, "disjoint: found False, expected True", node_time=time)
    wrong(ArgumentError, "edge_time: found times beside", node_time=time, edge_time=edge_time, disjoint=True)
    wrong(ArgumentError, "weight: found weights beside times", node_time=time, weight=weight, disjoint=True)
    wrong(ArgumentError, "seed_time: found None", edge_time=edge_time.sort().values, disjoint=True)
    wrong(ArgumentError, r"node_time: found shape \[4\], expected \[5\]", node_time=time[:4], disjoint=True)
    wrong(ArgumentTypeError, "node_time: found dtype torch.float32", node_time=time.float(), disjoint=True)
    wrong(ArgumentTypeError, "weight: found dtype torch.int64", weight=edge_time)
    wrong(ArgumentError, r"weight: found shape \[8\], expected \[9\]", weight=weight[:8])
    wrong(ArgumentError, "row: found 8 edges, expected 9", colptr, row[:8], seeds, [2])
    wrong(ArgumentTypeError, "row: found dtype torch.int16", colptr, row.short(), seeds, [2])
    wrong(ArgumentTypeError, "seeds: found dtype torch.bool", colptr, row, torch.ones(5, dtype=torch.bool), [2])
    for seed in (-1, 5):
        wrong(
            IndexOutOfRangeError, f"seeds: found node {seed}, expected 0 to 4", colptr, row, torch.tensor([seed]), [2]
        )
    wrong(IndexOutOfRangeError, "row: found 7 at position 0", colptr, row.clone().index_fill_(0, seeds, 7), seeds, [-1])


def test_wrong_weights_and_times() -> None:
    colptr, row = star(4)
    for bad in (-1.0, float("nan"), float("inf")):
        weight = torch.tensor([1.0, 2.0, bad, 1.0])
        for replace in (False, True):
            with pytest.raises(ArgumentError, match=f"weight: found {bad} at position 2"):
                sample_neighbors(colptr, row, torch.tensor([0]), [2], weight=weight, replace=replace, seed=0)
    with pytest.raises(ArgumentError, match="weight: found only zeros"):
        sample_neighbors(colptr, row, torch.tensor([0]), [2], weight=torch.zeros(4), replace=True, seed=0)
    with pytest.raises(ArgumentError, match="times of the neighbours of node 0 that are not sorted"):
        sample_neighbors(
            colptr, row, torch.tensor([0]), [2], node_time=torch.tensor([9, 4, 0, 0, 1]), disjoint=True, seed=0
        )


def test_wrong_types() -> None:
    colptr, row = typed()
    fan_outs, paper = {kind: [2, 2] for kind in KINDS}, {"paper": torch.tensor([0])}
    with pytest.raises(ArgumentError, match="seed_dict: found type 'book', expected one of paper, author, venue"):
        sample_neighbors_hetero(colptr, row, {"book": torch.tensor([0])}, fan_outs, KINDS, TYPES, seed=0)
    with pytest.raises(ArgumentError, match="num_neighbors_dict: found lists of different lengths"):
        sample_neighbors_hetero(colptr, row, paper, {**fan_outs, KINDS[0]: [2]}, KINDS, TYPES, seed=0)
    with pytest.raises(ArgumentError, match="seed_time_dict: found no times of 'paper'"):
        time = {"author": torch.zeros(25, dtype=torch.long)}
        sample_neighbors_hetero(colptr, row, paper, fan_outs, KINDS, TYPES, node_time_dict=time, disjoint=True, seed=0)
    with pytest.raises(ArgumentTypeError, match=r"weight_dict\[\('paper', 'cites', 'paper'\)\]: found dtype"):
        weight = {KINDS[1]: torch.ones(90, dtype=torch.long)}
        sample_neighbors_hetero(colptr, row, paper, fan_outs, KINDS, TYPES, weight_dict=weight, seed=0)


@pytest.mark.parametrize("sample", [sample_neighbors_hetero, hetero_device.sample_neighbors_hetero])
def test_types_that_are_missing(sample: Any) -> None:
    """An error names the argument that lacks an edge type, or the node type of edges that the graph lacks."""
    colptr, row = typed()
    given: dict[str, Any] = {
        "colptr_dict": colptr,
        "row_dict": row,
        "num_neighbors_dict": {kind: [2] for kind in KINDS},
    }
    more = {"seed_dict": {"paper": torch.tensor([0])}, "edge_types": KINDS, "seed": 0}
    for name in given:
        some = {**given, name: {KINDS[0]: given[name][KINDS[0]]}}
        with pytest.raises(ArgumentError, match=rf"{name}: found \('author', .*; add a value for \('paper', 'cites'"):
            sample(**some, **more, node_types=TYPES)
    with pytest.raises(ArgumentError, match=r"edge_types: found .*, whose nodes of type 'author' the graph does"):
        sample(**given, **more, node_types=["paper", "venue"])


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    colptr, row = star(3)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    cpu.library.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"sampler: it is compiled .* no C\+\+ compiler found"):
            sample_neighbors(colptr, row, torch.tensor([0]), [2], seed=0)
    finally:
        cpu.library.cache_clear()


def test_the_reference_of_one_type_is_that_of_several() -> None:
    """The references are one: a graph with one type given as a typed one samples the same."""
    colptr, row, _ = power_law(200, 2000)
    found = sample_neighbors_hetero(
        {KIND: colptr}, {KIND: row}, {"node": torch.arange(5)}, {KIND: [3, 3]}, [KIND], ["node"], seed=4
    )
    alone = sample_neighbors(colptr, row, torch.arange(5), [3, 3], seed=4)
    assert torch.equal(found.node["node"], alone.node) and torch.equal(found.row[KIND], alone.row)
