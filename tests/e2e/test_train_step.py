"""``gnncompile.TrainStep`` trains as the plain loop does. On a CPU tapes stand in for CUDA graphs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.models import GCN, GIN

import gnncompile
from tests.tape import tapes


@pytest.fixture(autouse=True)
def recording(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with nullcontext() if on_gpu else tapes():
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Normalisation with statistics, or what takes its place; attention; a switch that Python looks at."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = GCNConv(6, 8), norm or nn.BatchNorm1d(8)
        self.second = GATConv(8, 3, heads=2, concat=False)
        self.slope = 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.norm(self.first(x, edge_index)), self.slope), edge_index)


def graph(device: str, nodes: int = 12, edges: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 6, generator=made, dtype=torch.float64)
    y = torch.randint(3, (nodes,), generator=made)
    return x.to(device), torch.randint(nodes, (2, edges), generator=made).to(device), y.to(device)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Pair:
    """A model in a plain loop, and its copy in a :class:`gnncompile.TrainStep`."""

    def __init__(
        self,
        device: str,
        model: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        schedule: Callable[..., Any] | None = None,
        loss: Callable[..., Any] = F.cross_entropy,
        **settings: Any,
    ) -> None:
        self.plain = (model or Net()).double().to(device)
        self.model = copy.deepcopy(self.plain)
        self.loss, self.max_norm = loss, settings.get("max_norm")
        self.optimizer = optimizer(self.plain.parameters())
        self.schedule = schedule(self.optimizer) if schedule else None
        options = {"inductor": device != "cpu", **settings.pop("options", {})}
        ours = optimizer(self.model.parameters())
        scheduler = schedule(ours) if schedule else None
        self.step = gnncompile.TrainStep(self.model, loss, ours, scheduler=scheduler, options=options, **settings)

    def compare(self, *inputs: Tensor, **tolerance: float) -> None:
        """One step of both; the same loss, parameters, buffers and gradients."""
        *args, target = inputs
        self.optimizer.zero_grad()
        expected = self.loss(self.plain(*args), target)
        (expected[0] if isinstance(expected, tuple) else expected).backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.plain.parameters(), self.max_norm)
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        found = self.step(*args, target=target)
        close = {"rtol": 1e-9, "atol": 1e-9, **tolerance}
        torch.testing.assert_close(found, expected, **close)
        torch.testing.assert_close(self.model.state_dict(), self.plain.state_dict(), **close)
        for ours, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            if plain.grad is None:
                assert ours.grad is None
            else:
                torch.testing.assert_close(ours.grad, plain.grad, **close)

    @property
    def recorded(self) -> int:
        return sum(len(plan.recordings.recorded) for plan in self.step._plans)


def test_a_fixed_graph(device: str) -> None:
    both = Pair(device)
    inputs = graph(device)
    for k in range(8):
        both.compare(*inputs)
        assert both.recorded == (k >= 3)


def test_an_older_result_that_is_alive(device: str) -> None:
    """With it, what gathers the gradients of parameters is, and belongs to the stream on which that was computed."""
    both = Pair(device)
    x, edges, y = graph(device)
    older = both.plain(x, edges), both.model(x, edges)
    reached: list[Any] = []
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in both.model.parameters()]
    for node in nodes:
        node.register_prehook(reached.append)
    for _ in range(6):
        both.compare(x, edges, y)
    assert both.recorded == 1 and both.step.not_recorded is None
    assert len(reached) == len(nodes)  # in the first step, before it is known how to record one
    del older


def test_parameters_that_the_optimizer_leaves_alone(device: str) -> None:
    """Nobody clears their gradients, which grow, but the user."""
    both = Pair(device, optimizer=lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.1))
    inputs = graph(device)
    for k in range(20):
        both.compare(*inputs)
        if k in (9, 15, 16):
            both.plain.zero_grad(), both.model.zero_grad()
    assert 1 <= both.recorded <= 3


def test_gradients_that_the_user_takes_or_changes(device: str) -> None:
    """Those of the last step are there after each, whichever recording was replayed."""
    both = Pair(device)
    graphs = graph(device), graph(device, 7, 13)
    for k in range(16):
        both.compare(*graphs[k % 2])
        for model in (both.plain, both.model):
            if k % 5 == 4:
                model.zero_grad()
            if k % 5 == 2:
                for parameter in model.parameters():
                    parameter.grad = 2 * parameter.grad  # type: ignore[operator]
    assert both.recorded == 2


def test_hooks_that_come_and_go(device: str) -> None:
    both = Pair(device)
    inputs = graph(device)
    handles: list[Any] = []
    for k in range(24):
        if k in (6, 18):
            for model in (both.plain, both.model):
                first, second, *_ = model.parameters()
                handles.append(first.register_hook(lambda gradient: gradient / 2))
                handles.append(second.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 2)))
        if k == 12:
            for handle in handles:
                handle.remove()
        both.compare(*inputs)


def test_hooks_of_parameters(device: str) -> None:
    both = Pair(device)
    inputs = graph(device)
    for model in (both.plain, both.model):
        first, second, *_ = model.parameters()
        first.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        second.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad / 2))
    for _ in range(6):
        both.compare(*inputs)
    assert both.recorded == 1, both.step.not_recorded


def test_hooks_of_parameters_whose_nodes_are_garbage(device: str) -> None:
    """An autograd node belongs to the stream of the step that made it. No other stream can record it while it lives."""
    both = Pair(device)
    inputs = graph(device)
    for model in (both.plain, both.model):
        next(model.parameters()).register_hook(lambda gradient: gradient / 2)
    kept: list[Any] = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in both.model.parameters()]
    kept.append(kept)
    gc.disable()
    try:
        both.compare(*inputs)
        del kept
        for _ in range(5):
            both.compare(*inputs)
    finally:
        gc.enable()
    assert both.recorded == 1, both.step.not_recorded


def test_features_and_targets_from_elsewhere(device: str) -> None:
    both = Pair(device)
    x, edges, y = graph(device)
    kept = []
    for k in range(10):
        kept.append((x * (k + 1), (y + k) % 3))
        both.compare(kept[-1][0], edges, kept[-1][1])
    assert both.recorded == 1, both.step.not_recorded


def test_changed_graphs(device: str) -> None:
    both = Pair(device, GCN(6, 8, 2, 3), options={"recordings": 2})
    graphs = [graph(device, n, e, seed) for n, e, seed in ((12, 40, 0), (12, 40, 1), (7, 0, 2), (1, 1, 3))]
    for inputs in (g for _ in range(4) for g in graphs for _ in range(2)):
        both.compare(*inputs)
        assert both.recorded <= 2
    assert both.recorded == 2


def test_another_graph_of_the_same_size_each_time(device: str) -> None:
    both = Pair(device)
    for inputs in [graph(device, seed=k) for k in range(12)]:  # all alive, so that each stands elsewhere
        both.compare(*inputs)
    assert both.recorded == 1, both.step.not_recorded


def test_an_edge_list_changed_in_place(device: str) -> None:
    both = Pair(device)
    x, edges, y = graph(device)
    for k in range(10):
        both.compare(x, edges, y)
        if k % 5 == 4:
            edges.copy_(edges.flip(1).roll(1, 0))


def test_an_edge_list_changed_in_place_after_a_first_step_without_edges(device: str) -> None:
    """All empty tensors have one address, so the first step does not tell which of its arguments make the structure."""
    both = Pair(device, SAGEConv(6, 3))
    x, edges, y = graph(device)
    both.compare(x, edges[:, :0].clone(), y)
    for k in range(10):
        both.compare(x, edges, y)
        if k % 5 == 4:
            edges.copy_(edges.flip(1).roll(1, 0))


def test_what_python_looks_at(device: str) -> None:
    both = Pair(device)
    inputs = graph(device)
    for k in range(15):
        if k in (5, 10):
            both.plain.slope = both.model.slope = 0.1 * k
        if k == 12:
            both.plain.eval(), both.model.eval()
        both.compare(*inputs)
    assert both.recorded >= 2


def test_replaced_parameters_and_settings_of_the_optimizer(device: str) -> None:
    both = Pair(device)
    inputs = graph(device)
    for k in range(20):
        both.compare(*inputs)
        for model, optimizer in ((both.plain, both.optimizer), (both.model, both.step.optimizer)):
            if k == 15:
                optimizer.state.clear()
            if k == 5:
                optimizer.param_groups[0]["lr"] = 0.01
            if k in (8, 9, 10):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if k == 12:
                old, new = model.first.bias, nn.Parameter(torch.ones_like(model.first.bias))
                model.first.bias = new
                params = optimizer.param_groups[0]["params"]
                params[[p is old for p in params].index(True)] = new


def test_a_scheduler(device: str) -> None:
    both = Pair(device, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5))
    inputs = graph(device)
    for _ in range(12):
        both.compare(*inputs)


def test_clipping(device: str) -> None:
    both = Pair(device, max_norm=0.1)
    inputs = graph(device)
    for _ in range(8):
        both.compare(*inputs)
    assert both.recorded == 1, both.step.not_recorded


def test_a_loss_with_further_results(device: str) -> None:
    def loss(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(out, target), (out.argmax(1) == target).sum()

    both = Pair(device, loss=loss)
    inputs = graph(device)
    for _ in range(8):
        both.compare(*inputs)
    assert both.recorded == 1, both.step.not_recorded


def test_a_loss_on_masked_nodes(device: str) -> None:
    both = Pair(device, loss=lambda out, mask: out[mask].square().mean())
    x, edges, y = graph(device)
    mask = y > 0
    for _ in range(6):
        both.compare(x, edges, mask)
    assert both.recorded == 1, both.step.not_recorded


class Replacing(nn.Module):
    """A moving average that each forward replaces: a buffer, another attribute, or an item of a list."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, average = where, torch.zeros(8, dtype=torch.float64)
        if where == "buffer":
            self.register_buffer("average", average)
        elif where == "attribute":
            self.average = average
        else:
            self.averages = [average]

    def forward(self, x: Tensor) -> Tensor:
        old = self.averages[0] if self.where == "list" else self.average
        new = 0.9 * old.to(x.device) + 0.1 * x.detach().mean(0)
        if self.where == "list":
            self.averages[0] = new
        else:
            self.average = new
        return x - new


