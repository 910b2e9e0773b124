"""Walks in tiles that write over a tensor which they read last give the numbers of outputs of their own memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, nn

import gnncompile
from gnncompile import tuning
from gnncompile.codegen.triton import tiled_layers
from gnncompile.codegen.triton.kernel import triton_kernel
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.ir import reference, rules
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region
from gnncompile.ir.residuals import with_residuals
from gnncompile.runtime import launch
from tests.edge_states import CHANNELS, Centred, total
from tests.graphs import layout
from tests.harness import kernels, same_gradients, tune
from tests.tiled_regions import E, Maker, S, gated, mesh_graph_net, residual
from tests.triton_regions import DEVICE, GPU, INTERPRETED

pytestmark = INTERPRETED

which = triton_regions.which


def chain(make: Maker, channels: int = 48) -> Region:
    """Three layers with sums in between, which take several walks."""
    b, x = make.b, make.input(E, channels)
    for _ in range(3):
        x = b.op("add", x, rules.silu(b, make.layer(b.op("add", x, make.input(S, channels)), channels)))
    return make.finish(x, b.reduce("sum", x))


STATES: dict[str, tuple[Callable[[Maker, int], Region], int, tuple[str, ...]]] = {
    "mesh": (mesh_graph_net, 40, ("float32", "float64", "bfloat16")),
    "gated": (gated, 64, ("float32", "bfloat16")),
    "residual": (residual, 100, ("float32", "float64")),
    "chain": (chain, 48, ("float32",)),
}
"""Regions, their channels, and the dtypes in which a kernel may write over a tensor."""

MANY = 20_000 if DEVICE == "cuda" else 200
SIZES = {"no edge": (4, 3, 0), "one edge": (3, 2, 1), "hub": (20, 7, 90), "edges": (100, 90, MANY)}


def graph(name: str) -> tuple[list[Tensor], tuple[int, int, int]]:
    """The layouts of a graph by rows and by columns, and its numbers of rows, columns and edges."""
    generator = torch.Generator().manual_seed(len(name))
    rows, columns, count = SIZES[name]
    row, column = (torch.randint(n, (count,), generator=generator) for n in (rows, columns))
    if name == "hub":
        row[30:] = 17
    return [*layout(row, column, rows), *layout(column, row, columns)], (rows, columns, count)


class Overwriting:
    """A watcher that runs each walk again for every output and every tensor that the output may be written over."""

    def __init__(self) -> None:
        self.found = 0

    def __call__(
        self, region: Region, kernel: Any, tensors: Any, walk: Any, outputs: Any, start: Callable[[], None]
    ) -> None:
        start()
        for k, position in [(k, p) for k, positions in kernel.overwritable.items() for p in positions]:
            given, written = [t.clone() for t in tensors], [torch.full_like(o, torch.nan) for o in outputs]
            written[k] = given[position].view(outputs[k].shape)
            kernel.trusted(given, walk, written)
            for one, other in zip(written, outputs, strict=True):
                assert torch.equal(one, other), (k, position)
            self.found += 1


@pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=GPU)])
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in STATES for dtype in STATES[name][2]])
def test_numbers_of_kernels(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, device: str) -> None:
    tune(monkeypatch, processors=1)  # each program walks several tiles
    make, watcher = Maker(dtype), Overwriting()
    maker, channels, _ = STATES[name]
    region = with_residuals(maker(make, channels))
    for size in SIZES:
        walk, counts = graph(size)
        torch.manual_seed(0)
        leaves = [t.to(device).requires_grad_() for t in make.tensors(*counts, getattr(torch, dtype))]
        with kernels("triton"), launch.watched(watcher):
            outputs = torch.ops.gnncompile.region(leaves, [t.to(device) for t in walk], region.spec)
            torch.autograd.backward(outputs, [torch.randn_like(o) for o in outputs])
    assert watcher.found >= len(SIZES)


def _plan(values: Callable[[Maker], Sequence[int]], dtype: str = "float32", unmasked: bool = True) -> TiledPlan:
    make = Maker(dtype, unmasked)
    return TiledPlan(make.finish(*values(make)))


def test_what_is_read_later_is_kept() -> None:
    """Tensors that a sum per row, another walk or a gradient of weights reads, that are masked, or that are narrow."""

    def layered(make: Maker, channels: int = 64) -> tuple[int, int]:
        x = make.input(E, channels)
        return x, make.layer(x, channels)

    def alone(make: Maker) -> Sequence[int]:
        return [layered(make)[1]]

    assert _plan(alone).overwritable == {0: (0,)}
    assert _plan(alone, unmasked=False).overwritable == {}
    assert _plan(lambda make: [layered(make, 24)[1]]).overwritable == {}

    def with_sum(make: Maker) -> Sequence[int]:
        x, y = layered(make)
        return [y, make.b.reduce("sum", x)]

    assert _plan(with_sum).overwritable == {}
    assert _plan(lambda make: layered(make)).overwritable == {}  # the input is a result, too

    def with_weights(make: Maker) -> Sequence[int]:
        x, y = layered(make)
        return [y, make.b.outer(x, y, (1, 64))]

    assert _plan(with_weights).overwritable == {}

    def beside(make: Maker) -> Sequence[int]:  # what does not follow from an input may be written before it is read
        one, other = make.input(E, 32), make.input(E, 32)
        return [make.layer(one, 32), make.layer(other, 32)]

    plan = _plan(beside, "bfloat16")
    assert len(plan.phases) == 1 and plan.overwritable == {0: (0,), 1: (1,)}

    def again(make: Maker) -> Sequence[int]:  # the row is loaded again behind the layer
        x, y = layered(make)
        return [make.b.op("add", x, y)]

    assert _plan(again).overwritable == {}


def test_a_tile_has_a_number_for_each_thread() -> None:
    """So each number of a wide row is loaded by one thread."""
    tiles = [tile for table in (tuning.TILES.tiled_floats, tuning.TILES.tiled_halves) for _, tile in table]
    assert all(tile.edges * tiled_layers.WIDE >= tile.warps * 32 for tile in tiles)


@pytest.mark.parametrize("generator", ["cpp", "reference"])
def test_other_kernels_get_memory_of_their_own(generator: str) -> None:
    """Code that was written for Triton's kernels runs with the kernels of another generator as well."""
    make = Maker("float64")
    region = residual(make, 100)
    walk, counts = graph("hub")
    tensors = make.tensors(*counts, torch.float64)
    (expected,) = reference.run(region, tensors, Layout(*walk[:3]))
    with kernels("triton"):
        ((k, (position, *_)),) = triton_kernel(region).overwritable.items()
    with kernels(generator):
        launch.Call(region.spec, "cpu").write_over({position: k}, tensors, walk[:3], [tensors[position]])
    torch.testing.assert_close(tensors[position], expected)


