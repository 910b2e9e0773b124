"""The benchmark driver: its graphs, its checker, its tables. No time is asserted."""

import csv
import json
import time

import pytest
import torch
from torch import nn
from torch_geometric.nn.models import GCN, GraphSAGE

from benchmarks import __main__
from benchmarks.cases import graphs
from benchmarks.cases.names import named
from benchmarks.cases.registry import CASES, Case, select
from benchmarks.commands import guide
from benchmarks.measuring import check, comparison, counting, environment, measure
from benchmarks.measuring.step import Step
from benchmarks.reporting import step_rows, tables
from benchmarks.rows.variants import VARIANTS, Variant, for_device

CPU = torch.device("cpu")
TINY = graphs.Graph("tiny", 30, 90, 8, lambda: graphs.uniform(30, 90), "for tests")
OPTIONS = comparison.Options(seconds=0.01, rounds=2)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    counting.reset()
    yield
    counting.reset()


def tiny_case(make_model=lambda channels: GCN(channels, channels, num_layers=2)):
    return Case("GCN", "guide", TINY, 2, make_model)


# -- graphs --------------------------------------------------------------------------------------------------------


def test_registered_graphs_have_the_size_they_claim():
    for graph in graphs.GRAPHS.values():
        edge_index = graph.make()
        assert edge_index.shape == (2, graph.num_edges) and edge_index.dtype == torch.int64
        assert int(edge_index.min()) >= 0 and int(edge_index.max()) < graph.num_nodes
        assert torch.equal(edge_index, graph.make())


# -- cases and rows ------------------------------------------------------------------------------------------------


def test_cases_are_selected_by_name():
    assert [case.name for case in select("guide", "guide", ["GAT", "GCN"])] == ["GAT", "GCN"]
    assert len(select("guide", "powerlaw-arxiv")) == 4
    assert len({(case.suite, case.graph.name, case.name, case.order) for case in CASES}) == len(CASES)
    with pytest.raises(ValueError, match=r"models: got Nope, expected some of GCN, GraphSAGE, GIN, GAT"):
        select("guide", "guide", ["Nope"])
    with pytest.raises(ValueError, match=r"graph: got 'nope'"):
        select("guide", "nope")


def test_case_is_the_same_every_time():
    case = tiny_case()
    one, two = case.model(CPU), case.model(CPU)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(case.inputs(CPU), case.inputs(CPU), strict=True))


def test_rows_by_device_and_name():
    assert "reduce-overhead" not in [variant.name for variant in for_device(CPU)]
    assert "reduce-overhead" in [variant.name for variant in for_device(torch.device("cuda"))]
    assert [variant.name for variant in named(VARIANTS, ["gnncompile", "eager"])] == ["eager", "gnncompile"]
    with pytest.raises(ValueError, match="rows: got nope"):
        named(VARIANTS, ["nope"])


# -- correctness ---------------------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """A model that is right but for what `spoil` does to its output."""

    def __init__(self, model, spoil):
        super().__init__()
        self.model, self.spoil = model, spoil

    def forward(self, *inputs):
        return self.spoil(self.model(*inputs))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.05


def once_in(number, value):
    calls = iter(range(10_000))
    return lambda out: out * value if next(calls) >= number else out


