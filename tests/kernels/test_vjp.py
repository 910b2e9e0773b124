"""Gradients of regions through ``gnncompile::region``: gradcheck in float64, kernels against float64, stage counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import gnncompile.ops.region  # noqa: F401  (registers the ops)
from gnncompile.exc import InvalidRegionError
from gnncompile.ir import rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import BOOL, Node, Output, Region, Space
from gnncompile.ir.residuals import tensors_read, with_residuals
from gnncompile.ir.stages import Backward
from gnncompile.ir.verify import verify
from gnncompile.ir.vjp import vjp
from gnncompile.runtime import launch
from tests.graphs import layout
from tests.harness import kernels

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
F64 = "float64"


@dataclass(frozen=True)
class Graph:
    """Edges of a bipartite graph; `alive` of None means that every edge counts."""

    dst: Tensor
    src: Tensor
    rows: int
    cols: int
    alive: Tensor | None = None

    def both(self, device: str = "cpu") -> list[Tensor]:
        by_row = layout(self.dst, self.src, self.rows, self.alive)
        by_col = layout(self.src, self.dst, self.cols, self.alive)
        return [t.to(device) for t in (*by_row, *by_col)]


def graph(edges: list[tuple[int, int]], rows: int, cols: int, dead: tuple[int, ...] = ()) -> Graph:
    pairs = torch.tensor(edges, dtype=torch.long).view(-1, 2)
    alive = torch.ones(len(edges), dtype=torch.bool)
    alive[list(dead)] = False
    return Graph(pairs[:, 0], pairs[:, 1], rows, cols, alive if dead else None)


GRAPHS = {
    "bipartite, duplicates, empty rows": graph([(0, 4), (3, 1), (0, 4), (2, 0), (0, 2), (3, 3), (2, 4)], 5, 6),
    "no edges": graph([], 3, 2),
    "masked": graph([(0, 0), (1, 1), (1, 0), (2, 1), (0, 2), (2, 2)], 3, 3, dead=(0, 1, 5)),
    "all masked": graph([(0, 1), (1, 0)], 2, 2, dead=(0, 1)),
    "hub": graph([(1, k % 4) for k in range(12)] + [(0, 2), (2, 2)], 3, 4),
}


# -- regions ------------------------------------------------------------------------------------------------------


PLAIN: dict[Region, Region] = {}
"""From regions with residuals to those without."""


def region_of(outputs: Callable[[Builder], list[Output]]) -> Region:
    b = Builder(D)
    plain = b.finish(outputs(b))
    region = with_residuals(plain)
    verify(region)
    PLAIN[region] = plain
    return region


def visible(region: Region) -> list[bool]:
    """Which outputs are a user's, and not residuals."""
    return [k < len(PLAIN[region].outputs) for k in range(len(region.outputs))]


def _weighted_sum(b: Builder) -> list[Output]:
    x, w = b.input(0, S, (1, 3), F64), b.input(1, E, (1, 1), F64)
    return [Output(b.reduce("sum", b.op("mul", x, w)), F64, (3,))]


def _mean(b: Builder) -> list[Output]:
    x, inverse = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 1), F64)
    return [Output(b.reduce("sum", b.op("mul", x, inverse)), F64, (3,))]


def _mixed(b: Builder) -> list[Output]:
    x, y = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64)
    e, p = b.input(2, E, (1, 3), F64), b.input(3, P, (1, 3), F64)
    message = rules.silu(b, b.op("add", b.op("mul", x, p), b.op("add", y, e)))
    return [Output(b.reduce("sum", message), F64, (3,)), Output(b.reduce("max", message), F64, (3,))]


def _gat(b: Builder) -> list[Output]:
    a, c, x = b.input(0, S, (2, 1), F64), b.input(1, D, (2, 1), F64), b.input(2, S, (2, 3), F64)
    alpha = b.softmax(rules.leaky_relu(b, b.op("add", a, c), 0.2))
    return [Output(b.reduce("sum", b.op("mul", alpha, x)), F64, (2, 3))]