@pytest.mark.parametrize("where", ["buffer", "attribute", "list"])
def test_state_that_a_forward_replaces(device: str, where: str) -> None:
    """A replay would read the first state again and again."""
    both = Pair(device, Net(Replacing(where)))
    inputs = graph(device)
    for _ in range(10):
        both.compare(*inputs)
    name = "averages[0]" if where == "list" else "average"
    assert both.recorded == 0
    assert both.step.not_recorded == (
        f"its forward replaces model.norm.{name}, which it reads; write to it in place: model.norm.{name}.copy_(...)"
    )


def test_state_in_objects_and_lists_is_no_hindrance(device: str) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data, self.several = Data(x=torch.ones(8, dtype=torch.float64)), [torch.ones(1)]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.data.x.to(x.device) + self.several[0].to(x.device)

    both = Pair(device, Net(Holding()))
    inputs = graph(device)
    for _ in range(6):
        both.compare(*inputs)
    assert device != "cpu" or both.recorded == 1  # on a GPU these numbers are copied from the host in each step


def test_attributes_that_a_forward_only_writes(device: str) -> None:
    """Such steps are recorded, and the attribute has the numbers of the last step."""

    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = 2 * x.detach()
            return self.last + x

    both = Pair(device, Net(Keeping()))
    inputs = graph(device)
    for _ in range(10):
        both.compare(*inputs)
        torch.testing.assert_close(both.model.norm.last, both.plain.norm.last)
    assert both.recorded == 1


