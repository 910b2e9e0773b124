"""The benchmark of the core of attention: its modules, cases and targets. No time is asserted."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__
from benchmarks.cases import attention, graphs, limits, nested
from benchmarks.cases.limits import Size
from benchmarks.cases.registry import attention_case, select
from benchmarks.cases.targets import Target
from benchmarks.commands import layers
from benchmarks.measuring import check, comparison, counting
from benchmarks.measuring.step import Step
from benchmarks.rows.variants import VARIANTS
from gnncompile.report.traffic import RATES

CPU = torch.device("cpu")
SQUARE = graphs.Graph("square", 30, 90, 8, lambda: graphs.uniform(30, 90), "for tests")
BIPARTITE = graphs.Graph("bipartite", 40, 120, 8, lambda: graphs.bipartite(9, 40, 3), "for tests", num_sources=9)
OURS = [variant for variant in VARIANTS if variant.is_ours and "cpu" in variant.devices]
OPTIONS = comparison.Options(seconds=0.01, rounds=2, input_grad=True, warmup=1)
F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def fresh_dynamo():
    counting.reset()
    yield
    counting.reset()


def case_of(core, graph):
    return attention_case(*core.on(graph, milliseconds=1.0))


def cores(dtype):
    one_for_each = (
        attention.dot_product(4, dtype),
        attention.dot_product_edge(2, dtype),
        attention.gatv2(4, dtype),
        attention.maximum(dtype),
    )
    return [pytest.param(core, id=f"{core.name} {dtype}") for core in one_for_each]


# -- modules against formulas --------------------------------------------------------------------------------------


def by_destination(edge_index, num_nodes, shape, row):
    """Stacks `row(sources, edges, destination)` over destinations; zeros for those without an edge."""
    rows = []
    for i in range(num_nodes):
        edges = (edge_index[1] == i).nonzero().view(-1)
        rows.append(row(edge_index[0, edges], edges, i) if len(edges) else torch.zeros(shape, dtype=F64))
    return torch.stack(rows)


@pytest.mark.parametrize("graph", [SQUARE, BIPARTITE], ids=lambda graph: graph.name)
@pytest.mark.parametrize("make", [attention.dot_product, attention.dot_product_edge])
def test_dot_product_is_the_formula(make, graph):
    case = case_of(make(2, F64), graph)
    q, k, v, edge_index, *features = case.inputs(CPU)
    edge_attr = features[0].view(-1, 2, 4) if features else torch.zeros(graph.num_edges, 2, 4, dtype=F64)
    assert q.shape == (graph.num_nodes, 2, 4) and k.shape == v.shape == (graph.sources, 2, 4)

    def row(sources, edges, i):
        logits = torch.einsum("hc,jhc->jh", q[i], k[sources] + edge_attr[edges]) / math.sqrt(4)
        return torch.einsum("jh,jhc->hc", logits.softmax(0), v[sources] + edge_attr[edges])

    found = case.model(CPU)(*case.inputs(CPU))
    torch.testing.assert_close(found, by_destination(edge_index, graph.num_nodes, (2, 4), row))


def test_gatv2_is_the_formula():
    case = case_of(attention.gatv2(2, F64), SQUARE)
    (x_l, x_r, edge_index), model = case.inputs(CPU), case.model(CPU)

    def row(sources, edges, i):
        x = x_l[sources] + x_r[i]
        logits = (torch.where(x > 0, x, 0.2 * x) * model.att).sum(-1)
        return torch.einsum("jh,jhc->hc", logits.softmax(0), x_l[sources])

    torch.testing.assert_close(model(*case.inputs(CPU)), by_destination(edge_index, 30, (2, 4), row))


def test_max_is_the_formula():
    case = case_of(attention.maximum(F64), SQUARE)
    x, edge_index = case.inputs(CPU)
    expected = by_destination(edge_index, 30, (8,), lambda sources, edges, i: x[sources].amax(0))
    torch.testing.assert_close(case.model(CPU)(x, edge_index), expected)


@pytest.mark.parametrize("graph", [SQUARE, BIPARTITE], ids=lambda graph: graph.name)
def test_head_by_head_is_all_at_once(graph):
    case = case_of(attention.dot_product_edge(2, F64), graph)
    results = []
    for model in (case.model(CPU), case.reference(case.model(CPU))):
        step = Step(model, model, case.with_gradients(case.inputs(CPU)), torch.ones(graph.num_nodes, 2, 4, dtype=F64))
        step()
        results.append(step.results())
    assert isinstance(model, attention.HeadByHead) and len(results[0]) == 5
    torch.testing.assert_close(results[1], results[0])


# -- cases ---------------------------------------------------------------------------------------------------------


def test_bipartite_graph():
    edge_index = graphs.bipartite(9, 40, 3)
    assert edge_index.shape == (2, 120) and int(edge_index[0].max()) == 8
    assert torch.equal(torch.bincount(edge_index[1]), torch.full((40,), 3))
    assert str(BIPARTITE) == "bipartite: 40 destinations, 9 sources, 120 edges (for tests)"
    assert (BIPARTITE.sources, SQUARE.sources) == (9, 30)


def test_suite_lists_its_cases():
    cases = select("attention", None, orders=["sorted"])
    assert len(cases) == len(attention.ATTENTION) == 13
    assert {(case.graph.name, case.graph.channels) for case in cases} == {
        ("powerlaw-arxiv", 128),
        ("mesh-to-grid", 128),
        ("mesh-to-grid", 1024),
        ("mesh", 128),
        ("mesh", 1024),
    }
    assert [case.graph.name for case in select("attention", None, ["dot 4x32 float16"], ["sorted"])] == [
        "powerlaw-arxiv",
        "mesh-to-grid",
        "mesh",
    ]
    (edge_case,) = select("attention", "mesh", ["dot edge 16x64 float16"], ["sorted"])
    assert edge_case.target(torch.device("cuda")) == Target(milliseconds=1.45)
    with pytest.raises(ValueError, match="graph: got 'guide', expected one of powerlaw-arxiv, mesh-to-grid, mesh"):
        select("attention", "guide")


@pytest.mark.parametrize("core", [*cores(F32), *cores(F16)])
def test_every_argument_has_a_gradient_in_the_dtype_of_the_case(core):
    case = case_of(core, SQUARE)
    model, arguments = case.model(CPU), case.with_gradients(case.inputs(CPU))
    output = model(*arguments)
    step = Step(model, model, arguments, torch.ones_like(output))
    step()
    results = step.results()
    assert all(tensor is not None and tensor.dtype == core.dtype for tensor in results.values())
    places = [name for value in arguments for name, tensor in nested.tensors(value, "") if tensor.is_floating_point()]
    assert len(results) == 1 + len(places) + len(list(model.parameters()))
    assert bool((arguments[-1 - core.name.endswith("edge")][1].diff() >= 0).all())


@pytest.mark.parametrize("core", cores(F16))
def test_ours_is_right_in_float16(core):
    (row,) = comparison.run_case(case_of(core, SQUARE), OURS, CPU, OPTIONS, lambda message: None)
    assert (row.status, row.message) == ("ok", "")


def test_tolerance_of_float16():
    case = case_of(attention.dot_product(4, F16), SQUARE)
    model, arguments = case.model(CPU), case.with_gradients(case.inputs(CPU))
    reference = check.Reference(model, arguments, torch.randn(30, 4, 2).to(F16))
    assert all(tensor.dtype == F64 for tensor in reference.exact.values())
    eps = torch.finfo(F16).eps
    assert reference.tolerances["output"] >= check.FLOOR_ROUNDINGS * eps
    assert max(reference.tolerances.values()) < 0.1
    step = Step(model, model, arguments, reference.weights)
    step()
    results = step.results()
    assert reference.check(results).ok
    assert not reference.check({**results, "grad input 2": results["grad input 2"] * 1.2}).ok


# -- targets and limits --------------------------------------------------------------------------------------------


def test_milliseconds_are_judged_on_one_device():
    target = Target(milliseconds=2.9)
    assert str(target) == "2.9 ms on an H200"
    assert target.verdict(None, None, 2.9, device="NVIDIA H200") == "ok"
    assert target.verdict(9.0, 9.0, 3.0, device="NVIDIA H200") == "SHORT"
    assert target.verdict(9.0, 9.0, 3.0, device="NVIDIA H100 80GB HBM3") == "no baseline"
    both = Target(over_compile=2.0, milliseconds=2.9)
    assert str(both) == "2x compile, 2.9 ms on an H200"
    assert both.verdict(None, 1.9, 2.0, device="NVIDIA H200") == "SHORT"
    assert both.verdict(None, 2.0, 3.0) == "ok"


def test_limits_by_hand():
    size = Size(1_000, 20_000, 128)
    work = limits.core(limits.dot_product_core, F32, heads=4)(size)
    assert work.gathered == (6 * 128 + 2 * 4) * 20_000 * 4 and work.flops == 0
    assert work.streamed == 3 * 20_000 * 4 + 10 * 1_000 * 128 * 4
    half = limits.core(limits.dot_product_core, F16, heads=4)(size)
    assert half.gathered == work.gathered / 2 and half.streamed == 3 * 20_000 * 4 + 10 * 1_000 * 128 * 2
    fewer = limits.core(limits.dot_product_core, F32, heads=4)(replace(size, sources=500))
    assert fewer.streamed == work.streamed - 4 * 500 * 128 * 4
    edges = limits.core(limits.dot_product_edge_core, F16, heads=4)(size)
    assert edges.gathered == 6 * 128 * 20_000 * 2
    assert edges.streamed == half.streamed + (3 * 128 + 4 * 4) * 20_000 * 2


@pytest.mark.parametrize("case", select("attention", None, orders=["sorted"]), ids=lambda case: f"{case.name}")
def test_every_case_has_a_limit_below_others_best(case):
    work = case.limit()
    assert work is not None and work.milliseconds(RATES["H200"]) < 1.5 * case.target(torch.device("cuda")).milliseconds


# -- the command ---------------------------------------------------------------------------------------------------


def test_attention_end_to_end(tmp_path, monkeypatch, capsys):
    tiny = [
        attention_case(*attention.dot_product(4, F16).on(SQUARE, 1.0)),
        attention_case(*attention.dot_product_edge(2, F32).on(BIPARTITE, 1.0)),
    ]
    asked = []
    monkeypatch.setattr(layers, "select", lambda *arguments: asked.append(arguments) or tiny)
    command = ["layers", "--suite", "attention", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert __main__.main([*command, "--rows", "eager"]) == 0
    assert asked == [("attention", None, None, ("sorted",))]
    printed = capsys.readouterr().out
    assert "dot 4x2 float16, 1 layer, 8 channels; square" in printed
    assert "bipartite, dot edge 2x4 float32, sorted" in printed
    stored = json.loads((tmp_path / "attention-cpu.json").read_text())
    assert [(row["graph"], row["model"], row["status"]) for row in stored["rows"]] == [
        ("square", "dot 4x2 float16", "ok"),
        ("bipartite", "dot edge 2x4 float32", "ok"),
    ]
