"""The benchmark of memory: what it counts, its checks and its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import SimpleConv

from benchmarks import __main__
from benchmarks.cases import graphs
from benchmarks.cases.registry import Case
from benchmarks.commands import memory
from benchmarks.measuring import measure
from benchmarks.measuring.step import Step
from benchmarks.rows.variants import VARIANTS, Variant
from tests.harness import light

CPU = torch.device("cpu")
# One tensor [num_edges, channels] is 1 MiB, one of [num_nodes, channels] 16 KiB.
GRAPH = graphs.Graph("tiny", 64, 4096, 64, lambda: graphs.uniform(64, 4096), "for tests")


class Summed(nn.Module):
    """Keeps nothing of the size of the edges for the backward, or the messages."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.conv, self.keeps = SimpleConv("sum"), keeps

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.keeps:
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] * self.weight)
        return self.conv(x * self.weight, edge_index)


def case(keeps: bool = True) -> Case:
    return Case("Summed", "guide", GRAPH, 1, lambda channels: Summed(keeps))


def test_halves_of_a_step():
    kept = []

    def forward() -> None:
        a = torch.empty(3, 1024, 256)  # 3 MiB
        kept.append(torch.empty(1024, 256))
        del a

    def backward() -> None:
        b = torch.empty(4, 1024, 256)
        kept.clear()
        del b

    found = measure.memory(forward, backward, CPU)
    assert (found.peak, found.forward, found.kept) == pytest.approx((5, 4, 1), abs=0.1)
    found = measure.memory(lambda: None, lambda: None, CPU)
    assert (found.peak, found.forward, found.kept) == pytest.approx((0, 0, 0), abs=0.1)


def test_kept_for_the_backward():
    found = {}
    for keeps in (True, False):
        one = case(keeps)
        model, inputs = one.model(CPU), one.inputs(CPU)
        step = Step(model, model, inputs, torch.ones(64, 64))
        step()
        step.clear()
        found[keeps] = measure.memory(step.forward, step.backward, CPU)
    assert found[True].kept > 1 > found[False].kept
    assert found[True].peak >= found[True].forward >= found[True].kept


def test_halves_need_each_other():
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="call forward first"):
        Step(model, model, (torch.ones(1, 2),), torch.ones(1, 2)).backward()


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    wrong = Variant("compile", lambda model: lambda *inputs: 2 * model(*inputs), is_baseline=True)
    rows = tuple(wrong if variant.name == "compile" else variant for variant in VARIANTS)
    monkeypatch.setattr(memory, "VARIANTS", rows)
    monkeypatch.setattr(memory, "select", lambda suite, graph, models, orders: [replace(case(), name="A"), case()])
    command = ["memory", "--device", "cpu", "--out", str(tmp_path), "--rows"]
    with light("cpp"):
        assert __main__.main([*command, "eager,gnncompile"]) == 0
    said = capsys.readouterr().out
    assert "edge tensors" in said and "[2/2]" not in said
    stored = json.loads((tmp_path / "memory-guide-guide-cpu.json").read_text())["rows"]
    assert [(row["model"], row["row"]) for row in stored] == [
        ("A", "eager"),
        ("A", "gnncompile"),
        ("Summed", "eager"),
        ("Summed", "gnncompile"),
    ]
    eager, ours = stored[2:]
    assert eager["edge_tensors"] > 1 > ours["edge_tensors"] > 0 and ours["date"]
    assert ours["over_eager"] == pytest.approx(eager["peak_mib"] / ours["peak_mib"]) and ours["over_compile"] is None

    assert __main__.main([*command, "eager,compile"]) == 1
    assert "compile: WRONG: " in capsys.readouterr().out
    stored = json.loads((tmp_path / "memory-guide-guide-cpu.json").read_text())["rows"]
    assert stored[-1]["status"] == "WRONG" and stored[-1]["peak_mib"] is None


@pytest.mark.parametrize(
    "arguments", [["--models", "Nope"], ["--rows", "Nope"], ["--suite", "layers", "--graph", "mesh"]]
)
def test_unknown_names(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["memory", "--device", "cpu", *arguments]) == 2
    assert "expected" in capsys.readouterr().err