def test_a_loss_that_waits_is_not_recorded(device: str) -> None:
    both = Pair(device, loss=lambda out, _: out[out > 0].square().sum())
    inputs = graph(device)
    for _ in range(6):
        both.compare(*inputs)
    assert both.step.not_recorded is not None


@pytest.mark.parametrize("measure", [False, True])
def test_explain_runs_forward_and_loss(device: str, measure: bool) -> None:
    both = Pair(device, loss=lambda out, y: F.cross_entropy(out, y) + out[out > 0].square().sum())
    x, edges, y = graph(device)
    for _ in range(6):
        both.compare(x, edges, y)
    before = [p.detach().clone() for p in both.model.parameters()]
    gradients = [p.grad.clone() for p in both.model.parameters()]
    report = gnncompile.explain(both.step, x, edge_index=edges, target=y, measure=measure)
    assert [region.what.split()[0] for region in report.regions] and report.graph_breaks == 0
    assert both.step.not_recorded is not None and f"not recorded: {both.step.not_recorded}" in report.notes
    for p, value, gradient in zip(both.model.parameters(), before, gradients, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "NAdam", "foreach Adam"])
def test_optimizers(kind: str) -> None:
    name, chosen = kind.split()[-1], {"foreach": True} if kind.startswith("foreach") else {}
    both = Pair(
        "cuda",
        GIN(6, 8, 2, 3),
        lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **chosen),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
    )
    inputs = graph("cuda")
    for _ in range(12):
        both.compare(*inputs, rtol=1e-4, atol=1e-6)
    assert both.recorded == 1, both.step.not_recorded


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_two_hundred_steps_in_float32(kind: str) -> None:
    torch.manual_seed(0)
    plain = GCN(6, 16, 2, 3).cuda()
    model = copy.deepcopy(plain)
    x, edges, y = graph("cuda", 200, 900)
    optimizers = [getattr(torch.optim, kind)(m.parameters(), lr=0.01) for m in (plain, model)]
    step = gnncompile.TrainStep(model, F.cross_entropy, optimizers[1])
    for _ in range(200):
        optimizers[0].zero_grad()
        loss = F.cross_entropy(plain(x.float(), edges), y)
        loss.backward()
        optimizers[0].step()
        found = step(x.float(), edges, target=y)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-3, atol=1e-4)
    assert step._plans[0].recordings.recorded
    assert optimizers[1].param_groups[0]["fused"]


