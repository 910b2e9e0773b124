"""``warmup`` compiles and records ahead, and nothing else changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GATConv, GCNConv, SAGEConv

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs import native
from gnncompile.cudagraphs.pool import CudaGraphPool
from tests.harness import light
from tests.tape import tapes


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    torch._dynamo.reset()
    with light():
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Statistics, dropout, a cache, a count and a list: all that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = GCNConv(6, 8, cached=True), BatchNorm(8)
        self.second = GATConv(8, 3, dropout=0.2)
        self.calls, self.sizes = 0, [0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(1)
        x = nn.functional.dropout(self.norm(self.first(x, edge_index)).relu(), 0.5, self.training)
        return self.second(x, edge_index)


def graph(nodes: int = 12, edges: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, 6, generator=made), torch.randint(nodes, (2, edges), generator=made)


def compiled(model: Any, **options: Any) -> Any:
    return gnncompile.compile(model, options={"inductor": False}, **options)


def captures(run: Callable[[], object]) -> int:
    """How many graphs are captured in a call."""
    before = counters["stats"]["unique_graphs"]
    run()
    return int(counters["stats"]["unique_graphs"] - before)


def step(model: Any, *args: Any) -> None:
    torch.autograd.backward(model(*args).sum())


def test_nothing_is_captured_afterwards_and_nothing_has_changed():
    torch.manual_seed(0)
    plain = Net()
    model = compiled(copy.deepcopy(plain))
    step(model, *graph(5, 9))  # gradients and statistics of an earlier step
    plain.load_state_dict(model.state_dict())
    state, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    cache = model.first._cached_edge_index
    # Another size, the cache emptied as a user would.
    model.first._cached_edge_index, model.calls, model.sizes = None, 7, [3]
    sizes = model.sizes
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    calls: list[Tensor] = []
    hook = model.first.lin.weight.register_post_accumulate_grad_hook(calls.append)
    x, edge_index = graph()
    assert cache is not None and model.warmup(x, edge_index) is model
    hook.remove()
    assert not calls
    assert torch.equal(torch.rand(3), drawn[0]) and (random.random(), np.random.rand()) == drawn[1:]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip([g for g in gradients if g is not None], values, strict=True))
    assert (model.calls, model.sizes, model.first._cached_edge_index) == (7, [3], None) and model.sizes is sizes
    assert torch.equal(x, graph()[0]) and torch.equal(edge_index, graph()[1]) and x.grad is None
    # Two steps: the second one reads the cache.
    assert captures(lambda: [step(model, x, edge_index) for _ in range(2)]) == 0
    model.eval(), plain.eval()
    plain.load_state_dict(model.state_dict())
    plain.first._cached_edge_index = None
    torch.testing.assert_close(model(x, edge_index), plain(x, edge_index))


def test_a_graph_without_edges_first():
    torch.manual_seed(0)
    model = compiled(nn.ModuleList([SAGEConv(6, 4)])[0])
    empty, one = (torch.randn(3, 6), torch.zeros(2, 0, dtype=torch.long)), (torch.randn(1, 6), torch.zeros(2, 1).long())
    assert gnncompile.warmup(model, [empty, one]) is model
    x, edge_index = graph()
    assert captures(lambda: [step(model, *batch) for batch in (empty, one, (x, edge_index))]) == 0
    torch.testing.assert_close(model(x, edge_index), callable_of(model).target(x, edge_index))  # type: ignore[union-attr]


def test_ways_of_calling_are_warmed_one_by_one():
    torch.manual_seed(0)
    model, (x, edge_index) = compiled(SAGEConv(6, 4)), graph()
    with torch.no_grad():
        model.eval().warmup(x, edge_index=edge_index)
        assert captures(lambda: model(x, edge_index=edge_index)) == 0
    assert captures(lambda: step(model, x, edge_index)) == 1


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(6, 6)

    def forward(self, data: Data) -> Tensor:
        data.x = self.conv(data.x, data.edge_index)
        return data.x


def test_examples_that_are_written_to_or_have_a_history():
    torch.manual_seed(0)
    x, edge_index = graph()
    weight = torch.randn(6, 6, requires_grad=True)
    hidden = x @ weight
    data = Data(x=hidden, edge_index=edge_index)
    model = compiled(Takes())
    assert gnncompile.warmup(model, [data]) is model
    assert data.x is hidden
    hidden.sum().backward()  # its graph is still there
    assert weight.grad is not None and weight.grad.abs().sum() > 0

    def writes(x: Tensor, edge_index: Tensor) -> Tensor:
        return x.add_(1).index_select(0, edge_index[1])

    gnncompile.warmup(compiled(writes), [(x, edge_index)])
    assert torch.equal(x, graph()[0])


LAYER = BatchNorm(6)


def by_name(x: Tensor, edge_index: Tensor) -> Tensor:
    return LAYER(x)[edge_index[0]]


def test_functions():
    model, (x, edge_index) = compiled(by_name), graph()
    assert model.warmup(x, edge_index) is model
    assert LAYER.module.num_batches_tracked == 0 and torch.equal(LAYER.module.running_mean, torch.zeros(6))
    assert captures(lambda: step(model, x, edge_index)) == 0
    conv = Takes().conv
    method = compiled(conv.forward)
    assert gnncompile.warmup(method, [(x, edge_index)]) is method
    assert all(p.grad is None for p in conv.parameters())


class HasOne(SAGEConv):
    def warmup(self, epochs: int) -> int:
        return epochs + 1


def test_a_method_of_that_name_is_left_alone():
    model, batch = compiled(HasOne(6, 4)), graph()
    assert model.warmup(3) == 4
    gnncompile.warmup(model, [batch])
    assert captures(lambda: step(model, *batch)) == 0
    layer = SAGEConv(6, 4)
    layer.warmup = nn.Linear(2, 2)
    assert compiled(layer).warmup is layer.warmup
    again = copy.deepcopy(compiled(SAGEConv(6, 4)).warmup(*batch))
    assert again.warmup(*batch) is again


def test_errors():
    with pytest.raises(TypeError, match=r"compiled: found an uncompiled SAGEConv.*Compile it"):
        gnncompile.warmup(SAGEConv(6, 4), [graph()])
    with pytest.raises(RuntimeError, match=r"without a shape.*Call it once"):
        compiled(SAGEConv(-1, 4)).warmup(*graph())
    model = compiled(Net())
    with pytest.raises(Exception, match=r"mat1|size|shape"):
        model.warmup(torch.randn(12, 5), graph()[1])
    assert model.calls == 0 and model.norm.module.num_batches_tracked == 0


def recordings(model: Any) -> list[CudaGraphPool]:
    found = [c.recordings for c in callable_of(model).backend.captured]  # type: ignore[union-attr]
    assert all(isinstance(r, CudaGraphPool) for r in found), found
    return [r for r in found if isinstance(r, CudaGraphPool)]


@pytest.mark.parametrize("fresh", [False, True])
def test_sizes_are_recorded(fresh: bool):
    torch.manual_seed(0)
    plain = nn.ModuleDict({"norm": BatchNorm(6), "conv": SAGEConv(6, 4)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = plain

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.parts["conv"](self.parts["norm"](x), edge_index)

    eager = Model()
    model = compiled(copy.deepcopy(eager), mode="reduce-overhead")
    batches = [graph(), graph(7, 30, seed=1)]
    with tapes():
        gnncompile.warmup(model, batches, fresh=fresh)
        assert native.module() is not None
        (found,) = recordings(model)
        assert len(found.recorded) == 2
        before = [recording.last_call for _, recording in found.recorded]
        for x, edge_index in batches:
            given = (x.clone(), edge_index.clone()) if fresh else (x, edge_index)
            for one in (model, eager):
                one.zero_grad()
            results = [model(*given), eager(x, edge_index)]
            for result in results:
                result.square().sum().backward()
            torch.testing.assert_close(*results)
            for p, q in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        for p, q in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(p, q)
        assert len(found.recorded) == 2
        assert all(recording.last_call > last for (_, recording), last in zip(found.recorded, before, strict=True))
