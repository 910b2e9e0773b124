"""How Triton kernels are launched, and what their source depends on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import triton

from gnncompile import _compat, tuning
from gnncompile._compat import cuda
from gnncompile.codegen.triton import launcher
from gnncompile.codegen.triton.kernel import TritonKernel, _nothing
from gnncompile.codegen.triton.plan import Part
from gnncompile.codegen.triton.tile import Tile
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Node, Output, Region
from tests.harness import tune
from tests.triton_regions import (
    MIXED,
    D,
    S,
    attention,
    attention_gradient,
    dot_attention,
    neighbour_sum,
    row_wise,
    source,
    take_few_edges,
)

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device


class FakeJit(triton.JITFunction):
    """Stands for a Triton kernel: counts compilations, and records what is handed to the compiled kernel."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.by_triton = 0

    def warmup(self, *arguments: Tensor, grid: tuple[int, int, int], **options: Any) -> Any:
        self.by_triton += 1
        return FakeCompiled(self)


class FakeCompiled:
    function, packed_metadata = "function", "metadata"
    metadata = SimpleNamespace(
        num_warps=2, shared=64, num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0
    )

    def __init__(self, jit: FakeJit) -> None:
        self.jit = jit

    def run(self, *arguments: Any) -> None:
        self.jit.launched.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.jit.launched.append((grid, *arguments))


def pointers(x: Tensor, edges: Layout, out: Tensor) -> list[int]:
    """What a sum is given where there is no hub."""
    nothing = [edges.rowptr, edges.rowptr, _nothing(torch.float32, x.device)]
    return [t.data_ptr() for t in (x, edges.rowptr, edges.col, *nothing, out)]


def test_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is asked once for each alignment; then the compiled kernel runs directly, unless hooks watch. One program
    serves all four rows.
    """
    monkeypatch.setattr(launcher._compat, "current_stream", lambda device: 77)
    monkeypatch.setattr(_compat, "static_cuda_launch", lambda: None)
    kernel, jit = TritonKernel(neighbour_sum(D, "float32", 1, 4)), FakeJit()
    kernel.ordinary._kernel = jit
    x, out, edges = torch.randn(8, 4), torch.empty(4, 4), MIXED.layout("cpu")
    shifted = torch.zeros(33)[1:].view(8, 4)

    def expected(x: Tensor) -> tuple[Any, ...]:
        return (
            1,
            1,
            1,
            77,
            "function",
            "metadata",
            None,
            None,
            None,
            *pointers(x, edges, out),
            4,
            0,
            tuning.TILES.hub_edges,
        )

    for _ in range(2):
        kernel([x], edges, [out])
        kernel([shifted], edges, [out])
    assert jit.by_triton == 2
    assert jit.launched == 2 * [expected(x), expected(shifted)]
    assert sorted(kernel.ordinary.compiled, key=str) == [(-1, 0), -1]

    jit.launched.clear()
    hook = lambda metadata: None  # noqa: E731
    triton_regions.triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        kernel([x], edges, [out])
    finally:
        triton_regions.triton.knobs.runtime.launch_enter_hook.remove(hook)
    kernel([x], edges, [out])
    assert jit.launched == [((1, 1, 1), *expected(x)[9:]), expected(x)]


def test_handwritten_kernels_are_compiled_once_for_each_alignment_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher._compat, "current_stream", lambda device: 77)
    monkeypatch.setattr(_compat, "static_cuda_launch", lambda: None)
    jit = FakeJit()
    kernel, x = launcher.Kernel(jit), torch.zeros(64)
    halves = torch.zeros(64, dtype=torch.bfloat16)
    calls = [(x, x), (x, x[1:]), (x[1:], x), (x[2:], x[3:]), (x[4:], x[8:]), (x, halves), (halves, x)]
    for count in (6, 0):  # the fifth call has the alignment of the first one
        jit.by_triton = 0
        for given in calls:
            kernel(3, given, (5,), (7,))
        assert jit.by_triton == count
    pointers = [tuple(t.data_ptr() for t in given) for given in 2 * calls]
    assert jit.launched == [(3, 1, 1, 77, "function", "metadata", None, None, None, *p, 5, 7) for p in pointers]


def test_torchs_launcher_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launcher._compat, "current_stream", lambda device: 77)
    monkeypatch.setattr(_compat, "static_cuda_launch", lambda: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(_compat, "triton_function", lambda compiled: compiled.function)
    kernel, jit = TritonKernel(neighbour_sum(D, "float32", 1, 4)), FakeJit()
    kernel.ordinary._kernel = jit
    x, out, edges = torch.randn(8, 4), torch.empty(4, 4), MIXED.layout("cpu")
    shifted = torch.zeros(33)[1:].view(8, 4)
    for tensor in (x, x, shifted, shifted):
        kernel.trusted([tensor], edges, [out])
    kernel([x], edges, [out])
    assert jit.by_triton == 2 and not jit.launched

    def expected(x: Tensor) -> tuple[Any, ...]:
        given = (*pointers(x, edges, out), 4, 0, tuning.TILES.hub_edges, None)
        return ("function", 1, 1, 1, 2, 64, "OOOOOOOiiiO", given, 77)

    assert launched == [expected(one) for one in (x, x, shifted, shifted, x)]


class Loaded:
    """A kernel that Triton compiled. Reading `run` builds Triton's launcher and loads the kernel."""

    name, kernel = "name", b"code"

    def __init__(self, shared: int = 64, num_warps: int = 2, backend: str = "cuda", tensor_memory: int = 0) -> None:
        self.function: Any = None
        target = SimpleNamespace(backend=backend)
        self.metadata = SimpleNamespace(shared=shared, num_warps=num_warps, target=target, tmem_size=tensor_memory)

    @property
    def run(self) -> None:
        self.function = "by Triton"


