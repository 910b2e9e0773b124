"""Products of the same rows with several weights share a launch. Runs after differentiation, on each graph.

Before: ``a = product(x, v, b); c = product(x, w, d)``, in 16 bits
After:  ``a, c = products_of_same_rows(x, [v, w], [b, d])``
Why it pays: layers of the same rows are usual, as for queries, keys and values. Memory bounds narrow products in 16
bits. Together they read the rows once, and the host launches one kernel instead of several.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from gnncompile.codegen.gemm import MOST_SIDE_BY_SIDE
from gnncompile.device import HALVES
from gnncompile.passes.analysis import aten, is_packed, own, value

_VIEWS = (aten.permute.default, aten.t.default, aten.slice.Tensor, torch.ops.prims.convert_element_type.default)
"""What may stand between an input of the graph and a weight."""
_MOST_BETWEEN = 1
"""Most regions between two products that share a launch: a result that is made earlier lies in memory for longer."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=own.product.default):
        key = _kind(node)
        if key is None:
            continue
        group = groups.setdefault(key, [])
        if group and (len(group) == MOST_SIDE_BY_SIDE or not _may_join(group[0], node)):
            _join(graph, group)
            group.clear()
        group.append(node)
    for group in groups.values():
        _join(graph, group)


def _kind(node: fx.Node) -> Hashable | None:
    """Returns what is alike in products that may share a launch; None if a product can't."""
    args: Any = node.args
    left, right, added, gate, relu, in_place = args
    if value(left).dtype not in HALVES or gate is not None or relu or in_place:
        return None
    if added is not None and value(added).dim() != 1:
        return None
    weight = value(right)
    if not is_packed(weight) and not is_packed(weight.t()):  # the kernel takes no gaps between rows
        return None
    return left, tuple(weight.shape), is_packed(weight)


def _may_join(first: fx.Node, node: fx.Node) -> bool:
    """Whether a product can be computed beside an earlier one, without keeping its result for long."""
    _, right, added, *_ = node.args
    if not all(_is_there(given, first) for given in (right, added) if isinstance(given, fx.Node)):
        return False
    regions, between = 0, first.next
    while between is not node:
        regions += between.target is own.region.default
        between = between.next
    return regions <= _MOST_BETWEEN


def _is_there(given: fx.Node, first: fx.Node) -> bool:
    """Whether a tensor is computed before a node, or is a view of such a tensor."""
    return given < first or (given.target in _VIEWS and _is_there(given.all_input_nodes[0], first))


def _join(graph: fx.Graph, group: list[fx.Node]) -> None:
    if len(group) < 2:
        return
    rights, added = ([node.args[k] for node in group] for k in (1, 2))
    for given in (*rights, *added):
        _put_before(group[0], given)
    with graph.inserting_before(group[0]):
        made = graph.call_function(own.products_of_same_rows.default, (group[0].args[0], rights, added))
        made.meta["val"] = [value(node) for node in group]
        for at, node in enumerate(group):
            result = graph.call_function(operator.getitem, (made, at))
            result.meta = node.meta
            node.replace_all_uses_with(result)
    for node in group:
        graph.erase_node(node)


def _put_before(first: fx.Node, given: Any) -> None:
    """Moves a view, and the views that it is made of, before a node."""
    if isinstance(given, fx.Node) and not given < first:
        _put_before(first, given.all_input_nodes[0])
        first.prepend(given)
