"""Models with layers and states on edges: regions take the layers in, with eager's numbers and every gradient."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.models.mesh_graph_net import GraphNetBlock
from torch import Tensor, nn

import gnncompile
from gnncompile import _compat, tuning
from gnncompile.capture.compile import callable_of
from gnncompile.device import Device, device_of
from gnncompile.ir.region import Region, parse
from gnncompile.runtime import launch
from tests.harness import kernels, needs_interpreter

CHANNELS = 40
"""More features than a walk by rows takes."""


def total(rows: Tensor, index: Tensor, num_rows: int, kind: str = "sum") -> Tensor:
    """Reduces rows by index."""
    if kind == "sum":
        return rows.new_zeros(num_rows, rows.size(1)).index_add(0, index, rows)
    places = index.view(-1, 1).expand_as(rows)
    return rows.new_zeros(num_rows, rows.size(1)).scatter_reduce(0, places, rows, kind, include_self=False)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with SiLU in between."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class Blocks(nn.Module):
    """Two steps of a MeshGraphNet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GraphNetBlock(CHANNELS) for _ in range(2))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        for block in self.blocks:
            x, e = block(x, e, edge_index)
        return torch.cat([x.mean(0), e.sum(0)])


class Positions(nn.Module):
    """Messages and steps by one network: two reductions share its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.step = mlp(2 * CHANNELS + 1, CHANNELS, CHANNELS), mlp(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        away = pos[destination] - pos[source]
        message = self.message(torch.cat([x[destination], x[source], away.square().sum(-1, keepdim=True)], -1))
        received = total(message, destination, x.size(0))
        return torch.cat([received, total(away * self.step(message), destination, x.size(0))], -1)


class Aggregated(nn.Module):
    """A reduction of rows that two layers make."""

    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(dropout)
        self.first, self.last = nn.Linear(2 * CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS + 3)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        hidden = self.drop(self.first(torch.cat([x[destination] - x[source], e], -1)).relu())
        return total(self.last(hidden), destination, x.size(0), self.kind)


class OneState(nn.Module):
    """A step of edge states by one layer, and the sums of the states."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        e = e + self.step(e).relu()
        return torch.cat([total(e, edge_index[1], x.size(0)), e.sum(0, keepdim=True)])


class OneLayer(nn.Module):
    """The maximum of one layer of products of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        return total(self.layer(x[destination] * x[source]), destination, x.size(0), "amax")


class NormedState(nn.Module):
    """A state that goes through a batch norm outside of the region and comes back as an input of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(CHANNELS) for _ in range(3))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        for gate, norm in zip(self.gates, self.norms, strict=True):
            raw = gate(e) + x[source]
            x = x + total(raw.sigmoid() * x[source], destination, x.size(0))
            e = e + norm(raw).relu() if e.size(0) > 1 else e + raw
        return x + total(e, destination, x.size(0))


class ReadEarly(nn.Module):
    """A hidden row that the rest of the model reads before the last tensor of the message is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        hidden = self.first(e).tanh()
        scale = hidden.abs().max() if e.size(0) else hidden.sum()
        return total(self.last(hidden).tanh() * scale + x[source], destination, x.size(0))


class Layers(nn.Module):
    """Two layers and a norm, for the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS), nn.LayerNorm(CHANNELS)


class NormReadAgain(Layers):
    """A norm of several edge tensors that the caller reads as well."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        state = self.norm(e + e.flip(0).tanh())
        hidden = self.b((self.a(state) + x[edge_index[0]]).relu())
        return total(hidden, edge_index[1], x.size(0)) + state.sum()


class NormOfExpanded(Layers):
    """A norm of rows whose columns are all the same."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        hidden = self.norm((e[:, :1] * x[edge_index[0]][:, 1:2]).expand(-1, CHANNELS)) + e
        return total(self.a(hidden).tanh(), edge_index[1], x.size(0))


