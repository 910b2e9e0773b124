"""Features on the device, on the host and in a cache: each place gives the same rows; reports and errors."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.sampling import host_memory
from gnncompile.sampling.bounded import BoundedSampler
from gnncompile.sampling.features import Features
from gnncompile.sampling.reads import expected_reads, expected_reads_hetero, shares
from tests.kernels.test_device_sampling import Csc, hub, random_graph
from tests.sampled import csc

pytestmark = triton_regions.INTERPRETED
device_name = triton_regions.device

PLACES: list[dict[str, Any]] = [
    {},
    {"place": "host"},
    {"place": "host", "cache": 10 * 35, "reads": torch.arange(50)},
    {"place": {"x": "host"}, "cache": 10**9, "reads": torch.arange(50.0)},
]


def attributes() -> dict[str, Tensor]:
    """Rows of 20, 8, 1 and 6 bytes: 35 in all."""
    random = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(50, 5, generator=random),
        "y": torch.randint(9, (50,), generator=random),
        "mask": torch.rand(50, generator=random) < 0.5,
        "half": torch.randn(50, 3, generator=random).bfloat16(),
    }


@pytest.mark.parametrize("how", PLACES, ids=["device", "host", "cache of a fifth", "cache of x"])
def test_each_place_gives_the_same_rows(how: dict[str, Any], device_name: str):
    given, node = attributes(), torch.tensor([49, 0, 13, 13, 45, 2])
    features = Features(given, device_name, **how)
    for _ in range(2):
        found = features(node.to(device_name))
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name].cpu(), given[name][node]) for name in given)
        assert all(value.device.type == device_name for value in found.values())


def test_without_kernels(monkeypatch: pytest.MonkeyPatch):
    """On a CPU without Triton's interpreter, torch gathers."""
    monkeypatch.setattr("gnncompile.sampling.gather.runs", lambda device: False)
    given, node = attributes(), torch.tensor([49, 0, 13])
    found = Features(given, "cpu", place={"x": "host"})(node)
    assert all(torch.equal(found[name], given[name][node]) for name in given)
    with pytest.raises(ValueError, match=r"cache: found 8 bytes for attributes on \['host'\]"):
        Features(given, "cpu", place="host", cache=8)


def test_report(device_name: str):
    given = attributes()
    features = Features(
        given, device_name, place={"x": "host", "half": "host"}, cache=10 * 26 + 3, reads=torch.arange(50)
    )
    assert features.report()[0].hit_rate is None
    for _ in range(2):
        features(torch.tensor([49, 0, 13, 40, 45, 2], device=device_name))
    features.gather("x", torch.tensor([49, 48, 0, 49], device=device_name), torch.tensor([3], device=device_name))
    x, y, mask, half = features.report()
    assert (x.name, x.rows, x.bytes, x.place, x.cached_rows, x.cached_bytes) == ("x", 50, 1000, "host", 10, 200)
    assert (x.reads, x.hits, half.reads, half.hits, half.hit_rate) == (15, 8, 12, 6, 0.5)
    assert (y.place, y.bytes, y.cached_rows, y.reads, y.hit_rate) == ("device", 400, 0, None, None)
    assert mask.dtype == torch.bool
    text = str(features.report()).splitlines()
    assert " ".join(text[0].split()) == "attribute rows dtype MB place cached rows cached MB reads hit rate"
    assert text[1].split() == ["x", "50", "float32", "0.0", "host", "10", "0.0", "15", "53.3%"]
    assert text[2].split() == ["y", "50", "int64", "0.0", "device", "0", "0.0"]


def test_counted_reads_fill_the_cache(device_name: str):
    """The rows read most in the first epoch are in the cache in the second. Padding is not counted."""
    x = attributes()["x"]
    features = Features({"x": x}, device_name, place="host", cache=3 * 20)
    node = torch.tensor([7, 7, 7, 9, 9, 30, 30, 4, 5, 5, 5, 5], device=device_name)
    end = torch.tensor([8], device=device_name)
    features.gather("x", node, end)
    assert features.report()[0].hits == 0
    features.refill()
    assert torch.equal(features.gather("x", node).cpu(), x[node.cpu()])
    (found,) = features.report()
    assert (found.cached_rows, found.reads, found.hits) == (3, 20, 7)
    features.refill(torch.tensor([0.0] * 49 + [1.0]))
    assert torch.equal(features.gather("x", torch.tensor([49, 7], device=device_name)).cpu(), x[[49, 7]])


