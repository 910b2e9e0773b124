"""An activation that the backward only multiplies is computed again there, from matrices that the backward keeps.

Before: ``h = addmm(b, x, w)`` and ``a = silu(h)`` are kept for ``dh = dy * silu'(h)`` and ``dw = mm(dy.t(), a)``
After:  ``h`` is kept, and the backward computes ``a`` from it
Why it pays: torch keeps what the backward would have to write again, here a second matrix for each layer. The kernel
that computes ``dh`` reads ``h`` in any case, so the matrix costs one write. On CPUs writing costs more, and nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile.device import device_of
from gnncompile.passes.analysis import (
    aten,
    backward_of,
    depends_on_chance,
    is_pointwise,
    is_tensor,
    readers,
    same_shape,
    value,
    views_rows,
)

_PRODUCTS = {aten.mm.default, aten.addmm.default}
_VIEWS = {aten.t.default, aten.permute.default, aten.detach.default}

_MOST_MATRICES = 2
"""Most matrices that an activation is computed from, such as rows and what they are gated by."""


def run(graph: fx.Graph) -> None:
    """Marks the activations in a graph of a forward and its backward. The partitioner does the rest."""
    candidates = [node for node in graph.nodes if _is_matrix_of_a_gpu(node)]
    late = backward_of(graph) if candidates else set()
    for node in [node for node in candidates if node not in late and _is_activation(node, late)]:
        matrices = _matrices(node, late)
        if 0 < len(matrices) <= _MOST_MATRICES and all(_is_kept(matrix, late) for matrix in matrices):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def _is_matrix_of_a_gpu(node: fx.Node) -> bool:
    """Whether a node is arithmetic whose result is a matrix on a GPU."""
    return _computes(node) and value(node).dim() == 2 and device_of(value(node).device).runs_triton


def _is_activation(node: fx.Node, late: Container[fx.Node]) -> bool:
    """Whether the backward needs a matrix as a factor of products only, and nobody else says what becomes of it."""
    found = [reader for reader, _ in readers(node, _views)]
    is_free = "recompute" not in node.meta and all(reader.op != "output" for reader in found)
    reading = [reader for reader in found if reader in late]
    return is_free and bool(reading) and all(reader.target in _PRODUCTS for reader in reading)


def _is_kept(matrix: fx.Node, late: Container[fx.Node]) -> bool:
    """Whether the backward needs a matrix for other operations than products."""
    return any(reader in late and reader.target not in _PRODUCTS for reader, _ in readers(matrix, _views))


def _matrices(node: fx.Node, late: Container[fx.Node]) -> set[fx.Node]:
    """Returns the matrices that a node is computed from, and other tensors that are no inputs of the graph."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for given in todo.pop().all_input_nodes:
            if _computes(given) and same_shape(given, node) and not _is_kept(given, late):
                todo.append(given)
            elif given.op != "placeholder" or same_shape(given, node):
                found.add(given)
    return found


def _computes(node: fx.Node) -> bool:
    return is_pointwise(node) and is_tensor(node) and not depends_on_chance(node)


def _views(node: fx.Node) -> bool:
    return node.target in _VIEWS or views_rows(node)
