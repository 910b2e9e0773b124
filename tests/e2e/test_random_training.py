"""Training loops in which anything may change between two steps, against eager. Tapes stand in for CUDA graphs.

``GNNCOMPILE_TEST_EXAMPLES=20 pytest tests/e2e/test_random_training.py`` tries 20 times as many.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GraphConv, SAGEConv

import gnncompile
from gnncompile.cudagraphs import native
from tests.randomly import examples
from tests.tape import tapes

NODES, FEATURES, HIDDEN, CLASSES = 12, 6, 8, 3

LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GAT": GATConv,
    "GATv2": GATv2Conv,
    "GCN": GCNConv,
    "GIN": lambda width, out: GINConv(nn.Linear(width, out)),
    "GraphConv": GraphConv,
    "SAGE": SAGEConv,
    "SAGE max": lambda width, out: SAGEConv(width, out, aggr="max"),
}
BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "statistics": lambda: nn.BatchNorm1d(HIDDEN),
    "norm": lambda: nn.LayerNorm(HIDDEN),
    "chance": lambda: nn.RReLU(0.3, 0.3),
}


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    assert not native.wait()
    with tapes():
        yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Two layers, with a switch, a number and a buffer that Python looks at."""

    shift: Tensor

    def __init__(self, first: str, between: str, second: str) -> None:
        super().__init__()
        self.first, self.second = LAYERS[first](FEATURES, HIDDEN), LAYERS[second](HIDDEN, CLASSES)
        self.between = BETWEEN[between]()
        self.register_buffer("shift", torch.zeros(HIDDEN))
        self.slope, self.shifts = 0.0, False

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = F.leaky_relu(self.between(self.first(x, edge_index)), self.slope)
        if self.shifts:
            h = h + self.shift
        return self.second(1.5 * h if self.training else h, edge_index)


class Side(random.Random):
    """A model with its optimizer; one of two that have the same random numbers.

    Each method that begins with ``change_`` is something that may happen between two steps.
    """

    def __init__(self, seed: int, net: Net, momentum: float, left_alone: int) -> None:
        super().__init__(seed)
        self.net = net
        trained = list(net.parameters())[left_alone:]
        self.optimizer = torch.optim.SGD(trained, lr=0.01, momentum=momentum, weight_decay=0.01)
        self.handles: list[Any] = []
        self.graphs = [self.graph(NODES, 40), self.graph(7, 0)]
        self.train: Callable[[], Any] = lambda: None

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def graph(self, nodes: int, edges: int) -> list[Tensor]:
        made = torch.Generator().manual_seed(self.randrange(2**31))
        x = torch.randn(nodes, FEATURES, generator=made, dtype=torch.float64)
        return [
            x,
            torch.randint(nodes, (2, edges), generator=made),
            torch.randint(CLASSES, (nodes,), generator=made),
        ]

    def parameter(self) -> nn.Parameter:
        return self.choice(list(self.net.parameters()))

    def change_mode(self) -> None:
        self.net.train(not self.net.training)

    def change_slope(self) -> None:
        self.net.slope = self.choice([0.0, 0.1, 0.2])

    def change_shift(self) -> None:
        self.net.shifts = not self.net.shifts
        self.net.shift.fill_(self.random())

    def change_buffer(self) -> None:
        self.net.shift = torch.full_like(self.net.shift, self.random())

    def change_what_is_frozen(self) -> None:
        parameter = self.choice([p for p in self.net.parameters() if p is not self.group["params"][-1]])
        parameter.requires_grad_(not parameter.requires_grad)

    def change_memory(self) -> None:
        parameter = self.parameter()
        parameter.data = 0.9 * parameter.data

    def change_values(self) -> None:
        with torch.no_grad():
            self.parameter().mul_(0.9)

    def change_parameter(self) -> None:
        module, name, old = self.choice(
            [(m, n, p) for m in self.net.modules() for n, p in m.named_parameters(recurse=False)]
        )
        new = nn.Parameter(1.1 * old.detach())
        setattr(module, name, new)
        self.group["params"] = [new if p is old else p for p in self.group["params"]]
        if old in self.optimizer.state:
            self.optimizer.state[new] = self.optimizer.state.pop(old)

    def change_state_dict(self) -> None:
        state = {k: 0.9 * v if v.is_floating_point() else v for k, v in self.net.state_dict().items()}
        self.net.load_state_dict(state)

    def change_rate(self) -> None:
        self.group["lr"] = self.choice([0.01, 0.02])

    def change_momentum(self) -> None:
        self.group["momentum"] = self.choice([0.0, 0.5, 0.9])

    def change_state_of_optimizer(self) -> None:
        self.optimizer.state.clear()

    def change_tensors_of_optimizer(self) -> None:
        for state in self.optimizer.state.values():
            state.update({k: v / 2 for k, v in state.items() if isinstance(v, Tensor)})

    def change_optimizer(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def change_what_is_trained(self) -> None:
        if len(self.group["params"]) > 2:
            self.optimizer.state.pop(self.group["params"].pop(0), None)
        else:
            self.group["params"] = list(self.net.parameters())

    def change_gradients(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = None if parameter.grad is None else 2 * parameter.grad

    def change_to_no_gradients(self) -> None:
        self.net.zero_grad()

    def change_hooks(self) -> None:
        if self.handles:
            self.handles.pop().remove()
        else:
            self.handles.append(self.net.second.register_forward_hook(lambda module, args, made: 2 * made))

    def change_hooks_of_parameters(self) -> None:
        parameter = self.parameter()
        if self.handles:
            self.handles.pop().remove()
        elif parameter.requires_grad:
            self.handles.append(parameter.register_hook(lambda gradient: gradient / 2))

    def change_features(self) -> None:
        self.graphs[0][0].mul_(0.9)

    def change_memory_of_features(self) -> None:
        self.graphs[0][0].data = self.graphs[0][0].data.clone()

    def change_targets(self) -> None:
        self.graphs[0][2].copy_(self.graphs[0][2].roll(1))

    def change_edges(self) -> None:
        self.graphs[0][1].copy_(self.graphs[0][1].flip(0))

    def change_memory_of_edges(self) -> None:
        self.graphs[0][1].data = self.graphs[0][1].flip(1)

    def change_a_row_of_edges(self) -> None:
        self.graphs[0][1][0].copy_(self.graphs[0][1][0].roll(1))

    def change_graph(self) -> None:
        self.graphs[0] = self.graph(self.graphs[0][0].size(0), self.graphs[0][1].size(1))

    def change_size(self) -> None:
        self.graphs[0] = self.graph(self.choice([NODES, 7, 2]), self.choice([40, 13, 0]))

    def change_to_the_other_graph(self) -> None:
        self.graphs.reverse()


CHANGES = tuple(name for name in dir(Side) if name.startswith("change_"))
STEPS = 3
"""At least so many between two changes, so that something is recorded."""

WAYS = (
    *("plain", "plain", "gradients add up", "two forwards", "another forward before", "in a chain", "asked"),
    *("some by name", "weights in the loss", "in a thread"),
)

loops = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "net": st.tuples(*map(st.sampled_from, (list(LAYERS), list(BETWEEN), list(LAYERS)))),
        "momentum": st.sampled_from([0.0, 0.9]),
        "left_alone": st.integers(0, 1),
        "recordings": st.sampled_from([1, 2, 8]),
        "clips": st.booleans(),
        "changes": st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(STEPS - 2, STEPS + 3)), max_size=10),
    }
)


