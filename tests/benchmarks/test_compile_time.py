"""The benchmark of compile time: its checks, its shares of time and its table. No time is asserted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__
from benchmarks.cases.names import named
from benchmarks.cases.registry import select
from benchmarks.commands import compile_time
from benchmarks.measuring import phases, start
from benchmarks.measuring.check import Reference
from benchmarks.measuring.comparison import reference_of
from benchmarks.rows.variants import VARIANTS

CPU = torch.device("cpu")
(CASE,) = select("guide", "guide", ["GraphSAGE"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "reference"
    torch.save(reference_of(CASE, CASE.model(CPU), CASE.inputs(CPU), 0), path)
    return path


def eager(reference: Path, result: Path) -> start.Start:
    return start.Start("GraphSAGE", "guide", "eager", "cpu", 0, str(reference), str(result))


def test_a_start_is_checked(reference: Path, tmp_path: Path):
    what = eager(reference, tmp_path / "result")
    found = start.run(what)
    assert found["status"] == "ok" and found["error"] < 1e-3
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"], rel=0.05, abs=0.05)
    other: Reference = torch.load(reference, weights_only=False)
    other.exact["output"] *= 2
    torch.save(other, tmp_path / "other")
    found = start.run(replace(what, reference=str(tmp_path / "other")))
    assert found["status"] == "WRONG" and "seconds" not in found


def test_a_process_that_fails_says_why(reference: Path, tmp_path: Path):
    what = replace(eager(reference, tmp_path / "result"), model="AlexNet")
    found = compile_time.run_process(what, tmp_path / "caches")
    assert found == {"status": "FAILED", "message": found["message"]} and "AlexNet" in found["message"]


def inner() -> None:
    time.sleep(0.1)


def outer() -> None:
    time.sleep(0.05)
    inner()
    inner()


def test_time_belongs_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(phases, "PHASES", {"a": ((__name__, "outer"),), "b": ((__name__, "inner"),)})
    original = outer
    with phases.exclusive(ours=False) as spent:
        outer()
        time.sleep(0.02)
    assert spent["a"] >= 0.05 and spent["b"] >= 0.2 and spent["other"] >= 0.02
    assert spent["b"] > spent["a"] > spent["other"] and outer is original


def test_ratios_and_rows_that_are_wrong(monkeypatch: pytest.MonkeyPatch):
    seconds = {"compile": 10.0, "gnncompile": 12.0}

    def process(what: start.Start, caches: Path) -> dict[str, Any]:
        assert " " not in str(caches)  # compilers are called with it
        if what.row == "compile dynamic" and what.load:
            return {"status": "WRONG", "message": "output"}
        share = 1.0 if what.save else 0.5 if what.load else 0.25
        spent = dict.fromkeys((*phases.PHASES, phases.OTHER), 0.5)
        took = seconds.get(what.row, 1.0) * share
        return {"status": "ok", "seconds": took, "cpu_seconds": 2 * took, "hits": 1, "misses": 0, "phases": spent}

    monkeypatch.setattr(compile_time, "run_process", process)
    rows = compile_time.run_case(CASE, named(VARIANTS, compile_time.ROWS), CPU, 2, 0, lambda text: None)
    assert [row.status for row in rows] == ["ok", "WRONG", "ok"]
    stored = [compile_time.record(CASE, row, rows) for row in rows]
    assert stored[2]["over compile"] == 1.2 and stored[2]["second / cold"] == 0.25
    assert stored[2]["artifacts / cold"] == 0.5 and stored[2]["cpu over compile"] == 1.2
    assert stored[1]["cold_seconds"] is None and stored[2]["over compile dynamic"] is None
    table = compile_time.format_case(rows)
    assert "compile dynamic: WRONG: artifacts: output" in table and "gnncompile, second" in table


def test_starts_that_were_not_asked_for_are_not_made(monkeypatch: pytest.MonkeyPatch):
    made: list[bool] = []

    def process(what: start.Start, caches: Path) -> dict[str, Any]:
        made.append(bool(what.save))
        spent = dict.fromkeys((*phases.PHASES, phases.OTHER), 0.5)
        return {"status": "ok", "seconds": 2.0, "cpu_seconds": 3.0, "hits": 1, "misses": 0, "phases": spent}

    monkeypatch.setattr(compile_time, "run_process", process)
    monkeypatch.setattr(compile_time, "reference_of", lambda *given: None)
    (row,) = compile_time.run_case(CASE, named(VARIANTS, ["gnncompile"]), CPU, 1, 0, lambda text: None, ["second"])
    assert made == [True, False] and row.median("second", "seconds") == 2.0
    assert row.median("artifacts", "seconds") is None and " ok " not in compile_time.format_case([row])


def test_a_start_that_is_not_known(capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["compile-time", "--device", "cpu", "--starts", "warm"]) != 0
    assert "starts: got warm, expected some of cold, second, artifacts" in capsys.readouterr().err


@pytest.mark.parametrize(("suite", "model", "asks"), [("layers", "GINE", True), ("guide", "GIN", False)])
def test_a_start_of_another_suite_differentiates_by_the_features(
    suite: str, model: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (case,) = select(suite, "guide", [model])
    assert start.inputs_of(case, CPU, 0)[0].requires_grad == asks
    seen: list[start.Start] = []
    monkeypatch.setattr(
        compile_time, "run_process", lambda what, caches: (seen.append(what), {"status": "WRONG", "message": ""})[1]
    )
    monkeypatch.setattr(compile_time, "reference_of", lambda *given: None)
    compile_time.run_case(case, named(VARIANTS, ["gnncompile"]), CPU, 1, 0, lambda text: None)
    assert [(one.suite, one.graph, one.model) for one in seen] == [(suite, "guide", model)]
