"""What eager runs, the compiled model runs: whatever fails while a model is captured, calls give what eager gives.

The model's own Python runs once per call, one warning says why and where, ``explain`` lists it, and only
``fullgraph=True`` raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GraphConv, SAGEConv, global_mean_pool

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.capture.compiled_callable import CompiledCallable
from gnncompile.passes import manager
from tests.harness import light

NODES, EDGES, CHANNELS = 12, 40, 4


def graph(nodes: int = NODES, edges: int = EDGES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    edge_index = torch.randint(max(nodes, 1), (2, edges), generator=generator)
    return torch.randn(nodes, CHANNELS, generator=generator), edge_index


class Net(nn.Module):
    """A layer, a norm with statistics, and a count of how often the model's Python ran."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = SAGEConv(CHANNELS, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls = 0
        self.out.register_forward_hook(lambda module, args, out: self.count())

    @torch._dynamo.disable
    def count(self) -> None:
        self.calls += 1

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x, edge_index)).relu())


def _program(compiled: Any) -> CompiledCallable:
    program = callable_of(compiled)
    assert program is not None
    return program


def step(model: Callable[..., Tensor], x: Tensor, edge_index: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    out = model(leaf, edge_index)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaf)]


def same_states(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("made for this test")


def _fail_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "run_pre_grad", _raise)


def _fail_after_differentiation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "run_post_grad", _raise)


def _fail_in_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "compile_inductor", _raise)


def _fail_in_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "call_user_compiler", _raise)


