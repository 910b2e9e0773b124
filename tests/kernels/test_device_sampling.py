"""The sampler for GPUs: against a sampler in plain Python, the distribution of its draws, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.exc import UnsupportedSampling
from gnncompile.sampling import bounded, device, launch
from gnncompile.sampling.device import sample_neighbors
from gnncompile.sampling.neighborhood import Neighborhood
from gnncompile.testing import awkward
from tests.kernels.sampling_reference import floyd, lightest, sample, words

pytestmark = triton_regions.INTERPRETED
device_name = triton_regions.device

Csc = tuple[Tensor, Tensor]


def csc(edge_index: Tensor, num_nodes: int) -> Csc:
    """Returns colptr and row of an edge list."""
    col, order = edge_index[1].sort(stable=True)
    return torch.searchsorted(col, torch.arange(num_nodes + 1)), edge_index[0][order]


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> Csc:
    """Returns a graph with edges given twice and with self loops."""
    random = torch.Generator().manual_seed(seed)
    return csc(torch.randint(num_nodes, (2, num_edges), generator=random), num_nodes)


def hub(degree: int) -> Csc:
    """Returns a graph in which all edges lead to node 0; the sources are 1 to `degree`."""
    return torch.tensor([0] + [degree] * (degree + 1)), torch.arange(1, degree + 1)


def found(graph: Csc, seeds: Tensor, fan_outs: list[int], on: str, **options: Any) -> Neighborhood:
    """Samples on a device."""
    moved = {name: value.to(on) if isinstance(value, Tensor) else value for name, value in options.items()}
    return sample_neighbors(graph[0].to(on), graph[1].to(on), seeds.to(on), fan_outs, **moved)


def check(graph: Csc, seeds: Tensor, fan_outs: list[int], on: str, **options: Any) -> Neighborhood:
    """Compares a sampling with the reference: the same nodes, edges and numbers, in the same order."""
    result, expected = found(graph, seeds, fan_outs, on, **options), sample(*graph, seeds, fan_outs, **options)
    for name in ("node", "row", "col", "edge"):
        assert getattr(result, name).dtype == torch.int64
        assert getattr(result, name).tolist() == getattr(expected, name), name
    if options.get("disjoint"):
        assert result.batch is not None and result.batch.tolist() == expected.batch
    else:
        assert result.batch is None
    assert result.num_sampled_nodes == expected.num_sampled_nodes
    assert result.num_sampled_edges == expected.num_sampled_edges
    return result


SMALL = {
    name: csc(data.edge_index, data.num_nodes) for name, data in awkward(channels=None).items() if name != "bipartite"
}


# -- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"replace": True}, {"disjoint": True}], ids=str)
@pytest.mark.parametrize("name", list(SMALL))
def test_awkward_graphs(name: str, options: dict[str, Any], device_name: str):
    graph = SMALL[name]
    last = graph[0].numel() - 2
    check(graph, torch.tensor([0, last, 0]), [2, 3], device_name, seed=1, **options)


@pytest.mark.parametrize(
    "fan_outs, options",
    [
        ([5, 3, 2], {}),
        ([5, 3], {"replace": True}),
        ([5, 3], {"disjoint": True}),
        ([1], {}),
        ([4, 0, 3], {}),
        ([-1, 2], {}),
        ([2, -1], {"disjoint": True}),
        ([-1, 2], {"replace": True}),
        ([0], {}),
        ([], {}),
        ([30, 7], {}),
    ],
    ids=str,
)
def test_fan_outs(fan_outs: list[int], options: dict[str, Any], device_name: str):
    seeds = torch.tensor([3, 59, 3, 17])
    result = check(random_graph(60, 700), seeds, fan_outs, device_name, seed=2**40 + 7, **options)
    assert result.node[:4].tolist() == seeds.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"weights": True}], ids=str)
def test_dtypes_of_graphs(dtype: torch.dtype, options: dict[str, Any], device_name: str, monkeypatch):
    monkeypatch.setattr(launch, "_STEP", 16)
    colptr, row = random_graph(30, 300)
    options = {"weight": torch.rand(300, dtype=torch.float64) + 0.1} if options == {"weights": True} else options
    expected = sample(colptr, row, torch.tensor([4, 5]), [3, 2], seed=3, **options)
    result = found(
        (colptr.to(dtype), row.to(dtype)), torch.tensor([4, 5], dtype=dtype), [3, 2], device_name, seed=3, **options
    )
    assert result.edge is not None and result.edge.tolist() == expected.edge and result.row.tolist() == expected.row


def test_no_seeds(device_name: str):
    for options in ({}, {"disjoint": True}):
        result = check(random_graph(9, 20), torch.empty(0, dtype=torch.int64), [3, -1], device_name, seed=0, **options)
        assert result.num_sampled_nodes == [0, 0, 0]
    nothing = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    check(nothing, torch.empty(0, dtype=torch.int64), [3], device_name, seed=0)


def test_hub(device_name: str):
    """Of 5,000 edges: distinct ones, all, and by weight in several steps."""
    graph, seeds = hub(5000), torch.tensor([0, 0])
    result = check(graph, seeds, [20], device_name, seed=4)
    assert result.edge is not None and all(len(set(one.tolist())) == 20 for one in result.edge.view(2, 20))
    check(graph, seeds, [-1], device_name, seed=4)
    check(graph, seeds, [20], device_name, seed=4, replace=True)
    weight = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    check(graph, seeds[:1], [4], device_name, seed=4, weight=weight)
    check(graph, seeds[:1], [20], device_name, seed=4, weight=weight, replace=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fan_outs", [[3, 2], [1], [-1]], ids=str)
def test_weights(fan_outs: list[int], replace: bool, dtype: torch.dtype, device_name: str, monkeypatch):
    monkeypatch.setattr(launch, "_STEP", 8)  # several steps per node
    random = torch.Generator().manual_seed(0)
    weight = torch.rand(200, generator=random, dtype=torch.float64).to(dtype) * 10.0 ** torch.randint(
        -3, 4, (200,), generator=random
    )
    weight[::3] = 0.0
    graph = random_graph(12, 200)
    check(graph, torch.tensor([1, 7]), fan_outs, device_name, seed=5, weight=weight.to(dtype), replace=replace)


def test_weights_of_0_come_last(device_name: str):
    weight = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    for seed in range(3):
        result = check(hub(5), torch.tensor([0]), [3], device_name, seed=seed, weight=weight)
        assert result.edge is not None and {1, 3} < set(result.edge.tolist())


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("of", ["node_time", "edge_time"])
@pytest.mark.parametrize("replace", [False, True])
def test_times(strategy: str, of: str, replace: bool, device_name: str):
    """Each seed sees the edges until its own time, the time itself included."""
    random = torch.Generator().manual_seed(0)
    (colptr, row), node_time = random_graph(25, 250), torch.randint(40, (25,), generator=random)
    col = torch.repeat_interleave(torch.arange(25), colptr.diff())
    time = node_time[row] if of == "node_time" else torch.randint(40, (250,), generator=random)
    order = (col * 1000 + time).argsort(stable=True)
    row, time = row[order], time[order]
    seeds, limit = torch.tensor([3, 3, 8, 21]), torch.tensor([5, 39, 0, 22])
    options: dict[str, Any] = {of: node_time if of == "node_time" else time, "disjoint": True, "replace": replace}
    for fan_outs in ([3, 2], [-1, 1]):
        result = check(
            (colptr, row), seeds, fan_outs, device_name, seed=6, seed_time=limit, temporal_strategy=strategy, **options
        )
        assert result.edge is not None and result.batch is not None and result.edge.numel() > 5
        assert bool((time[result.edge.cpu()] <= limit[result.batch.cpu()[result.col.cpu()]]).all())
    if of == "node_time":
        check((colptr, row), seeds, [3, 2], device_name, seed=6, temporal_strategy=strategy, **options)


@pytest.mark.parametrize("disjoint", [False, True])
def test_hash_table_and_growing_memory_change_nothing(disjoint: bool, device_name: str, monkeypatch):
    graph, seeds = random_graph(80, 900), torch.arange(9)
    expected = check(graph, seeds, [4, 3, 2], device_name, seed=8, disjoint=disjoint)
    monkeypatch.setattr(device, "SMALL", 10)
    check(graph, seeds, [4, 3, 2], device_name, seed=8, disjoint=disjoint)
    monkeypatch.setattr(device, "needs_hash", lambda graph: True)
    again = check(graph, seeds, [4, 3, 2], device_name, seed=8, disjoint=disjoint)
    assert torch.equal(expected.node, again.node)


def test_many_programs(device_name: str, monkeypatch):
    """A hop spans several programs of each kernel, whose sums are added up in several steps."""
    monkeypatch.setattr(launch, "BLOCK", 16)
    monkeypatch.setattr(launch, "_TILE", 32)
    seeds = torch.arange(40).roll(3)
    check(random_graph(500, 4000), seeds, [4], device_name, seed=9)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=str)
def test_order_of_programs_changes_nothing(options: dict[str, Any], device_name: str, monkeypatch):
    """The interpreter runs the last program first. A GPU runs them in any order, so there a repetition must do."""
    monkeypatch.setattr(launch, "BLOCK", 16)
    monkeypatch.setattr(launch, "_TILE", 16)
    graph, seeds = random_graph(60, 900), torch.arange(20)
    if device_name == "cpu":
        from triton.runtime.interpreter import interpreter_builder as builder

        forward = builder.set_grid_idx

        def backward(x: int, y: int, z: int) -> None:
            forward(builder.grid_dim[0] - 1 - x, y, z)

        monkeypatch.setattr(builder, "set_grid_idx", backward)
    check(graph, seeds, [3, 2], device_name, seed=9, **options)


def test_positions_beyond_int32(device_name: str, tmp_path: Path):
    """The last edges of a graph of more than 2**31. On a CPU the memory is a sparse file."""
    size = 2**31 + 64
    if device_name == "cpu":
        row = torch.from_file(str(tmp_path / "row"), shared=True, size=size, dtype=torch.int32)
    else:
        row = torch.zeros(size, dtype=torch.int32, device=device_name)
    row[-20:] = torch.arange(20, dtype=torch.int32)
    colptr = torch.tensor([0] * 20 + [size - 20, size], device=device_name)
    result = sample_neighbors(colptr, row, torch.tensor([20], device=device_name), [5], seed=1)
    expected = [size - 20 + at for at in floyd(words(1, 0, 5), 20, 5)]
    assert result.edge is not None and result.edge.tolist() == expected
    assert result.node[1:].tolist() == [edge - size + 20 for edge in expected]


# -- distributions ------------------------------------------------------------------------------------------------


@pytest.fixture
def large_programs(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter run few large programs, which takes less time."""
    if device_name == "cpu":
        monkeypatch.setattr(launch, "_TILE", 2**18)
        monkeypatch.setattr(launch, "BLOCK", 2**15)


