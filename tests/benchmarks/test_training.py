"""The benchmark of whole training steps: its checks and its table. No time is asserted."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from benchmarks.cases import graphs
from benchmarks.cases.names import named
from benchmarks.cases.registry import GUIDE_MODELS, Case, science_case
from benchmarks.cases.science import SCIENCE
from benchmarks.commands import training
from benchmarks.commands.training import TRAINING_ROWS, TrainingRow, run_training
from benchmarks.measuring import counting
from benchmarks.measuring.comparison import Options
from benchmarks.measuring.losses import plain_loop

CPU = torch.device("cpu")
TINY = graphs.Graph("tiny", 30, 90, 8, lambda: graphs.uniform(30, 90), "for tests")
CASE = Case("GCN", "guide", TINY, 3, GUIDE_MODELS["GCN"])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    counting.reset()
    yield
    counting.reset()


class Wrong(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args):
        return self.model(*args) * 1.1


def test_losses_are_checked_and_rows_compared():
    rows = [*named(TRAINING_ROWS, ["eager", "TrainStep"]), TrainingRow("wrong", plain_loop(Wrong))]
    results = run_training(CASE, rows, CPU, Options(seconds=0.01, rounds=2), lambda text: None)
    assert [r.status for r in results] == ["ok", "ok", "WRONG"]
    assert results[1].timing is not None and results[2].timing is None
    table = training.format_case(results)
    assert "wrong: WRONG: losses differ by" in table
    stored = [training.record(CASE, r, results) for r in results]
    assert stored[0]["peak_mib"] > 0 and stored[1]["peak_mib"] > 0 and stored[2]["peak_mib"] is None
    assert stored[1]["over_eager"] == results[0].timing.median / results[1].timing.median


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_with_states_on_edges_are_trained(precision: str):
    case = science_case("GatedGCN", precision, SCIENCE["GatedGCN"].graph("GatedGCN", 0.0005))
    rows = [*named(TRAINING_ROWS, ["eager", "TrainStep"]), TrainingRow("wrong", plain_loop(Wrong))]
    results = run_training(case, rows, CPU, Options(seconds=0.01, rounds=2), lambda text: None)
    assert [r.status for r in results] == ["ok", "ok", "WRONG"]


def test_in_16_bits_a_row_may_err_as_eager_does(monkeypatch):
    case = science_case("GatedGCN", "bf16", SCIENCE["GatedGCN"].graph("GatedGCN", 0.0005))
    rows = [*named(TRAINING_ROWS, ["eager"]), TrainingRow("wrong", plain_loop(Wrong))]
    monkeypatch.setattr(training, "HALF_TOLERANCE", 1e-9)
    results = run_training(case, rows, CPU, Options(seconds=0.01, rounds=2), lambda text: None)
    assert [r.status for r in results] == ["ok", "WRONG"] and results[0].error > 1e-9
    assert "1.5 times eager's own error" in training.format_case(results)
    assert "eager's own error" not in training.format_case([])


def test_cases_of_a_suite():
    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    science = ["--suite", "science", "--models"]
    cases, where = training.cases_of(parser.parse_args([*science, "EGNN bf16,SchNet fp32"]))
    assert [case.name for case in cases] == ["EGNN bf16", "SchNet fp32"] and where == "science"
    (case,), _ = training.cases_of(parser.parse_args([*science, "EGNN bf16", "--scale", "0.01"]))
    assert (case.graph.num_nodes, case.graph.num_edges) == (200, 6_000)
    cases, where = training.cases_of(parser.parse_args([]))
    assert [case.name for case in cases] == list(GUIDE_MODELS) and where == "guide"