@pytest.mark.parametrize("place", ["device", "host"])
def test_padded_mini_batches(place: str, device_name: str):
    """Padded rows have the features of the nodes that they repeat, read from the host or not."""
    graph, x = random_graph(50, 200), attributes()["x"]
    features = Features({"x": x}, device_name, place=place)
    sampler = BoundedSampler(*(value.to(device_name) for value in graph), [3, 2], 4, seed=0)
    for seeds in ([3, 4, 5], [-1], [8, 8, 9, 1]):
        made = sampler(torch.tensor(seeds, device=device_name))
        assert torch.equal(features.gather("x", made.node, made.node_ends[-1:]).cpu(), x[made.node.cpu()])


@pytest.mark.parametrize("place", ["device", "host"])
def test_mapped_files(place: str, device_name: str, tmp_path: Path):
    path = str(tmp_path / "x.bin")
    x = torch.from_file(path, shared=True, size=50 * 6).view(50, 6)
    x.copy_(torch.randn(50, 6))
    read = torch.from_file(path, shared=False, size=50 * 6).view(50, 6)
    for source in (x, read):
        features = Features({"x": source}, device_name, place=place)
        assert torch.equal(features.gather("x", torch.tensor([3, 49], device=device_name)).cpu(), x[[3, 49]])


def test_no_rows(device_name: str):
    features = Features({"x": torch.empty(0, 3), "y": torch.empty(0)}, device_name, place="host", cache=100)
    assert features(torch.empty(0, dtype=torch.int64, device=device_name))["x"].shape == (0, 3)
    assert features.report()[0].cached_rows == 0
    assert "x" in features and "z" not in features


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tensors": {}}, "tensors: found none"),
    ({"tensors": {"x": torch.ones(3), "y": torch.ones(4)}}, r"tensors: found \{'x': 3, 'y': 4\} rows"),
    ({"tensors": {"x": torch.ones(3, 4).t()}}, "tensors: found 'x' with shape .*, not contiguous"),
    ({"tensors": {"x": torch.ones(())}}, "tensors: found 'x' with shape"),
    ({"tensors": {"x": torch.ones(3, requires_grad=True)}}, "tensors: found 'x', which needs a gradient"),
    ({"place": "disk"}, "place: found 'disk', expected one of device, host"),
    ({"place": None}, "place: found None, expected one of device, host"),
    ({"place": {"x": "disk"}}, "place: found 'disk', expected one of device, host"),
    ({"place": {"X": "host"}}, "place: found a place for 'X', expected names of attributes: x"),
    ({"place": "host", "reads": torch.ones(3)}, "reads: found a tensor and cache=0"),
    ({"cache": 100}, r"cache: found 100 bytes for attributes on \['device'\]"),
    ({"place": "host", "cache": -1}, "cache: found -1 bytes"),
    ({"place": "host", "cache": 3}, "cache: found 3 bytes, expected at least 4, which a row of x takes"),
    ({"place": "host", "cache": 9, "reads": torch.ones(4)}, r"reads: found shape \[4\], expected \[3\]"),
]


@pytest.mark.parametrize("how, message", WRONG, ids=[message for _, message in WRONG])
def test_arguments(how: dict[str, Any], message: str, device_name: str):
    with pytest.raises(ValueError, match=message):
        Features(**{"tensors": {"x": torch.ones(3)}, "device": device_name, **how})


def test_a_cache_has_whole_bytes(device_name: str):
    with pytest.raises(TypeError, match=r"cache: found 1000000000\.0, a float, expected an int"):
        Features({"x": torch.ones(3)}, device_name, place="host", cache=1e9)  # type: ignore[arg-type]


def test_refill_needs_a_cache_and_reads(device_name: str):
    features = Features({"x": torch.ones(3)}, device_name, place="host")
    with pytest.raises(ValueError, match="refill: found features without a cache, expected a cache to fill"):
        features.refill()
    features = Features({"x": torch.ones(3)}, device_name, place="host", cache=4, reads=torch.ones(3))
    with pytest.raises(ValueError, match="reads: found None, expected how often each row is read"):
        features.refill()


