"""Finds values of a few numbers per edge that cost less to read than to compute in every walk.

An example is a cutoff, ``0.5 * (cos(pi * d / r) + 1)`` of the length `d` of an edge. In a walk, all lanes that share
the channels of an edge compute it, and so does each further walk of the forward and the backward. In memory it is one
number, which Inductor computes once. On an H200 this took 0.3 of 4.3 ms from a step of PaiNN in float32.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, is_tensor, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad.message import COMPUTED, VIEWS, as_many_rows

_MOST_NUMBERS = 4
"""Most numbers per edge of a narrow value: a length, a cutoff, a direction in space."""

_LEAST_INSTRUCTIONS = 30
"""Fewest instructions per edge of a value that is stored. Below, a walk computes it while it waits for rows."""

_INSTRUCTIONS = {
    "cos": 20, "div": 8, "elu": 17, "erf": 30, "exp": 5, "exp2": 5, "expm1": 16, "gelu": 33, "log": 14, "log10": 14,
    "log1p": 30, "log2": 14, "log_sigmoid": 15, "mish": 31, "pow": 4, "reciprocal": 8, "rsqrt": 8, "sigmoid": 8,
    "silu": 9, "sin": 20, "softplus": 14, "sqrt": 8, "tanh": 16,
}  # fmt: skip
"""Approximate instructions per number of an operation on float32 numbers that takes more than one."""

_BY_EDGE = COMPUTED - {aten.dropout.default, own.edge_dropout.default, own.segment_softmax.default}
"""Operations of messages that compute each edge's value from its own operands alone."""


def narrow_values(ctx: Context) -> set[fx.Node]:
    """Returns the values to store.

    Values with a gradient are left to walks, since the gradient would have to be stored as well. So are values that are
    computed from wider rows, such as dot products of the rows of both ends, since a walk reads those in any case.
    """
    needed: dict[fx.Node, frozenset[fx.Node]] = {}
    of_rows: set[fx.Node] = set()
    for node in ctx.graph.nodes:
        if not _is_narrow(ctx, node):
            continue
        operands = [] if _gathers(node) else [n for n in node.all_input_nodes if is_tensor(n) and as_many_rows(n, node)]
        if any(arg in of_rows or _numbers(arg) > _MOST_NUMBERS for arg in operands):
            of_rows.add(node)
        else:
            needed[node] = frozenset({node}).union(*(needed.get(arg, frozenset()) for arg in operands))
    return {
        node
        for node, behind in needed.items()
        if node.target not in VIEWS and _is_read_by_rows(node) and sum(map(_cost, behind)) >= _LEAST_INSTRUCTIONS
    }


def _is_narrow(ctx: Context, node: fx.Node) -> bool:
    """Whether a node computes a few numbers for each row, by operations that walks compute as well."""
    if node.op != "call_function" or not is_tensor(node) or node in ctx.needs_grad or node in ctx.written:
        return False
    return (_gathers(node) or node.target in _BY_EDGE) and _numbers(node) <= _MOST_NUMBERS


def _gathers(node: fx.Node) -> bool:
    return node.target is aten.index_select.default and node.args[1:2] == (0,)


def _numbers(node: fx.Node) -> float:
    """Returns the numbers per row of a tensor; infinity if that is not known, or if the tensor has no rows."""
    shape = value(node).shape
    known = len(shape) > 0 and all(isinstance(size, int) for size in shape[1:])
    return math.prod(shape[1:]) if known else math.inf


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
