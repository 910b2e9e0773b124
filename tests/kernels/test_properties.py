"""Random regions on random graphs: gradients against autograd's, kernels against the reference, by hypothesis.

Every kernel writes to memory that is filled with NaN before, so that an element that is not written shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
import gnncompile.ops.region
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.residuals import with_residuals
from gnncompile.runtime import launch
from tests.harness import kernels
from tests.random_messages import Layer, Plan, arguments, plans
from tests.random_regions import (
    Edges,
    Run,
    derive,
    derive_twice,
    edges,
    in_double,
    in_single,
    reference,
    regions,
    tensors_of,
)
from tests.randomly import examples

pytestmark = triton_regions.INTERPRETED
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
KINDS = ["normal", "whole"]
SEEDS, STORED = st.integers(0, 50), st.sampled_from(["float32", "float64", "bfloat16", "float16"])


@pytest.fixture(autouse=True, scope="module")
def _poisoned() -> Iterator[None]:
    """Memory that is not initialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def operation(region: Region, where: Edges, device: str = "cpu") -> Run:
    """The region as the op that a compiled model calls, without what is kept for its gradient."""
    spec, walk = with_residuals(region).spec, [t.to(device) for t in where.both()]
    return lambda tensors: torch.ops.gnncompile.region(tensors, walk, spec)[: len(region.outputs)]


def close(
    found: Sequence[Tensor | None], expected: Sequence[Tensor | None], limits: Sequence[float], what: str
) -> None:
    for k, (one, other, limit) in enumerate(zip(found, expected, limits, strict=True)):
        if other is None or one is None:
            # A gradient of zeros may be None.
            assert all(t is None or not t.any() for t in (one, other)), f"{what} {k}: a gradient is missing"
            continue
        assert one.shape == other.shape
        if other.dtype is torch.bool:
            assert torch.equal(one, other), f"{what} {k}"
            continue
        scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(
            one.double(), other, rtol=limit, atol=limit * scale, msg=lambda m, k=k: f"{what} {k}: {m}"
        )


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


@examples(150)
@given(regions(["float64"], smooth=True, dropout=True), edges(), SEEDS, st.sampled_from(KINDS))
def test_gradients_are_those_of_autograd(region: Region, where: Edges, seed: int, kind: str):
    """The rules of regions against torch's, for sums, extrema, softmax, layers, dropout and epilogues."""
    tensors = tensors_of(region, where, seed, kind)
    expected = derive(reference(region, where), tensors)
    with kernels("reference"):
        found = derive(operation(region, where), tensors)
    for what, one, other in zip(("result", "gradient"), found, expected, strict=True):
        close(one, other, [1e-9] * len(other), what)


@examples(60)
@given(regions(["float64"], smooth=True, dropout=True), edges(), SEEDS, st.sampled_from(KINDS))
def test_second_gradients_are_those_of_autograd(region: Region, where: Edges, seed: int, kind: str):
    tensors = tensors_of(region, where, seed, kind)
    expected = derive_twice(reference(region, where), tensors)
    with kernels("reference"):
        found = derive_twice(operation(region, where), tensors)
    close(found, expected, [1e-8] * len(expected), "second gradient")


def check_kernels(which: str, region: Region, where: Edges, seed: int, kind: str) -> None:
    """Results and gradients of generated kernels, as far as rounding leaves anything to compare."""
    tensors = tensors_of(region, where, seed, kind)
    expected = derive(reference(in_double(region), where), widened(tensors))
    rounded = derive(reference(in_single(region), where), [t.float() if t.is_floating_point() else t for t in tensors])
    device = triton_regions.home(which)
    with kernels(which):
        results = derive(operation(region, where, device), [t.to(device) for t in tensors])
        assert launch.fallbacks == {}
    found = [[t if t is None else t.cpu() for t in ts] for ts in results]
    stored = [o.dtype for o in region.outputs]
    for what, one, other, single in zip(("result", "gradient"), found, expected, rounded, strict=True):
        dtypes = stored if what == "result" else [str(t.dtype).removeprefix("torch.") for t in tensors]
        kept = [well(a, b) for a, b in zip(single, other, strict=True)]
        pairs = [[t if t is None else t[k] for t, k in zip(ts, kept, strict=True)] for ts in (one, other)]
        close(*pairs, [TOLERANCE.get(d, 0) for d in dtypes], what)


def well(single: Tensor | None, double: Tensor | None) -> Tensor | slice:
    """Where float32 is near float64: elsewhere a comparison may turn out otherwise, or a difference cancel."""
    if single is None or double is None:
        return slice(None)
    if double.dtype is torch.bool:
        return single == double
    scale = max(1.0, float(double.abs().max())) if double.numel() else 1.0
    return (single.double() - double).abs() < 1e-4 * scale


