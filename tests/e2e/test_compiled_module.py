"""A compiled module is the original in every respect but speed: state, hooks, copies, pickling, nesting."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import CleanupManager
from torch.export import Dim
from torch_geometric.nn import GAE, GATConv, GCNConv, SAGEConv

import gnncompile
from gnncompile._compat import recovery
from gnncompile.capture.backend import Backend
from gnncompile.capture.compile import callable_of
from gnncompile.layout.structure_program import StructureCache
from tests.harness import light
from tests.tape import tapes


class Net(nn.Module):
    """Module-level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 6), SAGEConv(6, 3)
        self.register_buffer("scale", torch.ones(3))
        self.flag = 1

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index) * self.scale


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.lin = inner, nn.Linear(3, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.inner(x, edge_index))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
EDGES = torch.randint(6, (2, 14), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def compiled(model: Net) -> Any:
    return gnncompile.compile(model)


def equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- one state ----------------------------------------------------------------------------------------------------


def test_is_an_instance_with_the_same_names(model: Net, compiled: Any):
    assert isinstance(compiled, Net) and type(compiled).__name__ == "Net" and repr(compiled) == repr(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert compiled.first is model.first


@pytest.mark.parametrize("strict", [False, True])
def test_exports_as_the_original(strict: bool, model: Net, compiled: Any):
    """For all sizes, by the names of its arguments; what is loaded compiles to one graph again."""
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    sizes = {"x": {0: Dim.DYNAMIC}, "edge_index": {1: Dim.DYNAMIC}}
    program = torch.export.export(compiled, (X, EDGES), dynamic_shapes=sizes, strict=strict)
    assert not any("gnncompile" in str(node.target) for node in program.graph.nodes)
    assert program.state_dict.keys() == model.state_dict().keys()
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    served = gnncompile.compile(torch.export.load(stored).module())
    with torch.no_grad():
        for nodes in (1, 2, 5):
            x, edge_index = X[:nodes], EDGES[:, : 3 * nodes] % nodes
            torch.testing.assert_close(served(x, edge_index), model(x, edge_index))
        assert gnncompile.explain(served, X, EDGES).graph_breaks == 0


def test_attributes_are_shared(model: Net, compiled: Any):
    compiled.flag, model.other = 2, 3
    assert model.flag == 2 and compiled.other == 3
    del compiled.flag
    assert not hasattr(model, "flag")
    compiled.extra = nn.Linear(1, 1)
    assert "extra.weight" in model.state_dict()


def test_train_and_eval_are_shared(model: Net, compiled: Any):
    assert compiled.eval() is compiled and not model.training and not model.first.training
    model.train()
    assert compiled.training


def test_moves_in_place(model: Net, compiled: Any):
    equal(compiled(X, EDGES), model(X, EDGES))
    assert compiled.to(torch.float64) is compiled
    assert next(model.parameters()).dtype == torch.float64
    out = compiled(X.double(), EDGES)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, model(X.double(), EDGES))


def test_load_state_dict_after_compiling(model: Net, compiled: Any):
    compiled(X, EDGES)
    torch.manual_seed(5)
    other = Net()
    assert str(compiled.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    equal(compiled(X, EDGES), other(X, EDGES))


def test_a_buffer_that_is_replaced(model: Net, compiled: Any):
    compiled(X, EDGES)
    model.scale = torch.full((3,), 2.0)
    equal(compiled(X, EDGES), model(X, EDGES))


def test_requires_grad_and_apply(model: Net, compiled: Any):
    assert compiled.requires_grad_(False) is compiled and not any(p.requires_grad for p in model.parameters())
    assert not compiled(X, EDGES).requires_grad
    seen: list[nn.Module] = []
    assert compiled.apply(seen.append) is compiled and model.first in seen


def test_optimizer_steps_equal_eager(model: Net):
    eager = copy.deepcopy(model)
    compiled = gnncompile.compile(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (compiled, eager)]
    for _ in range(4):
        losses = []
        for m, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(X, EDGES).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        equal(*losses)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# -- hooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "called_before",
    [
        False,
        True,
    ],
)
@pytest.mark.parametrize("on", ["compiled", "original", "child"])
def test_forward_hooks(on: str, called_before: bool, model: Net, compiled: Any):
    plain = model(X, EDGES)
    if called_before:
        compiled(X, EDGES)
    target = {"compiled": compiled, "original": model, "child": compiled.second}[on]
    before = target.register_forward_pre_hook(lambda m, args: (args[0] * 2, *args[1:]))
    after = target.register_forward_hook(lambda m, args, out: out + 1)
    expected = model(X, EDGES)
    assert not torch.allclose(expected, plain)
    equal(compiled(X, EDGES), expected)
    before.remove(), after.remove()
    equal(compiled(X, EDGES), plain)


def test_a_hook_that_is_removed(model: Net, compiled: Any):
    hook = compiled.register_forward_hook(lambda m, args, out: out + 1)
    equal(compiled(X, EDGES), model(X, EDGES))
    hook.remove()
    equal(compiled(X, EDGES), model(X, EDGES))


# -- copies -------------------------------------------------------------------------------------------------------


def test_deepcopy(model: Net, compiled: Any):
    compiled(X, EDGES)
    other = copy.deepcopy(compiled)
    assert isinstance(other, Net) and callable_of(other) is not None and callable_of(other) is not callable_of(compiled)
    with torch.no_grad():
        other.second.lin_l.weight.zero_()
    assert model.second.lin_l.weight.abs().sum() > 0
    equal(other(X, EDGES), callable_of(other).target(X, EDGES))


def test_deepcopy_inside_another_module(compiled: Any):
    outer = Outer(compiled)
    other = copy.deepcopy(outer)
    assert callable_of(other.inner) is not None and other.inner.first is not compiled.first
    equal(other(X, EDGES), outer(X, EDGES))


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickle(how: str, model: Net):
    compiled = gnncompile.compile(model, fullgraph=True, options={"hoist": False})
    if how == "pickle":
        other = pickle.loads(pickle.dumps(compiled))
    else:
        buffer = io.BytesIO()
        torch.save(compiled, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert isinstance(other, Net) and callable_of(other).settings == callable_of(compiled).settings
    equal(other(X, EDGES), model(X, EDGES))


# -- ways to compile ----------------------------------------------------------------------------------------------


def test_function_and_decorator(model: Net):
    def forward(x: Tensor, edge_index: Tensor, *, factor: float = 1.0) -> Tensor:
        """Doc."""
        return model.first(x, edge_index) * factor

    for call in (
        gnncompile.compile(forward),
        gnncompile.compile()(forward),
        gnncompile.compile(fullgraph=True, options={"hoist": False})(forward),
    ):
        assert call.__name__ == "forward" and call.__doc__ == "Doc."
        equal(call(X, edge_index=EDGES, factor=2.0), forward(X, EDGES, factor=2.0))


def test_other_callables(model: Net):
    equal(gnncompile.compile(model.forward)(X, EDGES), model(X, EDGES))
    equal(gnncompile.compile(functools.partial(model, X))(edge_index=EDGES), model(X, EDGES))


def test_a_wrapper_of_a_compiled_function_is_not_compiled(model: Net):
    """``functools.wraps`` copies the attributes of a function. The wrapper may be compiled on its own."""

    @gnncompile.compile
    def inner(x: Tensor, edge_index: Tensor) -> Tensor:
        return model(x, edge_index)

    @functools.wraps(inner)
    def outer(*args: Any) -> Tensor:
        return inner(*args) + 1

    assert callable_of(inner) is not None and callable_of(outer) is None
    compiled = gnncompile.compile(outer)
    equal(compiled(X, EDGES), model(X, EDGES) + 1)
    assert callable_of(compiled).target is outer
    assert inner.warmup(X, EDGES) is inner and compiled.warmup(X, EDGES) is compiled


def test_a_compiled_function_is_freed(model: Net):
    compiled = gnncompile.compile(lambda x: model(x, EDGES))
    known, program = weakref.ref(compiled), weakref.ref(callable_of(compiled))
    assert callable_of(compiled) is program()
    del compiled
    gc.collect()
    assert known() is None and program() is None


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_model_that_has_run_is_freed(mode: str | None, remembered: bool, monkeypatch: pytest.MonkeyPatch):
    """Torch keeps backends until it is reset, and code keeps what was captured, which Python's collector can't see.

    The code may be `remembered`: torch.distributed holds the frames of the last calls of its collectives.
    """
    made, codes = [], []
    run = Backend.__call__

    def call(backend: Backend, *args: Any, **kwargs: Any) -> Any:
        made.append(weakref.ref(backend))
        return run(backend, *args, **kwargs)

    init = StructureCache.__init__

    def cache(self: StructureCache, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(Backend, "__call__", call)
    monkeypatch.setattr(StructureCache, "__init__", cache)
    with tapes():
        model, edges = Net(), EDGES.clone()
        compiled = gnncompile.compile(model, mode=mode, options={"inductor": False})
        for _ in range(4):
            compiled(X, edges).sum().backward()
        if remembered:
            codes = [code() for code in CleanupManager.instance.refs.values()]
            torch._dynamo.reset()
        kept = [weakref.ref(model), weakref.ref(callable_of(compiled)), *made]
        del model, compiled, edges
        gc.collect()
    assert len(kept) > 3 and [one() for one in kept] == [None] * len(kept)
    assert bool(codes) == remembered


def test_other_models_may_be_freed_meanwhile():
    """A collection while one model is freed may free the code of others, which torch then forgets."""

    def forward() -> None: ...

    codes = [forward.__code__.replace(co_name=f"code_{at}") for at in range(1500)]
    for code in codes:
        CleanupManager.instance[code] = []
    gc.collect()
    gc.disable()
    for _ in range(50):
        cycle: list[Any] = [codes[0].replace(co_name="garbage")]
        CleanupManager.instance[cycle[0]] = []
        cycle.append(cycle)
    del cycle
    before = gc.get_threshold()
    gc.set_threshold(gc.get_count()[0] + 500, *before[1:])  # it collects when 500 more containers are made
    gc.enable()
    try:
        recovery._free(codes[0].replace(co_name="another"))
    finally:
        gc.set_threshold(*before)


def test_a_model_in_parts_is_freed():
    """Torch keeps what it captured of a frame in the code of the model's class, as long as the model lives."""

    class Broken(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = super().forward(x, edge_index)
            torch._dynamo.graph_break()
            return out + super().forward(x, edge_index)

    broken = Broken()
    compiled = gnncompile.compile(broken, options={"inductor": False})
    for _ in range(3):
        equal(compiled(X, EDGES), Broken.forward(broken, X, EDGES))
    kept = weakref.ref(broken)
    del broken, compiled
    for _ in range(2):  # what torch kept is garbage after the first time
        gc.collect()
    assert kept() is None


def test_decorated_class_keeps_compiling_per_instance():
    made = [gnncompile.compile(Net()) for _ in range(2)]
    for one in made:
        equal(one(X, EDGES), callable_of(one).target(X, EDGES))
    assert callable_of(made[0]).backend is not callable_of(made[1]).backend
    assert [len(callable_of(m).backend.captured) for m in made] == [1, 1]


def test_disable(model: Net):
    assert gnncompile.compile(model, disable=True) is model
    assert gnncompile.compile(disable=True)(model) is model


def test_compile_again_replaces_the_settings(model: Net, compiled: Any):
    again = gnncompile.compile(compiled, fullgraph=True)
    assert callable_of(again).target is model and callable_of(again).settings["fullgraph"]
    equal(again(X, EDGES), model(X, EDGES))


def test_dynamic_false_compiles_for_one_size(model: Net):
    compiled = gnncompile.compile(model, dynamic=False)
    for nodes in (6, 5, 6):
        equal(compiled(X[:nodes], EDGES % nodes), model(X[:nodes], EDGES % nodes))
    assert len(callable_of(compiled).backend.captured) == 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str, model: Net):
    compiled = gnncompile.compile(model, mode=mode)
    equal(compiled(X, EDGES), model(X, EDGES))
    settings = dict(torch._inductor.list_mode_options(mode, True)) if mode != "default" else {}
    assert callable_of(compiled).backend.options.record == settings.pop("triton.cudagraphs", False)
    assert callable_of(compiled).backend.inductor == settings


@pytest.mark.parametrize("gradient", [False, True])
def test_torch_compile_with_our_backend(gradient: bool, model: Net):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="gnncompile", fullgraph=True)
    x = X.clone().requires_grad_(gradient)
    equal(compiled(x, EDGES), model(x, EDGES))
    if gradient:
        (found,) = torch.autograd.grad(compiled(x, EDGES).square().sum(), x)
        equal(found, torch.autograd.grad(model(x, EDGES).square().sum(), x)[0])


# -- together with others -----------------------------------------------------------------------------------------


def test_inside_an_eager_model(model: Net, compiled: Any):
    outer = Outer(compiled)
    equal(outer(X, EDGES), outer.lin(model(X, EDGES)))
    assert next(iter(outer.state_dict())).startswith("inner.")
    assert len(callable_of(compiled).backend.captured) == 1


@pytest.mark.parametrize("by", ["gnncompile", "torch"])
@pytest.mark.parametrize(
    "fullgraph",
    [
        False,
        True,
    ],
)
def test_inside_another_compiled_model(by: str, fullgraph: bool, model: Net, compiled: Any):
    torch._dynamo.reset()
    outer = Outer(compiled)
    if by == "gnncompile":
        call = gnncompile.compile(outer, fullgraph=fullgraph)
    else:
        call = torch.compile(outer, backend="eager", fullgraph=fullgraph)
    equal(call(X, EDGES), outer.lin(model(X, EDGES)))


def test_compiled_function_inside_another(model: Net):
    torch._dynamo.reset()
    inner = gnncompile.compile(lambda x, edge_index: model(x, edge_index))
    outer = torch.compile(lambda x, edge_index: inner(x, edge_index) + 1, backend="eager")
    equal(outer(X, EDGES), model(X, EDGES) + 1)


def test_two_models_at_once(model: Net, compiled: Any):
    other = gnncompile.compile(Outer(Net()))
    for nodes in (6, 4, 6):
        edges = EDGES % nodes
        equal(compiled(X[:nodes], edges), model(X[:nodes], edges))
        equal(other(X[:nodes], edges), callable_of(other).target(X[:nodes], edges))
    assert len(callable_of(compiled).backend.captured) == len(callable_of(other).backend.captured) == 1


def test_others_still_trace_pyg_as_it_is(model: Net, compiled: Any):
    """Substitutes act only while gnncompile captures."""
    compiled(X, EDGES)
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    equal(torch.compile(model, backend=backend)(X, EDGES), model(X, EDGES))
    assert seen and not any("gnncompile" in name for name in seen)


def test_torch_compile_with_our_backend_in_a_fresh_process():
    """Nothing but the entry point brings gnncompile in."""
    program = (
        "import torch; from torch_geometric.nn import GCNConv\n"
        "x, e, m = torch.randn(6, 4), torch.randint(6, (2, 14)), GCNConv(4, 3)\n"
        "c = torch.compile(m, backend='gnncompile', fullgraph=True)\n"
        "torch.testing.assert_close(c(x, e), m(x, e), rtol=1e-5, atol=1e-5)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("make", [lambda: SAGEConv(-1, 3), lambda: GATConv(-1, 3, heads=2)])
def test_parameters_without_a_shape_get_it_from_the_first_call(make: Any):
    torch.manual_seed(0)
    model = make()
    compiled = gnncompile.compile(model)
    torch.manual_seed(1)
    first = compiled(X, EDGES)
    assert callable_of(compiled).backend.captured == []  # type: ignore[union-attr]
    expected = model(X, EDGES)
    assert expected.isfinite().all()
    for found in (first, compiled(X, EDGES), compiled(X, EDGES)):
        torch.testing.assert_close(found, expected)
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]
    assert gnncompile.explain(make(), X, EDGES).captured_graphs == 1


# -- calls of what is captured already ------------------------------------------------------------------------------


class Broken(Net):
    """Its graph breaks behind the first layer."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.first(x, edge_index).relu()
        torch._dynamo.graph_break()
        return self.second(hidden, edge_index) * self.scale


@pytest.fixture
def whole_ways(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets longer with every call that goes through what ``torch.compile`` returned."""
    return count_whole_ways(compiled, monkeypatch)


def count_whole_ways(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    program, calls = callable_of(compiled), list[int]()
    assert program is not None
    original = program.compiled

    def count(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(program, "compiled", count)
    return calls


def test_captured_calls_go_straight_to_what_was_captured(model: Net, compiled: Any, whole_ways: list[int]):
    """A call that finds no capture takes the whole way, the next one like it does not."""
    for wanted in (1, 1, 1):
        equal(compiled(X, EDGES), model(X, EDGES))
        assert len(whole_ways) == wanted
    with torch.no_grad():
        for wanted in (2, 2):
            equal(compiled(X, EDGES), model(X, EDGES))
            assert len(whole_ways) == wanted
    equal(compiled(X, EDGES[:, :3]), model(X, EDGES[:, :3]))
    assert len(whole_ways) == 2
    torch._dynamo.reset()
    equal(compiled(X, EDGES), model(X, EDGES))
    assert len(whole_ways) == 3


def test_guards_hold_on_the_short_way(model: Net, compiled: Any, whole_ways: list[int]):
    compiled(X, EDGES)
    model.second.aggr_module = type(model.second.aggr_module)()
    model.flag, model.scale = 2, 2 * model.scale
    equal(compiled(X, EDGES), model(X, EDGES))
    model.second.normalize = True
    equal(compiled(X, EDGES), model(X, EDGES))
    assert len(whole_ways) >= 2


def scaled(x: Tensor) -> Tensor:
    return 2 * x


RAN = False


class OfThisModule(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        global RAN
        RAN = True
        return scaled(super().forward(x, edge_index))


def test_a_models_own_module_is_looked_at_and_written_to(monkeypatch: pytest.MonkeyPatch):
    """Only the classes and functions of libraries are taken to stay what they are."""
    monkeypatch.setitem(globals(), "RAN", False)
    model = OfThisModule()
    compiled: Any = gnncompile.compile(model)
    whole_ways = count_whole_ways(compiled, monkeypatch)
    for calls in (1, 1):
        assert torch.allclose(compiled(X, EDGES), model(X, EDGES), atol=1e-5)
        assert len(whole_ways) == calls
    monkeypatch.setitem(globals(), "RAN", False)
    compiled(X, EDGES)
    assert RAN
    monkeypatch.setitem(globals(), "scaled", lambda x: 3 * x)
    assert torch.allclose(compiled(X, EDGES), model(X, EDGES), atol=1e-5)
    assert len(whole_ways) == 2


def test_guards_leave_out_what_libraries_are_made_of(model: Net, compiled: Any):
    compiled(X, EDGES)
    program = callable_of(compiled)
    assert program is not None
    (entry,) = _debug_get_cache_entry_list(program.entry.__code__)
    guards = str(entry.guard_manager)
    assert "_parameters['bias']" in guards
    for part in ("['gcn_norm']", ".gcn_norm", "['isinstance']", ".torch,"):
        assert part not in guards


def test_guards_that_others_imply_are_left_out(model: Net, compiled: Any):
    """On how modules are called, on hooks that take arguments by name where there are none, on constants of ours."""
    compiled(X, EDGES)
    program = callable_of(compiled)
    assert program is not None
    (entry,) = _debug_get_cache_entry_list(program.entry.__code__)
    sources = re.findall(r"source=([^,]+)", str(entry.guard_manager))
    assert any(source.endswith("_forward_hooks") for source in sources)
    for part in ("_hooks_with_kwargs", "_global_forward_hooks", "__mro__", "__import_gnncompile", "empty_again"):
        assert not any(part in source for source in sources), part


def test_guards_that_the_user_forgoes(model: Net, compiled: Any):
    """Those that tell captures from each other are looked at."""
    plain, halved = compiled(X, EDGES), compiled(X.double().float() / 2, EDGES[:, :7])
    with torch.no_grad():
        quiet = compiled(X, EDGES)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        compiled.second.normalize = True
        equal(compiled(X, EDGES), plain)
        equal(compiled(X / 2, EDGES[:, :7]), halved)
        with torch.no_grad():
            found = compiled(X, EDGES)
            assert not found.requires_grad
            equal(found, quiet)
    equal(compiled(X, EDGES), model(X, EDGES))
    assert not torch.allclose(compiled(X, EDGES), plain)


def test_dynamo_is_not_put_away_on_the_short_way(model: Net, compiled: Any):
    """Torch's wrappers that do so around each call take as long as the guards."""
    compiled(X, EDGES)
    called = set[str]()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back is not None and frame.f_back.f_code.co_name.startswith("entry_"):
            called.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        compiled(X, EDGES)
    finally:
        sys.setprofile(None)
    assert called == {"call_size", "call"}  # how many nodes there are, and what was captured


def test_captured_calls_heed_the_stance(model: Net, compiled: Any, whole_ways: list[int]):
    compiled(X, EDGES)
    with torch.compiler.set_stance("force_eager"):
        equal(compiled(X, EDGES), model(X, EDGES))
    assert len(whole_ways) == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        equal(compiled(X, EDGES), model(X, EDGES))
    assert len(whole_ways) == 2


def test_broken_graphs_take_the_whole_way(monkeypatch: pytest.MonkeyPatch):
    """Behind a break Dynamo has to look for what it captured there."""
    torch.manual_seed(0)
    model = Broken()
    compiled = gnncompile.compile(model)
    calls = count_whole_ways(compiled, monkeypatch)
    for wanted in (1, 2, 3):
        equal(compiled(X, EDGES), model(X, EDGES))
        assert len(calls) == wanted
    assert len(callable_of(compiled).backend.captured) > 1  # type: ignore[union-attr]


class Scale:
    """An object that a capture is bound to."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return self.factor * x


class Scaled(Net):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.of = type("Of", (), {"scale": Scale(factor)})()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.of.scale(super().forward(x, edge_index))


def test_an_object_that_is_gone_takes_its_capture_along():
    """What Dynamo keeps of such a capture is neither called nor in the way."""
    torch.manual_seed(0)
    model = Scaled(2.0)
    compiled = gnncompile.compile(model)
    equal(compiled(X, EDGES), model(X, EDGES))
    for factor in (3.0, 4.0):
        model.of = type("Of", (), {"scale": type("Other", (Scale,), {})(factor)})()
        gc.collect()
        for _ in range(2):
            equal(compiled(X, EDGES), model(X, EDGES))


@pytest.mark.parametrize("what", ["method", "submodule"])
def test_a_method_other_than_forward(what: str) -> None:
    """As docs/sharp-edges.md compiles it: the method itself, or the module that it calls."""
    torch.manual_seed(0)
    eager = GAE(Net())
    ours = copy.deepcopy(eager)
    if what == "method":
        ours.encode = compiled = gnncompile.compile(ours.encode, options={"inductor": False})
    else:
        ours.encoder = compiled = gnncompile.compile(ours.encoder, options={"inductor": False})
    for nodes, edges in ((9, 30), (5, 8)):
        x, edge_index = torch.randn(nodes, 4), torch.randint(nodes, (2, edges))
        found, expected = ours.encode(x, edge_index), eager.encode(x, edge_index)
        torch.testing.assert_close(found, expected)
        gradients = (
            torch.autograd.grad(model.recon_loss(z, edge_index, edge_index), list(model.parameters()))
            for model, z in ((ours, found), (eager, expected))
        )
        torch.testing.assert_close(*gradients)
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1
