"""``torch_geometric.explain`` over a compiled model gives the masks that it gives over the original."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.explain import (
    AttentionExplainer,
    CaptumExplainer,
    DummyExplainer,
    Explainer,
    GNNExplainer,
    GraphMaskExplainer,
    PGExplainer,
)
from torch_geometric.nn import GATConv, GCNConv, HeteroConv, SAGEConv

import gnncompile
from gnncompile import testing
from gnncompile.capture.compile import callable_of
from tests.harness import light

CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
BOTH = {"node_mask_type": "attributes", "edge_mask_type": "object"}
EDGES = {"edge_mask_type": "object"}

GRAPHS: list[Any] = [
    testing.awkward(8)[name]
    for name in ("no edge", "one node, self loop", "self loops", "isolated nodes", "unsorted, duplicates, hub")
]


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.first, self.second = conv(8, 8), conv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def gnn_explainer(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    return Explainer(model, GNNExplainer(epochs=4), "model", CONFIG, **BOTH)(x, edge_index, index=0)


def attention_explainer(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    return Explainer(model, AttentionExplainer(), "model", CONFIG, **EDGES)(x, edge_index, index=0)


def dummy_explainer(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    return Explainer(model, DummyExplainer(), "model", CONFIG, **BOTH)(x, edge_index, index=0)


def pg_explainer(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    explainer = Explainer(model, PGExplainer(epochs=3), "phenomenon", CONFIG, **EDGES)
    index, target = torch.tensor([0]), torch.arange(x.size(0)) % 3
    for epoch in range(3):
        explainer.algorithm.train(epoch, model, x, edge_index, target=target, index=index)
    return explainer(x, edge_index, target=target, index=index)


def graph_mask_explainer(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    algorithm = GraphMaskExplainer(2, epochs=2, log=False)
    return Explainer(model, algorithm, "model", CONFIG, **BOTH)(x, edge_index, index=0)


def captum_explainer(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    algorithm = CaptumExplainer("IntegratedGradients", n_steps=3)
    return Explainer(model, algorithm, "model", CONFIG, **BOTH)(x, edge_index, index=0)


def captum_saliency(model: Any, x: Tensor, edge_index: Tensor) -> Any:
    kinds = {"node_mask_type": "attributes"}
    return Explainer(model, CaptumExplainer("Saliency"), "model", CONFIG, **kinds)(x, edge_index, index=0)


def assert_same(explain: Callable[..., Any], model: Any, compiled: Any, *args: Any) -> None:
    """Both explanations hold the same masks; or both can't be made."""
    found = []
    for run in (model, compiled):
        torch.manual_seed(0)
        try:
            found.append(explain(run, *args).to_dict())
        except (RuntimeError, ValueError, IndexError) as error:
            found.append(error)
    theirs, ours = found
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs) and str(ours) == str(theirs)
        return
    assert not isinstance(ours, Exception), ours
    masks = [name for name in theirs if name.endswith("_mask")]
    assert masks
    for name in masks:
        torch.testing.assert_close(ours[name], theirs[name])


EXPLAINERS: dict[Any, list[Callable[..., Any]]] = {
    # The last one leaves its masks on the model, which runs uncompiled from then on.
    GCNConv: [gnn_explainer, pg_explainer, dummy_explainer, graph_mask_explainer],
    GATConv: [attention_explainer, gnn_explainer],
}


def assert_masks(model: nn.Module, compiled: Any, explainers: list[Callable[..., Any]]) -> None:
    """The same masks of many graphs, one after the other: self loops are removed, added, and counted."""
    for explain in explainers:
        for graph in GRAPHS:
            torch.testing.assert_close(compiled(graph.x, graph.edge_index), model(graph.x, graph.edge_index))
            assert_same(explain, model, compiled, graph.x, graph.edge_index)


@pytest.mark.parametrize("conv", EXPLAINERS)
def test_masks_of_awkward_graphs(conv: Any) -> None:
    torch.manual_seed(0)
    model = Net(conv)
    compiled = gnncompile.compile(copy.deepcopy(model))
    assert_masks(model, compiled, EXPLAINERS[conv])
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) <= 6
    assert len([note for note in program.backend.notes if note.what == "the whole model"]) <= 2


@pytest.mark.skipif(importlib.util.find_spec("captum") is None, reason="needs captum")
def test_masks_of_captum() -> None:
    torch.manual_seed(0)
    model = Net(GCNConv)
    assert_masks(model, gnncompile.compile(copy.deepcopy(model)), [captum_explainer, captum_saliency])


def test_it_is_explained_why() -> None:
    model = Net(GCNConv)
    model.first.explain = True
    model.first._edge_mask = torch.randn(6)
    model.first._loop_mask = torch.ones(6, dtype=torch.bool)
    graph = testing.uniform(5, 6, channels=8)
    report = gnncompile.explain(model, graph.x, graph.edge_index)
    assert [s.what for s in report.skipped] == ["the whole model"]
    assert "first (GCNConv) is being explained" in report.skipped[0].reason


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = {("a", "to", "b"): SAGEConv((8, 8), 3), ("b", "to", "a"): SAGEConv((8, 8), 3)}
        self.conv = HeteroConv(kinds)

    def forward(self, x: dict[str, Tensor], edge_index: dict[Any, Tensor]) -> Tensor:
        found = self.conv(x, edge_index)
        return found["a"] + found["b"]


def test_typed_edges() -> None:
    torch.manual_seed(0)
    model = Typed()
    compiled = gnncompile.compile(copy.deepcopy(model))
    for size in (7, 9):
        x = {kind: torch.randn(size, 8) for kind in "ab"}
        edges = {kind: torch.randint(size, (2, 3 * size)) for kind in (("a", "to", "b"), ("b", "to", "a"))}
        found = []
        for run in (model, compiled):
            torch.manual_seed(0)
            found.append(Explainer(run, GNNExplainer(epochs=3), "model", CONFIG, **BOTH)(x, edges, index=0))
        theirs, ours = found
        for kind in x:
            torch.testing.assert_close(ours[kind].node_mask, theirs[kind].node_mask)
        for kind in edges:
            torch.testing.assert_close(ours[kind].edge_mask, theirs[kind].edge_mask)