def _softmax_used_twice(b: Builder) -> list[Output]:
    a, x = b.input(0, S, (1, 1), F64), b.input(1, S, (1, 3), F64)
    alpha = b.softmax(a)
    message = b.op("mul", b.op("mul", alpha, alpha), x)
    return [Output(b.reduce("sum", message), F64, (3,)), Output(b.reduce("sum", b.op("mul", alpha, x)), F64, (3,))]


def _softmax_of_max(b: Builder) -> list[Output]:
    a, x = b.input(0, S, (1, 1), F64), b.input(1, S, (1, 3), F64)
    return [Output(b.reduce("max", b.op("mul", b.softmax(a), x)), F64, (3,))]


def _softmax_per_edge(b: Builder) -> list[Output]:
    a, c = b.input(0, S, (2, 1), F64), b.input(1, D, (2, 1), F64)
    return [Output(b.softmax(b.op("mul", a, c)), F64, (2,))]


def _dot_attention(b: Builder) -> list[Output]:
    q, k, x = b.input(0, D, (2, 3), F64), b.input(1, S, (2, 3), F64), b.input(2, S, (2, 3), F64)
    alpha = b.softmax(b.sum_axis(b.op("mul", q, k), 1))
    return [Output(b.reduce("sum", b.op("mul", alpha, x)), F64, (2, 3)), Output(alpha, F64, (2, 1))]


def _two_weighted_sums(b: Builder) -> list[Output]:
    q, k, x = b.input(0, D, (2, 3), F64), b.input(1, S, (2, 3), F64), b.input(2, S, (2, 3), F64)
    u, e = b.input(3, D, (2, 2), F64), b.input(4, E, (1, 2), F64)
    alpha = b.softmax(b.op("add", b.sum_axis(b.op("mul", q, k), 1), b.sum_axis(b.op("mul", u, e), 1)))
    sums = [b.reduce("sum", b.op("mul", alpha, message)) for message in (x, e)]
    return [Output(sums[0], F64, (2, 3)), Output(sums[1], F64, (2, 2))]


def _epilogue(b: Builder) -> list[Output]:
    x, y, p = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64), b.input(2, P, (1, 3), F64)
    total = b.reduce("sum", b.op("add", x, y))
    return [Output(rules.silu(b, b.op("add", b.op("mul", total, y), p)), F64, (3,))]


def _feature_sums(b: Builder) -> list[Output]:
    x, y = b.input(0, S, (2, 3), F64), b.input(1, D, (2, 3), F64)
    heads = b.op("mul", b.sum_axis(x, 0), y)
    return [Output(b.reduce("sum", b.op("mul", b.sum_axis(x, 1), heads)), F64, (2, 3))]


def _heads_of_gradients(b: Builder) -> list[Output]:
    """The gradient of x has one head for both; that of y one from the edges, and two from its row."""
    x, y = b.input(0, S, (2, 3), F64), b.input(1, D, (2, 3), F64)
    total = b.reduce("sum", b.op("mul", b.sum_axis(x, 0), b.sum_axis(y, 0)))
    return [Output(total, F64, (3,)), Output(b.op("mul", total, y), F64, (2, 3))]


def _narrow(b: Builder) -> list[Output]:
    x, y = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64)
    return [Output(b.reduce("sum", b.op("mul", b.sum_axis(x, 1), b.sum_axis(y, 1))), F64, ())]


def _edge_output(b: Builder) -> list[Output]:
    x, y, e = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64), b.input(2, E, (1, 1), F64)
    return [Output(b.op("mul", b.op("sub", x, y), e), F64, (3,))]


def _gine(b: Builder) -> list[Output]:
    x, e, w = b.input(0, S, (1, 3), F64), b.input(1, E, (1, 2), F64), b.input(2, Space.FEATURE, (1, 3), F64)
    return [Output(b.reduce("sum", rules.relu(b, b.op("add", x, b.linear(e, w)))), F64, (3,))]


def _biased_gine(b: Builder) -> list[Output]:
    x, e, w = b.input(0, S, (1, 3), F64), b.input(1, E, (1, 2), F64), b.input(2, Space.FEATURE, (1, 3), F64)
    layer = b.op("add", b.linear(e, w), b.input(3, P, (1, 3), F64))
    return [Output(b.reduce("sum", rules.relu(b, b.op("add", x, layer))), F64, (3,))]


