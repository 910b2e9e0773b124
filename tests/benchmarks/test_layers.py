"""The benchmark of single layers: registry, inputs, limits, targets, and how results are kept. No time is asserted."""

import csv
import json
import time

import pytest
import torch
from torch import nn
from torch_geometric.nn import RGATConv

from benchmarks import __main__
from benchmarks.cases import graphs, inputs, limits, nested
from benchmarks.cases.layers import LAYERS
from benchmarks.cases.limits import Size
from benchmarks.cases.registry import CASES, layer_case, select
from benchmarks.cases.rgat_reference import RelationByRelation
from benchmarks.cases.targets import Target
from benchmarks.commands import driver, layers
from benchmarks.measuring import comparison, counting
from benchmarks.measuring.deadline import deadline
from benchmarks.measuring.step import Step
from benchmarks.reporting import step_rows, tables
from benchmarks.rows.variants import VARIANTS, Variant
from gnncompile.report.traffic import RATES, rates_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = graphs.Graph("tiny", 30, 90, 8, lambda: graphs.uniform(30, 90), "for tests")
OPTIONS = comparison.Options(seconds=0.01, rounds=2, input_grad=True, warmup=1)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    counting.reset()
    yield
    counting.reset()


def run(case, variants, options=OPTIONS):
    return comparison.run_case(case, variants, CPU, options, lambda message: None)


@pytest.mark.parametrize("name", ["GCN", "GINE", "HGT"])
def test_a_layer_in_half_precision(name):
    half = layer_case(name, TINY).to("bf16")
    assert half.name == f"{name} bf16" and layer_case(name, TINY).to("fp32").name == name
    assert {parameter.dtype for parameter in half.model(CPU).parameters()} == {torch.bfloat16}
    (row,) = run(half, [VARIANTS[0]])
    assert row.status == "ok" and row.verdict.error > 1e-4
    assert half.limit().bytes < layer_case(name, TINY).limit().bytes


def test_precisions_of_the_command():
    cases = layers.in_precisions(select("layers", "guide", ["GCN", "PNA"]), ["fp32", "bf16"])
    assert [case.name for case in cases] == ["GCN", "GCN bf16", "PNA", "PNA bf16"]
    with pytest.raises(ValueError, match="precisions: got half, expected some of fp32, bf16"):
        layers.in_precisions(cases, ["half"])
    with pytest.raises(ValueError, match="attention have their own"):
        layers.in_precisions(select("attention", None, orders=["sorted"]), ["bf16"])
    with pytest.raises(ValueError, match="got GCN of 3 layers, expected a single layer"):
        select("guide", "guide", ["GCN"])[0].to("bf16")


# -- registry and inputs -------------------------------------------------------------------------------------------


def test_layers_are_selected_by_name_and_order():
    cases = select("layers", "guide", ["PNA", "GCN"], ["sorted", "random"])
    assert [(case.name, case.order) for case in cases] == [
        ("PNA", "sorted"),
        ("PNA", "random"),
        ("GCN", "sorted"),
        ("GCN", "random"),
    ]
    assert len(select("layers", "powerlaw-arxiv", orders=inputs.ORDERS)) == 2 * len(LAYERS)
    with pytest.raises(ValueError, match="order: got upwards, expected some of random, sorted"):
        select("layers", "guide", ["GCN"], ["upwards"])
    with pytest.raises(ValueError, match="order: got 'upwards'"):
        inputs.ordered(TINY, "upwards")


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_runs_and_has_a_gradient_for_its_features(name):
    case = layer_case(name, TINY)
    (row,) = run(case, [VARIANTS[0]])
    assert (row.status, row.message) == ("ok", "") and row.timing is not None
    features = case.inputs(CPU)[0]
    arguments = (nested.map_tensors(lambda tensor: tensor.requires_grad_(), features), *case.inputs(CPU)[1:])
    model = case.model(CPU)
    step = Step(model, model, arguments, torch.ones(30, 8))
    step()
    found = {name for name, grad in step.results().items() if "input" in name and grad is not None}
    assert found == {f"grad {place}" for place, _ in nested.tensors(features, "input 0")}


@pytest.mark.parametrize("make", [inputs.with_edge_features, inputs.with_edge_types])
def test_sorting_takes_what_edges_carry_along(make):
    x, edge_index, carried = make(TINY, "random", torch.Generator().manual_seed(0))
    same_x, in_order, carried_in_order = make(TINY, "sorted", torch.Generator().manual_seed(0))
    position = edge_index[1].argsort(stable=True)
    assert torch.equal(x, same_x) and bool((in_order[1].diff() >= 0).all())
    assert torch.equal(in_order, edge_index[:, position]) and torch.equal(carried_in_order, carried[position])