@pytest.mark.parametrize(
    ("compiled", "builds", "function", "loads"),
    [
        (Loaded(), True, 5, 1),
        (Loaded(), False, "by Triton", 0),
        (Loaded(shared=65), True, "by Triton", 0),
        (Loaded(num_warps=33), True, "by Triton", 1),
        (Loaded(backend="hip"), True, "by Triton", 0),
        (Loaded(tensor_memory=513), True, "by Triton", 0),
    ],
)
def test_triton_builds_no_launcher_from_c(
    compiled: Loaded, builds: bool, function: Any, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But Triton loads a kernel that needs too much memory or too many threads: it raises the error."""
    given: list[tuple[Any, ...]] = []
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 64},
        load_binary=lambda *arguments: given.append(arguments) or ("module", 5, 32, 0, 1024),
    )
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda _: SimpleNamespace(utils=utils)))
    monkeypatch.setattr(cuda, "current_device", lambda: 3)
    launchers = SimpleNamespace(make_launcher=None) if builds else SimpleNamespace()
    monkeypatch.setattr(cuda, "_nvidia_driver", lambda: launchers)
    assert launcher._function(compiled) == function
    assert given == [("name", b"code", compiled.metadata.shared, 3)] * loads


def test_a_kernel_that_triton_loaded_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_loaded", lambda *_: pytest.fail())
    compiled = Loaded()
    compiled.function = 7
    assert launcher._function(compiled) == 7


def test_triton_loads_a_kernel_if_other_code_watches_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "triton_function", lambda compiled: pytest.fail())
    hook = lambda *arguments: None  # noqa: E731
    triton.knobs.runtime.kernel_load_start_hook.add(hook)
    try:
        assert launcher._function(Loaded()) == "by Triton"
    finally:
        triton.knobs.runtime.kernel_load_start_hook.remove(hook)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_counts_that_a_kernel_takes(rows: int, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, pieces, programs for large hubs, and edges of a piece: four rows, two of them hubs of two pieces."""
    monkeypatch.setattr(launcher._compat, "current_stream", lambda device: 77)
    monkeypatch.setattr(_compat, "static_cuda_launch", lambda: None)
    tune(monkeypatch, hub_edges=2)
    take_few_edges(monkeypatch, 1)
    region = neighbour_sum(D, "float32", 1, 64)
    kernel = TritonKernel(region, Tile(rows, 1, 64, 1))
    walk, join = kernel.ordinary._kernel, kernel.hubs[0]._kernel = FakeJit(), FakeJit()
    x, out, edges = torch.randn(7, 64), torch.empty(4, 64), MIXED.layout("cpu")
    for _ in range(2):
        (kernel.trusted if trusted else kernel)([x], edges, [out])
    counts = (4, 4, 2) if rows > 1 else (4, 2)
    assert len(walk.launched) == len(join.launched) == 2
    assert walk.launched[0][:2] == (4 // rows + 4, 1) and walk.launched[0][-len(counts) - 1 :] == (
        out.data_ptr(),
        *counts,
    )
    # two hubs, both of which may be large, in two columns: eight programs of 4 channels for each one of 32
    assert join.launched[0][:2] == (2 + 2 * 8, 2) and join.launched[0][-2:] == (out.data_ptr(), 2 * 8)


@pytest.mark.parametrize("special", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}])
def test_a_special_launch_is_left_to_triton(special: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher._compat, "current_stream", lambda device: 77)
    monkeypatch.setattr(_compat, "static_cuda_launch", lambda: pytest.fail)
    jit = FakeJit()
    compiled = FakeCompiled(jit)
    compiled.metadata = SimpleNamespace(**{**vars(FakeCompiled.metadata), **special})
    launcher.Launcher(compiled, "O")(3, 1, 0, [8])
    assert jit.launched == [(3, 1, 1, 77, "function", "metadata", None, None, None, 8)]