def _attended_layer(b: Builder) -> list[Output]:
    q, k = b.input(0, D, (2, 3), F64), b.input(1, S, (2, 3), F64)
    e = b.linear(b.input(2, E, (1, 4), F64), b.input(3, Space.FEATURE, (2, 3), F64))
    alpha = b.softmax(b.sum_axis(b.op("mul", q, b.op("add", k, e)), 1))
    return [Output(b.reduce("sum", b.op("mul", b.op("add", k, e), alpha)), F64, (6,))]


def _attention_on_a_layer(b: Builder) -> list[Output]:
    """Weights that do not depend on the row: both walks, and the sums for the layer, share the attention's values."""
    x, p, q = b.input(0, S, (1, 32), F64), b.input(3, P, (1, 32), F64), b.input(4, P, (1, 32), F64)
    e = b.linear(b.input(1, E, (1, 16), F64), b.input(2, Space.FEATURE, (1, 32), F64))
    message = b.op("add", x, b.op("add", e, p))
    alpha = b.softmax(rules.leaky_relu(b, b.sum_axis(b.op("mul", message, q), 1), 0.2))
    return [Output(b.reduce("sum", b.op("mul", message, alpha)), F64, (32,))]


def _softmax_of_softmax(b: Builder) -> list[Output]:
    """The weights of a sum are a softmax of another one's: the inner gradient reads the outer one's row value."""
    x, q = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64)
    inner = b.softmax(b.op("tanh", b.op("add", x, q)))
    return [Output(b.reduce("sum", b.op("mul", x, b.softmax(inner))), F64, (3,))]


def _attended_features(b: Builder) -> list[Output]:
    q, k, e = b.input(0, D, (2, 9), F64), b.input(1, S, (2, 9), F64), b.input(2, E, (2, 9), F64)
    alpha = b.softmax(b.sum_axis(b.op("mul", q, b.op("add", k, e)), 1))
    return [Output(b.reduce("sum", b.op("mul", b.op("add", k, e), alpha)), F64, (2, 9))]


def _features_twice(b: Builder) -> list[Output]:
    x, e, w = b.input(0, S, (1, 3), F64), b.input(1, E, (1, 3), F64), b.input(2, Space.FEATURE, (1, 3), F64)
    product = b.op("mul", b.linear(e, w), b.op("add", x, e))
    return [Output(b.reduce("sum", b.op("mul", b.linear(e, w), product)), F64, (3,))]


def _state(b: Builder) -> int:
    x, y, e = b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64), b.input(2, E, (1, 3), F64)
    return b.op("add", b.op("add", x, y), e)


def _returned_relu(b: Builder) -> list[Output]:
    state = rules.relu(b, _state(b))
    return [Output(state, F64, (3,)), Output(b.reduce("sum", state), F64, (3,))]


def _returned_sigmoid(b: Builder) -> list[Output]:
    state = b.op("sigmoid", _state(b))
    return [
        Output(state, F64, (3,)),
        Output(b.reduce("sum", b.op("mul", state, b.input(0, S, (1, 3), F64))), F64, (3,)),
    ]


