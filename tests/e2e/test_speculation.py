"""Steps of training whose forward and backward are launched before it is known that they are the right ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GCNConv

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.capture.compiled_callable import CompiledCallable
from gnncompile.cudagraphs import pool
from gnncompile.cudagraphs.recorder import CudaGraphRun
from gnncompile.steps.speculation import SpeculativeLaunch
from tests.e2e.test_train_step import Pair, graph, recording, sgd

__all__ = ["recording"]


class Net(nn.Module):
    """A layer in between, and a switch that Python looks at."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between, self.second = GCNConv(6, 8), between or nn.LayerNorm(8), GATConv(8, 3)
        self.slope = 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.between(self.first(x, edge_index)), self.slope), edge_index)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order: forward and backward were launched, guards were asked."""
    found: list[str] = []

    def note(kind: type[Any], name: str, what: str) -> None:
        original = getattr(kind, name)

        def noted(*args: Any) -> Any:
            found.append(what)
            return original(*args)

        monkeypatch.setattr(kind, name, noted)

    note(CudaGraphRun, "begin", "launched")
    note(CompiledCallable, "capture_for", "asked")
    return found


def test_launched_before_guards_are_asked(device: str, events: list[str]) -> None:
    both = Pair(device, Net())
    inputs = graph(device)
    for _ in range(5):
        both.compare(*inputs)
    for given in (inputs, [t.clone() for t in inputs]):  # the same tensors, and others that have to be taken apart
        for _ in range(6):
            events.clear()
            both.compare(*given)
        assert events == ["launched", "asked"]


def test_not_where_a_hook_may_see_it(device: str, events: list[str]) -> None:
    both = Pair(device, Net())
    for model in (both.plain, both.model):
        model.first.bias.register_hook(lambda gradient: 2 * gradient)  # type: ignore[union-attr]
    inputs = graph(device)
    for _ in range(6):
        events.clear()
        both.compare(*inputs)
    assert both.recorded == 1 and events == ["asked", "launched"]


class OnlyInTraining(nn.Module):
    """Doubles its input in training."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def set_slope(model: Any, optimizer: Any) -> None:
    model.slope = 0.3


def freeze(model: Any, optimizer: Any) -> None:
    model.first.bias.requires_grad_(False)


def evaluate(model: Any, optimizer: Any) -> None:
    model.eval()


def replace(model: Any, optimizer: Any) -> None:
    old, new = model.first.bias, nn.Parameter(torch.ones_like(model.first.bias))
    model.first.bias = new
    optimizer.param_groups[0]["params"] = [new if p is old else p for p in optimizer.param_groups[0]["params"]]


def hook(model: Any, optimizer: Any) -> None:
    model.second.register_forward_hook(lambda module, args, made: 2 * made)


