"""``mode="reduce-overhead"``: what is replayed gives what eager gives. On a CPU tapes stand in for CUDA graphs."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import is_multithreading_enabled, set_multithreading_enabled
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool
from torch_geometric.nn.models import GCN

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs import backward_thread, cuda_graph, native
from gnncompile.cudagraphs.pool import CudaGraphPool
from tests.tape import tapes

WARM = 2


@pytest.fixture(autouse=True, params=["native", "python"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does at a replay is the same in C++ and in Python."""
    if request.param == "python":
        monkeypatch.setattr(native, "module", lambda: None)


def compiled(model: Any, **options: Any) -> Any:
    chosen = {"inductor": next(model.parameters()).is_cuda, **options}
    return gnncompile.compile(model, mode="reduce-overhead", options=chosen)


def recordings(model: Any) -> list[CudaGraphPool]:
    program = callable_of(model)
    assert program is not None
    found = [c.recordings for c in program.backend.captured]
    assert all(isinstance(r, CudaGraphPool) for r in found), found
    return [r for r in found if isinstance(r, CudaGraphPool)]


def number(model: Any) -> int:
    """How many recordings a model has."""
    return sum(len(r.recorded) for r in recordings(model))


def graph(device: str, nodes: int = 12, edges: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 6, generator=made, dtype=torch.float64)
    return x.to(device), torch.randint(nodes, (2, edges), generator=made).to(device)


