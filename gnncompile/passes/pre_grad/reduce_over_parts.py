"""Over one part of a graph, reductions over rows become reductions over the rows of all parts.

Before: ``batch_norm(x, ...)``; ``mean(x, [0])``; ``softmax(x, 0)``; ``mse_loss(out, y)``, of the rows of one part
After:  ``all_reduce(sum(x, [0])) / count_rows(n)``, and the like
Why it pays: it does not; it gives what one process gives. Operations row by row stay as they are. An operation that is
        not known to be either raises an error that names it.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from gnncompile import _compat
from gnncompile.exc import PartitionError
from gnncompile.ops.exchange import counted_once
from gnncompile.passes.analysis import aten, depends_on_chance, drop_unused, is_switch, is_tensor, value
from gnncompile.passes.context import Context
from gnncompile.passes.padded import ops
from gnncompile.passes.padded.mask_padding import note_joined
from gnncompile.passes.padded.selections import is_trivial_check
from gnncompile.passes.partitioned.graph import PartitionedGraph
from gnncompile.passes.partitioned.parts import REMEDY
from gnncompile.passes.partitioned.rules import OF_INDICES, RULES, TAKE_INDICES, is_index, pointwise
from gnncompile.passes.pointwise import POINTWISE

_NO_BOUND = 2**31
"""Guards with larger numbers only say that a size is a size."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place.

    Raises:
        PartitionError: An operation is not known to give over parts what it gives over the whole graph.
    """
    if ctx.parts is None:
        return
    if not ctx.parts.sources:
        raise PartitionError(
            "the captured graph takes no edge_index of a part, and a graph break may be the reason. A model over parts "
            f"must be one graph. {REMEDY}"
        )
    p = PartitionedGraph(ctx, ctx.parts)
    for node in ctx.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        if is_trivial_check(node):
            ctx.graph.erase_node(node)
    drop_unused(ctx.graph)
    for node in ctx.graph.find_nodes(op="call_function", target=aten.cat.default):
        note_joined(p, node)
    for node in list(ctx.graph.nodes):
        if node.op != "call_function" or is_switch(node):
            continue
        p.at = node
        if p.meets_padding(node) or node.target is aten.nonzero.default:
            with ctx.graph.inserting_before(node):
                _treat(p, node)
        elif depends_on_chance(node):
            raise p.refuse("draws random numbers for values that all parts share, and each process draws its own")
    _check_guards(p)
    _share_results(p)
    drop_unused(ctx.graph)


def _treat(p: PartitionedGraph, node: fx.Node) -> None:
    """Applies the rule of one operation, which checks it or replaces it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        if target is not operator.getitem and not p.is_padded_number(node):
            raise p.refuse(f"({target}) compares numbers of rows, which differ between parts")
        return
    rule = RULES.get(target)
    first = node.args[0] if node.args else None
    if rule is not None:
        if rule not in TAKE_INDICES and is_index(p, first):
            raise p.refuse(OF_INDICES)
        rule(p, node)
    elif torch.Tag.pointwise in target.tags or target in POINTWISE:
        pointwise(p, node)
    elif target in ops.VIEWS:
        ops.view(p, node)
    else:
        raise p.refuse("is not known to treat rows one by one")


def _check_guards(p: PartitionedGraph) -> None:
    """Raises PartitionError if the model branches on a number of rows: parts have other numbers than the graph."""
    for expr in _compat.guards_on(p.ctx.fake_mode, p.known.sizes):
        numbers = [a for a in expr.args if a.is_Integer] if isinstance(expr, sympy.core.relational.Relational) else []
        if any(1 < abs(int(number)) < _NO_BOUND for number in numbers):
            raise PartitionError(
                f"the model branches on a number of rows ({expr}), which differs between parts. {REMEDY}"
            )


def _share_results(p: PartitionedGraph) -> None:
    """Divides the gradient of results that all processes have alike: together they are one result."""
    (output,) = p.ctx.graph.find_nodes(op="output")
    p.at = output
    results: Any = output.args[0]
    for node in dict.fromkeys(results):
        if p.is_padded_number(node):
            raise p.refuse("returns a number of rows")
        shared = is_tensor(node) and value(node).is_floating_point() and not p.dims(node)
        if shared and node.op == "call_function":
            with p.ctx.graph.inserting_before(output):
                once = p.ctx.inline(lambda x: counted_once(x, p.parts.size), node, like=node)
            output.replace_input_with(node, once)
