"""Padded rows of a mini-batch change no result: operations that would mix them with valid rows are masked.

Before: ``batch_norm(x, ...)``; ``mean(x, [0])``; ``mse_loss(out, y)``, where only the first n rows of x are valid
After:  the same of the first n rows, by masks, with n read on the device
Why it pays: all mini-batches of a bucket have one size, so one CUDA graph serves them. Operations row by row stay as
        they are. Operations along edges do too, since padded edges join padded nodes. If an operation is not known
        to be safe, the model runs unpadded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, drop_unused, is_tensor, value
from gnncompile.passes.context import Context
from gnncompile.passes.padded import guards, ops
from gnncompile.passes.padded.graph import SELECTED, PaddedGraph, expression, single
from gnncompile.passes.padded.selections import is_trivial_check, select_once
from gnncompile.passes.pointwise import POINTWISE


def run(ctx: Context) -> None:
    """Rewrites the graph in place, and records which dimensions of the results are padded.

    Raises:
        Recapture: An operation is not known to be safe.
    """
    if ctx.padded is not None:
        _rewrite(PaddedGraph(ctx, ctx.padded))


def _rewrite(p: PaddedGraph) -> None:
    select_once(p)
    for node in p.ctx.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        if is_trivial_check(node):
            p.ctx.graph.erase_node(node)
    drop_unused(p.ctx.graph)
    for node in p.ctx.graph.find_nodes(op="call_function", target=aten.cat.default):
        note_joined(p, node)
    for node in list(p.ctx.graph.nodes):
        if node.op != "call_function" or not p.meets_padding(node):
            continue
        p.at = node
        with p.ctx.graph.inserting_before(node):
            _treat(p, node)
    (output,) = p.ctx.graph.find_nodes(op="output")
    p.at = output
    p.ctx.log.padded = [_result(p, v) for v in output.args[0]]
    guards.check(p)
    drop_unused(p.ctx.graph)


def _treat(p: PaddedGraph, node: fx.Node) -> None:
    """Applies the rule of one operation, which checks it or replaces it."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        _python(p, node)
        return
    rule = ops.RULES.get(target)
    if rule is not None:
        rule(p, node)
    elif torch.Tag.pointwise in target.tags or target in POINTWISE:
        ops.pointwise(p, node)
    elif target in ops.VIEWS:
        ops.view(p, node)
    else:
        raise p.refuse(f"{target} is not known to leave padded rows alone")


def _python(p: PaddedGraph, node: fx.Node) -> None:
    """Allows arithmetic of sizes and parts of tuples, whose readers are checked instead. Refuses other functions."""
    if node.target is not operator.getitem and not p.is_padded_number(node):
        raise p.refuse(f"{node.target} compares sizes of the mini-batch")


def note_joined(p: PaddedGraph, node: fx.Node) -> None:
    """Notes the row types of the dimension along which `node` joins tensors, since its size may be used earlier."""
    p.at = node
    parts: Any = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % value(node).dim()
    size = value(node).shape[dim]
    if len(parts) == 1 or not p.is_padded_number(size):
        return
    kinds = tuple(kind for part in parts for kind in p.of(value(part).shape[dim]) or (None,))
    if p.kinds.setdefault(expression(size), kinds) != kinds:
        raise p.refuse("two dimensions of one size are padded in two ways")


def _result(p: PaddedGraph, node: Any) -> dict[int, int]:
    """Returns a dict from the padded dimensions of a result to their row types."""
    if p.is_padded_number(node):
        raise p.refuse("returns a size of the mini-batch")
    if not is_tensor(node):
        return {}
    found = {}
    for dim, kinds in p.dims(node).items():
        kind = single(kinds)
        if kind is None or expression(value(node).shape[dim]) in p.repeats:
            raise p.refuse("returns several padded tensors as one")
        if kind >= SELECTED:
            raise p.refuse("returns rows that a mask selects")
        found[dim] = kind
    return found