class ReducedTwice(Layers):
    """Two reductions and the caller read one state."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        hidden = (self.a(e) + x[edge_index[0]]).relu()
        first = total(hidden, edge_index[1], x.size(0))
        return first + total(self.b(hidden).tanh(), edge_index[1], x.size(0), "amax") + hidden.sum()


class NormedBySum(Layers):
    """Gates over their sum: the second reduction reads the result of the first."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        raw = self.a(e) + x[source]
        gate = raw.sigmoid()
        over = total(gate, destination, x.size(0))
        weighted = total(gate / (over[destination] + 1e-6), destination, x.size(0))
        return weighted + total(self.b(raw) * over.tanh()[destination], destination, x.size(0)) + raw.sum()


class ModeInside(Layers):
    """A part of the model runs without gradients."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sigmoid()
        hidden = self.b((self.a(e) + x[edge_index[0]]).relu()).tanh()
        return total(hidden * scale[edge_index[0]], edge_index[1], x.size(0)) + hidden.sum()


class ModeBetween(Layers):
    """What the message reads last is computed without gradients, after its layers."""

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        hidden = self.b((self.a(e) + x[edge_index[0]]).relu()).tanh()
        with torch.no_grad():
            scale = x.sigmoid()
        return total(self.a(hidden * scale[edge_index[0]]).tanh(), edge_index[1], x.size(0)) + hidden.sum()


class WithoutLoops(nn.Module):
    """Self loops are left out by a mask: no state may leave the region."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(CHANNELS, CHANNELS, CHANNELS)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        from torch_geometric.utils import remove_self_loops

        edge_index, kept = remove_self_loops(edge_index, e)
        source, destination = edge_index
        message = self.net(x[source] * kept)
        return total(message, destination, x.size(0)) + message.square().sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mesh_graph_net": (Blocks, 2),
    "positions": (Positions, 1),
    "sum": (lambda: Aggregated("sum"), 1),
    "mean": (lambda: Aggregated("mean"), 1),
    "max": (lambda: Aggregated("amax"), 1),
    "min": (lambda: Aggregated("amin"), 1),
    "normed state": (NormedState, 3),
    "read early": (ReadEarly, 1),
    "norm read again": (NormReadAgain, 1),
    "norm of expanded rows": (NormOfExpanded, 1),
    "reduced twice": (ReducedTwice, 1),
    "normed by a sum": (NormedBySum, 2),
    "mode inside": (ModeInside, 1),
    "mode between": (ModeBetween, 1),
    "without loops": (WithoutLoops, 1),
}
"""Makers of models, and the numbers of their regions with layers."""

GRAPHS = [(9, 30), (5, 0), (1, 1), (1, 4), (200, 900)]


@pytest.fixture(autouse=True)
def _every_region_has_a_kernel() -> Iterator[None]:
    before = dict(launch.fallbacks)
    yield
    assert launch.fallbacks == before


def inputs(
    nodes: int,
    edges: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    like: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Node features, positions, unsorted edges with a hub, and edge features; the numbers of `like`, if it is given."""
    if like is not None:
        return tuple(a.detach().to(dtype).requires_grad_() if a.is_floating_point() else a for a in like)
    generator = torch.Generator().manual_seed(nodes + edges)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    edge_index[1, : edges // 4] = nodes // 2
    drawn = [torch.randn(*size, generator=generator, dtype=dtype) for size in ((nodes, CHANNELS), (nodes, 3))]
    e = torch.randn(edges, CHANNELS, generator=generator, dtype=dtype)
    x, pos, edge_index, e = (tensor.to(device) for tensor in (*drawn, edge_index, e))
    return x.requires_grad_(), pos.requires_grad_(), edge_index, e.requires_grad_()


def gradients(model: nn.Module, run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
    """The result, and its gradients with respect to all inputs and parameters."""
    out = run(*args)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype, device=out.device)).view_as(out)
    leaves = [a for a in args if a.is_floating_point()] + list(model.parameters())
    found = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [out, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))]


def tiled(compiled: nn.Module) -> list[Region]:
    """The regions with layers in them, of a compiled model that has been called."""
    specs = {record.spec for one in callable_of(compiled).backend.captured for record in one.log.regions}
    return [region for region in map(parse, sorted(specs)) if region.tiled]


def first_regions(model: nn.Module) -> list[Region]:
    """The regions with layers in them of a model's first call."""
    compiled = gnncompile.compile(model)
    compiled(*inputs(9, 30, torch.float32))
    return tiled(compiled)


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients(name: str, device: str) -> None:
    torch.manual_seed(0)
    make, count = MODELS[name]
    model = make().double().to(device)
    compiled = gnncompile.compile(copy.deepcopy(model), fullgraph=True)
    for size in GRAPHS:
        args = inputs(*size, device=device)
        expected = gradients(model, model, args)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="gnncompile")  # nothing runs without the passes
            found = gradients(compiled, compiled, args)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), expected[0].detach(), rtol=1e-9, atol=1e-9)
    for one in callable_of(compiled).backend.captured:
        made = sum(parse(record.spec).tiled for record in one.log.regions)
        assert made == count or (device_of(device).runs_triton and made < count)  # more is left to the library


