"""The first few rows of a padded tensor have a size that is known before.

Before: ``out[:k]``, whose size is k or less, which torch takes for a size that only the data knows
After:  ``split_with_sizes(out, [k, n - k])[0]``
Why it pays: a neighbour loader's mini-batches begin with their seeds, all that the loss reads; what has a size
        that only the data knows is not recorded. That there are so many rows is asked before each call
        (:mod:`gnncompile.passes.padding`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile.passes.context import aten, own


def run(gm: fx.GraphModule) -> None:
    """Rewrites a graph of Dynamo's in place."""
    padded = [n.args[0] for n in gm.graph.find_nodes(op="call_function", target=own.padded)]
    symbols = {s for n in padded for s in _symbols(_size(n))}
    for node in gm.graph.find_nodes(op="call_function", target=operator.getitem) if symbols else ():
        source, end = node.args[0], _end(node.args[1])
        size = _size(source) if end is not None else None
        if size is not None and _symbols(size) & symbols:
            with gm.graph.inserting_before(node):
                rows = gm.graph.call_method("size", (source, 0))
                rest = gm.graph.call_function(operator.sub, (rows, end))
                parts = gm.graph.call_function(torch.split_with_sizes, (source, [end, rest]))
            node.args = (parts, 0)
            _drop_bounds(gm.graph, node)


def _drop_bounds(graph: fx.Graph, rows: fx.Node) -> None:
    """Takes out what asserts that the size of the rows is one of some of them: it is asked before."""
    for size in [user for user in rows.users if user.target is aten.sym_size.int]:
        for bound in [user for user in size.users if user.target in (operator.ge, operator.le)]:
            for check in [user for user in bound.users if user.target is aten._assert_scalar.default]:
                graph.erase_node(check)


def _end(index: Any) -> Any:
    """Where a slice of rows ends that begins with the first one; None for other indices."""
    first, *others = index if isinstance(index, tuple) else (index,)
    if any(other != slice(None) for other in others):
        return None
    if not isinstance(first, slice) or first.start not in (None, 0) or first.step not in (None, 1):
        return None
    return None if isinstance(first.stop, int) and first.stop < 0 else first.stop


def _size(node: Any) -> Any:
    """The first dimension of a tensor of Dynamo's graph."""
    fake = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return fake.shape[0] if isinstance(fake, torch.Tensor) and fake.dim() > 0 else None


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()