class Net(nn.Module):
    """Normalisation with statistics, attention, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = GCNConv(6, 8), nn.BatchNorm1d(8), GATConv(8, 4, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


def pair(device: str, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    eager = (model or Net()).double().to(device)
    return eager, compiled(copy.deepcopy(eager), **options)


def step(model: Any, *inputs: Any) -> list[Tensor]:
    """The result of one step, and the gradients of all parameters."""
    out = model(*inputs)
    (out * out).sum().backward()
    found = [out.detach().clone()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_steps_are_replayed(device: str, recording: None) -> None:
    eager, model = pair(device)
    inputs = graph(device)
    for k in range(6):
        same(step(model, *inputs), step(eager, *inputs))
        assert number(model) == (k >= WARM)
    same(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_features_from_elsewhere_are_copied(device: str, recording: None) -> None:
    eager, model = pair(device)
    x, edges = graph(device)
    kept = []
    for k in range(8):
        kept.append(x * (k + 1))
        same(step(model, kept[-1], edges), step(eager, kept[-1], edges))
    assert number(model) == 1


def test_features_with_a_gradient(device: str, recording: None) -> None:
    eager, model = pair(device)
    x, edges = graph(device)
    front = nn.Linear(6, 6).double().to(device)
    for _ in range(7):
        gradients = []
        for m in (eager, model):
            front.zero_grad()
            m(front(x), edges).square().sum().backward()
            gradients += [front.weight.grad.clone()]
        same(gradients[1], gradients[0])
    assert number(model) == 1


def test_optimizer_and_replaced_parameters_are_seen(device: str, recording: None) -> None:
    eager, model = pair(device)
    inputs = graph(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (eager, model)]
    for k in range(12):
        for m, optimizer in zip((eager, model), optimizers, strict=True):
            m(*inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=k % 2 == 0)
        if k == 6:
            for m in (eager, model):
                m.first.lin.weight = nn.Parameter(torch.full((8, 6), 0.3, dtype=torch.float64, device=device))
        same(model.state_dict(), eager.state_dict())
    assert number(model) == 2


def test_gradients_are_accumulated(device: str, recording: None) -> None:
    eager, model = pair(device)
    inputs = graph(device)
    for m in (eager, model):
        for _ in range(6):
            m(*inputs).square().sum().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_results_and_gradients_of_earlier_steps_stay(device: str, recording: None) -> None:
    eager, model = pair(device, GCN(6, 8, 2, 3))
    x, edges = graph(device)
    found, expected = [], []
    for k in range(6):
        x = x + k
        for m, kept in ((model, found), (eager, expected)):
            out = m(x, edges)
            kept += [out, *torch.autograd.grad(out.square().sum(), list(m.parameters()))]
    same(found, expected)


@pytest.mark.parametrize("forwards", [2, 3])
def test_several_forwards_before_their_backwards(device: str, recording: None, forwards: int) -> None:
    eager, model = pair(device, GCN(6, 8, 2, 3))
    graphs = [graph(device, seed=k)[0] for k in range(forwards)]
    edges = graph(device)[1]
    for _ in range(6):
        for m in (eager, model):
            m.zero_grad()
            losses = [m(x, edges).square().sum() * (k + 1) for k, x in enumerate(graphs)]
            for loss in reversed(losses):
                loss.backward()
        same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    assert number(model) >= 1


def test_a_forward_whose_backward_never_comes(device: str, recording: None) -> None:
    eager, model = pair(device, GCN(6, 8, 2, 3))
    inputs = graph(device)
    for _ in range(5):
        same(step(model, *inputs), step(eager, *inputs))
    for _ in range(4):
        model(*inputs)
    kept = [model(*inputs) for _ in range(3)]
    same(step(model, *inputs), step(eager, *inputs))
    same(kept[0], eager(*inputs))


def test_inputs_freed_before_the_backward(device: str, recording: None) -> None:
    eager, model = pair(device, GCN(6, 8, 2, 3))
    x, edges = graph(device)
    for _ in range(7):
        losses = []
        for m in (eager, model):
            m.zero_grad()
            given = x * 2.0
            losses.append(m(given, edges).square().sum())
            del given
        rubbish = [torch.full_like(x, float("nan")) for _ in range(4)]
        for loss in losses:
            loss.backward()
        del rubbish
        same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_a_parameter_changed_before_the_backward(device: str, recording: None) -> None:
    _, model = pair(device, GCN(6, 8, 2, 3))
    inputs = graph(device)
    for _ in range(4):
        step(model, *inputs)
    loss = model(*inputs).square().sum()
    with torch.no_grad():
        model.convs[1].lin.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    step(model, *inputs)


def test_a_second_backward_is_refused(device: str, recording: None) -> None:
    eager, model = pair(device, GCN(6, 8, 2, 3))
    inputs = graph(device)
    for _ in range(4):
        step(model, *inputs)
    loss = model(*inputs).square().sum()
    loss.backward(retain_graph=True)
    found = [p.grad.clone() for p in model.parameters()]
    eager(*inputs).square().sum().backward()
    same(found, [p.grad for p in eager.parameters()])
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_changed_graphs_and_sizes(device: str, recording: None) -> None:
    eager, model = pair(device, GCN(6, 8, 2, 3), recordings=3)
    graphs = [graph(device, n, e, seed) for n, e, seed in ((12, 40, 0), (12, 40, 1), (7, 0, 2), (1, 1, 3), (17, 61, 4))]
    for _ in range(5):
        for inputs in graphs:
            same(step(model, *inputs), step(eager, *inputs))
            same(step(model, *inputs), step(eager, *inputs))
        assert number(model) <= 3
    assert number(model) == 3


def test_another_graph_of_the_same_size_each_time(device: str, recording: None) -> None:
    eager, model = pair(device)
    for k in range(12):
        inputs = graph(device, seed=k)
        same(step(model, *inputs), step(eager, *inputs))
    assert number(model) == 1
    for _ in range(3):
        same(step(model, *inputs), step(eager, *inputs))


@pytest.mark.gpu
def test_an_index_outside_the_graph_is_reported() -> None:
    torch._dynamo.reset()
    _, model = pair("cuda", SAGEConv(6, 4))
    for k in range(8):
        step(model, *graph("cuda", seed=k))
    assert number(model) == 1
    x, edges = graph("cuda", seed=9)
    step(model, x, edges + (torch.arange(40, device="cuda") == 3) * 100)
    with pytest.raises(IndexError, match="an edge has an end outside the graph"):
        for _ in range(100):
            step(model, x, edges)
    for _ in range(100):
        step(model, x, edges)


def test_an_edge_list_changed_in_place(device: str, recording: None) -> None:
    eager, model = pair(device)
    x, edges = graph(device)
    for k in range(9):
        same(step(model, x, edges), step(eager, x, edges))
        if k % 4 == 3:
            edges.copy_(edges.flip(1).roll(1, 0))


def test_evaluation_and_training(device: str, recording: None) -> None:
    eager, model = pair(device)
    inputs = graph(device)
    for k in range(12):
        for m in (eager, model):
            m.train(k % 2 == 0)
        if k % 2:
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    same(model(*inputs), eager(*inputs))
        else:
            same(step(model, *inputs), step(eager, *inputs))
    assert number(model) >= 2


class Several(nn.Module):
    """Results without a gradient, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(6, 4)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
        h = self.conv(x, edge_index)
        return h, h.argmax(1), x.size(0), global_mean_pool(h, batch, 2)