@pytest.mark.parametrize("name", ["mesh_graph_net", "positions", "normed state"])
def test_inference(name: str, device: str) -> None:
    model = MODELS[name][0]().eval().to(device)
    compiled = gnncompile.compile(copy.deepcopy(model))
    for size in GRAPHS:
        args = inputs(*size, dtype=torch.float32, device=device)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-4)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


@pytest.mark.parametrize("which", ["usual", pytest.param("triton", marks=triton_regions.INTERPRETED)])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_as_exact_as_in_eager(name: str, which: str, device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]().to(device)
    exact = copy.deepcopy(model).double()
    with nullcontext() if which == "usual" else kernels("triton"):
        compiled = gnncompile.compile(copy.deepcopy(model), fullgraph=True)
        for size in [(9, 30), (5, 0), (1, 4)] if which == "triton" else GRAPHS:
            args = inputs(*size, dtype=torch.float32, device=device)
            expected = gradients(exact, exact, inputs(*size, device=device, like=args))
            with torch.autocast(device, torch.bfloat16):
                found, eager = gradients(compiled, compiled, args), gradients(model, model, args)
            assert [one.dtype for one in found] == [one.dtype for one in eager]
            for one, other, right in zip(found, eager, expected, strict=True):
                away, theirs = (_norm([a.double() - right]) for a in (one, other))
                assert away <= 2 * theirs + 2e-2 * _norm(expected) / len(expected)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_forms_the_same_regions(name: str) -> None:
    def found(dtype: torch.dtype, enabled: bool) -> list[int]:
        compiled = gnncompile.compile(MODELS[name][0]().to(dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            compiled(*inputs(9, 30, dtype))
        return sorted(sum(node.op == "linear" for node in region.nodes) for region in tiled(compiled))

    needs_interpreter("triton")
    with kernels("triton"):
        assert found(torch.float32, True) == found(torch.bfloat16, False)


def test_the_state_leaves_the_region_once() -> None:
    found = first_regions(Blocks())
    assert found
    for region in found:
        assert len(region.reductions) == 1 and sum(map(region.per_edge, region.outputs)) == 1


def test_two_reductions_share_their_layers() -> None:
    (region,) = first_regions(Positions())
    assert len(region.reductions) == 2
    assert sum(n.op == "linear" for n in region.nodes) == 4  # the distance has a layer of its own


def test_dropout_repeats_with_the_seed_and_has_the_mask_in_the_backward(device: str) -> None:
    model = Aggregated("sum", dropout=0.4).to(device)
    compiled = gnncompile.compile(model)
    args = inputs(50, 400, torch.float32, device)
    torch.manual_seed(5)
    found = gradients(model, compiled, args)
    torch.manual_seed(5)
    again = gradients(model, compiled, args)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    # The layer behind the dropout is linear in its weight: the result is known from the gradient of the weight.
    model.last.weight.grad = None
    torch.manual_seed(5)
    out = compiled(*args)
    (slope,) = torch.autograd.grad(out.sum(), [model.last.weight])
    rest = args[3].size(0) * model.last.bias.sum()
    torch.testing.assert_close((slope * model.last.weight).sum() + rest, out.sum(), rtol=1e-3, atol=1e-3)


def test_forces_are_trained_on(device: str) -> None:
    torch.manual_seed(1)
    model = Positions().double().to(device)

    def loss(run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
        (forces,) = torch.autograd.grad(run(*args).square().sum(), args[1], create_graph=True)
        return [forces, *torch.autograd.grad(forces.square().sum(), list(model.parameters()))]

    compiled = gnncompile.compile(model, options={"double_backward": True})
    for size in ((9, 30), (1, 0), (1, 3)):
        args = inputs(*size, device=device)
        for one, other in zip(loss(compiled, args), loss(model, args), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    model = Blocks()
    compiled = gnncompile.compile(model)
    args = inputs(3000, 20000, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradients(model, compiled, args)
        torch.set_num_threads(2)
        two = gradients(model, compiled, args)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one[1:4], two[1:4], strict=True))


BY_PAIRS = pytest.mark.skipif(not device_of("cpu").multiplies_pairs, reason="needs an AMD processor with AVX512-BF16")


@pytest.mark.parametrize("pairs", [pytest.param(True, marks=BY_PAIRS), False])
def test_cpus_leave_layers_in_16_bits_to_the_library(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that multiplies pairs of bfloat16 values computes several narrow layers."""
    monkeypatch.setattr(Device, "multiplies_pairs", property(lambda device: pairs))

    def regions(model: nn.Module, dtype: torch.dtype) -> list[Region]:
        compiled = gnncompile.compile(model.to(dtype))
        compiled(*inputs(9, 30, dtype))
        return tiled(compiled)

    assert regions(OneLayer(), torch.float32) and not regions(OneLayer(), torch.bfloat16)
    assert not regions(Blocks(), torch.float16)
    assert bool(regions(Blocks(), torch.bfloat16)) is pairs
    assert regions(OneState(), torch.float32) and not regions(OneState(), torch.bfloat16)
    narrow = replace(tuning.LOOPS, widest_pairs=CHANNELS - 1)
    monkeypatch.setattr(tuning, "LOOPS", narrow)
    assert not regions(Blocks(), torch.bfloat16)
    needs_interpreter("triton")
    with kernels("triton"):
        assert regions(Blocks(), torch.bfloat16) and not regions(OneLayer(), torch.bfloat16)


def test_a_torch_without_products_leaves_layers_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "has_products", lambda: False)
    assert not first_regions(Aggregated("sum"))


def test_wide_layers_are_left_to_the_library_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def widest_tile(device: Device, dtype: torch.dtype, has_states: bool) -> int:
        asked.append((dtype, has_states))
        return CHANNELS - 1

    monkeypatch.setattr(Device, "widest_tile", widest_tile)
    assert not first_regions(Aggregated("sum")) and asked == [(torch.float32, False)]
    assert not first_regions(Blocks()) and (torch.float32, True) in asked


def test_many_layers_are_left_to_the_library_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "most_tiled_layers", 1)
    assert first_regions(OneLayer()) and not first_regions(Aggregated("sum"))


def test_gpus_leave_one_layer_to_the_library() -> None:
    needs_interpreter("triton")
    host = device_of("cpu")
    assert host.walks_one_layer(torch.float32) and not host.walks_one_layer(torch.bfloat16)
    with kernels("triton"):
        assert not host.walks_one_layer(torch.float32)
        assert host.widest_tile(torch.float32, has_states=True) > host.widest_tile(torch.float32, has_states=False)


def test_the_option_leaves_layers_outside() -> None:
    compiled = gnncompile.compile(Blocks(), options={"edge_layers": False})
    compiled(*inputs(9, 30, torch.float32))
    assert not tiled(compiled)
