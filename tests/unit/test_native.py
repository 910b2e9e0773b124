"""What the host does at a replay in C++: which gradients it puts where autograd would, and which it leaves to autograd.

That results are those of Python's side is tested by test_recording.py, which runs with both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.nn.models import GCN

from gnncompile.codegen.cpp import compiler
from gnncompile.cudagraphs import native
from tests.e2e.test_recording import graph, number, pair, same, step

pytestmark = pytest.mark.usefixtures("recording")


def recorded(device: str, model: nn.Module | None = None) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """A model, the same compiled and recorded, and inputs of theirs."""
    eager, made = pair(device, model or GCN(6, 8, 2, 3))
    inputs = graph(device)
    for _ in range(4):
        step(made, *inputs)
    assert number(made) == 1
    return eager, made, inputs


def put(out: Tensor) -> bool:
    """Whether a backward has put all gradients where they belong: autograd had no way left to go."""
    assert out.grad_fn.name() == "GnncompileReplayBackward"
    return not out.grad_fn.next_functions


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def check(eager: nn.Module, model: Any, run: Any) -> Tensor:
    """Runs the same on both; their gradients are the same. Returns what the compiled one gave."""
    found = []
    for m in (eager, model):
        found.append(run(m))
    same(gradients(model), gradients(eager))
    return found[1]


def test_gradients_are_put(device: str) -> None:
    eager, model, inputs = recorded(device)

    def run(m: Any) -> Tensor:
        out = m(*inputs)
        out.square().sum().backward()
        return out

    assert put(check(eager, model, run))
    assert not any(p.grad._is_view() or p.grad.requires_grad for p in model.parameters())
    # They are added to those that are there, which autograd does.
    assert not put(check(eager, model, run))
    kept = [g.clone() for g in gradients(model)]
    model.zero_grad()
    eager.zero_grad()
    assert put(check(eager, model, run))
    assert not torch.equal(kept[0], gradients(model)[0])


def test_only_the_way_to_other_layers_is_left(device: str) -> None:
    eager, model, (x, edges) = recorded(device)
    front = nn.Linear(6, 6).double().to(device)
    kept: list[Tensor] = []  # so that no input is where an earlier one was: all are copied

    def run(m: Any) -> Tensor:
        front.zero_grad()
        hidden = front(x)
        kept.append(hidden.detach())
        out = m(hidden, edges)
        out.square().sum().backward()
        return out

    for _ in range(6):
        run(eager)
        eager.zero_grad()
        model.zero_grad()
        expected, out = front.weight.grad, None  # one that is alive leads to the same parameters
        out = check(eager, model, run)
        same(front.weight.grad, expected)
    assert [type(f).__name__ for f, _ in out.grad_fn.next_functions] == ["AddmmBackward0"]


HOOKS = {
    "tensor": lambda p, seen: p.register_hook(lambda g: seen.append(g) or g * 2),
    "accumulated": lambda p, seen: p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad)),
    "node": lambda p, seen: node_of(p).register_hook(lambda *_: seen.append(p)),
    "before node": lambda p, seen: node_of(p).register_prehook(lambda g: seen.append(g)),
}
KEPT: list[Any] = []


def node_of(parameter: nn.Parameter) -> Any:
    """Its node in the graph of autograd, which lives as long as someone holds it."""
    KEPT.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
    return KEPT[-1]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_called(device: str, kind: str) -> None:
    eager, model, inputs = recorded(device)
    seen: dict[Any, list[Any]] = {eager: [], model: []}

    def run(m: Any) -> Tensor:
        out = m(*inputs)
        out.square().sum().backward()
        return out

    for m in seen:
        HOOKS[kind](m.convs[0].lin.weight, seen[m])
    for _ in range(2):
        out = check(eager, model, run)
        assert len(out.grad_fn.next_functions) >= 1
    assert len(seen[model]) == len(seen[eager]) == 2
    KEPT.clear()


def test_a_parameter_that_the_loss_reads_as_well(device: str) -> None:
    eager, model, inputs = recorded(device)
    for _ in range(3):
        eager.zero_grad()
        model.zero_grad()
        check(eager, model, lambda m: (m(*inputs).square().sum() + m.convs[0].lin.weight.square().sum()).backward())


def test_two_results_in_one_loss(device: str) -> None:
    eager, model, inputs = recorded(device)
    for _ in range(4):
        eager.zero_grad()
        model.zero_grad()
        check(eager, model, lambda m: (m(*inputs) * m(*inputs).sin()).sum().backward())


def test_some_gradients_by_name(device: str) -> None:
    eager, model, inputs = recorded(device)

    def by_grad(m: Any) -> list[Tensor]:
        return list(torch.autograd.grad(m(*inputs).square().sum(), [m.convs[0].lin.weight, m.convs[1].bias]))

    same(by_grad(model), by_grad(eager))
    assert gradients(model) == [None] * len(gradients(model))

    def by_backward(m: Any) -> None:
        m(*inputs).square().sum().backward(inputs=[m.convs[1].lin.weight])

    check(eager, model, by_backward)
    assert [g is None for g in gradients(model)] == [True, True, True, False] or gradients(eager)[0] is None


def test_a_graph_that_is_kept(device: str) -> None:
    eager, model, inputs = recorded(device)
    found = {}

    def run(m: Any) -> None:
        found[m] = m(*inputs)
        found[m].square().sum().backward(retain_graph=True)

    check(eager, model, run)
    assert not put(found[model])
    with pytest.raises(RuntimeError, match="second backward"):
        found[model].sum().backward()


def test_a_second_backward_through_a_freed_graph(device: str) -> None:
    _, model, inputs = recorded(device)
    out = model(*inputs)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second"):
        out.sum().backward()


def test_a_parameter_in_another_order_of_memory(device: str) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.weight = GCNConv(6, 8), nn.Parameter(torch.randn(5, 8).t())

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index) @ self.weight

    eager, model, inputs = recorded(device, Turned())
    check(eager, model, lambda m: m(*inputs).square().sum().backward())
    assert model.weight.grad.stride() == model.weight.stride() == eager.weight.grad.stride()


def test_gradients_of_threads_are_added(device: str) -> None:
    eager, model, inputs = recorded(device)
    times = 4
    outs = {m: [m(*inputs).square().sum() for _ in range(times)] for m in (eager, model)}
    for m in (eager, model):
        threads = [threading.Thread(target=loss.backward) for loss in outs[m]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    same(gradients(model), gradients(eager))


REFUSED = {
    "create_graph": lambda loss, p: torch.autograd.grad(loss, p, create_graph=True),
    "batch": lambda loss, p: torch.autograd.grad(loss, p, torch.ones(3).to(loss), is_grads_batched=True),
    "vmap": lambda loss, p: torch.func.vmap(lambda v: torch.autograd.grad(loss, p, v))(torch.ones(3).to(loss)),
}


@pytest.mark.parametrize(
    ("kind", "says"), [("create_graph", "double_backward"), ("batch", "a batch of"), ("vmap", "a batch of")]
)
def test_what_python_refuses(device: str, kind: str, says: str) -> None:
    eager, model, inputs = recorded(device)
    with pytest.raises(RuntimeError, match=says):
        REFUSED[kind](model(*inputs).sum(), list(model.parameters()))
    model.zero_grad()
    same(step(model, *inputs), step(eager, *inputs))


def test_compiled_autograd_is_an_error_that_says_so(device: str) -> None:
    _, model, inputs = recorded(device)
    loss = model(*inputs).sum()
    with (
        torch._dynamo.compiled_autograd._enable(lambda gm: torch.compile(gm, backend="eager")),
        pytest.raises(RuntimeError, match='"native": False'),
    ):
        loss.backward()


def test_errors_of_hooks_come_through(device: str) -> None:
    _, model, inputs = recorded(device)
    out = model(*inputs)
    out.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()


# -- inputs -----------------------------------------------------------------------------------------------------------


def module() -> Any:
    found = native.module()
    assert found is not None
    return found


@pytest.fixture
def args() -> Iterator[list[Any]]:
    yield [torch.zeros(4, 3), torch.zeros(2, 5, dtype=torch.int64), 7, None, torch.zeros(3), 0.5]


OTHER: dict[str, Any] = {
    "place": lambda a: a.__setitem__(0, torch.zeros(4, 3)),
    "type": lambda a: a.__setitem__(0, a[0].view(torch.int32)),
    "sizes": lambda a: a.__setitem__(0, a[0][:3]),
    "strides": lambda a: a.__setitem__(0, a[0].view(-1).as_strided((4, 3), (1, 4))),
    "version": lambda a: a[1].add_(1),
    "storage": lambda a: a.__setitem__(1, torch.from_numpy(a[1].numpy())),
    "number": lambda a: a.__setitem__(2, 8),
    "a number for a tensor": lambda a: a.__setitem__(0, 8),
    "a tensor for None": lambda a: a.__setitem__(3, None if a[3] is not None else 1),
    "sizes of a copied one": lambda a: a.__setitem__(4, torch.zeros(4)),
    "fraction": lambda a: a.__setitem__(5, 0.25),
    "fewer": lambda a: a.pop(),
}


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("kind", OTHER)
def test_inputs_that_do_not_fit(device: str, args: list[Any], kind: str) -> None:
    expected = module().Inputs(args, [4], [1], [])
    assert expected.fit(args) and expected.fit(tuple(args))
    OTHER[kind](args)
    assert not expected.fit(args)


def in_one(start: int) -> list[Any]:
    """Two tensors in one piece of memory, the second from somewhere on."""
    memory = torch.zeros(24)
    return [memory[:6], 7, memory[8 + start : 14 + start]]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_inputs_that_stand_together(device: str) -> None:
    expected = module().Inputs(in_one(0), [0, 2], [], [[0, 2]])
    assert expected.fit(in_one(0)) and not expected.fit(in_one(1))
    assert not expected.fit([*in_one(0)[:2], in_one(0)[2]])  # at the same places of two memories
    assert not expected.fit([7, 7, in_one(0)[2]])


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_inputs_that_fit(device: str, args: list[Any]) -> None:
    expected = module().Inputs(args, [4], [1], [])
    args[0].add_(1)
    args[0] = args[0].view(4, 3)
    args[4] = torch.ones(3)
    args[2] = 7.0
    assert expected.fit(args)


# -- the build --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_without_a_compiler_python_does_it(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails() -> tuple[str, ...]:
        return ("false",)

    monkeypatch.setattr(compiler, "compiler", fails)
    monkeypatch.setattr(native, "_build", native._Build())
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(tmp_path))
    assert "false" in native.wait() and native.module() is None
    eager, model, inputs = recorded(device)
    same(step(model, *inputs), step(eager, *inputs))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_it_can_be_turned_off(device: str) -> None:
    _, model = pair(device, GCN(6, 8, 2, 3), native=False)
    inputs = graph(device)
    for _ in range(5):
        out = model(*inputs)
        out.sum().backward()
    assert number(model) == 1 and type(out.grad_fn).__name__ == "_ReplayBackward"


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_builds_its_own(device: str) -> None:
    code = (
        "import os\nimport time\nfrom gnncompile.cudagraphs import native\n"
        "native._build.run = lambda: time.sleep(60)\n"
        "native.prepare()\npid = os.fork()\nif pid == 0:\n    os._exit(0 if native.wait() == '' else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\nprint('right')\nos._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "right", done.stderr


@pytest.mark.gpu
def test_inputs_are_not_kept_alive() -> None:
    _, model, (x, edges) = recorded("cuda")
    x = x.clone()
    for _ in range(3):
        step(model, x, edges)
    gone = weakref.ref(x)
    out = model(x, edges)
    del x
    out.sum().backward()
    assert gone() is None
