"""Lowers pointwise operations of torch to nodes of a region."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from gnncompile.ir import rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.pointwise import POINTWISE as IR_POINTWISE
from gnncompile.ir.region import BOOL
from gnncompile.passes.analysis import aten, value

Slots = tuple[int, ...]
"""The region axis of each feature axis of a tensor: 0 or 1, or -1 for an axis of length 1."""


class NotFusable(Exception):  # noqa: N818  (a reason, always caught)
    """The reason why a message, or a part of it, cannot be written as region nodes."""


class Operands(Protocol):
    """The region to which a lowering adds the nodes of an operation."""

    @property
    def builder(self) -> Builder:
        """The builder that adds nodes to the region."""

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the index of the region node for an operand of `of`, broadcast as torch does."""


Lowering = Callable[[Operands, fx.Node, Slots, bool], int]
"""Adds the nodes of an operation to a region, and returns the index of the node that holds its value."""


def _plain(name: str) -> Lowering:
    def lower(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
        args = list(node.args)
        if value(node).dtype == torch.bool and IR_POINTWISE[name].result != BOOL and name != "where":
            raise NotFusable("arithmetic of bools is not fused")
        scale = node.kwargs.get("alpha", 1)
        if node.kwargs.get("rounding_mode") is not None or len(args) != IR_POINTWISE[name].arity:
            raise NotFusable("it has arguments that have no kernel")
        values = [region.operand(a, node, slots, strict) for a in args]
        if scale != 1:
            values[1] = region.builder.op("mul", values[1], region.builder.const(float(scale)))  # type: ignore[arg-type]
        return region.builder.op(name, *values)

    return lower


def _composite(rule: Callable[..., int]) -> Lowering:
    """Returns the lowering of a rule that takes (builder, tensor operand, numbers...)."""

    def lower(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
        numbers = list(node.args[1:])
        if any(isinstance(n, fx.Node) for n in numbers):
            raise NotFusable("a parameter of the function is not a number")
        return rule(region.builder, region.operand(node.args[0], node, slots, strict), *numbers, **node.kwargs)

    return lower


def _logic(name: str) -> Lowering:
    """Returns the lowering of a bitwise operation. It is a logical operation only for bools."""

    def lower(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
        if value(node).dtype != torch.bool:
            raise NotFusable("operations on bits of integers are not fused")
        return _plain(name)(region, node, slots, strict)

    return lower


def _masked_fill(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
    inner, mask, fill = (region.operand(a, node, slots, strict) for a in node.args)
    return region.builder.op("where", mask, fill, inner)


def _prelu(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
    if value(node).dim() != 2 and value(node.args[1]).numel() != 1:  # type: ignore[arg-type]
        raise NotFusable("its slopes differ by the first of several feature axes")
    b = region.builder
    inner, slope = (region.operand(a, node, slots, strict) for a in node.args)
    return b.op("where", b.op("gt", inner, b.const(0)), inner, b.op("mul", slope, inner))


def _relu_gradient(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
    b = region.builder
    gradient, result = (region.operand(a, node, slots, strict) for a in node.args[:2])
    threshold: Any = node.args[2]
    return b.op("where", b.op("le", result, b.const(float(threshold))), b.const(0), gradient)


def _leaky_relu_gradient(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
    b = region.builder
    gradient, inner = (region.operand(a, node, slots, strict) for a in node.args[:2])
    slope: Any = node.args[2]
    return b.op("where", b.op("gt", inner, b.const(0)), gradient, b.op("mul", gradient, b.const(float(slope))))


def _reversed_sub(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
    left, right = (region.operand(a, node, slots, strict) for a in node.args[:2])
    scale: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return region.builder.op("sub", right, region.builder.op("mul", left, region.builder.const(float(scale))))


def _extremum(comparison: str) -> Lowering:
    def lower(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
        b = region.builder
        left, right = (region.operand(a, node, slots, strict) for a in node.args)
        nan = b.op("ne", left, left)
        chosen = b.op("where", b.op("or", nan, b.op(comparison, left, right)), left, right)
        # In torch, equal operands share the gradient. The average of both has the same value and the same gradient.
        half = b.const(0.5)
        both = b.op("add", b.op("mul", left, half), b.op("mul", right, half))
        return b.op("where", b.op("eq", left, right), both, chosen)

    return lower


def _cast(region: Operands, node: fx.Node, slots: Slots, strict: bool) -> int:
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    before, after = value(inner).dtype, value(node).dtype
    if value(inner).device != value(node).device or not after.is_floating_point:
        raise NotFusable("it converts to an integer type or another device")
    if before == torch.float64 and after != torch.float64:
        raise NotFusable(f"it rounds float64 values to {after}")  # a region computes in float64
    if after == torch.float64 and before.is_floating_point and before != after:
        # The gradients of all readers are added up in float64, and rounded once.
        raise NotFusable(f"its gradient rounds float64 values to {before}")
    lowered = region.operand(inner, node, slots, strict)
    return region.builder.op("float", lowered) if before == torch.bool else lowered


POINTWISE: dict[Any, Lowering] = {
    aten.neg.default: _plain("neg"),
    aten.abs.default: _plain("abs"),
    aten.exp.default: _plain("exp"),
    aten.log.default: _plain("log"),
    aten.log1p.default: _plain("log1p"),
    aten.expm1.default: _plain("expm1"),
    aten.exp2.default: _plain("exp2"),
    aten.sqrt.default: _plain("sqrt"),
    aten.sign.default: _plain("sign"),
    aten.sgn.default: _plain("sign"),
    aten.floor.default: _plain("floor"),
    aten.ceil.default: _plain("ceil"),
    aten.pow.Tensor_Tensor: _plain("pow"),
    aten.pow.Scalar: _plain("pow"),
    aten.sin.default: _plain("sin"),
    aten.cos.default: _plain("cos"),
    aten.erf.default: _plain("erf"),
    aten.sigmoid.default: _plain("sigmoid"),
    aten.tanh.default: _plain("tanh"),
    aten.where.self: _plain("where"),
    aten.where.ScalarSelf: _plain("where"),
    aten.where.ScalarOther: _plain("where"),
    aten.where.Scalar: _plain("where"),
    aten.logical_not.default: _plain("not"),
    aten.logical_and.default: _plain("and"),
    aten.logical_or.default: _plain("or"),
    aten.bitwise_not.default: _logic("not"),
    aten.bitwise_and.Tensor: _logic("and"),
    aten.bitwise_or.Tensor: _logic("or"),
    aten.__and__.Tensor: _logic("and"),
    aten.__or__.Tensor: _logic("or"),
    aten.isnan.default: _composite(lambda b, x: b.op("ne", x, x)),
    aten.masked_fill.Scalar: _masked_fill,
    aten.prelu.default: _prelu,
    aten.rsub.Scalar: _reversed_sub,
    aten.maximum.default: _extremum("gt"),
    aten.minimum.default: _extremum("lt"),
    aten.threshold_backward.default: _relu_gradient,
    aten.leaky_relu_backward.default: _leaky_relu_gradient,
    aten.relu.default: _composite(rules.relu),
    aten.leaky_relu.default: _composite(rules.leaky_relu),
    aten.silu.default: _composite(rules.silu),
    aten.gelu.default: _composite(rules.gelu),
    aten.softplus.default: _composite(rules.softplus),
    aten.clamp.default: _composite(rules.clamp),
    aten.clamp_min.default: _composite(rules.clamp),
    aten.clamp_max.default: _composite(lambda b, x, high: rules.clamp(b, x, None, high)),
    aten.hardtanh.default: _composite(rules.hardtanh),
    aten.relu6.default: _composite(lambda b, x: rules.hardtanh(b, x, 0.0, 6.0)),
    aten.elu.default: _composite(rules.elu),
    aten.selu.default: _composite(rules.selu),
    aten.celu.default: _composite(rules.celu),
    aten.hardsigmoid.default: _composite(rules.hardsigmoid),
    aten.hardswish.default: _composite(rules.hardswish),
    aten.mish.default: _composite(rules.mish),
    aten.log_sigmoid.default: _composite(rules.log_sigmoid),
    aten.softshrink.default: _composite(rules.softshrink),
    aten.hardshrink.default: _composite(rules.hardshrink),
    aten.threshold.default: _composite(rules.threshold),
    aten.trunc.default: _composite(rules.trunc),
    aten.log2.default: _composite(lambda b, x: b.op("mul", b.op("log", x), b.const(1 / math.log(2)))),
    aten.log10.default: _composite(lambda b, x: b.op("mul", b.op("log", x), b.const(1 / math.log(10)))),
    aten.tan.default: _composite(lambda b, x: b.op("div", b.op("sin", x), b.op("cos", x))),
    aten.square.default: _composite(lambda b, x: b.op("mul", x, x)),
    aten.reciprocal.default: _composite(lambda b, x: b.op("div", b.const(1), x)),
    aten.rsqrt.default: _composite(lambda b, x: b.op("div", b.const(1), b.op("sqrt", x))),
    aten.pow.Tensor_Scalar: _composite(rules.power),
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    aten.to.dtype: _cast,
    aten.clone.default: _composite(lambda b, x, memory_format=None: x),
}
for _op in ("add", "sub", "mul", "div"):
    POINTWISE[getattr(aten, _op).Tensor] = _plain(_op)
    POINTWISE[getattr(aten, _op).Scalar] = _plain(_op)
for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    POINTWISE[getattr(aten, _op).Tensor] = _plain(_op)
    POINTWISE[getattr(aten, _op).Scalar] = _plain(_op)
