"""Finds values of a few numbers per edge that cost less to read than to compute in every walk.

An example is a cutoff, ``0.5 * (cos(pi * d / r) + 1)`` of the length `d` of an edge. In a walk, all lanes that share
the channels of an edge compute it, and so does each further walk of the forward and the backward. In memory it is one
number, which Inductor computes once. On an H200 this took 0.3 of 4.3 ms from a step of PaiNN in float32.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, is_tensor, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad.message import COMPUTED, VIEWS

_MOST_NUMBERS = 4
"""Most numbers per edge of a narrow value: a length, a cutoff, a direction in space."""

_LEAST_INSTRUCTIONS = 30
"""Fewest instructions per edge of a value that is stored. Below, a walk computes it while it waits for rows."""

_INSTRUCTIONS = {
    "acos": 30, "asin": 30, "atan": 30, "cos": 20, "div": 8, "erf": 30, "exp": 5, "expm1": 16, "log": 14, "log1p": 30,
    "pow": 4, "reciprocal": 8, "rsqrt": 8, "sigmoid": 8, "sin": 20, "softplus": 14, "sqrt": 8, "tan": 30, "tanh": 16,
}  # fmt: skip
"""Approximate instructions per number of an operation on float32 numbers that takes more than one."""

_RANDOM = {aten.dropout.default, own.edge_dropout.default, own.segment_softmax.default}
"""Operations of messages that do not compute each edge's value from its own operands alone."""


def narrow_values(ctx: Context) -> set[fx.Node]:
    """Returns the values to store. A gradient would have to be stored as well, so values with one are left to walks."""
    needed: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in ctx.graph.nodes:
        if _is_narrow(ctx, node):
            inner = (needed.get(arg, frozenset()) for arg in node.all_input_nodes if _same_rows(arg, node))
            needed[node] = frozenset({node}).union(*inner)
    return {
        node
        for node, behind in needed.items()
        if node.target not in VIEWS and _is_read_by_rows(node) and sum(map(_cost, behind)) >= _LEAST_INSTRUCTIONS
    }


def _is_narrow(ctx: Context, node: fx.Node) -> bool:
    """Whether a node computes a few numbers for each row, by operations that walks compute as well."""
    if node.op != "call_function" or not is_tensor(node) or node in ctx.needs_grad or node in ctx.written:
        return False
    gathers = node.target is aten.index_select.default and node.args[1] == 0
    return (gathers or node.target in COMPUTED - _RANDOM) and _numbers(node) <= _MOST_NUMBERS


def _numbers(node: fx.Node) -> float:
    """Returns the numbers per row of a tensor; infinity if that is not known, or if the tensor has no rows."""
    shape = value(node).shape
    known = len(shape) > 0 and all(isinstance(size, int) for size in shape[1:])
    return math.prod(shape[1:]) if known else math.inf


def _same_rows(arg: fx.Node, node: fx.Node) -> bool:
    if not is_tensor(arg) or value(arg).dim() == 0:
        return False
    return value(node).dim() > 0 and same_size(value(arg).shape[0], value(node).shape[0])


def _cost(node: fx.Node) -> float:
    """Returns the approximate instructions per edge of an operation."""
    if node.target in VIEWS:
        return 0
    by_number = len(node.args) > 1 and isinstance(node.args[1], (int, float))
    target: Any = node.target
    name = target.overloadpacket.__name__
    each = 1 if name == "div" and by_number else _INSTRUCTIONS.get(name, 1)
    return each * _numbers(node)


def _is_read_by_rows(node: fx.Node) -> bool:
    """Whether arithmetic on wider rows reads a value, or a view of it."""
    users: list[Any] = list(node.users)
    wide = [user for user in users if user.target in COMPUTED and is_tensor(user) and _numbers(user) > _MOST_NUMBERS]
    views = [user for user in users if user.target in VIEWS and user not in wide]
    return bool(wide) or any(map(_is_read_by_rows, views))
