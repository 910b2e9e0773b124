"""The region IR on its own: builder, verifier, printer, string form, activations; run by the reference interpreter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnncompile.exc import InvalidRegionError
from gnncompile.ir import rules
from gnncompile.ir.builder import Builder, broadcast, join
from gnncompile.ir.printer import summary, to_text
from gnncompile.ir.reference import run_rows
from gnncompile.ir.region import BOOL, FORMAT, SEED, Node, Output, Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.ir.vjp import vjp
from tests.tiled_regions import REGIONS, Maker

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


def weighted_sum() -> Region:
    b = Builder(D)
    x, w = b.input(0, S, (1, 4), "float32"), b.input(1, E, (1, 1), "float32")
    return b.finish([Output(b.reduce("sum", b.op("mul", x, w)), "float32", (4,))])


def attention() -> Region:
    b = Builder(D)
    a, c, x = (
        b.input(k, space, shape, "float32") for k, (space, shape) in enumerate([(S, (2, 1)), (D, (2, 1)), (S, (2, 3))])
    )
    alpha = b.softmax(rules.leaky_relu(b, b.op("add", a, c), 0.2))
    return b.finish([Output(b.reduce("sum", b.op("mul", alpha, x)), "float32", (2, 3))])


# -- builder ------------------------------------------------------------------------------------------------------


def test_equal_values_are_made_once():
    b = Builder(D)
    x, y = b.input(0, S, (1, 4), "float32"), b.input(1, D, (1, 4), "float32")
    assert b.op("mul", x, y) == b.op("mul", x, y)
    assert b.op("sub", x, y) != b.op("sub", y, x)
    assert b.const(2) == b.const(2.0) and b.const(2) != b.const(3)
    assert b.input(0, S, (1, 4), "float32") == x
    assert b.softmax(x) == b.softmax(x) and b.reduce("sum", x) != b.reduce("max", x)


def test_neutral_elements_are_removed():
    b = Builder(D)
    x, one, zero = b.input(0, S, (1, 4), "float32"), b.const(1), b.const(0)
    assert b.op("mul", x, one) == b.op("mul", one, x) == b.op("div", x, one) == x
    assert b.op("sub", x, zero) == x
    assert b.sum_axis(b.input(1, S, (4, 1), "float32"), 1) == b.input(1, S, (4, 1), "float32")


@pytest.mark.parametrize("fold", ["mul 0", "mul 0 left", "sub self", "div self", "div by 0", "pow"])
def test_folding_keeps_nan_and_infinity(fold: str):
    b = Builder(D)
    x, zero = b.input(0, D, (1, 4), "float64"), b.const(0)
    made: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
        "mul 0": (b.op("mul", x, zero), lambda t: t * 0.0),
        "mul 0 left": (b.op("mul", zero, x), lambda t: 0.0 * t),
        "sub self": (b.op("sub", x, x), lambda t: t - t),
        "div self": (b.op("div", x, x), lambda t: t / t),
        "div by 0": (b.op("div", x, zero), lambda t: t / 0.0),
        "pow": (rules.power(b, x, 2.0) or 0, lambda t: t**2),
    }
    value, expected = made[fold]
    data = torch.tensor([[NAN, INF, -INF, 2.0]], dtype=torch.float64)
    (found,) = run_rows(b.finish([Output(value, "float64", (4,))]), [data], 1, CPU)
    torch.testing.assert_close(found, expected(data), rtol=0, atol=0, equal_nan=True)


def test_adding_zero_to_minus_zero():
    b = Builder(D)
    value = b.op("add", b.input(0, D, (1, 1), "float64"), b.const(0.0))
    (found,) = run_rows(
        b.finish([Output(value, "float64", (1,))]), [torch.tensor([[-0.0]], dtype=torch.float64)], 1, CPU
    )
    assert not torch.signbit(found).any()


def test_bool_times_one_is_a_number():
    b = Builder(D)
    x = b.input(0, D, (1, 1), "float64")
    flags = [b.op("mul", b.op("gt", x, b.const(k)), b.const(1)) for k in (0, 1)]
    (found,) = run_rows(
        b.finish([Output(b.op("add", *flags), "float64", (1,))]), [torch.tensor([[2.0]]).double()], 1, CPU
    )
    assert found.item() == 2.0


def test_feature_shapes_broadcast():
    assert broadcast((1, 4), (2, 1), (1, 1)) == (2, 4)
    with pytest.raises(ValueError, match=r"\(1, 4\).*\(1, 3\).*do not broadcast"):
        broadcast((1, 4), (1, 3))
    b = Builder(D)
    with pytest.raises(ValueError, match="do not broadcast"):
        b.op("add", b.input(0, S, (2, 4), "float32"), b.input(1, S, (3, 4), "float32"))


def test_spaces_join():
    assert join(D, [D, P]) is D and join(D, [P, P]) is P
    assert join(D, [S, P]) is E and join(D, [S, D]) is E and join(S, [S]) is S


def test_sum_to_scales_what_stands_for_equal_entries():
    b = Builder(D)
    narrow, wide = b.input(0, D, (1, 1), "float64"), b.input(1, D, (2, 3), "float64")
    outs = [Output(b.sum_to(v, (1, 1), (2, 3)), "float64", ()) for v in (narrow, wide)]
    data = [torch.tensor([2.0]).double(), torch.arange(6.0).double().view(1, 2, 3)]
    found = run_rows(b.finish(outs), data, 1, CPU)
    assert [t.item() for t in found] == [12.0, 15.0]


def test_rows_without_a_tensor_are_where_it_is_said():
    """As the gradient of a sign is, which is 0 everywhere."""
    b = Builder(D)
    region = b.finish([Output(b.const(2.0), "float32", (1,))])
    for device in (CPU, torch.device("meta")):
        (found,) = run_rows(region, [], 4, device)
        assert (found.device, found.shape) == (device, (4, 1))


def test_finish_drops_what_no_output_needs():
    b = Builder(D)
    x = b.input(0, S, (1, 4), "float32")
    b.op("exp", b.input(1, S, (1, 4), "float32"))
    region = b.finish([Output(b.reduce("sum", x), "float32", (4,))])
    assert [n.op for n in region.nodes] == ["input", "reduce_sum"] and len(region.inputs) == 1


# -- verifier -----------------------------------------------------------------------------------------------------

X = Node("input", (), S, (1, 4), "float32", 0)
ROW = Node("reduce_sum", (0,), D, (1, 4))
OUT = Output(1, "float32", (4,))
SEED_INPUT = Node("input", (), P, (1, 1), SEED, 0)
BROKEN = {
    "walked by source or destination": Region(E, (X, ROW), (OUT,)),
    "arguments must be earlier nodes": Region(D, (X, Node("reduce_sum", (1,), D, (1, 4))), (OUT,)),
    "needs a storage type": Region(D, (replace(X, dtype="int16"), ROW), (OUT,)),
    "and a position": Region(D, (replace(X, value=None), ROW), (OUT,)),
    "takes 2 arguments, found 1": Region(D, (X, Node("add", (0,), E, (1, 4))), (OUT,)),
    "its arguments broadcast to": Region(D, (X, Node("neg", (0,), E, (1, 3))), (OUT,)),
    "lives on destination, its arguments on edge": Region(D, (X, Node("neg", (0,), D, (1, 4))), (OUT,)),
    "is a bool": Region(D, (X, Node("eq", (0, 0), E, (1, 4))), (OUT,)),
    "has type float32": Region(D, (X, Node("neg", (0,), E, (1, 4), "float32")), (OUT,)),
    "takes one argument, found 0": Region(D, (X, Node("reduce_sum", (), D, (1, 4))), (OUT,)),
    "keeps every axis but the reduced one": Region(D, (X, Node("sum_channels", (0,), X.space, (1, 4))), (OUT,)),
    "lives on edges": Region(D, (X, Node("softmax", (0,), D, (1, 4))), (OUT,)),
    "a seed is one parameter, found (1, 4) on source": Region(D, (replace(X, dtype=SEED), ROW), (OUT,)),
    "reads a seed, which only dropout does": Region(D, (SEED_INPUT, Node("neg", (0,), P, (1, 1))), ()),
    "takes one seed, found ['float32']": Region(D, (X, Node("dropout", (0,), E, (1, 4), value=0.5)), ()),
    "needs a probability": Region(D, (SEED_INPUT, Node("dropout", (0,), E, (1, 4), value=1.0)), ()),
    "lives on edges in compute type": Region(D, (SEED_INPUT, Node("dropout", (0,), D, (1, 4), value=0.5)), ()),
    "is a row value of a softmax": Region(D, (X, Node("softmax_max", (0,), D, (1, 4))), (OUT,)),
    "has a row per row of the region": Region(D, (X, Node("reduce_sum", (0,), E, (1, 4))), (OUT,)),
    "unknown operation": Region(D, (X, Node("fft", (0,), D, (1, 4))), (OUT,)),
    "lives on source, expected destination or edge": Region(D, (X, ROW), (Output(0, "float32", (4,)),)),
    "does not hold": Region(D, (X, ROW), (Output(1, "float32", (5,)),)),
    "int64 does not hold": Region(D, (X, ROW), (Output(1, "int64", (4,)),)),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_verify_names_the_rule(problem: str):
    with pytest.raises(InvalidRegionError) as error:
        verify(BROKEN[problem])
    assert problem in str(error.value).replace("storage type and a position", "storage type; and a position")


@pytest.mark.parametrize(
    "region", [weighted_sum(), attention(), with_residuals(attention())], ids=["sum", "gat", "kept"]
)
def test_verify_accepts(region: Region):
    verify(region)


@pytest.mark.parametrize(
    ("problem", "region"),
    [
        (
            "space of a feature sum",
            Region(D, (X, Node("sum_channels", (0,), D, (1, 1)), ROW), (Output(2, "float32", (4,)),)),
        ),
        ("negative position", Region(D, (replace(X, value=-1), ROW), (OUT,))),
        ("output of a node that is not there", Region(D, (X, ROW), (Output(7, "float32", (4,)),))),
    ],
)
def test_verify_misses(problem: str, region: Region):
    with pytest.raises(InvalidRegionError):
        verify(region)


# -- printer and string form --------------------------------------------------------------------------------------


def test_text_of_a_sum():
    assert to_text(weighted_sum()) == (
        "region by destination:\n"
        "  x0: float32[source, 1x4] = tensor 0\n"
        "  x1: float32[edge, 1x1] = tensor 1\n"
        "  v2: [edge, 1x4] = x0 * x1\n"
        "  v3: [destination, 1x4] = sum over edges of v2\n"
        "  return v3 as float32"
    )
    assert summary(weighted_sum()) == "sum of 1x4 from source, edge"


def test_text_of_attention():
    assert to_text(attention()) == (
        "region by destination:\n"
        "  x0: float32[source, 2x1] = tensor 0\n"
        "  x1: float32[destination, 2x1] = tensor 1\n"
        "  x2: float32[source, 2x3] = tensor 2\n"
        "  v3: [edge, 2x1] = x0 + x1\n"
        "  v5: bool[edge, 2x1] = v3 > 0\n"
        "  v8: [edge, 2x1] = where(v5, 1, 0.2)\n"
        "  v9: [edge, 2x1] = v3 * v8\n"
        "  v10: [edge, 2x1] = softmax(v9)\n"
        "  v11: [edge, 2x3] = v10 * x2\n"
        "  v12: [destination, 2x3] = sum over edges of v11\n"
        "  return v12 as float32"
    )
    assert summary(attention()) == "softmax, sum of 2x3 from source, destination"


@pytest.mark.parametrize("region", [weighted_sum(), with_residuals(attention())], ids=["sum", "attention"])
def test_string_form_round_trip(region: Region):
    assert parse(region.spec) == region
    assert parse(region.spec).spec == region.spec
    assert "\n" not in region.spec


@pytest.mark.parametrize("number", [1e-300, -0.0, INF, -INF, 1 / 3])
def test_string_form_keeps_numbers(number: float):
    b = Builder(D)
    region = b.finish(
        [Output(b.reduce("sum", b.op("mul", b.input(0, S, (1, 1), "float32"), b.const(number))), "float32", ())]
    )
    (found,) = (n.value for n in parse(region.spec).nodes if n.op == "const")
    assert found == number and math.copysign(1, found) == math.copysign(1, number)


def test_string_form_of_another_version():
    spec = json.loads(weighted_sum().spec)
    spec[0] += 1
    with pytest.raises(ValueError, match=f"found format {FORMAT + 1}, expected {FORMAT}; clear"):
        parse(json.dumps(spec))


def test_residuals():
    kept = with_residuals(attention())
    assert [kept.nodes[o.node].op for o in kept.outputs] == [
        "reduce_sum",
        "softmax_max",
        "softmax_sum",
        "reduce_sum",
        "reduce_sum",
    ]
    assert with_residuals(weighted_sum()) == weighted_sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "layers"), [("gated", 1), ("directed", 1), ("mesh_graph_net", 4)])
def test_a_gradient_reads_states_instead_of_computing_layers_again(name: str, layers: int, dtype: str):
    region = with_residuals(REGIONS[name](Maker(dtype)))
    plan = vjp(region, (True,) * region.count, (True,) * len(region.outputs))
    nodes = [node for stage in plan.stages for node in stage.region.nodes]
    assert sum(node.op in ("linear", "transposed") for node in nodes) == layers
    assert any(o.kind == "output" for stage in plan.stages for o in stage.operands) == (layers == 1)


@pytest.mark.parametrize(
    ("kind", "activation"),
    [("max", rules.silu), ("sum", lambda b, x: rules.clamp(b, x, -0.5, 0.5)), ("sum", lambda b, x: b.softmax(x))],
)
def test_a_gradient_that_compares_computes_rounded_states_again(kind: str, activation: Callable[[Builder, int], int]):
    """A rounded state might not be the maximum, or might lie on the other side of a bound."""
    for dtype, again in (("float32", False), ("bfloat16", True)):
        make = Maker(dtype)
        state = make.layer(make.input(E, 16), 16)
        region = with_residuals(make.finish(state, make.b.reduce(kind, activation(make.b, state))))
        given = tuple(k < 2 for k in range(len(region.outputs)))
        nodes = [n for stage in vjp(region, (True,) * region.count, given).stages for n in stage.region.nodes]
        assert any(n.op == "linear" for n in nodes) == again


def test_gathered_gradients_that_read_little_are_not_stored():
    """That of the gate's factor reads a state and a row. That of the state is stored, since weights need it."""
    region = with_residuals(REGIONS["gated"](Maker()))
    plan = vjp(region, (True,) * region.count, (True,) * len(region.outputs))
    (last,) = [stage for stage in plan.stages if stage.region.by is Space.SOURCE]
    assert [o.kind for o in last.operands].count("temporary") == 1