@examples(4)
@given(loops)
def test_train_step(loop: dict[str, Any]) -> None:
    max_norm = 0.5 if loop["clips"] else None

    def start(plain: Side, ours: Side, options: dict[str, Any]) -> None:
        step = gnncompile.TrainStep(ours.net, F.cross_entropy, ours.optimizer, max_norm=max_norm, options=options)

        def train() -> Tensor:
            x, edge_index, target = plain.graphs[0]
            plain.optimizer.zero_grad()
            loss = F.cross_entropy(plain.net(x, edge_index), target)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(plain.group["params"], max_norm)
            plain.optimizer.step()
            return loss.detach()

        plain.train = train
        ours.train = lambda: step(*ours.graphs[0][:2], target=ours.graphs[0][2])

    run(loop, start)


@examples(4)
@given(loops)
def test_a_plain_loop(loop: dict[str, Any]) -> None:
    def start(plain: Side, ours: Side, options: dict[str, Any]) -> None:
        compiled = gnncompile.compile(ours.net, mode="reduce-overhead", options=options)
        for side, model in ((plain, plain.net), (ours, compiled)):
            side.train = lambda side=side, model=model: one_step(side, model)  # type: ignore[misc]

    run(loop, start)


def one_step(side: Side, model: nn.Module) -> list[Any]:
    """A step in one of the ways in which users write it."""
    x, edge_index, target = side.graphs[0]
    way = side.choice(WAYS)
    if way != "gradients add up":
        side.optimizer.zero_grad()
    out = model(x, edge_index)
    loss = F.cross_entropy(out, target)
    if way == "two forwards":
        loss = loss + F.cross_entropy(model(x / 2, edge_index), target)
    if way == "another forward before":
        model(2 * x, edge_index)
    if way == "in a chain":
        loss = loss + model(x + out.mean(1, keepdim=True) / 10, edge_index).square().mean()
    if way == "weights in the loss":
        loss = loss + sum(p.square().sum() for p in side.net.parameters()) / 10
    trained = [p for p in side.net.parameters() if p.requires_grad]
    if way == "asked":
        for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            parameter.grad = gradient
    elif way == "some by name":
        loss.backward(inputs=trained[: 1 + side.randrange(len(trained))])
    elif way == "in a thread":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        loss.backward()
    side.optimizer.step()
    return [loss.detach(), out.detach()]


def run(loop: dict[str, Any], start: Callable[[Side, Side, dict[str, Any]], None]) -> None:
    """Both sides, step by step."""
    torch._dynamo.reset()
    torch.manual_seed(loop["seed"])
    net = Net(*loop["net"]).double()
    nets = net, copy.deepcopy(net)
    plain, ours = (Side(loop["seed"], net, loop["momentum"], loop["left_alone"]) for net in nets)
    start(plain, ours, {"inductor": False, "recordings": loop["recordings"]})
    for change, steps in (("change_slope", 2 * STEPS), *loop["changes"]):
        for side in (plain, ours):
            getattr(side, change)()
        for _ in range(steps):
            same(ours.train(), plain.train())
            same(ours.net.state_dict(), plain.net.state_dict())
            same([p.grad for p in ours.net.parameters()], [p.grad for p in plain.net.parameters()])


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