FAILURES = [_fail_in_a_pass, _fail_after_differentiation, _fail_in_the_compiler, _fail_in_dynamo]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("fail", FAILURES)
def test_calls_run_whatever_fails(fail: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    """Numbers, gradients, statistics and side effects are eager's, from the first call on."""
    fail(monkeypatch)
    torch.manual_seed(0)
    theirs, ours = Net(), Net()
    ours.load_state_dict(theirs.state_dict())
    compiled = gnncompile.compile(ours)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for nodes, edges in ((NODES, EDGES), (5, 0), (7, 20), (NODES, EDGES)):
            for a, b in zip(*(step(model, *graph(nodes, edges)) for model in (compiled, theirs)), strict=True):
                torch.testing.assert_close(a, b)
    same_states(ours, theirs)
    assert ours.calls == theirs.calls == 4
    told = [str(w.message) for w in caught if "a capture failed" in str(w.message)]
    assert len(told) == 1 and "LookupError: made for this test" in told[0], told
    notes = _program(compiled).backend.notes
    assert any("LookupError: made for this test" in note.reason for note in notes)


@pytest.mark.parametrize("fail", FAILURES)
def test_fullgraph_raises(fail: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    fail(monkeypatch)
    with pytest.raises(Exception, match="made for this test"):
        gnncompile.compile(SAGEConv(CHANNELS, 8), fullgraph=True)(*graph())


def test_fullgraph_raises_an_error_of_ours_for_what_is_never_captured():
    def model(adjacency: Tensor, x: Tensor) -> Tensor:
        return adjacency.coalesce().values().sum() + x

    torch._dynamo.reset()
    matrix, x = torch.eye(3).to_sparse(), torch.randn(3, 2)
    torch.testing.assert_close(gnncompile.compile(model)(matrix, x), model(matrix, x))
    with pytest.raises(
        gnncompile.exc.CaptureError, match=r"captured as one graph: the model uses `coalesce`\. Without"
    ):
        gnncompile.compile(model, fullgraph=True)(matrix, x)


def test_a_capture_that_fails_after_a_break_runs_nothing_twice():
    """A pooling without a number of graphs, in the part of the model that comes after a graph break."""

    class Pooled(Net):
        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            return global_mean_pool(self.out(self.conv.lin_l(x)), batch)

    torch.manual_seed(0)
    theirs, ours = Pooled(), Pooled()
    ours.load_state_dict(theirs.state_dict())
    for model in (theirs, ours):
        model.out.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    compiled = gnncompile.compile(ours)
    with light():
        for nodes in (9, 9, 4):
            batch = torch.arange(nodes) // 3
            for a, b in zip(*(step(model, graph(nodes)[0], batch) for model in (compiled, theirs)), strict=True):
                torch.testing.assert_close(a, b)
    assert ours.calls == theirs.calls == 3


def test_a_user_s_error_is_eager_s_and_leaves_no_trace():
    """The message is eager's, no other exception comes before it, and later calls are captured."""
    conv = SAGEConv(CHANNELS, 8)
    compiled = gnncompile.compile(conv)
    x, edge_index = graph()
    with light():
        for _ in range(3):
            wrong = torch.randn(NODES, CHANNELS + 1)
            with pytest.raises(RuntimeError) as theirs:
                conv(wrong, edge_index)
            with pytest.raises(RuntimeError) as ours, warnings.catch_warnings():
                warnings.simplefilter("error")
                compiled(wrong, edge_index)
            assert str(ours.value) == str(theirs.value) and ours.value.__context__ is None
        torch.testing.assert_close(compiled(x, edge_index), conv(x, edge_index))
        program = _program(compiled)
        assert len(program.backend.captured) == 1 and not program.backend.notes


def test_more_kinds_of_calls_than_torch_captures():
    """What comes after the limit runs as eager does, and what was captured before runs as captured."""
    conv = GraphConv((CHANNELS, CHANNELS), 8)
    compiled = gnncompile.compile(conv)
    x, y, w = torch.randn(4, CHANNELS), torch.randn(2, CHANNELS), torch.rand(4)
    edge_index = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
    edges = EdgeIndex(edge_index, sort_order="col", sparse_size=(4, 2))
    calls: list[tuple[Any, ...]] = [
        *(((x, end), edge_index, *rest) for end in (y, None) for rest in ((None, (4, 2)), (w, (4, 2)))),
        *(((x, end), edges, *rest) for end in (y, None) for rest in ((), (w,))),
        ((x, y), edge_index),
        ((x, y), edge_index, w),
    ]
    with light(), warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=3):
        warnings.simplefilter("always")
        for args in (*calls, *calls):
            torch.testing.assert_close(compiled(*args), conv(*args))
        assert len(_program(compiled).backend.captured) == 3
    assert sum("recompile_limit" in str(w.message) for w in caught) == 1


class _Irreps(tuple[int, ...]):
    """Irreducible representations of e3nn are tuples whose length must not be asked for."""

    def __len__(self) -> int:
        raise NotImplementedError


class _WithArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = np.linspace(0, 1, CHANNELS, dtype=np.float32)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x.new_zeros(x.shape).index_add(0, edge_index[1], (x - torch.from_numpy(self.mean))[edge_index[0]])


class _WithIrreps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.irreps = [_Irreps((1, 2)), _Irreps((0, 1))]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scale = sum(1 for one in self.irreps if one[0] >= 0)
        return x.new_zeros(x.shape).index_add(0, edge_index[1], scale * x[edge_index[0]])


class _WithAttribute(nn.Module):
    """Hands edges from one method to another, as layers of GraphGPS do."""

    def __init__(self) -> None:
        super().__init__()
        self.edges: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.edges = x[edge_index[0]]
        out = x.new_zeros(x.shape).index_add(0, edge_index[1], self.edges)
        del self.edges
        return out


def _data(x: Tensor, edge_index: Tensor) -> Tensor:
    return x * x.new_zeros(x.shape).index_add(0, edge_index[1], x.data[edge_index[0]])


def _permuted(x: Tensor, edge_index: Tensor) -> Tensor:
    """The corruption of DeepGraphInfomax."""
    return x.new_zeros(x.shape).index_add(0, edge_index[1], x[torch.randperm(x.size(0))][edge_index[0]])


CAPTURED: list[Callable[..., Tensor]] = [_WithArray(), _WithIrreps(), _WithAttribute(), _data, _permuted]


@pytest.mark.parametrize("model", CAPTURED, ids=lambda m: getattr(m, "__name__", type(m).__name__))
def test_what_is_captured_as_a_whole(model: Callable[..., Tensor]):
    """One graph for all sizes, with a region, without a note; random numbers are eager's."""
    compiled = gnncompile.compile(model)
    for nodes, edges in ((NODES, EDGES), (5, 0), (1, 1), (NODES, EDGES)):
        for a, b in zip(*(step(run, *graph(nodes, edges)) for run in (compiled, model)), strict=True):
            torch.testing.assert_close(a, b)
    program = _program(compiled)
    assert len(program.backend.captured) == 1 and program.backend.captured[0].log.regions
    assert not program.backend.notes


def test_an_array_that_is_replaced_is_read_anew():
    model = _WithArray()
    compiled = gnncompile.compile(model)
    x, edge_index = graph()
    with light():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))
            model.mean = model.mean + 1


def test_an_array_and_a_tensor_are_told_apart():
    """``x.size`` is a number of the one and a method of the other."""

    def double(x: Any) -> Any:
        return x + x if isinstance(x, Tensor) else torch.from_numpy(x) * 3

    compiled = gnncompile.compile(double)
    x = torch.ones(4, 3)
    with light():
        for one in (x.numpy(), x, x.numpy(), x):
            torch.testing.assert_close(compiled(one), double(one))