R, C, K = "rows", "cols", "edges"
CASES: dict[str, tuple[Callable[[Builder], list[Output]], list[tuple[object, ...]]]] = {
    "weighted sum": (_weighted_sum, [(C, 3), (K,)]),
    "mean": (_mean, [(C, 3), (R,)]),
    "mixed": (_mixed, [(C, 3), (R, 3), (K, 3), (3,)]),
    "gat": (_gat, [(C, 2), (R, 2), (C, 2, 3)]),
    "softmax used twice": (_softmax_used_twice, [(C, 1), (C, 3)]),
    "max of softmax": (_softmax_of_max, [(C, 1), (C, 3)]),
    "softmax per edge": (_softmax_per_edge, [(C, 2), (R, 2)]),
    "dot attention": (_dot_attention, [(R, 2, 3), (C, 2, 3), (C, 2, 3)]),
    "two weighted sums": (_two_weighted_sums, [(R, 2, 3), (C, 2, 3), (C, 2, 3), (R, 2, 2), (K, 2)]),
    "epilogue": (_epilogue, [(C, 3), (R, 3), (3,)]),
    "feature sums": (_feature_sums, [(C, 2, 3), (R, 2, 3)]),
    "heads of gradients": (_heads_of_gradients, [(C, 2, 3), (R, 2, 3)]),
    "narrow": (_narrow, [(C, 3), (R, 3)]),
    "edge output": (_edge_output, [(C, 3), (R, 3), (K,)]),
    "gine": (_gine, [(C, 3), (K, 2), (2, 3)]),
    "biased gine": (_biased_gine, [(C, 3), (K, 2), (2, 3), (3,)]),
    "attention with a layer": (_attended_layer, [(R, 2, 3), (C, 2, 3), (K, 4), (4, 6)]),
    "attention on a layer": (_attention_on_a_layer, [(C, 32), (K, 16), (16, 32), (32,), (32,)]),
    "softmax of softmax": (_softmax_of_softmax, [(C, 3), (R, 3)]),
    "attention with features": (_attended_features, [(R, 2, 9), (C, 2, 9), (K, 2, 9)]),
    "features twice": (_features_twice, [(C, 3), (K, 3), (3, 3)]),
    "returned relu": (_returned_relu, [(C, 3), (R, 3), (K, 3)]),
    "returned sigmoid": (_returned_sigmoid, [(C, 3), (R, 3), (K, 3)]),
}
REGIONS = {name: region_of(outputs) for name, (outputs, _) in CASES.items()}


def tensors(name: str, g: Graph, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {R: g.rows, C: g.cols, K: len(g.dst)}
    shapes = [[sizes.get(n, n) for n in shape] for shape in CASES[name][1]]  # type: ignore[call-overload]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]  # type: ignore[arg-type]


def results(region: Region, inputs: list[Tensor], walk: list[Tensor]) -> tuple[Tensor, ...]:
    """What a user sees: what only serves the gradient is left out."""
    made = torch.ops.gnncompile.region(inputs, walk, region.spec)
    return tuple(t for t, k in zip(made, visible(region), strict=True) if k)


@pytest.fixture(autouse=True, scope="module")
def _reference():
    with kernels("reference"):
        yield


# -- gradients are right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", GRAPHS)
@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str, on: str):
    g, region = GRAPHS[on], REGIONS[name]
    walk = g.both()
    assert torch.autograd.gradcheck(lambda *t: results(region, list(t), walk), tensors(name, g), fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_a_stage_reads_what_is_there(name: str):
    """Whichever gradients are wanted, a plan has no placeholder left, and no stage reads what a later one makes."""
    plain = PLAIN[REGIONS[name]]
    for wanted in [w for w in itertools.product((False, True), repeat=plain.count) if any(w)]:
        region, made = with_residuals(plain, wanted), 0
        for stage in vjp(region, wanted, tuple(k < len(plain.outputs) for k in range(len(region.outputs)))).stages:
            assert {o.kind for o in stage.operands} <= {"input", "output", "cotangent", "temporary"}
            assert all(o.index < made for o in stage.operands if o.kind == "temporary")
            made += len(stage.region.outputs)


@pytest.mark.parametrize("name", CASES)
def test_second_gradient(name: str):
    g, region = GRAPHS["masked"], REGIONS[name]
    walk = g.both()
    assert torch.autograd.gradgradcheck(lambda *t: results(region, list(t), walk), tensors(name, g), fast_mode=True)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("on", ["bipartite, duplicates, empty rows", "hub"])
@pytest.mark.parametrize("reached", [2.0, 0.0])
def test_ties_share_the_gradient_as_in_eager(kind: str, on: str, reached: float):
    """With the zero that the result began with, too."""
    g = GRAPHS[on]

    def extremum(b: Builder) -> list[Output]:
        x, w = b.input(0, S, (1, 2), F64), b.input(1, E, (1, 2), F64)
        return [Output(b.reduce(kind, b.op("mul", x, w)), F64, (2,))]

    region = region_of(extremum)
    with pytest.raises(ValueError, match="does not count the ties of %3 reduce_m"):
        vjp(PLAIN[region], (True, True), (True,))
    ours = [torch.ones(g.cols, 2).double(), torch.ones(len(g.dst), 2).double()]
    ours[1][:] = reached - 1 if kind == "max" else reached + 1
    ours[1][::3] = reached
    theirs = [t.clone().requires_grad_() for t in ours]
    ours = [t.requires_grad_() for t in ours]
    (out,) = results(region, ours, g.both())
    index = g.dst.view(-1, 1).expand(-1, 2)
    message = theirs[0][g.src] * theirs[1]
    expected = message.new_zeros(g.rows, 2).scatter_reduce(0, index, message, f"a{kind}", include_self=False)
    weight = torch.arange(1.0, out.numel() + 1).view_as(out).double()
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad((out * weight).sum(), ours)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weight).sum(), theirs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_extrema_of_16_bits_have_no_further_digits(kind: str, dtype: str):
    """A gradient reads 16 bits of each row at the other end of an edge: of the extremum, and of the shares."""

    def extremum(computed: bool) -> Region:
        b = Builder(D)
        x = b.input(0, S, (1, 4), dtype)
        value = b.reduce(kind, b.op("mul", x, x) if computed else x)
        return with_residuals(b.finish([Output(value, dtype, (4,))]))

    region = extremum(computed=False)
    assert [out.dtype for out in region.outputs] == [dtype, "float32"]  # the second counts ties
    (rows, walk) = vjp(region, (True,), (True, False)).stages
    assert {node.dtype for node in walk.region.inputs} == {dtype}
    assert [out.dtype for out in rows.region.outputs] == [dtype]
    computed = [out.dtype for out in extremum(computed=True).outputs]
    assert computed == [dtype, "float32", "float32"], "products of 16 bits have more digits"


