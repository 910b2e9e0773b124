"""What a walk in tiles is estimated to need, and the tile that is chosen for it."""

from __future__ import annotations

import pytest

from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.codegen.triton.tiled_tile import choose_tiled_tile
from gnncompile.codegen.triton.tiled_work import TiledWork
from tests.compiled_tiles import both_ways
from tests.harness import tune
from tests.tiled_regions import E, Maker, S


def _plans(name: str, channels: int, dtype: str) -> list[TiledPlan]:
    return [TiledPlan(region) for region in both_ways(name, channels, dtype).values()]


def _work(make: Maker, *values: int) -> TiledWork:
    plan = TiledPlan(make.finish(*values))
    return TiledWork(plan, plan.phases[0])


def test_values_wait_until_they_are_read_for_the_last_time() -> None:
    make = Maker()
    x = make.b.op("tanh", make.input(E, 64))
    y = make.layer(x, 64, bias=False)
    assert _work(make, y).waiting == 2 * 64  # the row and its tanh, then the tanh and the layer
    assert _work(make, make.b.op("mul", y, x)).waiting == 3 * 64  # the tanh waits over the layer


def test_float64_values_take_two_registers() -> None:
    found = []
    for dtype in ("float32", "float64"):
        make = Maker(dtype)
        found.append(_work(make, make.layer(make.input(E, 64), 64, bias=False)).waiting)
    assert found[1] == 2 * found[0]


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_bytes_of_rows(dtype: str, size: int) -> None:
    make = Maker(dtype)
    x = make.b.op("add", make.input(E, 40), make.input(S, 40))
    narrow = make.b.op("mul", x, make.input(E, 1))
    work = _work(make, make.layer(narrow, 40))
    assert work.bytes_of_rows == 2 * 64 * size  # padded to 64 channels; a row of one channel is not wide
    assert work.begins_with_rows


@pytest.mark.parametrize(("channels", "stages"), [(1, 3), (3, 1), (64, 3)])
def test_no_walk_loads_vectors_ahead(channels: int, stages: int) -> None:
    make = Maker("float32")
    x = make.layer(make.input(E, 64), 64)
    x = make.b.op("add", x, make.b.sum_axis(make.input(S, channels), 1))
    plan = TiledPlan(make.finish(x))
    (phase,) = plan.phases
    assert TiledWork(plan, phase).reads_vectors == (channels == 3)
    assert choose_tiled_tile(plan, phase).stages == stages


def test_a_walk_that_begins_with_arithmetic() -> None:
    make = Maker()
    hidden = make.layer(make.b.op("tanh", make.input(E, 3)), 64)
    work = _work(make, make.layer(make.b.op("mul", hidden, make.input(S, 64)), 64))
    assert not work.begins_with_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_loaded_ahead_only_if_all_programs_still_fit(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    stages = {}
    for size in (2**14, 2**18, 2**24):
        tune(monkeypatch, shared_memory=size)
        plans = _plans("mesh_graph_net", 64, dtype)
        stages[size] = {choose_tiled_tile(plan, phase).stages for plan in plans for phase in plan.phases}
    assert stages[2**14] == {1}
    assert stages[2**24] == {3}


def test_fewer_programs_where_values_would_not_fit_in_registers() -> None:
    plan = _plans("mesh_graph_net", 64, "float32")[1]
    programs = {TiledWork(plan, p).waiting: choose_tiled_tile(plan, p).programs for p in plan.phases}
    assert programs[min(programs)] == 3
    assert programs[max(programs)] == 2


def test_walks_of_16_bits_load_rows_ahead_rather_than_have_a_third_program(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plans("mesh_graph_net", 128, "bfloat16")[0]
    work = TiledWork(plan, plan.phases[0])
    for limit, programs, stages in ((work.instructions, 2, 3), (work.instructions - 1, 3, 1)):
        tune(monkeypatch, tiled_arithmetic=limit)
        tile = choose_tiled_tile(plan, plan.phases[0])
        assert (tile.programs, tile.stages) == (programs, stages)


def test_two_programs_where_values_fit_in_no_registers() -> None:
    plan = _plans("skip", 128, "bfloat16")[1]
    phase = max(plan.phases, key=lambda phase: TiledWork(plan, phase).waiting)
    assert TiledWork(plan, phase).waiting > 8 * 128
    assert choose_tiled_tile(plan, phase).programs == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_regions_that_compare_values_have_one_tile(dtype: str) -> None:
    tiles = set()
    for channels in (16, 64):
        for count in (1, 2):
            make = Maker(dtype)
            x = make.input(E, channels)
            for _ in range(count):
                x = make.layer(x, channels)
            plan = TiledPlan(make.finish(make.b.reduce("max", x)))
            assert plan.region.exact
            tiles |= {choose_tiled_tile(plan, phase) for phase in plan.phases}
    assert len(tiles) == 1