@pytest.mark.gpu
def test_mixed_precision() -> None:
    torch.manual_seed(0)
    plain = GCN(6, 8, 2, 3).cuda()
    model = copy.deepcopy(plain)
    x, edges, y = graph("cuda")
    x = x.float()
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=4) for _ in range(2)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, fused=True) for m in (plain, model)]
    step = gnncompile.TrainStep(
        model, F.cross_entropy, optimizers[1], scaler=scalers[1], max_norm=1.0, autocast=torch.float16
    )
    for _ in range(40):
        optimizers[0].zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(plain(x, edges), y)
        scalers[0].scale(loss).backward()
        scalers[0].unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scalers[0].step(optimizers[0])
        scalers[0].update()
        found = step(x, edges, target=y)
    assert step._plans[0].recordings.recorded
    torch.testing.assert_close(found, loss.detach(), rtol=2e-2, atol=2e-2)
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**30


def test_it_says_why_it_does_not_record() -> None:
    both = Pair("cpu", GCN(6, 8, 2, 3), options={"record": False})
    assert both.step.not_recorded is None
    both.compare(*graph("cpu"))
    assert both.step.not_recorded == "it is turned off"
    breaking = Pair("cpu", GCN(6, 8, 2, 3), loss=lambda out, y: (torch._dynamo.graph_break(), out.sum())[1])
    for _ in range(5):
        breaking.compare(*graph("cpu"))
    assert breaking.step.not_recorded == "the graph breaks"


