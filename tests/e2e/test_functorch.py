"""``torch.func``, forward mode, second derivatives and batches of gradients: equal to eager, or an error that helps.

What compiled code can't take part in must never be a silent zero, or a wrong number.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv

import gnncompile
from gnncompile.capture.compile import callable_of
from tests.harness import kernels
from tests.tape import tapes

# Self loops, duplicates, a hub, an isolated node, unsorted.
EDGES = torch.tensor([[0, 1, 2, 3, 3, 4, 2, 2, 1], [0, 1, 3, 2, 3, 0, 2, 1, 3]])
X, V = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()

LIGHT = {"options": {"inductor": False}}
TWICE = {"options": {"double_backward": True}}
RECORDED = {"mode": "reduce-overhead", **LIGHT}


class Own(MessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x)).tanh()

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i - x_j).tanh() * x_j


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(4, 4),
    "gat": lambda: GATConv(4, 2, heads=2),
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
    "own": Own,
}


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    with kernels("reference"):
        yield


def made(layer: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[layer]().double()


def compiled_and_warm(model: nn.Module, settings: dict[str, Any]) -> Any:
    compiled = gnncompile.compile(copy.deepcopy(model), **settings)
    for _ in range(4 if "mode" in settings else 1):
        x = X.clone().requires_grad_()
        torch.autograd.grad(compiled(x, EDGES).sum(), x)
    return compiled


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for one in found for t in flat(one)]


def same(found: Any, expected: Any) -> None:
    assert not any(t is None for t in expected)
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-9, atol=1e-9)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def squares(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x, EDGES).square().sum()


def with_double_parameters(model: nn.Module) -> Any:
    given = {name: (2 * p).requires_grad_() for name, p in parameters(model).items()}
    out = functional_call(model, given, (X, EDGES))
    return [out, *torch.autograd.grad(out.square().sum(), list(given.values()))]


def dual(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(X, V), EDGES)))


def dual_parameters(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        given = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in parameters(model).items()}
        return list(forward_ad.unpack_dual(functional_call(model, given, (X, EDGES))))


def forward_over_reverse(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X.clone().requires_grad_(), V)
        (found,) = torch.autograd.grad(squares(model)(x), x, create_graph=True)
        return forward_ad.unpack_dual(found).tangent.detach()


def second(model: nn.Module) -> Any:
    """Of a loss on forces beside which there are other terms: forces without a graph would be left out in silence."""
    x = X.clone().requires_grad_()
    (force,) = torch.autograd.grad(model(x, EDGES).sum(), x, create_graph=True)
    weights = [p for p in model.parameters() if p.dim() == 2]
    loss = force.sin().sum() + sum(w.square().sum() for w in weights)
    return torch.autograd.grad(loss, weights)


def batched(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x, EDGES), x, torch.stack([V, 2 * V]), is_grads_batched=True)


def vmapped_backward(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    out = model(x, EDGES)
    return vmap(lambda v: torch.autograd.grad(out, x, v, retain_graph=True)[0])(torch.stack([V, 2 * V]))


UNCOMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: grad(squares(m))(X),
    "grad of parameters": lambda m: list(
        grad(lambda p: functional_call(m, p, (X, EDGES)).square().sum())(parameters(m)).values()
    ),
    "grad of grad": lambda m: grad(lambda x: grad(squares(m))(x).sin().sum())(X),
    "vmap": lambda m: vmap(lambda x: m(x, EDGES))(torch.stack([X, V])),
    "vmap of parameters": lambda m: vmap(lambda p: functional_call(m, p, (X, EDGES)))(
        {name: torch.stack([p, 2 * p]) for name, p in parameters(m).items()}
    ),
    "vmap of grad": lambda m: vmap(grad(squares(m)))(torch.stack([X, V])),
    "jvp": lambda m: jvp(lambda x: m(x, EDGES), (X,), (V,)),
    "vjp": lambda m: vjp(lambda x: m(x, EDGES), X)[1](V),
    "jacrev": lambda m: jacrev(lambda x: m(x, EDGES))(X),
    "jacfwd": lambda m: jacfwd(lambda x: m(x, EDGES))(X),
    "hessian": lambda m: hessian(squares(m))(X),
    "functionalize": lambda m: torch.func.functionalize(lambda x: m(x, EDGES))(X),
    "dual": dual,
    "dual parameters": dual_parameters,
    "forward over reverse": forward_over_reverse,
    "forward-mode jacobian": lambda m: functional.jacobian(
        lambda x: m(x, EDGES), X, vectorize=True, strategy="forward-mode"
    ),
}
"""Equal to eager since these calls run uncompiled, with a warning."""

TRACED: dict[str, Callable[[nn.Module], Any]] = {
    "linearize": lambda m: linearize(lambda x: m(x, EDGES), X)[1](V),
    "make_fx": lambda m: make_fx(lambda x: m(x, EDGES))(X)(V),
}
"""Equal to eager since the original is what is traced."""

ONCE: dict[str, Callable[[nn.Module], Any]] = {
    "functional_call": with_double_parameters,
    "vjp by autograd": lambda m: functional.vjp(lambda x: m(x, EDGES), X, V)[1],
}
"""Runs compiled."""

SECOND: dict[str, Callable[[nn.Module], Any]] = {
    "forces": second,
    "hvp": lambda m: functional.hvp(squares(m), X, V)[1],
    "hessian by autograd": lambda m: functional.hessian(lambda a: squares(m)(a * X), torch.ones(4, dtype=X.dtype)),
    "jvp by autograd": lambda m: functional.jvp(lambda x: m(x, EDGES), X, V)[1],
}
"""Runs compiled with ``double_backward``."""

BATCHED: dict[str, Callable[[nn.Module], Any]] = {
    "is_grads_batched": batched,
    "vmapped backward": vmapped_backward,
    "vectorised jacobian": lambda m: functional.jacobian(lambda x: m(x, EDGES), X, vectorize=True),
}


def outcome(use: Callable[[nn.Module], Any], model: nn.Module, eager: nn.Module) -> str:
    """What became of it: equal, other numbers, or the error."""
    try:
        found = use(model)
    except RuntimeError as error:
        return str(error)
    same(found, use(eager))
    return "equal"


SETTINGS = {"compiled": LIGHT, "double_backward": TWICE, "recorded": RECORDED}


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("compiled", "gcn"),
        ("double_backward", "gat"),
        ("recorded", "gin"),
    ],
)
def test_outside(kind: str, layer: str) -> None:
    eager, settings = made(layer), SETTINGS[kind]
    with tapes() if settings is RECORDED else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = compiled_and_warm(eager, settings)
        if settings is RECORDED:
            assert callable_of(model).backend.captured[0].recordings.recorded  # type: ignore[union-attr]
        for name, use in (UNCOMPILED | TRACED | ONCE).items():
            assert outcome(use, model, eager) == "equal", name
        for name, use in SECOND.items():
            found = outcome(use, model, eager)
            assert found == "equal" if settings is TWICE else 'options={"double_backward": True}' in found, name
        for name, use in BATCHED.items():
            assert "Leave out vmap, is_grads_batched=True or vectorize=True" in outcome(use, model, eager), name
        for _ in range(2):
            x = X.clone().requires_grad_()
            runs = [m(x, EDGES) for m in (model, eager)]
            same(*(torch.autograd.grad(out.square().sum(), x) for out in runs))


def test_outside_with_inductor() -> None:
    eager = made("own")
    model = gnncompile.compile(copy.deepcopy(eager))
    with pytest.warns(UserWarning, match=r"inside torch.func.grad .* run uncompiled. Call the original model"):
        assert outcome(UNCOMPILED["grad"], model, eager) == "equal"
    for use in (checkpointed, ONCE["functional_call"]):
        assert outcome(use, model, eager) == "equal"
    assert [len(c.log.regions) for c in callable_of(model).backend.captured] == [1, 1]  # type: ignore[union-attr]
    assert "double_backward" in outcome(second, model, eager)
    assert "Leave out vmap" in outcome(batched, model, eager)


def checkpointed(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    out = checkpoint(model, x, EDGES, use_reentrant=False)
    return torch.autograd.grad(out.square().sum(), [x, *model.parameters()])


def moved(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = model(x, EDGES)
    return torch.autograd.grad(out.square().sum(), [x, *model.parameters()])


@pytest.mark.parametrize("use", [checkpointed, moved])
@pytest.mark.parametrize("settings", [LIGHT, TWICE], ids=["compiled", "double_backward"])
def test_hooks_on_saved_tensors_at_the_first_call(settings: dict[str, Any], use: Callable[..., Any]) -> None:
    """What the capture of a graph saves is none of their business."""
    eager = made("gin")
    model = gnncompile.compile(copy.deepcopy(eager), **settings)
    for _ in range(2):
        assert outcome(use, model, eager) == "equal"


def test_a_warning_once_a_note_and_compiled_afterwards() -> None:
    eager = made("gcn")
    model = gnncompile.compile(copy.deepcopy(eager), **LIGHT)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            grad(squares(model))(X)
    assert [w.filename for w in said if "gnncompile" in str(w.message)] == [__file__]
    program = callable_of(model)
    assert program is not None and not program.backend.captured
    assert "torch.func.grad" in program.backend.notes[0].reason
    same(model(X, EDGES), eager(X, EDGES))
    assert len(program.backend.captured) == 1 and program.backend.captured[0].log.regions


@pytest.mark.parametrize("kind", SETTINGS)
def test_tangents_in_a_backward(kind: str) -> None:
    settings = SETTINGS[kind]
    with tapes() if settings is RECORDED else nullcontext():
        model = compiled_and_warm(made("gat"), settings)
        x = X.clone().requires_grad_()
        out = model(x, EDGES)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="would lose its tangent"):
            torch.autograd.grad(out, x, forward_ad.make_dual(V, X))


def inside_dual(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(x, V), EDGES)))


INSIDE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda m, x: grad(squares(m))(x),
    "vmap": lambda m, x: vmap(lambda y: m(y, EDGES))(torch.stack([x, 2 * x])),
    "vmap of a part": lambda m, x: m(vmap(lambda a: (a * a.sum()).sin())(x), EDGES),
    "jvp": lambda m, x: jvp(lambda y: m(y, EDGES), (x,), (V,)),
    "functional_call": lambda m, x: functional_call(m, {n: 2 * p for n, p in m.named_parameters()}, (x, EDGES)),
    "dual": inside_dual,
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str) -> None:
    """Transforms in what is compiled."""
    model = made("gcn")
    weights = list(model.parameters())

    def results(run: Callable[..., Any]) -> list[Tensor]:
        out = flat(run(model, X))
        return [*out, *torch.autograd.grad(sum(t.sin().sum() for t in out), weights, allow_unused=True)]

    found = gnncompile.compile(INSIDE[name], **LIGHT)
    if name == "dual" and torch.__version__ < "2.15":  # later Dynamo leaves what has a tangent to Python
        with pytest.raises(RuntimeError, match=r"would lose its tangent\. Call the original model"):
            found(model, X)
        return
    for _ in range(2):
        same(results(found), results(INSIDE[name]))


class Nested(nn.Module):
    """A graph within a graph; GCN and GAT mask self loops, which what runs them has to understand."""

    def __init__(self, conv: nn.Module, where: str) -> None:
        super().__init__()
        self.conv, self.lin, self.where = conv, nn.Linear(4, 4), where

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.where == "all of it":
            return checkpoint(lambda h: self.lin(self.conv(h, edge_index)), x, use_reentrant=False)
        h = self.conv(x, edge_index)
        if self.where == "behind":
            return checkpoint(lambda h: self.lin(h).relu(), h, use_reentrant=False)
        return torch.cond(x.sum() > 0, lambda h: self.lin(h).relu(), lambda h: self.lin(h) - 1, (h,))


@pytest.mark.parametrize(
    ("layer", "where"),
    [("gcn", "all of it"), ("gcn", "behind"), ("gcn", "control flow"), ("gat", "all of it"), ("sage", "behind")],
)
def test_graphs_within_graphs(layer: str, where: str) -> None:
    torch.manual_seed(0)
    conv = SAGEConv(4, 4, aggr="max") if layer == "sage" else LAYERS[layer]()
    eager = Nested(conv, where).double()
    model = gnncompile.compile(copy.deepcopy(eager), **LIGHT)
    for x, edges in ((X, EDGES), (X[:5], EDGES[:, 1:4])):
        results = []
        for m in (model, eager):
            given = x.clone().requires_grad_()
            out = m(given, edges)
            results.append([out, *torch.autograd.grad(out.square().sum(), [given, *m.parameters()])])
        same(*results)
    backend = callable_of(model).backend  # type: ignore[union-attr]
    assert not backend.notes and backend.captured[-1].log.regions


def test_graphs_within_graphs_for_torch_compile() -> None:
    torch.manual_seed(0)
    options = {"backend": "gnncompile", "options": {"inductor": False}}
    for conv in (SAGEConv(4, 4), GCNConv(4, 4)):
        eager = Nested(conv, "all of it").double()
        same(torch.compile(eager, **options)(X, EDGES), eager(X, EDGES))


def test_jit_trace_traces_the_original() -> None:
    eager = made("gin").eval()
    model = gnncompile.compile(eager, **LIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, (X, EDGES))
    same(traced(V[:3], EDGES[:, :2] % 3), eager(V[:3], EDGES[:, :2] % 3))
