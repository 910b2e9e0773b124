"""An activation that the backward only multiplies is computed again there, from matrices that the backward keeps.

Before: ``h = addmm(b, x, w)`` and ``a = silu(h)`` are kept for ``dh = dy * silu'(h)`` and ``dw = mm(dy.t(), a)``
After:  ``h`` is kept, and the backward computes ``a`` from it
Why it pays: torch keeps what the backward would have to write again, here a second matrix for each layer. The kernel
that computes ``dh`` reads ``h`` in any case, so the matrix costs one write. On CPUs writing costs more, and nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile.device import device_of
from gnncompile.passes.analysis import aten, backward_of, depends_on_chance, is_tensor, same_shape, value, views_rows

_PRODUCTS = {aten.mm.default, aten.addmm.default}
_VIEWS = {aten.t.default, aten.permute.default, aten.detach.default}
_CONVERT = torch.ops.prims.convert_element_type.default

_MOST_MATRICES = 2
"""Most matrices that an activation is computed from, such as rows and what they are gated by."""


def run(graph: fx.Graph) -> None:
    """Marks the activations in a graph of a forward and its backward. The partitioner does the rest."""
    late = backward_of(graph)
    found = [node for node in graph.nodes if node not in late and _is_activation(node, late)]
    for node in found:
        matrices = _matrices(node, late)
        if 0 < len(matrices) <= _MOST_MATRICES and all(_is_kept(matrix, late) for matrix in matrices):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _is_activation(node: fx.Node, late: Container[fx.Node]) -> bool:
    """Whether a node is arithmetic on a GPU whose matrix the backward needs as a factor of products only."""
    if not _is_pointwise(node) or value(node).dim() != 2 or not device_of(value(node).device).runs_triton:
        return False
    readers = [reader for reader in _readers(node) if reader in late]
    is_free = "recompute" not in node.meta and all(reader.op != "output" for reader in _readers(node))
    return is_free and bool(readers) and all(reader.target in _PRODUCTS for reader in readers)


def _is_kept(matrix: fx.Node, late: Container[fx.Node]) -> bool:
    """Whether the backward needs a matrix for other operations than products."""
    return any(reader in late and reader.target not in _PRODUCTS for reader in _readers(matrix))


def _matrices(node: fx.Node, late: Container[fx.Node]) -> set[fx.Node]:
    """Returns the matrices that a node is computed from, and other tensors that are no inputs of the graph."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for given in todo.pop().all_input_nodes:
            if _is_pointwise(given) and same_shape(given, node) and not _is_kept(given, late):
                todo.append(given)
            elif given.op != "placeholder" or same_shape(given, node):
                found.add(given)
    return found


def _is_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not is_tensor(node) or depends_on_chance(node):
        return False
    return node.target is _CONVERT or torch.Tag.pointwise in node.target.tags


def _readers(node: fx.Node) -> Iterator[Any]:
    """Yields the nodes that read a matrix or a view of it."""
    for user in node.users:
        if user.target in _VIEWS or views_rows(user):
            yield from _readers(user)
        else:
            yield user