# -- activations --------------------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, tuple[Callable[[Builder, int], int], Callable[[Tensor], Tensor]]] = {
    "relu": (rules.relu, F.relu),
    "leaky_relu": (lambda b, x: rules.leaky_relu(b, x, 0.2), lambda t: F.leaky_relu(t, 0.2)),
    "silu": (rules.silu, F.silu),
    "gelu": (rules.gelu, F.gelu),
    "gelu tanh": (lambda b, x: rules.gelu(b, x, "tanh"), lambda t: F.gelu(t, approximate="tanh")),
    "hardtanh": (rules.hardtanh, F.hardtanh),
    "relu6": (lambda b, x: rules.hardtanh(b, x, 0.0, 6.0), F.relu6),
    "elu": (lambda b, x: rules.elu(b, x, 0.7), lambda t: F.elu(t, 0.7)),
    "selu": (rules.selu, F.selu),
    "celu": (lambda b, x: rules.celu(b, x, 1.3), lambda t: F.celu(t, 1.3)),
    "hardsigmoid": (rules.hardsigmoid, F.hardsigmoid),
    "hardswish": (rules.hardswish, F.hardswish),
    "mish": (rules.mish, F.mish),
    "softplus": (lambda b, x: rules.softplus(b, x, 2.0), lambda t: F.softplus(t, 2.0)),
    "log_sigmoid": (rules.log_sigmoid, F.logsigmoid),
    "softshrink": (rules.softshrink, F.softshrink),
    "hardshrink": (rules.hardshrink, F.hardshrink),
    "threshold": (lambda b, x: rules.threshold(b, x, 0.3, -2.0), lambda t: F.threshold(t, 0.3, -2.0)),
    "trunc": (rules.trunc, torch.trunc),
    "clamp": (lambda b, x: rules.clamp(b, x, -0.5, 2.0), lambda t: t.clamp(-0.5, 2.0)),
    "clamp_min": (lambda b, x: rules.clamp(b, x, 0.0), lambda t: t.clamp(min=0.0)),
    "clamp_max": (lambda b, x: rules.clamp(b, x, None, 1.0), lambda t: t.clamp(max=1.0)),
    "clamp crossed": (lambda b, x: rules.clamp(b, x, 2.0, -0.5), lambda t: t.clamp(2.0, -0.5)),
    **{
        f"power {p:g}": (lambda b, x, p=p: rules.power(b, x, p), lambda t, p=p: t**p)
        for p in (0.5, -0.5, 1, 2, 3, 4, -1, -2, 0, 1.5, 5, -3)
    },
}
POINTS = [
    0.0,
    -0.0,
    1e-8,
    -1e-8,
    0.3,
    -0.3,
    1.0,
    -1.0,
    2.5,
    -2.5,
    19.9,
    21.0,
    -30.0,
    90.0,
    -90.0,
    1e30,
    -1e30,
    INF,
    -INF,
    NAN,
]