@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("returned", ["bfloat16", "float16", "float32"])
def test_an_extremum_that_is_returned_in_another_dtype_is_found(given: str, returned: str):
    """The gradient compares rows with the extremum itself, not with what the user gets, which may be rounded."""
    region = region_of(lambda b: [Output(b.reduce("max", b.input(0, S, (1, 1), given)), returned, (1,))])
    x = torch.tensor([[1.507e-5], [0.301], [1.507], [-0.3], [0.2]]).to(getattr(torch, given)).requires_grad_()
    g = graph([(0, 0), (0, 1), (0, 2), (2, 3), (2, 4)], 3, 5)
    (out,) = results(region, [x], g.both())
    weight = torch.tensor([[0.7], [1.3], [-2.5]]).to(out.dtype)
    (found,) = torch.autograd.grad(out, x, weight)
    assert torch.equal(found.float(), torch.tensor([[0], [0], [weight[0, 0]], [0], [-2.5]]).to(x.dtype).float())
    shares = [
        out.dtype for out in vjp(region, (True,), (True, False, False)[: len(region.outputs)]).stages[0].region.outputs
    ]
    narrow = given == returned and given != "float32"
    assert shares == [given if narrow else "float32"], "torch's shares have the dtype of what was reduced"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_shares_of_16_bits_are_those_of_eager(kind: str, dtype: torch.dtype):
    """Three edges of a row reach the extremum, and each node has one edge: both round a third in the same way."""
    name = str(dtype).removeprefix("torch.")
    region = region_of(lambda b: [Output(b.reduce(kind, b.input(0, S, (1, 2), name)), name, (2,))])
    g = graph([(0, 0), (0, 1), (0, 2), (2, 3), (2, 4)], 3, 5)
    x = torch.tensor([[1.5], [1.5], [1.5], [0.3], [-0.3]]).expand(5, 2).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (out,) = results(region, [ours], g.both())
    index = g.dst.view(-1, 1).expand(-1, 2)
    expected = theirs.new_zeros(3, 2).scatter_reduce(0, index, theirs[g.src], f"a{kind}", include_self=False)
    assert torch.equal(out, expected)
    weight = torch.tensor([[0.7], [1.3], [-2.9]]).expand(3, 2).to(dtype)
    (found,) = torch.autograd.grad(out, ours, weight)
    (wanted,) = torch.autograd.grad(expected, theirs, weight)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["mixed", "gat", "dot attention", "epilogue"])
def test_only_some_gradients_wanted(name: str):
    g, region = GRAPHS["bipartite, duplicates, empty rows"], REGIONS[name]
    inputs, walk = tensors(name, g), g.both()

    def total() -> Tensor:
        return sum((t * torch.cos(t.detach() + 1)).sum() for t in results(region, inputs, walk))  # type: ignore[return-value]

    full = torch.autograd.grad(total(), inputs)
    for k, one in enumerate(inputs):
        for t in inputs:
            t.requires_grad_(t is one)
        torch.testing.assert_close(torch.autograd.grad(total(), one)[0], full[k])


