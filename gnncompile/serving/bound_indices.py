"""Makes the operations of a traced program check their indices, so that a wrong index does not end the process.

Before: ``aten.embedding(weight, z)``
After:  ``aten.embedding(weight, gnncompile.bounded(z, rows, False))``
Why: a GPU that finds a wrong index in torch's or Inductor's kernels computes nothing more for this process. On a CPU,
Inductor's code throws an exception within a parallel loop, which ends the process. ``bounded`` lets the call fail in
words; on a GPU it also replaces wrong indices. Edges of regions are checked where they are sorted, and the order in
which a call sorts them needs no check. An index that reads several tensors of one size is checked once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from gnncompile.exc import CaptureError
from gnncompile.passes.analysis import same_size
from gnncompile.passes.log import line_of

aten, _own = torch.ops.aten, torch.ops.gnncompile

_ALONG = {
    aten.index_select.default: 2,
    aten.gather.default: 2,
    aten.scatter.src: 2,
    aten.scatter.value: 2,
    aten.scatter_add.default: 2,
    aten.scatter.reduce: 2,
    aten.scatter.value_reduce: 2,
    aten.scatter_reduce.two: 2,
    aten.index_reduce.default: 2,
    aten.index_add.default: 2,
    aten.index_fill.int_Scalar: 2,
    aten.index_fill.int_Tensor: 2,
    aten.index_copy.default: 2,
}
"""Operations along the axis that the argument 1 names, and the position of their index."""

_WITH_LISTS = (aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default)
"""Operations whose argument 1 holds an index for each axis. These may be negative."""

MASKS = (torch.bool, torch.uint8)
"""The dtypes of indices that are masks."""

_UNCHECKED = (aten.take.default, aten.put.default, aten.embedding_bag.padding_idx, aten.nll_loss_nd.default)


def run(graph: fx.Graph, checks_all: bool = True) -> None:
    """Rewrites the graph in place.

    Args:
        graph: The graph of a traced program.
        checks_all: Whether all indices must be checked here. Otherwise torch's own kernels check some.

    Raises:
        CaptureError: An operation reads by indices that nothing checks.
    """
    checked: _Checked = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _WITH_LISTS:
            indices, axis = [], 0
            for one in node.args[1]:
                indices.append(one if one is None else _bounded(graph, checked, node, axis, one, wraps=True))
                axis += 1 if one is None else _axes(one)
            node.update_arg(1, indices)
        elif node.target in _UNCHECKED and checks_all:
            line = line_of(node.meta.get("stack_trace") or "")
            raise CaptureError(
                f"model: can't be packaged for a GPU at {line}: {node.target} reads by indices that a package does not "
                "check. Write it with index_select, gather or scatter_add."
            )
        elif node.target is aten.embedding.default:
            node.update_arg(1, _bounded(graph, checked, node, 0, node.args[1], wraps=False))
        elif node.target in _ALONG:
            at = _ALONG[node.target]
            node.update_arg(at, _bounded(graph, checked, node, node.args[1], node.args[at], wraps=False))


_Checked = dict[tuple[fx.Node, str, bool], fx.Node]
"""The checked indices, by the index, the number of rows, and whether negative entries count from the end."""


def _bounded(graph: fx.Graph, checked: _Checked, user: Any, axis: int, index: Any, wraps: bool) -> Any:
    """Returns the node of a checked index, before the node that reads its argument 0 by the index."""
    value: Any = index.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype in MASKS or not _is_given(index):
        return index
    rows = user.args[0].meta["val"].shape[axis]
    if _orders_edges(index, rows):
        return index
    key = index, str(rows), wraps
    if key in checked:
        return checked[key]
    with graph.inserting_before(user):
        size = graph.call_function(aten.sym_size.int, (user.args[0], axis))
        size.meta["val"] = rows
        made = graph.call_function(_own.bounded.default, (index, size, wraps))
    made.meta["val"] = value
    checked[key] = made
    return made


def _orders_edges(index: fx.Node, rows: Any) -> bool:
    """Whether an index is the order of the edges in a layout that the call sorts, a permutation of all edges."""
    if index.target is not operator.getitem or index.args[1] != _EDGE:
        return False
    layout: Any = index.args[0]
    return layout.target is _own.csr.default and same_size(index.meta["val"].shape[0], rows)


_EDGE = 2
"""The position of the order of the edges among the results of ``csr``."""


def _axes(index: fx.Node) -> int:
    """Returns the number of axes that an index stands for: several for a mask of several dimensions."""
    value: Any = index.meta.get("val")
    return value.dim() if isinstance(value, Tensor) and value.dtype in MASKS else 1


def _is_given(index: fx.Node) -> bool:
    """Whether an index depends on an input, and not only on sizes."""
    seen, todo = set[fx.Node](), [index]
    while todo:
        node = todo.pop()
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            return True
        if node.target is not aten.sym_size.int:
            todo += [one for one in node.all_input_nodes if one not in seen]
        seen.add(node)
    return False