def test_several_results(device: str, recording: None) -> None:
    eager, model = pair(device, Several())
    x, edges = graph(device)
    batch = (torch.arange(12) // 7).to(device)
    for k in range(8):
        found = []
        for m in (eager, model):
            m.zero_grad()
            h, best, count, pooled = m(x, edges, batch)
            assert count == 12
            assert not best.requires_grad
            (pooled if k % 2 else h + h).square().sum().backward()
            found.append([h, best, pooled, *[p.grad.clone() for p in m.parameters()]])
        same(found[1], found[0])
    assert number(model) == 1


def test_two_models_at_once(device: str, recording: None) -> None:
    pairs = [pair(device), pair(device)]
    inputs = graph(device)
    for _ in range(5):
        losses = [[m(*inputs).square().sum() for m in both] for both in pairs]
        for both, models in zip(losses, pairs, strict=True):
            for loss in both:
                loss.backward()
            same([p.grad for p in models[1].parameters()], [p.grad for p in models[0].parameters()])


def test_the_backward_runs_in_its_caller(device: str, recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of results that are not recorded, autograd's threads are off as long as one is alive; in a thread of its own,
    where no result of another test is.
    """
    monkeypatch.setattr(backward_thread, "has_thread", lambda tensor: True)
    with ThreadPoolExecutor(1) as alone:
        alone.submit(_steps_in_their_caller, device).result()


def _steps_in_their_caller(device: str) -> None:
    _, model = pair(device)
    inputs = graph(device)
    for _ in range(5):
        step(model, *inputs)
        gc.collect()  # a capture may leave a result in a cycle of frames
        assert is_multithreading_enabled()
    first, second = model(*inputs), model(*inputs)  # a recording for each of two that are alive
    del first, second
    for _ in range(5):
        first, second = model(*inputs), model(*inputs)
        assert not is_multithreading_enabled()
        first.sum().backward()
        del first
        assert not is_multithreading_enabled()
        second.sum().backward()
        assert not is_multithreading_enabled()
        del second
        assert is_multithreading_enabled()
    assert number(model) >= 1
    with set_multithreading_enabled(False):
        out = model(*inputs)
        out.sum().backward()
        del out
        assert not is_multithreading_enabled()
    kept = [model(*inputs)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert not is_multithreading_enabled()  # of another thread it can't be set
    step(model, *inputs)
    assert is_multithreading_enabled()


def test_dropout_differs_and_repeats(device: str, recording: None) -> None:
    _, model = pair(device, GCN(6, 8, 2, 3, dropout=0.5))
    inputs = graph(device)
    for _ in range(4):
        step(model, *inputs)
    torch.manual_seed(1)
    first, second = step(model, *inputs), step(model, *inputs)
    torch.manual_seed(1)
    same(step(model, *inputs), first)
    assert not torch.equal(first[0], second[0])
    assert number(model) == 1


class Returned(nn.Module):
    """A view of an input among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(6, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.conv(x, edge_index), x[:, 1:3]


def test_views_of_inputs_are_not_recorded(device: str, recording: None) -> None:
    eager, model = pair(device, Returned())
    inputs = graph(device)
    for _ in range(5):
        same([t.detach() for t in model(*inputs)], [t.detach() for t in eager(*inputs)])
        model(*inputs)[0].sum().backward()
    assert number(model) == 0
    assert "shares memory" in str(recordings(model)[0].reason)


def broken_capture(kind: str) -> RuntimeError:
    """What ends a broken capture: torch's error has CUDA's code, and Triton's has CUDA's text only."""
    if kind == "triton":
        return RuntimeError("Triton Error [CUDA]: operation failed due to a previous error during capture\nmore")
    error = torch.AcceleratorError("CUDA error: in other words\nmore")
    error.error_code = 901  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("kind", ["torch", "triton"])
@pytest.mark.parametrize(("failures", "recorded"), [(1, 1), (2, 1), (3, 0)])
def test_a_capture_that_others_broke_is_tried_again(failures: int, recorded: int, kind: str) -> None:
    eager, model = pair("cpu")
    inputs, left = graph("cpu"), [failures]

    class Broken:
        def __init__(self, record: Any) -> None:
            self.record = record

        def __call__(self, work: Any) -> Any:
            found = self.record(work)
            if left[0]:
                left[0] -= 1
                raise broken_capture(kind)
            return found

    with tapes(), pytest.MonkeyPatch.context() as patch:
        recorder = cuda_graph.recorder
        patch.setattr(cuda_graph, "recorder", lambda device: Broken(recorder(device)))
        for _ in range(14):
            same(step(model, *inputs), step(eager, *inputs))
    assert number(model) == recorded and left == [0]
    assert (recordings(model)[0].reason is None) == bool(recorded)


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_what_broke_a_capture_is_said(kind: str) -> None:
    """The end of the capture raises as well, and would hide it."""

    def record(work: Any) -> Any:
        try:
            raise RuntimeError("the model waits for the device")
        finally:
            raise broken_capture(kind)

    _, model = pair("cpu")
    inputs = graph("cpu")
    with tapes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "recorder", lambda device: record)
        for _ in range(5):
            step(model, *inputs)
    assert recordings(model)[0].reason == "the model waits for the device"


class Picks(nn.Module):
    """Gives some rows of a layer's result, by one of the ways to pick rows."""

    def __init__(self, pick: Any) -> None:
        super().__init__()
        self.conv, self.pick = GCNConv(6, 4), pick

    def forward(self, x: Tensor, edge_index: Tensor, rows: Tensor) -> Tensor:
        return self.pick(self.conv(x, edge_index).relu(), rows)


PICKS = {
    "indices": lambda out, rows: out[rows],
    "columns": lambda out, rows: out[:, rows % 4],
    "pairs": lambda out, rows: out[rows, rows % 4],
    "classes": lambda out, rows: out[: rows.numel()] * nn.functional.one_hot(rows % 4, 4),
    "repeats": lambda out, rows: out.repeat_interleave(rows * 0 + 2, dim=0, output_size=2 * rows.numel()),
}


@pytest.mark.parametrize("name", PICKS)
def test_rows_picked_by_indices_are_recorded(name: str, device: str, recording: None) -> None:
    """torch tags these operations, since the sizes of other uses of them depend on data: of masks, for example."""
    eager, model = pair(device, Picks(PICKS[name]))
    x, edges = graph(device)
    rows = torch.tensor([3, -1, 3, 0, 7] if name == "indices" else [3, 11, 3, 0, 7], device=device)
    if name == "repeats":
        rows = torch.arange(12, device=device)
    for _ in range(5):
        same(step(model, x, edges, rows), step(eager, x, edges, rows))
    assert number(model) == 1


def test_rows_picked_by_a_mask_of_results_are_not_recorded(device: str, recording: None) -> None:
    eager, model = pair(device, Picks(lambda out, rows: out[out[:, 0] > 0]))
    x, edges = graph(device)
    rows = torch.arange(12, device=device)
    for _ in range(5):
        same(step(model, x, edges, rows), step(eager, x, edges, rows))
    program = callable_of(model)
    assert program is not None
    assert "waits for the device" in str(program.backend.captured[0].recordings)


def test_nothing_is_recorded_on_a_cpu() -> None:
    _, model = pair("cpu", GCN(6, 8, 2, 3))
    inputs = graph("cpu")
    for _ in range(4):
        step(model, *inputs)
    program = callable_of(model)
    assert program is not None
    assert program.backend.captured[0].recordings == "its device is cpu"
    assert "not recorded: its device is cpu" in str(gnncompile.explain(model, *inputs))