@pytest.mark.parametrize("kept", [0, 1])
def test_outputs_without_a_cotangent(kept: int):
    g, region = GRAPHS["hub"], REGIONS["mixed"]
    walk = g.both()
    assert torch.autograd.gradcheck(
        lambda *t: results(region, list(t), walk)[kept], tensors("mixed", g), fast_mode=True
    )


def test_no_cotangent_gives_no_stage():
    region = REGIONS["mixed"]
    plan = vjp(region, (True,) * 4, (False,) * len(region.outputs))
    assert plan == Backward((), (None,) * 4)


def test_reduction_read_again_on_edges_is_refused():
    b = Builder(D)
    x = b.input(0, S, (1, 2), F64)
    centred = b.op("sub", x, b.reduce("sum", x))
    region = b.finish([Output(b.reduce("sum", b.op("mul", centred, centred)), F64, (2,))])
    with pytest.raises(InvalidRegionError, match="reads a reduction on edges again"):
        verify(region)


# -- and cheap ----------------------------------------------------------------------------------------------------


def plan_of(name: str) -> Backward:
    region = REGIONS[name]
    return vjp(region, (True,) * len(CASES[name][1]), tuple(visible(region)))


def gathered(stage_region: Region) -> int:
    """Elements gathered per edge from the other end of the walk."""
    return sum(n.shape[0] * n.shape[1] for n in stage_region.inputs if n.space is stage_region.by.opposite)


def test_gradient_of_a_plain_sum_is_one_walk_by_source():
    b = Builder(D)
    region = b.finish([Output(b.reduce("sum", b.input(0, S, (1, 64), "float32")), "float32", (64,))])
    (stage,) = vjp(with_residuals(region), (True,), (True,)).stages
    assert stage.region.by is S and [n.op for n in stage.region.nodes] == ["input", "reduce_sum"]
    assert [o.kind for o in stage.operands] == ["cotangent"]


@pytest.mark.parametrize("relu", [False, True])
def test_terms_of_a_sum_share_their_gradient(relu: bool):
    """In ``x[source] + y[source] + e + f`` the gradients of x and y are equal, and so are those of e and f."""
    b = Builder(Space.DESTINATION)
    spaces = (Space.SOURCE, Space.SOURCE, Space.EDGE, Space.EDGE)
    terms = [b.input(k, space, (1, 4), "float32") for k, space in enumerate(spaces)]
    total = b.op("add", b.op("add", terms[0], terms[2]), b.op("add", terms[1], terms[3]))
    message = b.op("where", b.op("gt", total, b.const(0)), total, b.const(0)) if relu else total
    region = with_residuals(b.finish([Output(b.reduce("sum", message), "float32", (4,))]))
    plan = vjp(region, (True,) * 4, (True,) + (False,) * (len(region.outputs) - 1))
    x, y, e, f = plan.gradients
    assert x is not None and x == y and e is not None and e == f
    assert sum(len(stage.region.outputs) for stage in plan.stages) == 2


def test_gat_gathers_wide_rows_once():
    """By source: the cotangent (2x3), and logit, maximum, sum and dot product of two heads; never a value per edge."""
    stages = plan_of("gat").stages
    assert [(s.region.by, s.region.walks_edges) for s in stages] == [(D, False), (S, True), (D, False)]
    assert gathered(stages[1].region) == 6 + 4 * 2
    assert all(n.space is not Space.EDGE for n in stages[1].region.nodes if n.op == "sum_channels")


def test_a_gradient_per_edge_is_handed_over():
    """Where edges have logits of their own, their gradient serves the rows as well: no sum is kept for those."""

    def attention(b: Builder) -> list[Output]:
        a, c, e = b.input(0, S, (2, 1), F64), b.input(1, D, (2, 1), F64), b.input(2, E, (2, 1), F64)
        alpha = b.softmax(rules.leaky_relu(b, b.op("add", b.op("add", a, c), e), 0.2))
        return [Output(b.reduce("sum", b.op("mul", alpha, b.input(3, S, (2, 3), F64))), F64, (2, 3))]

    region = region_of(attention)
    assert [region.nodes[o.node].op for o in region.outputs] == ["reduce_sum", "softmax_max", "softmax_sum"]
    stages = vjp(region, (True,) * 4, (True, False, False)).stages
    assert [gathered(s.region) for s in stages if s.region.walks_edges] == [6 + 4 * 2, 0]
    assert any(o.kind == "temporary" for o in stages[-1].operands)


