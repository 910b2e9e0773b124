"""Pads the rows that a mask selects (``out[mask]``) to the number of all rows, with the selected rows first.

Only the device knows the number of selected rows. The padded size is unique to the mask, so the pass recognises
tensors made of selected rows by their size.
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
    """Whether a node asserts a condition that is known to hold, or that a size is not negative."""
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
    """Makes equal masks select once, so that both selections have one size: ``cross_entropy(out[y > 0], y[y > 0])``."""
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
    """Replaces ``nonzero`` of a mask by the indices of its selected valid rows, followed by all other indices."""
    mask: Any = node.args[0]
    if value(mask).dim() != 1 or value(mask).dtype != torch.bool:
        raise p.refuse("selects rows by something else than a mask of them")
    true = p.ctx.call(aten.logical_and.default, mask, p.mask(mask))
    number = p.ctx.call(aten.sum.default, true)
    new = p.ctx.inline(masked_reductions.places, true, _more(p, value(mask).shape[0]), like=node)
    p.add_kind(value(new).shape[0], number)
    p.given.add(new)  # all entries are in range, but its padded entries may index valid rows
    p.replace(node, new)
    _renew(p, new)


def _more(p: PaddedGraph, rows: Any) -> int:
    """Returns the number of extra entries that makes the padded size differ from every other size."""
    tensors = [value(n) for n in p.ctx.graph.nodes if is_tensor(n)]
    known = {size.node.expr for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)}
    return next(more for more in range(1, len(known) + 2) if rows.node.expr + more not in known)


def _renew(p: PaddedGraph, new: fx.Node) -> None:
    """Computes the fake values of all nodes made from selected rows again, with the new size."""
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
    """Yields the calls that depend on a node, in the order of the graph."""
    made, node = {source}, source.next
    while node.op != "output":
        if node.op == "call_function" and not made.isdisjoint(node.all_input_nodes):
            yield node
            made.add(node)
        node = node.next
