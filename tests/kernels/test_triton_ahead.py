"""Triton kernels are compiled before their first launch, in threads, for the very arguments that launches bring."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile._compat import cuda
from gnncompile.codegen.triton import ahead, launcher
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import Region
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.vjp import vjp
from tests import tiled_regions
from tests.harness import without_interpreter
from tests.kernels.test_edge_linears import message
from tests.triton_regions import GRAPHS, D, attention_gradient, dot_attention, neighbour_sum

pytestmark = triton_regions.INTERPRETED

SCRIPT = """
import contextlib, gc, sys, torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
torch.cuda.device, torch.cuda.is_initialized = lambda index: contextlib.nullcontext(), lambda: True

from gnncompile import _compat
from gnncompile.codegen.triton import ahead
from gnncompile.codegen.triton.kernel import Variant, triton_kernel
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import parse

_compat.current_device = lambda: 0
begin, begun = ahead.begin, []
def record(kernel, *given):
    begun.append((kernel, begin(kernel, *given)))
    return begun[-1][1]
ahead.begin = record

class CompilesOnly:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def run(*given, **options):
            launched.append(self.kernel)
            self.kernel.warmup(*given, grid=grid, **options)
        return run

def count():
    return [len(kernel.device_caches[0][0]) for kernel, _ in begun]

cases, results = torch.load(sys.argv[1]), {}
kernels = {name: triton_kernel(parse(spec)) for name, (spec, *_) in cases.items()}
for name, (spec, tensors, layout, outputs) in cases.items():
    begun.clear()
    launched = []
    kernels[name].compile_ahead(150)
    for _, future in begun:
        future.result()
    before = count()
    for one in gc.get_objects():
        if isinstance(one, (Variant, Kernel)) and not isinstance(one._kernel, CompilesOnly):
            one.real, one._kernel = one._kernel, CompilesOnly(one._kernel)
    kernels[name](tensors, Layout(*layout), outputs)
    others = sum(all(found is not known for known, _ in begun) for found in launched)
    results[name] = before, count(), len(launched), others
    for one in gc.get_objects():
        if isinstance(one, (Variant, Kernel)):
            one._kernel = one.real
torch.save(results, sys.argv[2])
"""
"""Compiles the kernels of regions ahead, for an H100. Then launches them, except that Triton only compiles.

Saves for each region how many results Triton holds for each kernel, before and after; how many launches there were, and
how many of kernels that were not compiled ahead.
"""


def over_all_edges() -> Region:
    """The gradient of a layer's weights, which sums over all edges."""
    region = with_residuals(message("float32", 1, 8, 4), (True, False, True))
    stages = vjp(region, (True, False, True), tuple(k == 0 for k in range(len(region.outputs)))).stages
    return next(stage.region for stage in stages if stage.region.sums_all)


def in_tiles(dtype: str) -> Region:
    """A layer of a mesh graph network."""
    return tiled_regions.REGIONS["mesh_graph_net"](tiled_regions.Maker(dtype))


REGIONS: dict[str, Callable[[], Region]] = {
    "sum": lambda: neighbour_sum(D, "bfloat16", 1, 32),
    "softmax": lambda: dot_attention(D, "float32", 2, 16),
    "gradient": lambda: attention_gradient(D, "float32", 2, 16),
    "all edges": over_all_edges,
    "tiles": lambda: in_tiles("float32"),
    "tiles in float64": lambda: in_tiles("float64"),
}


def case(region: Region) -> tuple[Any, ...]:
    """A region with tensors, of enough rows, for a graph with a hub."""
    layout = GRAPHS["hub"].layout("cpu")
    rows, edges = layout.rowptr.size(0) - 1, layout.col.size(0)
    types = {int(n.value or 0): (n.dtype, n.shape) for n in region.inputs}
    given = [types.get(k, ("float32", (1, 1))) for k in range(1 + max(types))]
    tensors = [torch.zeros(edges, heads * channels, dtype=tensor_type(dtype)) for dtype, (heads, channels) in given]
    sizes = [(region.rows(out, rows, edges), *out.trailing) for out in region.outputs]
    outputs = [torch.zeros(size, dtype=tensor_type(out.dtype)) for size, out in zip(sizes, region.outputs, strict=True)]
    return region.spec, tensors, tuple(layout), outputs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script finds."""
    folder = tmp_path_factory.mktemp("ahead")
    torch.save({name: case(make()) for name, make in REGIONS.items()}, folder / "given")
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "GNNCOMPILE_CACHE_DIR": str(folder / "ours")}
    without_interpreter("-c", SCRIPT, str(folder / "given"), str(folder / "found"), **caches)
    results: dict[str, Any] = torch.load(folder / "found")
    return results


@pytest.mark.parametrize("name", REGIONS)
def test_a_launch_finds_what_was_compiled_ahead(name: str, found: dict[str, Any]):
    before, after, launches, others = found[name]
    assert before and min(before) > 0 and after == before
    assert launches >= len(before) and others == 0


def test_nothing_is_compiled_ahead_under_the_interpreter():
    assert ahead.begin(lambda: None, [torch.float32], [1], {}) is None


def test_a_launch_waits_for_a_compile_that_has_begun(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Slow(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            order.append("waited")

    asked: list[Any] = []

    def begin(kernel: Any, pointers: Any, others: Any, options: Any) -> Future[None]:
        asked.append((tuple(pointers), tuple(others)))
        return Slow()

    class Jit:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: order.append("launched")

    monkeypatch.setattr(ahead, "begin", begin)
    kernel = launcher.Kernel(Jit())
    x = torch.zeros(3)
    for _ in range(2):
        kernel.compile_ahead([x.dtype], 1, (5,))
    kernel(1, [x.to("meta")], [2], (5,))
    kernel(1, [x], [2], (5,))
    kernel(1, [x], [2], (6,))
    kernel(1, [x.half()], [2], (5,))
    assert asked == [((torch.float32,), (1, 5))] and order == ["waited", "launched", "launched", "launched"]


def test_threads_that_compile_prepare_triton_once(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    @cache
    def prepare() -> None:
        order.append("begun")
        time.sleep(0.1)
        order.append("prepared")

    monkeypatch.setattr(cuda, "triton_hash_with_backend", prepare)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    kernel: Any = SimpleNamespace(warmup=lambda *given, **options: order.append("compiled"))
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            threads.submit(ahead._compile, kernel, (), 0, {})
    assert order == ["begun", "prepared", *["compiled"] * 3]