def test_tensors_of_another_type_are_refused(device: str) -> None:
    kernel, edges = TritonKernel(neighbour_sum(D, "float32", 1, 4)), MIXED.layout(device)
    out = torch.empty(4, 4, device=device)
    with pytest.raises(ValueError, match=r"found a tensor torch\.float64 .* expected torch\.float32"):
        kernel([torch.zeros(7, 4, dtype=torch.float64, device=device)], edges, [out])
    with pytest.raises(ValueError, match=r"expected torch\.int32"):
        kernel([torch.zeros(7, 4, device=device)], Layout(edges.rowptr.long(), edges.col, edges.edge), [out])


@pytest.mark.gpu
def test_tensors_on_another_device_are_refused() -> None:
    kernel, edges = TritonKernel(neighbour_sum(D, "float32", 1, 4)), MIXED.layout("cuda")
    with pytest.raises(ValueError, match=r"expected torch\.float32 on cuda:0"):
        kernel([torch.zeros(7, 4)], edges, [torch.empty(4, 4, device="cuda")])


def test_source_is_deterministic_and_free_of_sizes() -> None:
    first, second = (source(attention(D, "float32", 4, 16)) for _ in range(2))
    assert first == second
    assert "constexpr" not in first and "num_rows" not in first and "atomic" not in first
    assert 'do_not_specialize=["num_rows"]' in source(row_wise(D, "float32", 1, 16))
    both = source(neighbour_sum(D, "float32", 1, 64), part=Part("both"))
    assert both.count("do_not_specialize") == 1 and 'do_not_specialize=["num_rows", "num_pieces", "most_edges"]' in both


def test_what_a_softmax_weighs_is_gathered_with_its_logits() -> None:
    text = source(attention(D, "float32", 4, 16))
    assert text.count("over the edges\n") == 1 and all(text.count(f"load(t{k}") == 1 for k in range(4))


def test_what_waits_for_a_sum_is_gathered_again() -> None:
    first, second = source(attention_gradient(D, "float32", 4, 16)).split("# pass ")[1:]
    assert "load(t1" in first and "load(t2" in first and "load(t1" in second and "load(t2" in second


def test_unsupported() -> None:
    b = Builder(D)
    value = b.input(0, S, (1, 1), "float32")
    for _ in range(5):
        value = b.softmax(value)
    with pytest.raises(UnsupportedRegion, match="passes"):
        TritonKernel(b.finish([Output(value, "float32", (1,))]))
    with pytest.raises(UnsupportedRegion, match="elements"):
        TritonKernel(dot_attention(D, "float32", 3, 9000))
    opposite = Region(D, (Node("input", (), S, (1, 1), "float32", 0),), (Output(0, "float32", (1,)),))
    with pytest.raises(UnsupportedRegion, match="other end"):
        TritonKernel(opposite)
