"""Rows that a mask selects (``out[mask]``) get a place each of as many as there are rows, those selected first.

How many these are is known on the device alone; the places have a size that only their mask has, so that what is made
of selected rows is known by it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gnncompile.passes.analysis import aten, is_tensor, value, value_numbers, written_nodes
from gnncompile.passes.padded import masked_reductions
from gnncompile.passes.padded.graph import PaddedGraph

_OTHER_NUMBER = "rows that a mask selects meet rows of another number"


def is_trivial_check(node: fx.Node) -> bool:
    """Whether a node makes sure of what is known to be true, or that a number of rows is not negative."""
    found: Any = node.args[0]
    if not isinstance(found, fx.Node):
        return False
    if statically_known_true(value(found)):
        return True
    if found.target is not operator.ge or found.args[1] != 0:
        return False
    size: Any = found.args[0]
    return isinstance(size, fx.Node) and size.target is aten.sym_size.int


def select_once(p: PaddedGraph) -> None:
    """Has equal masks select once (``cross_entropy(out[y > 0], y[y > 0])``): as many rows, as is known then."""
    selections = p.ctx.graph.find_nodes(op="call_function", target=aten.nonzero.default)
    if len(selections) < 2:
        return
    found = value_numbers(p.ctx.graph, written_nodes(p.ctx.graph))
    firsts: dict[int, fx.Node] = {}
    for node in selections:
        p.at = first = firsts.setdefault(found[node], node)
        if first is not node:
            p.replace(node, first)
            for user in _made_of(first):
                _find_again(p, user)


def selected(p: PaddedGraph, node: fx.Node) -> None:
    """``nonzero`` of a mask: where its true rows are, and behind them where the others are."""
    mask: Any = node.args[0]
    if value(mask).dim() != 1 or value(mask).dtype != torch.bool:
        raise p.refuse("selects rows by something else than a mask of them")
    true = p.ctx.call(aten.logical_and.default, mask, p.mask(mask))
    number = p.ctx.call(aten.sum.default, true)
    new = p.ctx.inline(masked_reductions.places, true, _more(p, value(mask).shape[0]), like=node)
    p.add_kind(value(new).shape[0], number)
    p.given.add(new)  # but what its padding numbers may be true
    p.replace(node, new)
    _renew(p, new)


def _more(p: PaddedGraph, rows: Any) -> int:
    """How many places more than rows make a size that nothing else has."""
    tensors = [value(n) for n in p.ctx.graph.nodes if is_tensor(n)]
    known = {size.node.expr for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)}
    return next(more for more in range(1, len(known) + 2) if rows.node.expr + more not in known)


def _renew(p: PaddedGraph, new: fx.Node) -> None:
    """Finds what is made of selected rows in their new number."""
    for node in _made_of(new):
        if node.target is aten._assert_scalar.default and not statically_known_true(value(node.args[0])):  # type: ignore[arg-type]
            raise p.refuse(_OTHER_NUMBER)
        _find_again(p, node)


def _find_again(p: PaddedGraph, node: fx.Node) -> None:
    try:
        p.ctx.find_value(node)
    except Exception as error:
        raise p.refuse(_OTHER_NUMBER) from error


def _made_of(source: fx.Node) -> Iterator[fx.Node]:
    """The calls that something of a node enters, in the order of the graph."""
    made, node = {source}, source.next
    while node.op != "output":
        if node.op == "call_function" and not made.isdisjoint(node.all_input_nodes):
            yield node
            made.add(node)
        node = node.next