# -- expected reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [None, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expected_reads(dtype: torch.dtype, number: int | None, monkeypatch: pytest.MonkeyPatch):
    """Against a sum over the edges, one after the other."""
    monkeypatch.setattr("gnncompile.sampling.reads.STEP", 7)
    colptr, row = (value.to(dtype) for value in random_graph(12, 40))
    seeds = None if number is None else torch.arange(number)
    chance = [0.0] * 12
    for node in range(12 if number is None else number):
        chance[node] = 2 / (number or 12)
    expected = list(chance)
    for fan_out in (3, 0, -1):
        drawn = [0.0] * 12
        for node in range(12):
            edges = range(int(colptr[node]), int(colptr[node + 1]))
            for edge in edges:
                share = 1.0 if fan_out < 0 else min(1.0, fan_out / len(edges))
                drawn[int(row[edge])] += chance[node] * share
        expected = [one + other for one, other in zip(expected, drawn, strict=True)]
        chance = [1 - float(torch.exp(torch.tensor(-one, dtype=torch.float64))) for one in drawn]
    found = expected_reads(colptr, row, [3, 0, -1], batch_size=2, seeds=seeds)
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("known", [True, False])
def test_expected_reads_of_several_types(known: bool):
    """Against a sum over the edges of each type, one after the other; type c is no destination."""
    sizes = {"a": 6, "b": 9, "c": 5}
    kinds = [("a", "to", "b"), ("b", "to", "a"), ("b", "to", "b"), ("c", "to", "a")]
    fan_outs = {kind: [2, -1] if kind[0] == "b" else [3, 1] for kind in kinds}
    generator = torch.Generator().manual_seed(1)
    edges = {
        kind: torch.stack([torch.randint(sizes[end], (20,), generator=generator) for end in kind[::2]])
        for kind in kinds
    }
    edges["c", "to", "a"][0, 0] = 4
    graph = {kind: csc(edges[kind], sizes[kind[2]])[:2] for kind in kinds}
    chance = {"a": [0.5] * 4 + [0.0] * 2, "b": [1.0] + [0.0] * 8, "c": [0.0] * 5}
    expected = {name: list(values) for name, values in chance.items()}
    for hop in range(2):
        drawn = {name: [0.0] * size for name, size in sizes.items()}
        for kind in kinds:
            for source, target in edges[kind].t().tolist():
                degree, fan_out = int((edges[kind][1] == target).sum()), fan_outs[kind][hop]
                drawn[kind[0]][source] += chance[kind[2]][target] * (1.0 if fan_out < 0 else min(1.0, fan_out / degree))
        expected = {name: [a + b for a, b in zip(expected[name], drawn[name], strict=True)] for name in sizes}
        chance = {name: [1 - math.exp(-one) for one in values] for name, values in drawn.items()}
    found = expected_reads_hetero(
        {kind: one[0] for kind, one in graph.items()},
        {kind: one[1] for kind, one in graph.items()},
        fan_outs,
        kinds,
        list(sizes),
        batch_size_dict={"a": 2, "b": 7},
        seed_dict={"a": torch.arange(4), "b": torch.zeros(1, dtype=torch.int64)},
        num_nodes_dict={"c": 5} if known else None,
    )
    for name in sizes:
        assert torch.allclose(found[name].double(), torch.tensor(expected[name], dtype=torch.float64), atol=1e-6)


def test_shares_of_a_cache():
    """The rows with the most reads for each byte fit, whatever their type; a type may get nothing."""
    wanted = {"a": (torch.tensor([8.0, 1.0, 6.0]), 8), "b": (torch.tensor([3.0, 0.1]), 2), "c": (torch.zeros(2), 4)}
    assert shares(0, wanted) == {"a": 0, "b": 0, "c": 0}
    assert shares(11, wanted) == {"a": 8, "b": 2, "c": 0}
    assert shares(18, wanted) == {"a": 16, "b": 2, "c": 0}
    assert shares(9, {"wide": (torch.full((3,), 90.0), 40), "slim": (torch.ones(5), 2)}) == {"wide": 0, "slim": 8}
    assert shares(1000, wanted) == {"a": 24, "b": 4, "c": 8}
    assert shares(9, {"a": (torch.ones(0), 4), "b": (torch.ones(3), 0)}) == {"a": 0, "b": 3}