def is_likely(hits: Tensor, probabilities: Tensor, draws: int, distinct: int = 0) -> bool:
    """Whether Pearson's chi-square is within 5 sigma. `distinct` edges per draw without replacement vary less."""
    expected = probabilities * draws
    chi, free = float(((hits - expected) ** 2 / expected).sum()), len(hits) - 1
    return abs(chi / (1 - distinct / len(hits)) - free) < 5 * (2 * free) ** 0.5


@pytest.mark.parametrize(
    "degree, fan_out, replace", [(7, 3, False), (100, 10, False), (100, 10, True), (5000, 25, False)]
)
def test_uniform_draws(degree: int, fan_out: int, replace: bool, device_name: str, large_programs: None):
    number = 4000
    result = found(
        hub(degree), torch.zeros(number, dtype=torch.int64), [fan_out], device_name, seed=11, replace=replace
    )
    assert result.edge is not None
    hits = torch.bincount(result.edge.cpu(), minlength=degree).double()
    even = torch.full((degree,), fan_out / degree, dtype=torch.float64)
    assert is_likely(hits, even, number, 0 if replace else fan_out)


def test_draws_of_neighbouring_seeds_are_independent(device_name: str, large_programs: None):
    """Pairs of draws of one node, of neighbouring nodes, and of neighbouring seeds."""
    seeds = torch.zeros(3000, dtype=torch.int64)
    one, other = (
        found(hub(8), seeds, [2], device_name, seed=seed, replace=True).edge.cpu().view(-1, 2)  # type: ignore[union-attr]
        for seed in (20, 21)
    )
    for a, b in ((one[:, 0], one[:, 1]), (one[:-1, 0], one[1:, 0]), (one[:, 0], other[:, 0])):
        hits = torch.bincount(a * 8 + b, minlength=64).double()
        assert is_likely(hits, torch.full((64,), 1 / 64, dtype=torch.float64), len(a))


