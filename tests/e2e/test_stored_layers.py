"""Layers on edges whose results a forward stores, so that its gradient does not compute them again."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gnncompile
from gnncompile import device as devices
from gnncompile.device import Device, device_of
from gnncompile.ir.costs import multiplications
from gnncompile.ir.region import parse
from gnncompile.ir.residuals import with_residuals
from tests.e2e.test_edge_layers import GRAPHS, MODELS, Aggregated, Positions, gradients, inputs, tiled
from tests.harness import kernels, launched
from tests.tiled_regions import REGIONS, E, Maker, S, gradient_of


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every layer of eight features or more is stored."""
    monkeypatch.setattr(Device, "stored_layers", property(lambda device: 8))
    yield
    torch._dynamo.reset()


def layers(specs: list[str]) -> int:
    """The number of layers that regions compute, without the gradients of layers."""
    return sum(node.op == "linear" for spec in specs for node in parse(spec).nodes)


def step(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[list[Tensor], int, int]:
    """What a compiled model and its gradient give, and how many layers the regions of each compute."""
    compiled = gnncompile.compile(copy.deepcopy(model))
    gradients(compiled, compiled, args)  # layouts are made and kernels chosen
    with launched() as forward:
        out = compiled(*args)
    with launched() as backward:
        out.sum().backward()
    return gradients(compiled, compiled, args), layers(forward), layers(backward)


@pytest.mark.parametrize(
    "name",
    ["mesh_graph_net", "positions", "mean", "max", "normed state", "reduced twice", "mode inside", "without loops"],
)
def test_results_and_gradients(name: str, stored: None) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    compiled = gnncompile.compile(copy.deepcopy(model), fullgraph=True)
    for size in GRAPHS:
        args = inputs(*size)
        expected = gradients(model, model, args)
        for one, other in zip(gradients(compiled, compiled, args), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_gradient_computes_no_stored_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, args = Positions().double(), inputs(9, 30)
    with kernels("cpp"):
        monkeypatch.setattr(Device, "stored_layers", property(lambda device: 0))
        right, forward, backward = step(model, args)
        assert (forward, backward) == (4, 4)
        torch._dynamo.reset()
        monkeypatch.setattr(Device, "stored_layers", property(lambda device: 8))
        found, forward, backward = step(model, args)
        assert (forward, backward) == (4, 1)  # a layer of one feature is computed again
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_stored(stored: None) -> None:
    model, args = Aggregated("sum"), inputs(9, 30, torch.float32)
    compiled = gnncompile.compile(model)
    with torch.no_grad():
        compiled(*args)
    (region,) = tiled(compiled)
    assert len(region.outputs) == 1
    compiled(*args)
    assert max(len(region.outputs) for region in tiled(compiled)) == 2


def test_dropout_behind_stored_layers(stored: None) -> None:
    """Draws are the same in the forward and in the gradient."""
    torch.manual_seed(0)
    model, args = Aggregated("sum", 0.4).double(), inputs(200, 900)
    compiled = gnncompile.compile(model)
    torch.manual_seed(1)
    out = compiled(*args)
    (slope,) = torch.autograd.grad(out.square().sum(), model.last.bias, retain_graph=True)
    counts = torch.zeros(200, dtype=torch.float64).index_add(0, args[2][1], torch.ones(900, dtype=torch.float64))
    torch.testing.assert_close(slope, (2 * out * counts.view(-1, 1)).sum(0))
    (found,) = torch.autograd.grad(out.sum(), model.last.weight)
    torch.manual_seed(1)
    hidden = (compiled(*args) - counts.view(-1, 1) * model.last.bias).sum(0)
    torch.testing.assert_close((found * model.last.weight).sum(1), hidden)


def test_gradients_of_gradients(stored: None) -> None:
    torch.manual_seed(0)
    eager = Positions().double()
    compiled = gnncompile.compile(copy.deepcopy(eager), options={"double_backward": True})
    for size in GRAPHS:
        found = []
        for model in (eager, compiled):
            args = inputs(*size)
            energy = model(*args).square().sum()
            (force,) = torch.autograd.grad(energy, args[1], create_graph=True)
            leaves = [args[0], args[1], *model.parameters()]
            second = torch.autograd.grad(energy + force.sin().sum(), leaves, allow_unused=True)
            found.append([energy, force, *(torch.zeros(1) if g is None else g for g in second)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", REGIONS)
def test_what_is_stored_saves_multiplications(name: str) -> None:
    plain = REGIONS[name](Maker())
    without, region = with_residuals(plain), with_residuals(plain, least_features=2)
    assert region.outputs[: len(without.outputs)] == without.outputs
    counts = [multiplications(gradient_of(one, len(plain.outputs))) for one in (without, region)]
    assert (counts[1] < counts[0]) == (len(region.outputs) > len(without.outputs))
    saved = counts[0] - counts[1]
    for output in region.outputs[len(without.outputs) :]:
        assert region.per_edge(output) and output.dtype == region.compute
    assert saved <= sum(region.features(at) * n.shape[1] for at, n in enumerate(region.nodes) if n.op == "linear")


def test_which_layers_are_stored() -> None:
    """Those of many features that a gradient needs. What is added to a result is stored with it."""

    def added(least: int, dtype: str = "float32", reads: bool = True) -> list[str]:
        make = Maker(dtype)
        b = make.b
        x = b.op("add", b.op("add", make.layer(make.input(E, 24), 16), make.input(S, 16)), make.input(E, 16))
        plain = make.finish(b.reduce("sum", b.op("tanh", x) if reads else x))
        region = with_residuals(plain, least_features=least)
        assert all(out.node == x for out in region.outputs[1:])
        return [region.nodes[out.node].op for out in region.outputs[1:]]

    assert added(24) == ["add"]
    assert added(25) == []  # too few features
    assert added(24, reads=False) == []  # the gradient needs no result of a layer
    assert added(24, "bfloat16") == []  # products of 16 bits are fast


@pytest.mark.parametrize(("family", "expected"), [(25, 64), (26, 0)])
def test_devices(family: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_library_halves_vectors", lambda: True)
    monkeypatch.setattr(devices, "_cpuinfo", lambda: [f"cpu family\t: {family}\n"])
    devices._halves_vectors.cache_clear()
    try:
        with kernels("cpp"):
            assert device_of("cpu").stored_layers == expected
            assert device_of(torch.device("cuda")).stored_layers == 0
        with kernels("reference"):
            assert device_of("cpu").stored_layers == 0
    finally:
        devices._halves_vectors.cache_clear()