class Counting(torch.optim.SGD):
    """Its rate goes down with the steps, which it counts itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.data.add_(parameter.grad, alpha=-0.1 / state["count"])


def test_an_optimizer_that_counts_in_python(device: str) -> None:
    both = Pair(device, optimizer=lambda parameters: Counting(parameters, lr=0.1))
    inputs = graph(device)
    for _ in range(8):
        both.compare(*inputs)
    assert both.recorded == 0 and "after each step" in (both.step.not_recorded or "")


class Odd(torch.optim.Optimizer):
    """Has no ``lr``, and settings that are no numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rates": {"all": 0.1}, "factors": [1.0, 2.0]})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["rates"]["all"] * group["factors"][1])


def test_an_optimizer_with_settings_of_its_own(device: str) -> None:
    both = Pair(device, optimizer=Odd)
    inputs = graph(device)
    for k in range(16):
        for optimizer in (both.optimizer, both.step.optimizer):
            if k == 6:
                optimizer.param_groups[0]["rates"]["all"] = 0.2
            if k == 11:
                optimizer.param_groups[0]["factors"][1] = 0.5
        both.compare(*inputs)
    assert both.recorded == 3


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_an_optimizer_that_needs_a_closure(max_norm: float | None) -> None:
    both = Pair("cpu", GCN(6, 8, 2, 3), lambda ps: torch.optim.LBFGS(ps, max_iter=3), max_norm=max_norm)
    for seed in range(3):
        *args, target = graph("cpu", seed=seed)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            both.optimizer.zero_grad()
            losses.append(F.cross_entropy(both.plain(*args), target))  # noqa: B023
            losses[-1].backward()  # noqa: B023
            if max_norm is not None:
                nn.utils.clip_grad_norm_(both.plain.parameters(), max_norm)
            return losses[-1]  # noqa: B023

        both.optimizer.step(closure)
        found = both.step(*args, target=target)
        torch.testing.assert_close(found, losses[0].detach())
        for ours, plain in zip(both.model.parameters(), both.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, plain)
            torch.testing.assert_close(ours.grad, plain.grad)
    assert len(losses) > 1 and "closure" in (both.step.not_recorded or "")


def test_a_closure_and_a_scaler() -> None:
    model = GCN(6, 8, 2, 3)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=r"optimizer: found a LBFGS.* together with a scaler"):
        gnncompile.TrainStep(model, F.cross_entropy, optimizer, scaler=torch.amp.GradScaler("cpu"))


def test_a_scheduler_that_needs_a_metric(device: str) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    both = Pair(device, GCN(6, 8, 2, 3), schedule=lambda o: plateau(o, factor=0.5, patience=1, threshold=0.5))
    assert both.schedule is not None
    after, both.schedule = both.schedule, None
    inputs = graph(device)
    for _ in range(10):
        expected = F.cross_entropy(both.plain(*inputs[:2]), inputs[2]).detach()
        both.compare(*inputs)
        after.step(expected)
    rates = [float(o.param_groups[0]["lr"]) for o in (both.optimizer, both.step.optimizer)]
    assert rates[0] == rates[1] < 0.1


class Between:
    """A schedule that depends on two numbers."""

    def step(self, loss: Tensor, accuracy: float) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": F.relu}, "model: found .*expected an nn.Module"),
        ({"optimizer": "adam"}, "optimizer: found str, expected a torch.optim.Optimizer"),
        ({"scheduler": Between()}, "scheduler: found a Between, whose step takes loss, accuracy"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    model = GCN(6, 8, 2, 3)
    right = {"model": model, "loss": F.cross_entropy, "optimizer": sgd(model.parameters())}
    with pytest.raises(TypeError, match=message):
        gnncompile.TrainStep(**{**right, **given})


@pytest.mark.parametrize("before", [0, 5])
def test_wrong_arguments_of_a_step(before: int) -> None:
    """They are named, by the first step and where steps are replayed."""
    both, inputs = Pair("cpu"), graph("cpu")
    for _ in range(before):
        both.compare(*inputs)
    assert both.recorded == (before > 0)
    x, edge_index, target = inputs
    for wrong, message in (
        (edge_index.t(), "edge_index: found shape"),
        (edge_index.double(), "edge_index: found dtype"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            both.step(x, wrong, target=target)
    both.compare(*inputs)