@pytest.mark.parametrize(
    ("spoil", "status", "text"),
    [
        (lambda out: out, "ok", ""),
        (lambda out: out * 1.0005, "WRONG", "relative error 5"),
        (lambda out: out + (torch.arange(30) == 7).view(-1, 1) * 0.1, "WRONG", "output"),
        (lambda out: out * float("nan"), "WRONG", "nan"),
        (WrongGradient.apply, "WRONG", "grad"),
        (lambda out: out.detach().requires_grad_(), "WRONG", "missing"),
        (lambda out: out.sum(1, keepdim=True).expand_as(out)[:, :0], "FAILED", "RuntimeError"),
        (once_in(1, 1.01), "WRONG", "relative error"),  # right in the first call only
        (once_in(6, 1.01), "WRONG", "after timing"),
    ],
)
def test_no_time_without_correctness(spoil, status, text):
    variants = [VARIANTS[0], Variant("spoilt", lambda model: Wrong(model, spoil))]
    eager, spoilt = comparison.run_case(tiny_case(), variants, CPU, OPTIONS, lambda message: None)
    assert eager.status == "ok" and eager.timing is not None and eager.memory.peak > 0
    assert spoilt.status == status
    assert (spoilt.timing is not None) == (status == "ok")
    table = step_rows.format_case([eager, spoilt])
    if status != "ok":
        assert text in spoilt.message
        assert f"spoilt: {status}: " in table and spoilt.message in table
        assert step_rows.speedups(spoilt, [eager, spoilt]) == (None, None)


def test_crash_is_reported_with_its_first_line():
    def build(model):
        raise KeyError("\nno such thing\nmore")

    (row,) = comparison.run_case(tiny_case(), [Variant("broken", build)], CPU, OPTIONS, lambda message: None)
    assert (row.status, row.timing) == ("FAILED", None)
    assert row.message.startswith("KeyError: ") and "no such thing" in row.message


def test_tolerance_follows_eager_with_a_floor():
    case = tiny_case()
    model, inputs = case.model(CPU), case.inputs(CPU)
    reference = check.Reference(model, inputs, torch.randn(30, 8))
    assert set(reference.tolerances) == {"output", *(f"grad {name}" for name, _ in model.named_parameters())}
    assert min(reference.tolerances.values()) == check.FLOOR
    assert max(reference.tolerances.values()) == check.MOST_KINKS  # 240 values: a flip changes a gradient by 9 %
    assert check.Reference._floor("grad w", 1e-7, 25_600) == 0.025  # eight flips
    assert check.Reference._floor("grad w", 1e-7, 10**7) == check.KINK_FLOOR

    class Coarse(nn.Module):  # as exact as bfloat16, in every way of running it
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x, edge_index):
            return self.lin(x) if x.dtype == torch.float64 else self.lin(x).bfloat16().float()

    reference = check.Reference(Coarse(), inputs, torch.randn(30, 8))
    assert 1e-3 < reference.tolerances["output"] < 1e-1


def test_input_gradients_are_checked_when_asked_for():
    case = tiny_case()
    x, edge_index = case.inputs(CPU)
    model = case.model(CPU)
    step = Step(model, model, (x.requires_grad_(), edge_index), torch.ones(30, 8))
    with pytest.raises(RuntimeError, match="call the step first"):
        step.results()
    step()
    results = step.results()
    reference = check.Reference(model, (x, edge_index), torch.ones(30, 8))
    assert "grad input 0" in results and reference.check(results).ok
    results["grad input 0"] = results["grad input 0"] + 1
    assert reference.check(results).name == "grad input 0"


# -- measuring -----------------------------------------------------------------------------------------------------


def test_interleaved_timing_takes_turns():
    order = []
    steps = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = measure.interleaved(steps, CPU, seconds=0.0, rounds=3, warmup=1)
    assert "".join(order) == "aabb" + "aaabbb" * 3
    assert timings["a"].steps == 6
    assert timings["a"].minimum <= timings["a"].p10 <= timings["a"].median <= timings["a"].p90


def test_slow_steps_are_not_repeated():
    calls = []
    steps = {"slow": lambda: (calls.append("s"), time.sleep(1.05)), "fast": lambda: calls.append("f")}
    timings = measure.interleaved(steps, CPU, seconds=0.0, rounds=3, warmup=1)
    assert "".join(calls) == "sff" + "sfff" * 2 + "fff"
    assert timings["slow"].steps == 2 and timings["fast"].steps == 6
    assert measure.least_ms(1_050, 0.0, 3, 1) == 3 * 1_050 and measure.least_ms(10, 0.0, 3, 1) == 110