def test_weighted_draws():
    """The keys, which kernels and reference share, give the probabilities of drawing one edge after the other."""
    weights, number = [1.0, 2.0, 3.0, 10.0], 2500
    hits = torch.zeros(4, 4, dtype=torch.float64)
    for local in range(number):
        first, second = lightest(words(12, local, 4), weights, 2)
        hits[first, second] += 1
    w = torch.tensor(weights, dtype=torch.float64)
    expected = (w / 16)[:, None] * w[None, :] / (16 - w)[:, None]
    pairs = ~torch.eye(4, dtype=torch.bool)
    assert is_likely(hits[pairs], expected[pairs], number)


def test_weighted_draws_with_replacement(device_name: str):
    weight = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0])
    seeds = torch.zeros(60, dtype=torch.int64)
    result = found(hub(5), seeds, [50], device_name, seed=13, weight=weight, replace=True)
    assert result.edge is not None
    hits = torch.bincount(result.edge.cpu(), minlength=5).double()
    assert hits[0] == hits[3] == 0
    assert is_likely(hits[weight > 0], weight[weight > 0].double() / 8, 3000)


def test_same_seed_same_bits(device_name: str):
    graph, seeds = random_graph(200, 4000), torch.arange(50)
    one, again, other = (found(graph, seeds, [5, 3], device_name, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.row, again.row) and torch.equal(one.node, again.node)
    assert one.edge is not None and other.edge is not None
    assert one.edge.tolist() != other.edge.tolist()


# -- errors -------------------------------------------------------------------------------------------------------


def test_indices_outside_the_graph(device_name: str):
    colptr, row = random_graph(10, 50)
    w = torch.ones(50)
    for seeds in ([3, 10], [-2], [-1, 3], [2**40]):
        with pytest.raises(IndexError, match="seeds: found a node outside the graph, expected 0 to 9"):
            found((colptr, row), torch.tensor(seeds), [3], device_name, seed=0)
    for bad, fan_out, options in ((-1, 12, {}), (10, -1, {}), (2**40, 12, {"disjoint": True}), (10, 16, {"weight": w})):
        wrong = row.clone()
        wrong[7] = bad
        with pytest.raises(IndexError, match="row or colptr: found a source outside of 0 to 9"):
            found((colptr, wrong), torch.arange(10), [fan_out], device_name, seed=0, **options)
    for wrong, options in ((colptr + 1, {}), (colptr.flip(0), {}), (colptr - 1, {}), (colptr + 1, {"weight": w})):
        with pytest.raises(IndexError, match="edges outside of 0 to 50"):
            found((wrong, row), torch.arange(10), [3], device_name, seed=0, **options)
    with pytest.raises(IndexError, match="a graph without nodes"):
        found((colptr[:1], row[:0]), torch.tensor([0]), [3], device_name, seed=0)


@pytest.mark.parametrize("of", ["node_time", "edge_time"])
def test_times_that_are_not_sorted(of: str, device_name: str):
    graph, time = hub(4), torch.tensor([0, 9, 3, 2, 1])
    options = {of: time if of == "node_time" else time[1:], "seed_time": torch.tensor([9])}
    with pytest.raises(ValueError, match=f"{of}: found neighbours that are not sorted by time"):
        found(graph, torch.tensor([0]), [2], device_name, seed=0, disjoint=True, **options)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan")])
def test_weights_that_are_none(bad: float, device_name: str):
    for replace in (False, True):
        with pytest.raises(ValueError, match="weight: found a negative, infinite or NaN weight"):
            weight = torch.tensor([1.0, bad, 1.0])
            found(hub(3), torch.tensor([0]), [2], device_name, seed=0, weight=weight, replace=replace)
    with pytest.raises(ValueError, match="only zeros for a node"):
        found(hub(3), torch.tensor([0]), [2], device_name, seed=0, weight=torch.zeros(3), replace=True)


def zeros(number: int) -> Tensor:
    return torch.zeros(number, dtype=torch.int64)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temporal_strategy": "first"}, ValueError, "temporal_strategy: found 'first'"),
    ({"node_time": zeros(4)}, ValueError, "disjoint: found False"),
    ({"node_time": zeros(4), "edge_time": zeros(3)}, ValueError, "one of the two"),
    ({"edge_time": zeros(3), "disjoint": True}, ValueError, "seed_time: found None"),
    ({"edge_time": zeros(3), "disjoint": True, "weight": torch.ones(3)}, ValueError, "weight: found weights beside"),
    ({"node_time": zeros(3), "disjoint": True}, ValueError, r"node_time: found shape \[3\], expected \[4\]"),
    ({"weight": zeros(3)}, TypeError, "weight: found dtype torch.int64"),
    ({"weight": torch.ones(2)}, ValueError, r"weight: found shape \[2\], expected \[3\]"),
    ({"directed": False}, UnsupportedSampling, "directed=False"),
]


@pytest.mark.parametrize("options, error, message", WRONG, ids=[row[2] for row in WRONG])
def test_arguments_that_do_not_fit(options: dict[str, Any], error: type[Exception], message: str, device_name: str):
    with pytest.raises(error, match=message):
        found(hub(3), torch.tensor([0]), [2], device_name, seed=0, **options)


def test_fan_outs_that_are_too_large(device_name: str):
    with pytest.raises(UnsupportedSampling, match="num_neighbors: found 1025, expected at most 1024"):
        found(hub(3), torch.tensor([0]), [1025], device_name, seed=0)
    check(hub(200), torch.tensor([0]), [130], device_name, seed=0)


def test_bounds_that_are_too_large(device_name: str):
    graph = random_graph(2**16, 50)
    with pytest.raises(ValueError, match=r"num_neighbors: found up to \d+ nodes and \d+ edges, expected fewer"):
        bounded.BoundedSampler(*(t.to(device_name) for t in graph), [1024] * 4, 1024, disjoint=True, seed=0)