@pytest.mark.parametrize("which", triton_regions.GENERATORS)
def test_kernels_and_gradients(which: str):
    @examples(12)
    @given(
        STORED.flatmap(lambda dtype: regions([dtype], smooth=True, dropout=True)),
        edges(),
        SEEDS,
        st.sampled_from(KINDS),
    )
    def check(region: Region, where: Edges, seed: int, kind: str) -> None:
        check_kernels(which, region, where, seed, kind)

    check()


@pytest.mark.parametrize("device", [pytest.param(triton_regions.DEVICE, marks=triton_regions.GPU)])
def test_generators_agree_on_special_numbers(device: str):
    """Any function of infinities and NaN, in float64: C++, Triton (on a GPU, or interpreted) and the reference."""

    @examples(8)
    @given(regions(["float64"], smooth=False), edges(), SEEDS)
    def check(region: Region, where: Edges, seed: int) -> None:
        check_special(region, where, seed)

    check()


def check_special(region: Region, where: Edges, seed: int) -> None:
    tensors = tensors_of(region, where, seed, "special")
    results = []
    for which in ("reference", "cpp", "triton"):
        device = triton_regions.home(which)
        walk = [t.to(device) for t in where.both()[:3]]
        with kernels(which):
            outputs = launch.runner(region.spec, device)([t.to(device) for t in tensors], walk)
            results.append([t.cpu() for t in outputs])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_reference_finds_its_maxima_again():
    """Of three equal edges each gets its third, also where torch computes the last one on its own."""
    b = Builder(Space.DESTINATION)
    sigmoid = b.op("sigmoid", b.input(0, Space.SOURCE, (1, 17), "float64"))
    region = b.finish([Output(b.reduce("max", sigmoid), "float64", (1, 17))])
    where = Edges(((0, 0), (0, 1), (0, 0), (0, 1), (0, 0)), 1, 2)
    for seed in range(20):
        tensors = tensors_of(region, where, seed, "normal")
        tensors[0][1] = tensors[0][0]
        with kernels("reference"):
            _, (gradient,) = derive(operation(region, where), tensors)
        value = tensors[0][0].sigmoid()
        slope = value * (1 - value) * torch.cos(torch.arange(17.0).double()).view(1, 17)
        torch.testing.assert_close(gradient, torch.stack([slope * 3 / 5, slope * 2 / 5]))


def test_reference_finds_maxima_of_a_layer_again():
    """Of products that torch rounds by the order of the edges, which is another one in a second gradient."""
    b = Builder(Space.DESTINATION)
    total = b.reduce("sum", b.input(0, Space.SOURCE, (1, 1), "float64"))
    rows = b.linear(b.input(1, Space.EDGE, (1, 4), "float64"), b.input(2, Space.FEATURE, (1, 17), "float64"))
    region = b.finish([Output(total, "float64", (1, 1)), Output(b.reduce("max", rows), "float64", (1, 17))])
    where = Edges(((0, 0), (0, 0), (0, 0), (0, 1), (0, 0)), 1, 2)
    for seed in range(20):
        tensors = tensors_of(region, where, seed, "normal")
        expected = derive_twice(reference(region, where), tensors)
        with kernels("reference"):
            found = derive_twice(operation(region, where), tensors)
        close(found, expected, [1e-8] * len(expected), "second gradient")


# -- layers -------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    sources, destinations = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    one = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    return sources, destinations, draw(st.lists(one, max_size=20))


@examples(10)
@given(plans(), st.lists(graphs(), min_size=1, max_size=3), st.sampled_from(["reference", "reference", "cpp"]))
def test_layers_are_eager(plan: Plan, on: list[tuple[int, int, list[tuple[int, int]]]], which: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(plan)
    with kernels(which):
        compiled = gnncompile.compile(layer, options={"inductor": False})
        for seed, graph in enumerate(on):
            args = arguments(plan, *graph, seed)
            results = []
            for fn in (compiled, layer):
                out = fn(*args)
                wanted = [t for t in (*args, *layer.parameters()) if t.requires_grad]
                weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
                total = (out * weight).sum()
                # What is all comparisons has no gradient in eager, and ours one of zeros.
                grads = torch.autograd.grad(total, wanted, allow_unused=True) if out.requires_grad else [None] * 7
                results.append([out.detach(), *grads])
            close(*results, [1e-8] * len(results[0]), f"graph {seed}")
