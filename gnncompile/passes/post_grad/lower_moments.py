"""Means and variances of columns are computed by a kernel of our own. Runs after differentiation, on each graph.

Before: ``var_mean(convert(x, float32), [0])``, where ``x`` is stored anyway
After:  ``var_mean_over_rows(x)``
Why it pays: a batch norm needs the statistics of all rows. Inductor updates them row by row, with a division for each
number, and reads a matrix at a third of the memory's rate.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gnncompile import _compat, tuning
from gnncompile._compat import aoti
from gnncompile.device import HALVES, device_of
from gnncompile.passes.analysis import aten, has_kernel, is_packed, is_tensor, own, value

_CONVERT = torch.ops.prims.convert_element_type.default


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    if aoti.current_build() is not None:  # packages have no such kernel
        return
    for node in graph.find_nodes(op="call_function", target=aten.var_mean.correction):
        matrix, correction = _source(node.args[0]), node.kwargs.get("correction", 1)
        if not _sums_rows(node) or not isinstance(correction, int) or not _fits(matrix) or not _is_stored(matrix):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(own.var_mean_over_rows.default, (matrix, correction))
        made.meta["val"] = [fake.reshape(-1) for fake in value(node)]
        for user in list(node.users):
            _replace(graph, user, made)
        graph.erase_node(node)


def _source(given: Any) -> Any:
    """Returns the matrix whose statistics are asked for, before it is converted from 16 bits."""
    if given.target is _CONVERT and value(given).dtype is torch.float32:
        (source,) = given.all_input_nodes
        return source if value(source).dtype in HALVES else given
    return given


def _sums_rows(node: fx.Node) -> bool:
    """Whether statistics are those of columns, in float32, and read one by one."""
    summed = value(node.all_input_nodes[0])
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    rows = summed.dim() == 2 and dims in ([0], [-2])
    return rows and summed.dtype is torch.float32 and all(user.target is operator.getitem for user in node.users)


def _fits(matrix: Any) -> bool:
    """Whether the kernel takes a matrix, and is faster for one of the present size."""
    if not is_tensor(matrix) or not device_of(value(matrix).device).runs_triton or not is_packed(value(matrix)):
        return False
    rows, columns = value(matrix).shape
    now = _compat.size_now(rows)
    return isinstance(columns, int) and columns > 0 and (now is None or now * columns >= tuning.LEAST_MOMENTS)


def _is_stored(matrix: fx.Node) -> bool:
    """Whether a matrix lies in memory before it is read. Inductor computes other ones while it sums them."""
    return matrix.op == "placeholder" or has_kernel(matrix)


def _replace(graph: fx.Graph, user: fx.Node, made: fx.Node) -> None:
    """Puts one result of ours in the place of a result of torch's, in its shape."""
    with graph.inserting_before(user):
        result = graph.call_function(operator.getitem, (made, user.args[1]))
        shaped = graph.call_function(aten.reshape.default, (result, list(value(user).shape)))
    result.meta["val"], shaped.meta = made.meta["val"][user.args[1]], user.meta
    user.replace_all_uses_with(shaped)
    graph.erase_node(user)