def brake(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = 0.1


def forget(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def stop(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])


def leave_out(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][0]


def remove(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p is not model.first.bias]
    model.first.bias = None


CHANGES = (set_slope, freeze, evaluate, replace, hook, brake, forget, stop, leave_out, remove)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_noticed_after_the_launch(device: str, events: list[str], change: Callable[[Any, Any], None]) -> None:
    """Statistics that were updated in vain are those of before again."""
    norm = nn.BatchNorm1d(8)
    both = Pair(device, Net(nn.Sequential(norm, OnlyInTraining()) if change is evaluate else norm))
    inputs = graph(device)
    for k in range(14):
        if k == 6:
            events.clear()
            change(both.plain, both.optimizer)
            change(both.model, both.step.optimizer)
        both.compare(*inputs)
        if k == 6:
            assert events[0] == ("asked" if change in (replace, leave_out, remove) else "launched")


def test_another_norm_to_clip_at(device: str) -> None:
    both = Pair(device, Net(), max_norm=0.1)
    inputs = graph(device)
    for k in range(12):
        if k == 6:
            both.max_norm = both.step.max_norm = 0.01
        both.compare(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_learning_rate_of_the_loop_s_own(kind: Any) -> None:
    """It is a number each time; one recording replays with all of them."""
    both = Pair("cuda", Net(), lambda parameters: kind(parameters, lr=0.01))
    for model in (both.plain, both.model):
        model.float()
    x, edges, y = graph("cuda")
    x = x.float()  # in one place: one that moved would be recorded once more, with a copy
    for k in range(12):
        for optimizer in (both.optimizer, both.step.optimizer):
            optimizer.param_groups[0]["lr"] = 0.01 * (k % 4)
        both.compare(x, edges, y, rtol=1e-4, atol=1e-5)
    assert both.recorded == 1


def test_gradients_that_grow(device: str) -> None:
    """Those of parameters that the optimizer leaves alone get no share of what was launched in vain."""
    both = Pair(device, Net(), optimizer=lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.1))
    inputs = graph(device)
    for k in range(16):
        if k in (7, 12):
            both.plain.slope = both.model.slope = 0.1 * k
        both.compare(*inputs)


def test_two_models_of_attributes_in_turn(device: str, events: list[str]) -> None:
    """What is wrong each time is not tried each time."""
    both = Pair(device, Net())
    inputs = graph(device)
    for k in range(12):
        both.plain.slope = both.model.slope = 0.1 * (k % 2)
        events.clear()
        both.compare(*inputs)
        assert events[:1] in (["asked"], [])
    assert both.recorded == 2


def test_arguments_changed_in_place(device: str) -> None:
    both = Pair(device, Net())
    x, edges, y = graph(device)
    for k in range(20):
        both.compare(x, edges, y)
        if k in (5, 6, 12):
            x.mul_(0.9), y.copy_(y.flip(0))
        if k in (8, 9, 14):
            edges.copy_(edges.flip(1).roll(1, 0))
        if k == 11:
            x.data = x.data.clone()


def test_arguments_of_other_kinds(device: str) -> None:
    """At the same place: a number for a tensor, another type of the same size."""
    x, edges, _ = graph(device)
    model = Net().to(device).double()
    step = gnncompile.TrainStep(
        model,
        lambda out, weight: (out * weight).sum(),
        sgd(model.parameters()),
        options={"inductor": device != "cpu"},
    )
    for weight in (torch.ones(12, 3, device=device), 2.0, torch.ones(12, 3, dtype=torch.int32, device=device), None):
        if weight is None:
            with pytest.raises(Exception):  # noqa: B017  (torch's own)
                step(x, edges, target=weight)
        else:
            for _ in range(6):
                assert step(x, edges, target=weight).dtype == torch.float64


class Counting(nn.Module):
    """Counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


class Remembering(nn.Module):
    """Remembers numbers in a buffer of this length, or in another tensor."""

    def __init__(self, length: int, is_buffer: bool = True) -> None:
        super().__init__()
        memory = torch.zeros(length, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("memory", memory)
        else:
            self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.memory[: x.size(0)] += x[:, 0]
        return x + self.memory.mean()


class Viewed(nn.Module):
    """A batch norm whose statistics are views of one buffer, or made of it by an operation that may return it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("statistics", torch.stack([torch.zeros(8), torch.ones(8)]))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.statistics.unbind() if self.how == "unbind" else self.statistics
        if self.how == "to":
            mean, variance = mean.to(x.dtype), variance.detach().view(-1)
        if self.how == "native":
            return torch.native_batch_norm(x, None, None, mean, variance, self.training, 0.1, 1e-5)[0]
        return F.batch_norm(x, mean, variance, training=self.training)


WRITING = [nn.BatchNorm1d(8), Counting(), Remembering(100), *map(Viewed, ("", "unbind", "to", "native"))]


@pytest.mark.parametrize("between", WRITING)
def test_what_a_launch_wrote_is_undone(device: str, events: list[str], between: nn.Module) -> None:
    both = Pair(device, Net(between))
    x, edges, y = graph(device)
    for k in range(30):
        if k in (5, 12, 13, 20):  # another capture, or the first one again
            both.plain.slope = both.model.slope = 0.3 - both.plain.slope  # type: ignore[operator]
        if k == 16:  # what the user writes between two steps
            for model in (both.plain, both.model):
                for buffer in model.buffers():
                    buffer.add_(1)
        if k in (9, 24):
            both.model.train(), both.plain.train()
            x.mul_(0.9)
        events.clear()
        both.compare(x, edges, y, rtol=1e-6, atol=1e-6)  # rounding grows in 30 steps
        if k in (11, 12, 23):
            assert events[:2] == ["launched", "asked"]


class Noisy(nn.Module):
    """Draws numbers in several ways, and keeps some."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8, dtype=torch.float64))
        self.attention = GATConv(8, 8, dropout=0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.rrelu(x, training=True), 0.3) + 0.1 * torch.rand_like(x)
        loops = torch.arange(x.size(0), device=x.device).expand(2, -1)
        x = self.attention(x, loops)
        with torch.no_grad():
            self.last.copy_(x[0])
        return x


@pytest.mark.parametrize("ahead", [True, False])
def test_numbers_drawn_in_vain_are_drawn_again(device: str, events: list[str], ahead: bool) -> None:
    """The same numbers come of steps that are begun before they are checked, and of those that are not."""
    torch.manual_seed(3)
    model = Net(Noisy()).double().to(device)
    x, edges, y = graph(device)

    def trained(begins: bool) -> list[Tensor]:
        torch._dynamo.reset()
        net = copy.deepcopy(model)
        step = gnncompile.TrainStep(net, F.cross_entropy, sgd(net.parameters()), options={"inductor": device != "cpu"})
        torch.manual_seed(5)
        found = []
        with pytest.MonkeyPatch.context() as patch:
            if not begins:
                patch.setattr(SpeculativeLaunch, "begin", lambda *_: None)
            for k in range(20):
                if k in (6, 12):
                    net.slope = 0.2 - net.slope  # type: ignore[operator]
                if k == 15:
                    torch.manual_seed(8)
                events.clear()
                found.append(step(x, edges, target=y))
                if k in (5, 6, 14, 17):
                    assert (events[0] == "launched") == begins
                found.append(torch.rand(2, device=device))  # what the user draws
        return [*found, *net.state_dict().values()]

    right = trained(False)
    for one, other in zip(trained(ahead), right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("place", [(CompiledCallable, "capture_for"), (pool.bad_indices, "check_pending")])
def test_an_error_after_the_launch_leaves_no_trace(
    device: str, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    both = Pair(device, Net(nn.BatchNorm1d(8)))
    inputs = graph(device)
    for _ in range(6):
        both.compare(*inputs)

    def fail(*_: Any) -> None:
        raise KeyError("a guard")

    before = copy.deepcopy(both.model.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(*place, fail)
        with pytest.raises(KeyError, match="a guard"):
            both.step(*inputs[:2], target=inputs[2])
    torch.testing.assert_close(both.model.state_dict(), before, rtol=0, atol=0)
    for _ in range(4):
        both.compare(*inputs)


@pytest.mark.parametrize("between", [Remembering(2**18), Remembering(100, is_buffer=False)])
def test_not_where_it_can_t_be_undone(events: list[str], between: nn.Module) -> None:
    """A large buffer would be copied in each step; a tensor that is no buffer is not among a step's tensors."""
    both = Pair("cpu", Net(between))
    inputs = graph("cpu")
    for _ in range(6):
        events.clear()
        both.compare(*inputs)
    assert events[0] == "asked"


def written_by(model: nn.Module, *inputs: Tensor) -> list[str] | None:
    """The names of the buffers that a compiled model's graph writes to, or None if it leaves more behind."""
    compiled = gnncompile.compile(model, options={"inductor": False})
    compiled(*inputs)
    program = callable_of(compiled)
    assert program is not None
    (captured,) = program.backend.captured
    names = {id(buffer): name.split(".")[-1] for name, buffer in model.named_buffers()}
    return None if captured.written is None else sorted(names.get(id(ref()), "?") for ref in captured.written)


STATISTICS = ["num_batches_tracked", "running_mean", "running_var"]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (nn.LayerNorm(8), []),
        (nn.BatchNorm1d(8).eval(), []),
        (nn.BatchNorm1d(8, track_running_stats=False), []),
        (nn.BatchNorm1d(8), STATISTICS),
        (nn.Dropout(0.5), []),
        (nn.RReLU(), []),
        (Counting(), ["calls"]),
        *[(Viewed(how), ["statistics"]) for how in ("", "unbind", "to", "native")],
        (Remembering(100), ["memory"]),
        (Remembering(100, is_buffer=False), ["?"]),
    ],
)
def test_what_a_graph_writes_to(between: nn.Module, expected: list[str] | None) -> None:
    x, edges, _ = graph("cpu")
    assert written_by(Net(between).double(), x, edges) == expected


def test_an_argument_that_a_graph_writes_to() -> None:
    class Growing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.view(-1)[:2].add_(1)
            return x * 2

    assert written_by(Growing(), torch.zeros(3, 4)) == ["?"]
