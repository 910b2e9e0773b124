"""Products with sparse matrices become reductions over the entries of the matrix.

Before: ``mm(adjacency(row, col, values, shape), x)``
After:  ``segment_reduce(values * index_select(x, 0, col), row, n, "sum")``
Why it pays: the product is message passing. With any other use, the model runs with the original matrix.
"""

from __future__ import annotations

from gnncompile import _compat
from gnncompile.passes.analysis import aten, drop_unused, own
from gnncompile.passes.context import Context

_PRODUCTS = {aten.mm.default, aten.matmul.default}


def run(ctx: Context) -> None:
    """Rewrites the graph in place.

    Raises:
        Recapture: A sparse matrix has a reader that is not a product or a size.
    """
    drop_unused(ctx.graph)
    for node in list(ctx.graph.nodes):
        if node.op != "call_function" or node.target is not own.adjacency.default:
            continue
        for user in list(node.users):
            if user.target is aten.sym_size.int:
                continue
            if user.target not in _PRODUCTS or user.args[0] is not node or user.args[1] is node:
                raise _compat.needs_original(str(user.target))
            row, col, values, shape = node.args
            with ctx.graph.inserting_before(user):
                rows = ctx.call(aten.index_select.default, user.args[1], 0, col, like=user)
                weights = ctx.call(aten.unsqueeze.default, values, 1, like=user)
                messages = ctx.call(aten.mul.Tensor, rows, weights, like=user)
                size = ctx.call(aten.sym_size.int, shape, 0, like=user)
                summed = ctx.call(own.segment_reduce.default, messages, row, size, "sum", like=user)
            user.replace_all_uses_with(summed)
            ctx.graph.erase_node(user)
        for user in list(node.users):
            with ctx.graph.inserting_before(user):
                user.args = (node.args[3], user.args[1])
        ctx.graph.erase_node(node)
