"""Attention over edges with types: one graph for every size; outputs and all gradients equal eager's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import RGATConv

import gnncompile
from gnncompile.ir.region import parse
from gnncompile.runtime import launch
from gnncompile.substitutes import relation_tables
from tests.e2e.test_end_to_end import compare
from tests.e2e.test_typed import CHANNELS, RELATIONS, graph, one_graph
from tests.harness import launched, light, needs_interpreter


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


# -- RGAT ---------------------------------------------------------------------------------------------------------

HEADS = 2
MULTIPLICATIVE, WITHIN = "multiplicative-self-attention", "within-relation"


def rgat(**options: Any) -> nn.Module:
    """A layer whose parameters are all random: PyG leaves some at 0 or 1, and one without values."""
    layer = RGATConv(CHANNELS, 4, RELATIONS, heads=HEADS, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


RGAT: dict[str, tuple[dict[str, Any], int]] = {
    "additive": ({}, 2),
    "within": ({"attention_mechanism": WITHIN}, 2),
    "multiplicative": ({"attention_mode": MULTIPLICATIVE}, 2),
    "several queries": ({"attention_mode": MULTIPLICATIVE, "dim": 3}, 4),
    "several queries within": ({"attention_mode": MULTIPLICATIVE, "dim": 2, "attention_mechanism": WITHIN}, 3),
    "bases": ({"num_bases": 2}, 2),
    "blocks": ({"num_blocks": 2}, 2),
    "mean over heads": ({"concat": False, "bias": False}, 2),
    "mean over heads of several queries": ({"concat": False, "attention_mode": MULTIPLICATIVE, "dim": 2}, 3),
    "additive cardinality": ({"mod": "additive"}, 2),
    "scaled cardinality": ({"mod": "scaled"}, 3),
    "scaled cardinality of several queries": ({"mod": "scaled", "attention_mode": MULTIPLICATIVE, "dim": 2}, 4),
    "f-additive cardinality": ({"mod": "f-additive"}, 2),
    "f-scaled cardinality": ({"mod": "f-scaled", "attention_mechanism": WITHIN}, 3),
    "against the edges": ({"flow": "target_to_source"}, 2),
}
"""Options and how many regions they take: all queries' sums are one region, and each query's logits take one."""


def narrow(specs: list[str]) -> bool:
    """Whether no region stores more than a number per head and edge."""
    regions = [parse(spec) for spec in specs]
    return all(math.prod(out.trailing) <= HEADS for r in regions for out in r.outputs if r.per_edge(out))


@pytest.mark.parametrize("name", RGAT)
def test_rgat(name: str):
    torch.manual_seed(0)
    options, regions = RGAT[name]
    with launched() as specs:
        one = one_graph(rgat(**options), skipped=True)
    assert len(one.log.regions) == regions and narrow(specs)


def with_attributes(*width: int) -> Callable[[int, int], Any]:
    def inputs(nodes: int, edges: int) -> Any:
        x, edge_index, edge_type = graph(nodes, edges)
        return x, edge_index, edge_type, torch.randn(edges, *width).requires_grad_()

    return inputs


@pytest.mark.parametrize("mode", ["additive-self-attention", MULTIPLICATIVE])
def test_rgat_with_edge_attributes(mode: str):
    torch.manual_seed(0)
    one_graph(rgat(edge_dim=3, attention_mode=mode), with_attributes(3), skipped=True)
    one_graph(rgat(edge_dim=1, attention_mode=mode, attention_mechanism=WITHIN), with_attributes(), skipped=True)
    one_graph(rgat(edge_dim=1, attention_mode=mode), with_attributes(1), skipped=True)


@pytest.mark.parametrize("mechanism", ["across-relation", WITHIN])
def test_rgat_in_groups(mechanism: str, monkeypatch: pytest.MonkeyPatch):
    """The attention is over all relations, whatever table an edge's value is in."""
    monkeypatch.setattr(relation_tables, "TABLE_WIDTH", 30)
    torch.manual_seed(0)
    with launched() as specs:
        one = one_graph(rgat(attention_mechanism=mechanism), skipped=True)
    assert len(one.log.regions) == (4 if mechanism == "across-relation" else 3) and narrow(specs)


def test_rgat_hands_out_its_attention():
    torch.manual_seed(0)
    for options in ({}, {"attention_mode": MULTIPLICATIVE, "dim": 2, "attention_mechanism": WITHIN}):
        model, inputs = rgat(**options), graph(12, 40)
        found, expected = (
            m(*inputs, return_attention_weights=True) for m in (gnncompile.compile(model, fullgraph=True), model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rgat_drops_attention():
    """What is dropped differs from eager's; that none of it is lost on average does not."""
    torch.manual_seed(0)
    model = rgat(dropout=0.5)
    inputs = graph(12, 40)
    compiled = gnncompile.compile(model, fullgraph=True)
    with launched() as specs:
        runs = torch.stack([compiled(*inputs).detach() for _ in range(400)])
    assert narrow(specs) and any("dropout" in spec for spec in specs) and not torch.equal(runs[0], runs[1])
    expected = model.eval()(*inputs)
    assert ((runs.mean(0) - expected).abs() < 5 * runs.std(0) / 20 + 1e-5).all()
    compare(compiled, model, inputs)


def test_rgat_in_other_types():
    torch.manual_seed(0)
    x, edge_index, edge_type = graph(12, 40)
    for dtype, tol in ((torch.float64, 1e-12), (torch.bfloat16, 1e-1)):
        model = rgat().to(dtype)
        found, expected = (m(x.to(dtype), edge_index, edge_type) for m in (gnncompile.compile(model), model))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def test_rgat_with_a_type_too_many_is_an_error():
    x, edge_index, edge_type = graph(12, 40)
    edge_type[7] = RELATIONS
    with pytest.raises(IndexError, match="edge_type against num_relations"):
        gnncompile.compile(rgat())(x, edge_index, edge_type)


def test_other_rgat_layers_are_traced_as_written():
    torch.manual_seed(0)
    for model in (rgat(aggr="mean"), rgat(aggr="max")):
        compare(gnncompile.compile(model), model, graph(12, 40))


@pytest.mark.parametrize("which", ["cpp", "triton"])
def test_rgat_by_generated_kernels(which: str):
    needs_interpreter(which)
    torch.manual_seed(0)
    sizes = [(12, 40), (1, 0)] if which == "triton" else [(12, 40), (1, 0), (150, 700)]
    with light(which):
        one_graph(rgat(), sizes=sizes, skipped=True)
        one_graph(rgat(attention_mechanism=WITHIN), sizes=sizes, skipped=True)
        assert launch.fallbacks == {}
        report = gnncompile.explain(rgat(), *graph(12, 40))
    assert (report.captured_graphs, report.graph_breaks, report.host_syncs, len(report.regions)) == (1, 0, 0, 2)
