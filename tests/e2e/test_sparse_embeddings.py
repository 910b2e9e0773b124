"""Embeddings with ``sparse=True`` train: their gradient is a sparse tensor, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GCNConv

import gnncompile
from gnncompile import testing
from gnncompile.capture.compile import callable_of
from tests.harness import light


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


class Net(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.conv = embedding, GCNConv(8, 4)

    def forward(self, kind: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.embedding(kind), edge_index)


def bags() -> nn.Module:
    return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.EmbeddingBag(50, 8, mode="sum", sparse=True))


@pytest.mark.parametrize(
    "make", [lambda: nn.Embedding(50, 8, sparse=True), lambda: nn.Embedding(50, 8, 3, max_norm=1.0, sparse=True), bags]
)
def test_gradients_are_sparse(make: Any) -> None:
    torch.manual_seed(0)
    model = Net(make())
    ours = copy.deepcopy(model)
    compiled = gnncompile.compile(ours)
    for graph in testing.awkward(None).values():
        if isinstance(graph, HeteroData):
            continue
        kind = torch.randint(50, (graph.num_nodes,))
        for one, run in ((model, model), (ours, compiled)):
            one.zero_grad()
            run(kind, graph.edge_index).square().sum().backward()
        for a, b in zip(ours.parameters(), model.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and a.grad.layout == b.grad.layout
            torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())
            torch.testing.assert_close(a, b)
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) <= 3
    assert any(captured.log.regions for captured in program.backend.captured), "the layer is fused all the same"


def test_inference_is_one_graph() -> None:
    model = Net(nn.Embedding(50, 8, sparse=True))
    graph = testing.uniform(12, 40, channels=None)
    with torch.no_grad():
        compiled = gnncompile.compile(model, fullgraph=True)
        kind = torch.randint(50, (12,))
        torch.testing.assert_close(compiled(kind, graph.edge_index), model(kind, graph.edge_index))


def test_train_step() -> None:
    plain = Net(nn.Embedding(50, 8, sparse=True))
    model = copy.deepcopy(plain)
    graph, target = testing.uniform(12, 40, channels=None), torch.randn(12, 4)
    optimizers = [torch.optim.SparseAdam(m.embedding.parameters(), lr=0.1) for m in (plain, model)]
    step = gnncompile.TrainStep(model, nn.functional.mse_loss, optimizers[1])
    for seed in range(4):
        kind = torch.randint(50, (12,), generator=torch.Generator().manual_seed(seed))
        optimizers[0].zero_grad()
        loss = nn.functional.mse_loss(plain(kind, graph.edge_index), target)
        loss.backward()
        optimizers[0].step()
        torch.testing.assert_close(step(kind, graph.edge_index, target=target), loss.detach())
    torch.testing.assert_close(model.embedding.weight, plain.embedding.weight)