def test_typed_graph_has_the_same_edges():
    x_dict, edges = inputs.typed(TINY, "sorted", torch.Generator().manual_seed(0))
    assert {kind: x.shape for kind, x in x_dict.items()} == {"paper": (20, 8), "author": (10, 8)}
    assert tuple(edges) == inputs.EDGE_TYPES and sum(edge_index.size(1) for edge_index in edges.values()) == 90
    for (source, _, destination), edge_index in edges.items():
        assert int(edge_index[0].max()) < len(x_dict[source]) and int(edge_index[1].max()) < len(x_dict[destination])
        assert bool((edge_index[1].diff() >= 0).all()) and edge_index.size(1) > 3


def test_nested_tensors_have_names():
    value = ({"a": torch.ones(1), ("a", "to", "b"): [torch.ones(2), 3]}, None)
    assert [name for name, _ in nested.tensors(value, "x")] == ["x.0.a", "x.0.a__to__b.0"]
    doubled = nested.map_tensors(lambda tensor: tensor * 2, value)
    assert doubled[0]["a"].item() == 2 and doubled[0][("a", "to", "b")][1] == 3 and doubled[1] is None


def test_reference_of_rgat_is_rgat():
    case = layer_case("RGAT", TINY)
    model = case.model(CPU)
    own = case.reference(model)
    assert isinstance(model, RGATConv) and isinstance(own, RelationByRelation)
    torch.testing.assert_close(own(*case.inputs(CPU)), model(*case.inputs(CPU)))
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in model.named_parameters()]
    gcn = layer_case("GCN", TINY)
    assert gcn.reference(model) is model


# -- limits and targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_limits_grow_with_the_graph(name):
    limit, rates = LAYERS[name].limit, RATES["H200"]
    small = limit(Size(1_000, 20_000, 64))
    for larger in (limit(Size(1_000, 40_000, 64)), limit(Size(2_000, 20_000, 64)), limit(Size(1_000, 20_000, 128))):
        assert larger.gathered >= small.gathered and larger.streamed > small.streamed and larger.flops >= small.flops
        assert larger.milliseconds(rates) > small.milliseconds(rates)
    # Twice a row per edge, forward and backward, but for the gradient of a maximum.
    assert small.gathered >= (1 if name == "SAGE max" else 2) * 20_000 * 64 * 4


def test_limit_of_gcn_by_hand():
    work = limits.aggregation(1)(Size(1_000, 20_000, 64))
    assert work.gathered == 2 * 20_000 * 64 * 4
    assert work.streamed == 2 * (20_000 * 4 + 1_000 * 64 * 4) + 3 * 2 * 1_000 * 64 * 4
    assert work.flops == 3 * 2 * 1_000 * 64 * 64
    by_bytes = work.gathered / 5e12 + work.streamed / 4.3e12
    assert by_bytes * 1e3 <= work.milliseconds(RATES["H200"]) <= by_bytes * 1e3 + work.flops / 60e9
    assert rates_of("NVIDIA H200") is RATES["H200"] and rates_of("some CPU") is None


def test_targets():
    target = Target(over_eager=4.0, over_compile=1.0)
    assert target.verdict(4.0, 1.2) == "ok" and target.verdict(4.0, None) == "ok"
    assert target.verdict(3.9, 1.2) == target.verdict(5.0, 0.9) == "SHORT"
    assert target.verdict(None, None) == "no baseline" and str(target) == "4x eager, 1x compile"
    assert layer_case("GAT", TINY).target(CUDA) == Target(over_eager=12.0)
    assert layer_case("EdgeConv", TINY).target(CPU) == Target(over_eager=1.5, over_compile=1.0)


# -- rows that go wrong --------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *arguments):
        return self.model(*arguments) * 2


def crash(model):
    raise RuntimeError("no such kernel")


def test_wrong_row_on_typed_inputs_has_no_time():
    case = layer_case("HeteroConv(SAGE)", TINY)
    variants = [VARIANTS[0], Variant("compile", crash, is_baseline=True), Variant("gnncompile", Doubled, is_ours=True)]
    rows = run(case, variants)
    assert [row.status for row in rows] == ["ok", "FAILED", "WRONG"]
    assert rows[0].timing is not None and rows[2].timing is None
    assert "target 4x eager, 1x compile: SHORT" in layers.describe_layer(case, rows, CPU)
    assert "compile: FAILED: RuntimeError: no such kernel" in step_rows.format_case(rows)
    text = layers.summary([layers.record_layer(case, row, rows, CPU) for row in rows])
    line = text.splitlines()[-1]
    assert line.startswith("HeteroConv(SAGE), random") and "FAILED" in line and "WRONG" in line and "SHORT" in line


