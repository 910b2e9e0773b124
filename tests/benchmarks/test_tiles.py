"""The benchmark of tiles: which are tried, that they are checked, and its tables. No time is asserted."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__
from benchmarks.cases import attention, graphs, registry
from benchmarks.cases.layers import Layer
from benchmarks.commands import tiles
from benchmarks.measuring import comparison
from gnncompile.codegen.triton.tile import Tile
from gnncompile.ir.region import Space
from tests import triton_regions

DEVICE = torch.device(triton_regions.DEVICE)
OPTIONS = comparison.Options(seconds=0.01, rounds=2)
TINY = graphs.Graph("tiny", 20, 60, 16, lambda: graphs.uniform(20, 60), "for tests")

pytestmark = [triton_regions.INTERPRETED, *triton_regions.GPU]


@pytest.fixture(scope="module")
def launched():
    name, graph, layer = attention.dot_product(2, torch.float32).on(TINY, 1.0)
    return tiles.launches(registry.attention_case(name, graph, layer), DEVICE)


def test_regions_of_forward_and_backward_once_each(launched):
    assert [one.region.by for one in launched] == [Space.DESTINATION, Space.DESTINATION, Space.SOURCE]
    assert len({one.region.spec for one in launched}) == 3
    assert all(one.layout.rowptr.numel() == 21 for one in launched)


def test_the_chosen_tile_comes_first_and_others_once(launched):
    region = launched[0].region
    tried = tiles.tiles_around(region, launched[0].degree, tiles.Tried((1, 2), (1, 2)))
    assert tried[0].rows > 1 and len(tried) == len(set(tried)) and {t.rows for t in tried} == {1, 2, 4, 8}
    wide = triton_regions.dot_attention(Space.DESTINATION, "float32", 16, 64)
    tried = tiles.tiles_around(wide, 0, tiles.Tried((1, 2), (2,)))
    assert {(t.heads, t.num_warps) for t in tried} == {(2, 1), (4, 1), (8, 2), (0, 4)}
    several = tiles.Tried((1,), (1,), rows=(2,), warps=(1, 4), any_rows=True)
    assert {t.rows for t in tiles.tiles_around(wide, 0, several)} == {1}, "programs share the heads"
    tried = tiles.tiles_around(triton_regions.neighbour_sum(Space.DESTINATION, "float32", 1, 256), 0, several)
    assert {(t.rows, t.num_warps) for t in tried[1:]} == {(2, 1), (2, 4), (1, 1), (1, 4)}


def test_the_chosen_tile_is_that_for_the_graph():
    """By how many edges its rows have."""
    region = triton_regions.neighbour_sum(Space.DESTINATION, "float32", 1, 256)
    assert [tiles.tiles_around(region, degree, tiles.Tried())[0].channels for degree in (7.9, 8, 32)] == [256, 128, 64]


def test_wrong_and_broken_tiles_have_no_time(launched, monkeypatch):
    one = launched[0]
    right, *_ = tiles.tiles_around(one.region, one.degree, tiles.Tried((2,), (1,)))
    broken = replace(right, edges=3)  # no power of two
    found = tiles.measure_tiles(one, [right, replace(right, edges=1), broken], DEVICE, OPTIONS)
    assert [result.status for result in found] == ["ok", "ok", "FAILED"]
    assert [result.timing is None for result in found] == [False, False, True]
    monkeypatch.setattr(tiles, "TOLERANCES", {torch.float32: -1.0})
    wrong = tiles.measure_tiles(one, [replace(right, edges=1)], DEVICE, OPTIONS)
    assert [(result.status, result.timing) for result in wrong] == [("WRONG", None)]
    text = tiles.format_region(0, one.region, found)
    assert "chosen: " in text and "FAILED" in text.splitlines()[-1]


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    name, graph, layer = attention.maximum(torch.float32).on(TINY, 1.0)
    assert isinstance(layer, Layer)
    monkeypatch.setattr(tiles, "select", lambda *given: [registry.attention_case(name, graph, layer)])
    given = ["tiles", "--device", DEVICE.type, "--suite", "attention", "--quick", "--edges", "2", "--stages", "1"]
    assert __main__.main([*given, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"tiles-attention-{DEVICE.type}.json").read_text())["rows"]
    assert {row["region"] for row in rows} == {0, 1} and [row["ours"] for row in rows].count(True) == 2
    assert "region 1 by source" in capsys.readouterr().out


def test_needs_a_gpu_or_the_interpreter(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert __main__.main(["tiles", "--device", "cpu"]) == 2
    assert "expected cuda" in capsys.readouterr().err


def test_tiles_in_words():
    assert tiles.name_of(Tile(1, 2, 64, 1, stages=2, heads=4)) == "1 row(s), 2 edge(s), 2 stage(s), 1 warp(s), 4 heads"
