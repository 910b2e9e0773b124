"""Negative entries of an index count from the end in Python indexing, and are an error in other operations.

Before: ``index_select(x, 0, idx)``, which stands for the user's ``x[idx]`` as well
After:  ``x[idx]`` where the user wrote that
Why it pays: it does not; compiled code accepts and refuses the same indices as eager mode. Layouts of regions replace
negative entries while they are built: see :func:`gnncompile.layout.csr.csr`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import aten, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad.normalize_sizes import size_node

_COUNTS, _REFUSES = "counts from the end", "refuses negative entries"

_INDEXING = {aten.index.Tensor, aten.index_put.default}
if _compat.TAKE_ALONG_DIM_COUNTS:
    _INDEXING.add(aten.take_along_dim.default)


def note_markers(ctx: Context) -> None:
    """Notes that PyG's reductions refuse negative entries, as ``scatter`` does."""
    for op in (own.segment_reduce.default, own.segment_softmax.default):
        for node in ctx.graph.find_nodes(op="call_function", target=op):
            _note(node.args[1], _REFUSES)


def note(node: fx.Node, index: fx.Node) -> None:
    """Notes whether the user's operation `node` counts negative entries of its index from the end, or refuses them."""
    _note(index, _COUNTS if node.target in _INDEXING else _REFUSES)


def note_indexing(index: fx.Node) -> None:
    """Notes that an index is used in Python indexing."""
    _note(index, _COUNTS)


def _note(index: Any, what: str) -> None:
    if isinstance(index, fx.Node):
        index.meta[what] = True


def take_over(index: fx.Node, other: fx.Node) -> None:
    """Copies the notes of an equal index, which `index` replaces."""
    index.meta.update({what: True for what in (_COUNTS, _REFUSES) if what in other.meta})


def counts(ctx: Context, index: fx.Node) -> bool:
    """Whether negative entries of an index count from the end.

    If another operation refuses them, they are an error anyway. A padded mini-batch ends with padding, so its
    entries never count from the end.
    """
    return ctx.padded is None and _COUNTS in index.meta and _REFUSES not in index.meta


def wrapped(ctx: Context, index: fx.Node, rows: Any) -> fx.Node:
    """Adds an index whose negative entries are replaced by the rows that they stand for, among so many rows."""
    last = ctx.call(aten.add.Tensor, index, rows, like=index)
    return ctx.call(aten.where.self, ctx.call(aten.lt.Scalar, index, 0, like=index), last, index)


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    made: dict[tuple[fx.Node, Any], fx.Node] = {}
    for node in list(ctx.graph.find_nodes(op="call_function", target=aten.index_select.default)):
        source, dim, index = node.args
        if dim != 0 or not isinstance(index, fx.Node) or not counts(ctx, index) or value(index).dim() != 1:
            continue
        if ctx.runs_post_grad:
            node.target, node.args = aten.index.Tensor, (source, [index])
            continue
        # The gradient of ``x[idx]`` is slow. In the structure program, entries are replaced once per graph.
        with ctx.graph.inserting_before(node):
            rows = size_node(ctx, source, node)
            key = index, rows
            if key not in made:
                made[key] = wrapped(ctx, index, rows)
        node.args = source, dim, made[key]