def test_case_without_a_reference_fails_alone(monkeypatch):
    case = layer_case("GCN", TINY)
    monkeypatch.setattr(type(case), "reference", lambda case, model: crash(model))
    (row,) = run(case, [VARIANTS[0]])
    assert row.status == "FAILED" and row.message == "no reference: RuntimeError: no such kernel"


def test_slow_rows_are_given_up():
    class Slow(nn.Module):
        def __init__(self, model, seconds):
            super().__init__()
            self.model, self.seconds = model, seconds

        def forward(self, *arguments):
            time.sleep(self.seconds)
            return self.model(*arguments)

    options = comparison.Options(seconds=0.01, rounds=2, warmup=1, row_limit=2.0)
    variants = [
        Variant("slow", lambda model: Slow(model, 0.3)),  # 0.9 s to check, 2.4 s to time
        Variant("endless", lambda model: Slow(model, 30.0)),
        VARIANTS[0],
    ]
    slow, endless, eager = run(layer_case("GIN", TINY), variants, options)
    assert slow.status == "FAILED" and "timing it would take longer than 2 s" in slow.message
    assert endless.status == "FAILED" and "took longer than 2 s" in endless.message
    assert eager.status == "ok"
    with deadline(None), deadline(10.0):
        pass


# -- the command ---------------------------------------------------------------------------------------------------


def arguments(tmp_path, *others):
    return ["layers", "--device", "cpu", "--quick", "--rows", "eager", "--out", str(tmp_path), *others]


@pytest.fixture
def tiny_cases(monkeypatch):
    def fake(suite, graph, models, orders):
        return [layer_case(name, TINY, order) for name in models for order in orders]

    monkeypatch.setattr(layers, "select", fake)


def test_layers_end_to_end_adds_to_earlier_results(tmp_path, tiny_cases, capsys):
    assert __main__.main(arguments(tmp_path, "--layers", "GCN,HGT", "--order", "random")) == 0
    printed = capsys.readouterr().out
    assert "GFLOP" in printed and "edges sorted" not in printed and "HGT, random" in printed
    assert __main__.main(arguments(tmp_path, "--layers", "GCN", "--order", "sorted,random")) == 0
    assert "edges sorted by destination" in capsys.readouterr().out
    stored = json.loads((tmp_path / "layers-guide-cpu.json").read_text())
    assert [(row["model"], row["order"]) for row in stored["rows"]] == [
        ("HGT", "random"),
        ("GCN", "sorted"),
        ("GCN", "random"),
    ]
    assert all(row["median_ms"] > 0 and row["date"] and row["gathered_bytes"] > 0 for row in stored["rows"])
    with (tmp_path / "layers-guide-cpu.csv").open() as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["HGT", "GCN", "GCN"]


def test_results_are_written_after_each_case(tmp_path, tiny_cases, monkeypatch):
    written = []
    monkeypatch.setattr(tables.Results, "write", lambda self, rows: written.append(len(rows)))
    assert __main__.main(arguments(tmp_path, "--layers", "GCN,GIN", "--order", "random")) == 0
    assert written == [1, 2]


def test_budget_stops_before_the_next_case(tmp_path, tiny_cases, capsys):
    assert __main__.main(arguments(tmp_path, "--layers", "GCN,GIN", "--order", "random", "--budget", "0")) == 0
    assert "left out, over the budget of 0 s: GCN random, GIN random" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    budget = driver.Budget(None)
    assert budget.allows("any") and not budget.left_out and str(budget) == ""


def test_results_of_other_versions_are_not_kept(tmp_path):
    rows = [{"model": "GCN", "ms": 1.0}]
    tables.Results(tmp_path, "r", {"torch": "1", "date": "today"}, key=("model",)).write(rows)
    assert tables.Results(tmp_path, "r", {"torch": "1", "date": "tomorrow"}, key=("model",)).earlier == rows
    assert tables.Results(tmp_path, "r", {"torch": "2", "date": "today"}, key=("model",)).earlier == []
    assert tables.Results(tmp_path, "r", {"torch": "1"}).earlier == []


def test_layers_refuses_unknown_names(capsys):
    assert __main__.main(["layers", "--device", "cpu", "--layers", "Nope"]) == 2
    assert "models: got Nope" in capsys.readouterr().err


def test_every_layer_is_registered_for_every_graph_and_order():
    found = {(case.graph.name, case.name, case.order) for case in CASES if case.suite == "layers"}
    assert len(found) == len(graphs.GRAPHS) * len(LAYERS) * len(inputs.ORDERS)