def activation(name: str, dtype: str) -> Region:
    b = Builder(D)
    value = ACTIVATIONS[name][0](b, b.input(0, D, (1, 1), dtype))
    region = b.finish([Output(value, dtype, ())])
    verify(region)
    return region


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_in_float64(name: str):
    data = torch.tensor(POINTS, dtype=torch.float64)
    (found,) = run_rows(activation(name, "float64"), [data], len(POINTS), CPU)
    torch.testing.assert_close(found, ACTIVATIONS[name][1](data), rtol=1e-14, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_in_float32(name: str):
    # torch's own vectorised gelu gives NaN at infinity in float32, and infinity in float64.
    data = torch.tensor([p for p in POINTS if name != "gelu" or not math.isinf(p)])
    (found,) = run_rows(activation(name, "float32"), [data], len(data), CPU)
    torch.testing.assert_close(found, ACTIVATIONS[name][1](data), rtol=3e-6, atol=3e-7, equal_nan=True)


PRIMITIVES = [
    "erf",
    "sigmoid",
    "tanh",
    "exp",
    "expm1",
    "exp2",
    "log",
    "sqrt",
    "abs",
    "sin",
    "cos",
    "floor",
    "ceil",
    "sign",
]


@pytest.mark.parametrize("op", PRIMITIVES)
def test_primitives_are_torchs_own(op: str):
    b = Builder(D)
    region = b.finish([Output(b.op(op, b.input(0, D, (1, 1), "float64")), "float64", ())])
    data = torch.tensor(POINTS, dtype=torch.float64)
    torch.testing.assert_close(run_rows(region, [data], len(POINTS), CPU)[0], getattr(torch, op)(data), equal_nan=True)


def test_bool_output_type_of_where():
    b = Builder(D)
    x = b.input(0, D, (1, 1), "float32")
    flag = b.op("gt", x, b.const(0))
    chosen = b.op("where", flag, flag, b.op("lt", x, b.const(1)))
    assert b.nodes[chosen].dtype == BOOL and b.nodes[b.op("float", chosen)].dtype == "compute"
