"""Rows of a case in processes of their own. No time is asserted."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import __main__
from benchmarks.cases import graphs
from benchmarks.cases.registry import Case
from benchmarks.commands import layers
from benchmarks.measuring import comparison, isolated
from benchmarks.measuring.comparison import Options, Row
from benchmarks.rows.variants import VARIANTS, Variant

CPU = torch.device("cpu")
TINY = graphs.Graph("tiny", 30, 90, 8, lambda: graphs.uniform(30, 90), "for tests")
ROUNDS = 2
FIRST_CALLS = 3
"""The calls of a row before its warm-up."""


class Logged(nn.Module):
    """A linear layer that writes each call into a file: process and dtype."""

    def __init__(self, log: Path, channels: int) -> None:
        super().__init__()
        self.lin, self.log = nn.Linear(channels, channels), log

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        with self.log.open("a") as file:
            print(os.getpid(), x.dtype, file=file)
        out: Tensor = self.lin(x)
        return out


def logged_case(log: Path) -> Case:
    return Case("logged", "guide", TINY, 1, partial(Logged, log))


def eager(model: nn.Module) -> nn.Module:
    return model


def after_calls(number: int, then: Callable[[Tensor], Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """Returns the model, whose output goes through `then` after `number` calls."""
    calls = itertools.count()

    def run(*inputs: Tensor) -> Tensor:
        out: Tensor = model(*inputs)
        return then(out) if next(calls) >= number else out

    return run


def double(out: Tensor) -> Tensor:
    return out * 2


def die(out: Tensor) -> Tensor:
    os._exit(3)


def hang(out: Tensor) -> Tensor:
    time.sleep(60)
    return out


def crash(model: nn.Module) -> nn.Module:
    raise RuntimeError("no such kernel\nmore")


def run(log: Path, variants: Sequence[Variant], **options: Any) -> list[Row]:
    how = Options(seconds=0.01, rounds=ROUNDS, input_grad=True, warmup=1, **options)
    return isolated.run_case(partial(logged_case, log), variants, CPU, how, lambda message: None)


@dataclass
class Run:
    rows: list[Row]
    calls: list[list[str]]  # process and dtype of each call, of all rows

    @property
    def processes(self) -> list[str]:
        return list(dict.fromkeys(process for process, _ in self.calls))


@pytest.fixture(scope="module")
def two_rows(tmp_path_factory: pytest.TempPathFactory) -> Run:
    log = tmp_path_factory.mktemp("isolated") / "log"
    rows = run(log, [Variant("one", eager), Variant("two", eager)])
    return Run(rows, [line.split() for line in log.read_text().splitlines()])


def test_each_row_has_a_process(two_rows: Run) -> None:
    assert len(two_rows.processes) == 2 and str(os.getpid()) not in two_rows.processes


def test_the_reference_comes_after_the_times(two_rows: Run) -> None:
    for process, row in zip(two_rows.processes, two_rows.rows, strict=True):
        dtypes = [dtype for found, dtype in two_rows.calls if found == process]
        assert row.timing is not None and dtypes.count("torch.float64") == 1
        # A step whose results are kept, and one whose memory is measured; the reference begins with a call.
        timed = FIRST_CALLS + 2 + ROUNDS + row.timing.steps
        assert dtypes.index("torch.float64") == timed + 2 + 1


def test_rows_take_turns(two_rows: Run) -> None:
    one, two = two_rows.processes
    parts = [process for process, _ in itertools.groupby(two_rows.calls, key=lambda call: call[0])]
    assert parts == [one, two] * (1 + 1 + ROUNDS + 1)  # first steps, warm-up, turns, memory and check


def test_rows_have_what_rows_of_one_process_have(two_rows: Run, tmp_path: Path) -> None:
    how = Options(seconds=0.01, rounds=ROUNDS, input_grad=True, warmup=1)
    case, variants = logged_case(tmp_path / "log"), [row.variant for row in two_rows.rows]
    expected = comparison.run_case(case, variants, CPU, how, lambda message: None)
    for found, same in zip(two_rows.rows, expected, strict=True):
        assert found.status == same.status == "ok" and found.verdict is not None and same.verdict is not None
        assert found.verdict.name == same.verdict.name
        assert found.verdict.error == pytest.approx(same.verdict.error)  # seeds of model, inputs and weights
        assert (found.graphs, found.graph_breaks, found.recompiles) == (same.graphs, same.graph_breaks, same.recompiles)
        assert found.memory == same.memory and found.first_s is not None and found.first_s > 0


def test_no_time_without_correctness(tmp_path: Path) -> None:
    later = Variant("wrong later", partial(after_calls, FIRST_CALLS + 2, double))
    wrong, crashed = run(tmp_path / "log", [later, Variant("crash", crash)])
    assert wrong.status == "WRONG" and "relative error 1.0e+00" in wrong.message
    assert wrong.timing is None and wrong.memory is None and wrong.verdict is not None
    assert (crashed.status, crashed.message) == ("FAILED", "RuntimeError: no such kernel")


def test_a_process_that_dies_or_hangs_fails_alone(tmp_path: Path) -> None:
    variants = [
        Variant("dies in a turn", partial(after_calls, FIRST_CALLS + 2, die)),
        Variant("hangs", partial(after_calls, 1, hang)),
        Variant("eager", eager),
    ]
    dead, endless, right = run(tmp_path / "log", variants, row_limit=3.0)
    assert (dead.status, dead.message) == ("FAILED", "its process ended with exit status 3")
    assert (endless.status, endless.message) == ("FAILED", "took longer than 3 s")
    assert dead.timing is None and endless.timing is None
    assert right.status == "ok" and right.timing is not None
    for process in {line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}:
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


@pytest.mark.gpu
def test_rows_of_a_gpu(tmp_path: Path) -> None:
    how = Options(seconds=0.01, rounds=ROUNDS, input_grad=True, warmup=1)
    case, cuda = partial(logged_case, tmp_path / "log"), torch.device("cuda")
    variants = [Variant("one", eager), Variant("ours", eager, is_ours=True)]
    expected = comparison.run_case(case(), variants, cuda, how, lambda message: None)
    for found, same in zip(isolated.run_case(case, variants, cuda, how, lambda message: None), expected, strict=True):
        assert found.status == same.status == "ok", found.message
        assert found.device_ms is not None and found.device_ms > 0 and found.syncs == same.syncs
        assert found.memory is not None and same.memory is not None
        assert found.memory.peak == pytest.approx(same.memory.peak, abs=0.01)


# -- the commands --------------------------------------------------------------------------------------------------


def test_the_command_says_so_in_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--models", "EGNN", "--precisions", "fp32", "--scale", "0.001", "--rows", "eager"]
    folder = ["--quick", "--out", str(tmp_path)]
    assert __main__.main(["science", "--device", "cpu", "--isolate", *names, *folder]) == 0
    assert "each in a process of its own" in capsys.readouterr().out
    stored = json.loads((tmp_path / "science-cpu-isolated.json").read_text())
    assert stored["environment"]["rows"] == layers.ISOLATED
    (row,) = stored["rows"]
    assert row["status"] == "ok" and row["median_ms"] > 0 and row["model"] == "EGNN fp32"


def test_other_processes_make_the_same_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def run_case(make_case: Callable[[], Case], variants: Sequence[Variant], *settings: Any) -> list[Row]:
        made.append(pickle.loads(pickle.dumps(make_case))().label)
        return [Row(variant, "FAILED") for variant in variants]

    monkeypatch.setattr(isolated, "run_case", run_case)
    names = ["--layers", "GIN,GCN", "--order", "sorted,random", "--precisions", "fp32,bf16"]
    __main__.main(["layers", "--device", "cpu", "--isolate", "--quick", "--out", str(tmp_path), *names])
    assert made == [
        f"{name}{precision} {order}"
        for name in ("GIN", "GCN")
        for order in ("sorted", "random")
        for precision in ("", " bf16")
    ]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_row_can_be_pickled(variant: Variant) -> None:
    assert pickle.loads(pickle.dumps(variant)).name == variant.name
