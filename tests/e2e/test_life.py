"""What happens to a compiled model after its first call: whatever is done to it, it stays equal to an eager one that
the same was done to. Outputs, gradients of inputs and parameters, and buffers are compared after each change.

What is the same at once is in tests/e2e/test_compiled_module.py.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnncompile
from gnncompile.capture.compile import callable_of
from tests.harness import kernels
from tests.tape import tapes

# Self loops, duplicates, a hub, an isolated node, unsorted.
EDGES = torch.tensor([[0, 1, 2, 3, 3, 4, 2, 2, 1], [0, 1, 3, 2, 3, 0, 2, 1, 3]])
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LIGHT: dict[str, Any] = {"options": {"inductor": False}}
RECORDED: dict[str, Any] = {"mode": "reduce-overhead", **LIGHT}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.lin = SAGEConv(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.norm(self.conv(x, edge_index)).tanh()) * self.scale


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    with kernels("reference"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


def pair(**settings: Any) -> tuple[Net, Any]:
    eager = made()
    return eager, gnncompile.compile(copy.deepcopy(eager), **(settings or LIGHT))


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Outputs, gradients of the input and all parameters, and buffers, for one forward and backward."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, EDGES)
    if out.requires_grad:
        out.double().square().sum().backward()
    kept = [None if g is None else g.clone() for g in (x.grad, *(p.grad for p in model.parameters()))]
    return [out.detach(), *kept, *(b.clone() for b in model.buffers())]


def same(model: Any, eager: nn.Module, x: Tensor = X) -> None:
    found, expected = step(model, x), step(eager, x)
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}[x.dtype]
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    assert list(model.state_dict()) == list(eager.state_dict())


# -- changes ------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Iterator[Any]]] = {}
"""Each changes a model in steps, the eager one and the compiled one alike, and may yield the input from then on."""


def change(function: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


@change
def parameters_replaced(m: Any) -> Iterator[Any]:
    m.lin.weight = nn.Parameter(torch.full_like(m.lin.weight, 0.3))
    yield
    m.conv.lin_l.weight = nn.Parameter(m.conv.lin_l.weight.detach() * 2)
    m.lin.bias = None
    yield


@change
def memory_of_parameters_replaced(m: Any) -> Iterator[Any]:
    m.lin.weight.data = torch.full_like(m.lin.weight, 0.4)
    yield
    m.conv.lin_l.weight.data.mul_(2)
    yield
    vector_to_parameters(parameters_to_vector(m.parameters()).detach() * 1.1, m.parameters())
    yield
    with torch.no_grad():
        m.lin.weight.set_(torch.full_like(m.lin.weight, 0.1))
    yield


@change
def frozen_and_thawed(m: Any) -> Iterator[Any]:
    for part, wanted in ((m.conv, False), (m, False), (m, True)):
        part.requires_grad_(wanted)
        yield


@change
def tied(m: Any) -> Iterator[Any]:
    m.conv.lin_l.bias = m.norm.bias
    yield
    m.head, m.lin = m.lin, nn.Linear(6, 4).double()
    m.lin.weight, m.lin.bias = m.head.weight, nn.Parameter(m.head.bias.detach() + 1)
    yield
    m.lin.weight = nn.Parameter(m.head.weight.detach() + 1)
    yield


@change
def weight_norm(m: Any) -> Iterator[Any]:
    parametrizations.weight_norm(m.lin)
    torch.nn.utils.weight_norm(m.conv.lin_l)
    yield
    parametrize.remove_parametrizations(m.lin, "weight")
    yield


@change
def spectral_norm(m: Any) -> Iterator[Any]:
    torch.manual_seed(1)
    parametrizations.spectral_norm(m.lin)
    yield
    yield


class Bounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() * 2


@change
def parametrized_and_pruned(m: Any) -> Iterator[Any]:
    parametrize.register_parametrization(m.conv.lin_l, "weight", Bounded())
    prune.l1_unstructured(m.lin, "weight", 0.5)
    yield


@change
def types(m: Any) -> Iterator[Any]:
    for kind in (torch.float16, torch.float64):
        m.to(kind).norm.reset_running_stats()
        yield X.to(kind)


@change
def training_and_evaluation(m: Any) -> Iterator[Any]:
    m.eval()
    yield
    m.norm.train()
    yield
    m.train()
    m.norm.momentum = 0.5
    yield


@change
def layers_replaced_and_added(m: Any) -> Iterator[Any]:
    torch.manual_seed(1)
    m.conv = GCNConv(4, 6).double()
    m.lin, m.unused = nn.Sequential(m.lin, nn.Tanh()), nn.Linear(1, 1).double()
    yield
    torch.manual_seed(2)
    m.conv = GATConv(4, 3, heads=2).double()
    yield


@change
def attributes(m: Any) -> Iterator[Any]:
    m.conv.normalize = True
    m.conv.aggr_module = SAGEConv(1, 1, aggr="max").aggr_module
    yield


@change
def forward_replaced(m: Any) -> Iterator[Any]:
    m.forward = lambda x, edge_index: x * 2
    yield
    del m.forward
    m.lin.forward = lambda x: x[:, :4] * 3
    yield


@change
def loaded(m: Any) -> Iterator[Any]:
    torch.manual_seed(9)
    other = Net().double().state_dict()
    m.load_state_dict(other)
    yield
    m.load_state_dict({name: value * 2 for name, value in other.items()}, assign=True)
    yield


@change
def hooks_that_take_arguments_by_name(m: Any) -> Iterator[Any]:
    hook = m.conv.register_forward_pre_hook(lambda _, args, named: ((args[0] * 2, args[1]), named), with_kwargs=True)
    yield
    hook.remove()
    hook = m.conv.register_forward_pre_hook(lambda _, args: (args[0] * 3, args[1]))
    yield
    hook.remove()
    m.lin.register_forward_hook(lambda _, args, named, out: out + args[0][:, :4], with_kwargs=True)
    yield
    m.lin.register_forward_hook(lambda _, args, out: out * 2)
    yield


@change
def backward_hooks(m: Any) -> Iterator[Any]:
    def twice(_: nn.Module, inner: Any, outer: Any) -> Any:
        return tuple(None if g is None else g * 2 for g in inner)

    hooks = [module.register_full_backward_hook(twice) for module in (m, m.lin)]
    hooks.append(m.lin.weight.register_hook(lambda g: g * 5))
    yield
    for hook in hooks:
        hook.remove()
    yield


@change
def inference(m: Any) -> Iterator[Any]:
    with torch.inference_mode():
        x, edge_index = X * 1, EDGES + 0
        for _ in range(3):
            m(x, edge_index), m(X, EDGES)
    yield
    m.eval()
    with torch.inference_mode():
        m(x, edge_index)
    m.train()
    yield


@pytest.mark.parametrize(
    "settings", [LIGHT, {"options": {"double_backward": True}}], ids=["compiled", "double_backward"]
)
def test_frozen_first(settings: dict[str, Any]) -> None:
    """Fine-tuning: captured with a frozen layer, which learns later."""
    eager, model = pair(**settings)
    for wanted in (False, True, False):
        for m in (eager, model):
            m.conv.requires_grad_(wanted)
        same(model, eager)


def test_changes_are_all_listed() -> None:
    assert len(CHANGES) == 16


@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str) -> None:
    eager, model = pair()
    same(model, eager)
    for x, _ in itertools.zip_longest(CHANGES[name](model), CHANGES[name](eager)):
        same(model, eager, X if x is None else x)
    assert callable_of(model).backend.captured  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["memory of parameters replaced", "tied", "inference"])
def test_change_of_a_recorded_model(name: str) -> None:
    """Nothing is replayed that was recorded of what is no more."""
    with tapes() as seen:
        eager, model = pair(**RECORDED)
        for _ in range(8):
            same(model, eager)
        assert seen.captures == 2
        for _ in itertools.zip_longest(CHANGES[name](model), CHANGES[name](eager)):
            for _ in range(4):
                same(model, eager)


def test_hooks_on_all_modules() -> None:
    """They run, and so the model does uncompiled meanwhile."""
    eager, model = (m.eval() for m in pair())
    same(model, eager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train = gnncompile.TrainStep(model, lambda out, target: out.sum(), optimizer, options=LIGHT["options"])
    plain = train(X, EDGES)

    def forward(module: nn.Module, _: Any, out: Tensor) -> Tensor | None:
        return out * 1.5 if isinstance(module, nn.Linear) else None

    def backward(module: nn.Module, inner: Any, _: Any) -> Any:
        return tuple(None if g is None else g * 2 for g in inner) if isinstance(module, nn.Linear) else None

    for register, hook in ((register_module_forward_hook, forward), (register_module_full_backward_hook, backward)):
        handle = register(hook)
        try:
            with pytest.warns(UserWarning, match="hooks on all modules") if hook is forward else nullcontext():
                same(model, eager)
            if hook is forward:
                with pytest.warns(UserWarning, match="run uncompiled"):
                    torch.testing.assert_close(train(X, EDGES), plain * 1.5)
        finally:
            handle.remove()
    same(model, eager)
    assert len(callable_of(model).backend.captured) == 1  # type: ignore[union-attr]


# -- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LIGHT, RECORDED], ids=["compiled", "recorded"])
def test_averaged_models(settings: dict[str, Any]) -> None:
    """Copies that follow: compiled as well, saved and loaded as ones of eager models."""
    with tapes():
        models = pair(**settings)
        averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) for m in models]
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in models]
        for _ in range(7):
            for model, optimizer, average in zip(models, optimizers, averages, strict=True):
                optimizer.zero_grad()
                model(X, EDGES).square().mean().backward()
                optimizer.step()
                average.update_parameters(model)
            torch.testing.assert_close(averages[1](X, EDGES), averages[0](X, EDGES))
        assert callable_of(averages[1].module) not in (None, callable_of(models[1]))
        for average in averages:
            update_bn([X, 2 * X], type("Bound", (nn.Module,), {"forward": lambda _, x, m=average: m(x, EDGES)})())
        torch.testing.assert_close(averages[1].state_dict(), averages[0].state_dict())


def stored(value: Any, **settings: Any) -> Any:
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return torch.load(memory, **settings)


def test_a_checkpoint_goes_both_ways() -> None:
    """Of a compiled model into an eager one that goes on, and back; optimizers too."""
    eager, model = pair()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (eager, model)]
    for turn in range(4):
        for m, optimizer in zip((eager, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(X, EDGES).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
        if turn == 1:
            kept = [
                stored({"model": m.state_dict(), "optimizer": o.state_dict()}, weights_only=True)
                for m, o in zip((model, eager), optimizers[::-1], strict=True)
            ]
            eager, model = made(), gnncompile.compile(made(), **LIGHT)
            optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (eager, model)]
            for m, optimizer, one in zip((eager, model), optimizers, kept, strict=True):
                m.load_state_dict(one["model"])
                optimizer.load_state_dict(one["optimizer"])


def test_a_shallow_copy() -> None:
    """Shares layers, as a copy of the original does, but not attributes."""
    eager, model = pair()
    same(model, eager)
    copies = [copy.copy(m) for m in (eager, model)]
    for one in copies:
        one.note = "of the copy"
    assert not hasattr(model, "note") and copies[1].lin is model.lin
    assert callable_of(copies[1]) not in (None, callable_of(model))
    same(copies[1], copies[0])
    same(model, eager)


def test_made_without_memory() -> None:
    eager = made()
    with torch.device("meta"):
        empty = Net().double()
    model = gnncompile.compile(empty, **LIGHT).to_empty(device="cpu")
    model.load_state_dict(eager.state_dict())
    same(model, eager)


# -- other tools --------------------------------------------------------------------------------------------------


class Trainer:
    """What a framework does with a model: freezes, validates under `inference_mode`, keeps the best, resumes."""

    def fit(self, model: Any, epochs: int) -> list[Tensor]:
        model.trainer = self  # a framework leaves itself in the model
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        seen, best = [], copy.deepcopy(model.state_dict())
        for epoch in range(epochs):
            model.conv.requires_grad_(epoch > 0)
            model.train()
            for x in (X, 2 * X):
                optimizer.zero_grad(set_to_none=True)
                loss = model(x, EDGES).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.eval()
            with torch.inference_mode():
                seen += [loss.detach(), model(X, EDGES).square().mean()]
            best = copy.deepcopy(model.state_dict()) if seen[-1] == min(seen[1::2]) else best
        model.load_state_dict(best)
        del model.trainer
        return [s.clone() for s in seen]


def test_a_training_framework() -> None:
    eager, model = pair()
    torch.testing.assert_close(Trainer().fit(model, 3), Trainer().fit(eager, 3))
    same(model, eager)
    assert len(callable_of(model).backend.captured) <= 5  # type: ignore[union-attr]


def test_torchscript() -> None:
    """Scripted is the original; what is scripted can't be compiled, which is said."""
    eager = made().eval()
    model = gnncompile.compile(copy.deepcopy(eager), **LIGHT)
    scripted = torch.jit.script(gnncompile.compile(nn.Sequential(nn.Linear(4, 2), nn.Tanh()).double()))
    assert scripted(X).shape == (6, 2)
    with pytest.raises(TypeError, match=r"TorchScript module.*Compile what it was made of"):
        gnncompile.compile(scripted)
    same(model, eager)