def test_arguments_of_expected_reads():
    colptr, row = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"colptr: found \[2\] as the last entry, expected \[1\], the number of edges"):
        expected_reads(colptr, row[:1], [2], batch_size=1)
    with pytest.raises(TypeError, match=r"row: found dtype torch\.float32"):
        expected_reads(colptr, row.float(), [2], batch_size=1)
    with pytest.raises(IndexError, match="row: found nodes 1 to 2, expected 0 to 1"):
        expected_reads(colptr, row + 1, [2], batch_size=1)
    with pytest.raises(IndexError, match="seeds: found nodes -1 to 1, expected 0 to 1"):
        expected_reads(colptr, row, [2], batch_size=1, seeds=torch.tensor([1, -1]))
    with pytest.raises(TypeError, match=r"seeds: found dtype torch\.bool, expected integers"):
        expected_reads(colptr, row, [2], batch_size=1, seeds=torch.tensor([True, False]))
    with pytest.raises(ValueError, match="batch_size: found 0, expected at least 1"):
        expected_reads(colptr, row, [2], batch_size=0)
    kind, size = ("a", "to", "b"), {"batch_size_dict": {"b": 1}, "seed_dict": {"b": torch.tensor([0])}}
    types = [kind], ["a", "b"]
    with pytest.raises(ValueError, match=r"colptr_dict\[\('a', 'to', 'b'\)\]: found \[2\] as the last entry"):
        expected_reads_hetero({kind: colptr}, {kind: row[:1]}, {kind: [2]}, *types, **size)
    with pytest.raises(IndexError, match=r"row_dict\[\('a', 'to', 'b'\)\]: found nodes 0 to 1, expected 0 to 0"):
        expected_reads_hetero({kind: colptr}, {kind: row}, {kind: [2]}, *types, **size, num_nodes_dict={"a": 1})
    with pytest.raises(ValueError, match="num_neighbors_dict: found no edge type, expected every edge type"):
        expected_reads_hetero({kind: colptr}, {kind: row}, {}, *types, **size)
    with pytest.raises(ValueError, match=r"batch_size_dict\['b'\]: found 0, expected at least 1"):
        expected_reads_hetero({kind: colptr}, {kind: row}, {kind: [2]}, *types, **{**size, "batch_size_dict": {}})


def test_reads_of_a_hub(device_name: str):
    """Sources of one destination share its draws; the hub itself is read only as a seed."""
    colptr, row = (value.to(device_name) for value in hub(10))
    found = expected_reads(colptr, row, [5], batch_size=11).cpu()
    assert torch.allclose(found, torch.tensor([1.0] + [1.5] * 10))
    no_edge: Csc = csc(torch.empty(2, 0, dtype=torch.int64), 3)[:2]
    assert expected_reads(*no_edge, [5, 5], batch_size=3).tolist() == [1.0] * 3


# -- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [100, 10**6])
def test_memory_is_pinned_as_long_as_it_is_used(rows: int):
    """Large tensors are pinned where they lie; small ones are copied."""
    x, node = torch.randn(rows, 8), torch.randint(rows, (100,))
    first, second = (Features({"x": x}, "cuda", place="host") for _ in range(2))
    assert x.is_pinned() == (x.nbytes >= host_memory.SMALL)
    del first
    gc.collect()
    assert torch.equal(second.gather("x", node.cuda()).cpu(), x[node])
    del second
    gc.collect()
    assert not x.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_large_mapped_files(shared: bool, tmp_path: Path):
    """Where CUDA refuses to pin a file, a copy is pinned, and no error is left for the next call."""
    path = str(tmp_path / "x.bin")
    torch.from_file(path, shared=True, size=8 * 10**6).copy_(torch.arange(8e6))
    x = torch.from_file(path, shared=shared, size=8 * 10**6).view(-1, 8)
    features = Features({"x": x}, "cuda", place="host")
    node = torch.randint(10**6, (100,), device="cuda")
    assert torch.equal(features.gather("x", node), node[:, None] * 8.0 + torch.arange(8, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("how", PLACES, ids=["device", "host", "cache of a fifth", "cache of x"])
def test_cuda_graph(how: dict[str, Any]):
    """A replay reads nodes and cache anew."""
    given, node = attributes(), torch.tensor([49, 0, 13, 2], device="cuda")
    features, end = Features(given, "cuda", **how), torch.tensor([4], device="cuda")
    features(node, end)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        found = features(node, end)
    for chosen in ([1, 2, 3, 4], [49, 48, 5, 0]):
        node.copy_(torch.tensor(chosen))
        recorded.replay()
        assert all(torch.equal(found[name].cpu(), given[name][chosen]) for name in given)
        if how.get("cache"):
            features.refill(torch.rand(50))