def test_peak_memory_counts_what_is_alive_at_once():
    def step():
        for _ in range(3):
            a = torch.empty(1024, 1024)
            del a
        b = torch.empty(1024, 1024)
        c = torch.empty(1024, 1024)
        del b, c

    assert measure.peak_memory(step, CPU) == pytest.approx(8, abs=0.1)


def test_counts_graphs_breaks_and_recompiles():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled = torch.compile(broken, backend="eager", dynamic=False)
    start = counting.mark()
    compiled(torch.ones(3))
    assert counting.since(start) == counting.Counts(graphs=2, recompiles=0, graph_breaks=1)
    compiled(torch.ones(4))
    assert counting.since(start).recompiles == 2 and counting.since(start).graphs == 4


def test_counts_do_not_mix_rows_of_one_class():
    x, edge_index = tiny_case().inputs(CPU)
    for backend in ("eager", "aot_eager"):
        start = counting.mark()
        torch.compile(GraphSAGE(8, 8, num_layers=2), backend=backend)(x, edge_index)
        assert counting.since(start) == counting.Counts(graphs=1, recompiles=0, graph_breaks=0)


# -- printing and storing ------------------------------------------------------------------------------------------


def test_text_table():
    text = tables.text_table(["name", "ms"], [["eager", "10.5"], ["compile", "9"]])
    assert text.splitlines() == ["name       ms", "-------  ----", "eager    10.5", "compile     9"]
    with pytest.raises(ValueError, match="expected 2"):
        tables.text_table(["name", "ms"], [["eager"]])


def test_environment_names_what_a_number_needs():
    facts = environment.describe(CPU, ["python", "-m", "benchmarks", "guide", "--out", "a b"])
    assert facts["command"] == "python -m benchmarks guide --out 'a b'"
    assert {"date", "commit", "cpu", "system", "torch", "triton", "torch-geometric"} <= set(facts)
    slug = environment.machine_slug(CPU)
    assert slug and slug == slug.lower() and not set(slug) & set(" /@()")


def test_guide_end_to_end(tmp_path, monkeypatch, capsys):
    case = tiny_case()
    monkeypatch.setattr(guide, "select", lambda suite, graph, models: [case])
    arguments = ["guide", "--device", "cpu", "--quick", "--rows", "eager", "--out", str(tmp_path)]
    assert __main__.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "tiny: 30 nodes, 90 edges" in printed and "torch-geometric" in printed
    stored = json.loads((tmp_path / "guide-guide-cpu.json").read_text())
    assert stored["rows"][0]["status"] == "ok" and stored["rows"][0]["median_ms"] > 0
    assert stored["environment"]["command"].startswith("python -m benchmarks guide")
    with (tmp_path / "guide-guide-cpu.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["row"] == "eager" and float(row["over_eager"]) == 1.0


def test_guide_refuses_unknown_names(capsys):
    assert __main__.main(["guide", "--device", "cpu", "--models", "Nope"]) == 2
    assert "models: got Nope" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_memory_of_a_step_that_may_be_recorded(recorded: bool):
    device = torch.device("cuda")
    before = measure.reserved(device)

    def step():
        return torch.ones(64 * 2**18, device=device).sum()

    step()
    replay = step
    if recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    assert 64 <= measure.repeated_memory(replay, device, before) < 128


@pytest.mark.gpu
def test_rows_of_a_gpu_have_the_time_of_the_device():
    device = torch.device("cuda")
    eager = [variant for variant in for_device(device) if variant.name == "eager"]
    (row,) = comparison.run_case(tiny_case(), eager, device, OPTIONS, lambda text: None)
    assert row.timing is not None and row.device_ms is not None and row.device_ms > 0


@pytest.mark.gpu
def test_sync_check_sees_a_sync():
    device = torch.device("cuda")
    x = torch.ones(3, device=device)
    assert measure.sync_error(lambda: x + 1, device) is None
    assert "synchroniz" in measure.sync_error(lambda: x.sum().item(), device)
