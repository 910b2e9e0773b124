"""A value that column sums and later arithmetic read is computed for each of them. Runs after differentiation.

Before: ``g = where(relu(x * scale + shift) > 0, dy, 0); s = sum(g, 0); dx = g - s / n``
After:  ``g = where(...); s = sum(g, 0); h = where(...); dx = h - s / n``, where ``h`` equals ``g``
Why it pays: the gradient of a batch norm needs sums of all rows before it can be written. Inductor stores ``g``, in
float32, if it is computed from more than four tensors, and counts the rows ``scale`` and ``shift`` as well. Of the two
matrices ``x`` and ``dy`` each kernel can compute it again, and nothing is stored in between.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile import _compat
from gnncompile.device import device_of
from gnncompile.passes.analysis import is_pointwise, is_tensor, same_shape, sums_rows, value

_MOST_MATRICES = 2
"""Most matrices of the shape of a value that it is computed from: each of its readers reads them in its place."""
_MOST_READERS = 2
"""Most readers besides column sums."""
_MOST_OPERATIONS = 24
"""Most operations of a value that is computed several times."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in list(graph.nodes):
        if _is_matrix(node) and len(node.users) > 1 and device_of(value(node).device).runs_triton:
            chain = _chain(node)
            if chain and _is_summed_and_read(node):
                for user in list(node.users)[1:]:
                    _copy(graph, node, chain, user)


def _is_matrix(node: Any) -> bool:
    """Whether a node is pointwise arithmetic whose result is a matrix of floating-point numbers."""
    if not is_pointwise(node) or not is_tensor(node):
        return False
    return bool(value(node).dim() == 2 and value(node).is_floating_point())


def _is_summed_and_read(node: fx.Node) -> bool:
    """Whether some readers only sum a value by column, and a few others are arithmetic that may need the sums."""
    others = [user for user in node.users if not _ends_in_sum(user)]
    return 0 < len(others) <= _MOST_READERS and len(others) < len(node.users) and all(map(_is_matrix, others))


def _ends_in_sum(node: fx.Node) -> bool:
    """Whether a node is a column sum, or arithmetic that only a column sum reads."""
    while _is_matrix(node) and len(node.users) == 1:
        (node,) = node.users
    return sums_rows(node)


def _chain(top: fx.Node) -> list[fx.Node]:
    """Returns the operations that only compute a value, in order; none if the value is cheaper to store.

    Inductor does not store a value that is computed from few tensors, so nothing is returned for that one either.
    """
    chain: list[fx.Node] = []
    read: dict[fx.Node, None] = {}
    todo = [top]
    while todo:
        node = todo.pop()
        inner = node is top or (is_pointwise(node) and same_shape(node, top) and len(node.users) == 1)
        if not inner:
            read[node] = None
        elif node not in chain:
            chain.append(node)
            todo += node.all_input_nodes
    matrices = sum(same_shape(node, top) for node in read)
    if matrices > _MOST_MATRICES or len(chain) > _MOST_OPERATIONS or len(read) <= _compat.most_reads():
        return []
    return sorted(chain)


def _copy(graph: fx.Graph, top: fx.Node, chain: list[fx.Node], user: fx.Node) -> None:
    """Computes a value once more, for one of its readers."""
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(user):
        for node in chain:
            made[node] = graph.node_copy(node, lambda given: made.get(given, given))
    user.replace_input_with(top, made[top])