def test_wide_features_of_edges_are_read_once():
    """The walk over the region's own rows goes first, and hands over a weight and the gradient of a logit per head."""
    stages = plan_of("attention with features").stages
    assert [s.region.by for s in stages if s.region.walks_edges] == [D, S]
    ours, theirs = ([n.shape for n in s.region.inputs if n.space is E] for s in stages if s.region.walks_edges)
    assert ours == [(2, 9)] and theirs == [(2, 1), (2, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sign_of_a_returned_relu_is_read_from_its_rows(dtype: str):
    """So nothing that the state was made of is kept: neither gathered rows, nor those of edges."""
    b = Builder(D)
    x, y, e = (b.input(k, space, (1, 64), dtype) for k, space in enumerate((S, D, E)))
    state = rules.relu(b, b.op("add", b.op("add", x, y), e))
    region = with_residuals(b.finish([Output(state, dtype, (64,)), Output(b.reduce("sum", state), dtype, (64,))]))
    assert [o.dtype for o in region.outputs] == [dtype, dtype]
    assert tensors_read(region, (True,) * 3, "input") == frozenset()
    assert tensors_read(region, (True,) * 3, "output") == {0}


def test_a_returned_value_of_another_type_is_computed_again():
    """Eager computes with its rounded rows as well, but those of the region are not rounded."""
    b = Builder(D)
    state = b.op("sigmoid", b.op("add", b.input(0, S, (1, 64), "bfloat16"), b.input(1, E, (1, 64), "bfloat16")))
    region = with_residuals(b.finish([Output(state, "bfloat16", (64,)), Output(b.reduce("sum", state), F64, (64,))]))
    assert tensors_read(region, (True,) * 2, "input") == {0, 1}


def test_several_sums_weighed_by_one_softmax_need_no_walk_for_its_dot_product():
    """Nor is the gradient of the narrower row handed over: the walk for the wider one gathers the same rows."""
    region = REGIONS["two weighted sums"]
    stages = vjp(region, (True, True, True, True, False), tuple(visible(region))).stages
    assert [(s.region.by, s.region.walks_edges) for s in stages] == [(D, True), (S, True)]
    assert not any(s.region.per_edge(o) for s in stages for o in s.region.outputs)


def test_nothing_is_kept_where_no_gradient_is_wanted():
    b = Builder(D)
    region = b.finish(_gat(b))
    assert with_residuals(region, (False,) * 3) == region
    only_values = with_residuals(region, (False, False, True))
    assert [only_values.nodes[o.node].op for o in only_values.outputs] == ["reduce_sum", "softmax_max", "softmax_sum"]


@pytest.mark.parametrize("name", ["softmax used twice", "max of softmax"])
def test_softmax_without_the_shortcut_walks_for_its_dot_product(name: str):
    assert any(s.region.by is D and s.region.walks_edges and s.region.reductions for s in plan_of(name).stages[:-1])


def test_a_bias_is_summed_by_the_walk_for_the_weights_of_its_layer():
    """The forward keeps no sum for it, unless that walk is not needed."""
    region = REGIONS["biased gine"]
    assert [region.nodes[o.node].op for o in region.outputs] == ["reduce_sum"]
    without_features = vjp(region, (True, False, True, True), (True,)).stages
    assert [[s.region.nodes[o.node].op for o in s.region.outputs] for s in without_features] == [
        ["reduce_sum"],
        ["outer", "outer"],
    ]
    frozen = with_residuals(PLAIN[region], (True, False, False, True))
    assert [frozen.nodes[o.node].op for o in frozen.outputs] == ["reduce_sum", "reduce_sum"]


def test_unwanted_gradients_cost_nothing():
    region = REGIONS["mixed"]
    given = (True, *(False for _ in region.outputs[1:]))
    only_destination = vjp(region, (False, True, False, False), given)
    assert {s.region.by for s in only_destination.stages} == {D}
    assert [g is not None for g in only_destination.gradients] == [False, True, False, False]


@pytest.mark.parametrize("name", CASES)
def test_stages_are_valid(name: str):
    for stage in plan_of(name).stages:
        verify(stage.region)
        assert len(stage.operands) == len({n.value for n in stage.region.inputs})


# -- generated kernels --------------------------------------------------------------------------------------------


def single(region: Region) -> Region:
    """The region in float32."""

    def narrow(n: Node) -> Node:
        return replace(n, dtype="float32") if n.op == "input" and n.dtype != BOOL else n

    plain = PLAIN[region]
    outputs = tuple(replace(o, dtype="float32") for o in plain.outputs)
    return region_of(lambda b: _copied(b, Region(plain.by, tuple(map(narrow, plain.nodes)), outputs)))


def _copied(b: Builder, region: Region) -> list[Output]:
    for node in region.nodes:
        b.emit(node)
    return list(region.outputs)


@pytest.mark.parametrize(
    "name",
    [
        *("weighted sum", "mixed", "gat", "dot attention", "max of softmax", "feature sums"),
        *("gine", "biased gine", "attention with a layer", "features twice", "returned relu", "returned sigmoid"),
    ],
)
def test_kernels_and_their_gradients(name: str, device: str):
    region = REGIONS[name]
    for on, g in GRAPHS.items():
        exact = tensors(name, g)
        ours = [t.detach().float().to(device).requires_grad_() for t in exact]
        expected = results(region, exact, g.both())
        weights = [torch.cos(torch.arange(t.numel()).double()).view_as(t) for t in expected]
        wanted = torch.autograd.grad([(t * w).sum() for t, w in zip(expected, weights, strict=True)], exact)
        with kernels("cpp" if device == "cpu" else "triton"):
            found = results(single(region), ours, g.both(device))
            sums = [(t * w.to(t)).sum() for t, w in zip(found, weights, strict=True)]
            grads = torch.autograd.grad(sums, ours)
            assert launch.fallbacks == {}
        for a, b in [*zip(found, expected, strict=True), *zip(grads, wanted, strict=True)]:
            torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5, msg=lambda m, on=on: f"{on}: {m}")


# -- the ops as torch ops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weighted sum", "gat", "epilogue"])
def test_region_op(name: str):
    g = GRAPHS["masked"]
    torch.library.opcheck(torch.ops.gnncompile.region.default, (tensors(name, g), g.both(), REGIONS[name].spec))


@pytest.mark.parametrize("unmasked", [False, True])
def test_values_of_masked_edges(unmasked: bool):
    """They are zero, unless the region says that no edge is masked: then nothing is spent on them."""
    g = GRAPHS["masked"]
    b = Builder(D)
    message = b.op("mul", b.input(0, S, (1, 3), F64), b.input(1, D, (1, 3), F64))
    region = replace(b.finish([Output(message, F64, (3,))]), unmasked=unmasked)
    ones = [torch.ones(count, 3, dtype=torch.float64) for count in (g.cols, g.rows)]
    with kernels("cpp"):
        torch.use_deterministic_algorithms(True)  # fills what is not initialised with NaN
        try:
            (out,) = launch.runner(region.spec, "cpu")(ones, g.both()[:3])
        finally:
            torch.use_deterministic_algorithms(False)
    assert g.alive is not None
    assert (out[g.alive] == 1).all() and (out[~g.alive].isnan() if unmasked else out[~g.alive] == 0).all()


@pytest.mark.parametrize("alive", [None, torch.tensor([True, False, True])])
def test_csr_op(alive: Tensor | None):
    row, col = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    torch.library.opcheck(torch.ops.gnncompile.csr.default, (row, col, 3, 2, alive))


@pytest.mark.parametrize("on", GRAPHS)
def test_csr_is_the_layout_by_hand(on: str):
    g = GRAPHS[on]
    found = torch.ops.gnncompile.csr(g.dst, g.src, g.rows, g.cols, g.alive)
    expected = layout(g.dst, g.src, g.rows, g.alive)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.int32 and torch.equal(a, b)