class Added(Centred):
    """The same states, and what each layer gives is added to by an input, whose gradient is that of the next state."""

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        for layer in self.layers:
            raw = layer(e) + x[source]
            x = x + total(raw.sigmoid(), destination, x.size(0))
            e = (raw * self.scale).tanh() + e
        return torch.cat([x, total(e * e, destination, x.size(0))], dim=1)


@pytest.mark.parametrize("model", [Centred(3), Added(3)], ids=["centred", "added"])
@pytest.mark.parametrize("which", [pytest.param("triton", marks=GPU)], indirect=True)
def test_compiled_models_write_over_what_they_read_last(which: str, model: nn.Module) -> None:
    """Gradients are eager's, twice through one forward as well."""
    device = triton_regions.home(which)
    torch.manual_seed(0)
    model = copy.deepcopy(model).to(device, torch.float64)
    edge_index = torch.randint(30, (2, 200), device=device)
    x, e = (torch.randn(n, CHANNELS, device=device, dtype=torch.float64) for n in (30, 200))
    other, written = copy.deepcopy(model), list[bool]()

    def watch(region: Region, kernel: Any, tensors: Any, walk: Any, outputs: Any, start: Callable[[], None]) -> None:
        start()
        written.append(not {t.data_ptr() for t in tensors}.isdisjoint(o.data_ptr() for o in outputs))

    compiled = gnncompile.compile(other, fullgraph=True)
    # A graph from the cache may have been compiled for kernels that write over nothing.
    with launch.watched(watch), torch._inductor.config.patch(force_disable_caches=True):
        same_gradients(model, (other, compiled), x, edge_index, e)
    assert any(written)

    leaves = [x.requires_grad_(), e.requires_grad_()]
    result = compiled(x, edge_index, e).sum()
    first, second = (torch.autograd.grad(result, leaves, retain_graph=again) for again in (True, False))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("which", [pytest.param("triton", marks=GPU)], indirect=True)
def test_a_gradient_that_leaves_is_kept(which: str) -> None:
    """The gradient of a state is that of a number per edge, too, which is a result of the backward."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(3))

        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, *shifts: Tensor) -> Tensor:
            source, destination = edge_index
            for layer, shift in zip(self.layers, shifts, strict=True):
                e = (layer(e) + x[source]).tanh() + e + shift
            return total(e * e, destination, x.size(0))

    device = triton_regions.home(which)
    torch.manual_seed(0)
    model = Shifted().to(device, torch.float64)
    edge_index = torch.randint(30, (2, 200), device=device)
    x, *rows = (torch.randn(n, CHANNELS, device=device, dtype=torch.float64) for n in (30, 200, 200, 200, 200))
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other, fullgraph=True)), x, edge_index, *rows)