def test_data_parallel() -> None:
    """It copies the model in every step: the copies run uncompiled, and it is said what to use."""
    eager, model = pair()
    with pytest.warns(UserWarning, match="copies run uncompiled. Use torch.nn.parallel.DistributedDataParallel"):
        replica = model._replicate_for_data_parallel()
    assert callable_of(replica) is None and type(replica) is Net
    for name, layer in model.named_children():
        setattr(replica, name, layer)
    torch.testing.assert_close(replica.eval()(X, EDGES), eager.eval()(X, EDGES))


def test_a_package_of_aotinductor(tmp_path: Any) -> None:
    """A program without Python, for all sizes, none included: the plain model, as docs/sharp-edges.md says."""
    eager = made().float().eval()
    model = gnncompile.compile(eager, **LIGHT)
    x = X.float()
    model(x, EDGES)
    sizes = {"x": {0: torch.export.Dim.DYNAMIC}, "edge_index": {1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(model, (x, EDGES), dynamic_shapes=sizes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    served = torch._inductor.aoti_load_package(path)
    for nodes, edges in ((6, EDGES), (5, EDGES[:, :0]), (1, EDGES[:, :3] * 0), (40, torch.randint(40, (2, 300)))):
        given = torch.randn(nodes, 4)
        torch.testing.assert_close(served(given, edges), eager(given, edges), rtol=1e-4, atol=1e-4)
