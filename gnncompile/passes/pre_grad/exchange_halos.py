"""Over one part of a graph, the rows that edges read of other parts are exchanged, once for each gathered tensor.

Before: ``index_select(x, 0, src)``, where `src` counts own rows and then halo rows, and `x` holds own rows
After:  ``index_select(cat([x, halo_exchange(x, send)]), 0, src)``
Why it pays: linear layers have found their place by now, so rows are exchanged where they are narrow. What only depends
        on the graph, as degrees, is exchanged once per graph.
"""

from __future__ import annotations

from torch import fx

from gnncompile.exc import PartitionError
from gnncompile.passes.analysis import aten, own, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import ExchangeRecord, user_line
from gnncompile.passes.partitioned.parts import Halo


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if ctx.parts is None:
        return
    made: dict[tuple[fx.Node, Halo], fx.Node] = {}
    for node in list(ctx.graph.find_nodes(op="call_function", target=aten.index_select.default)):
        table, dim, index = node.args
        halo = ctx.parts.space(index)
        if not isinstance(halo, Halo) or dim != 0:
            continue
        if (table, halo) not in made:
            with ctx.graph.inserting_before(node):
                made[table, halo] = _exchanged(ctx, table, halo, node)
        node.replace_input_with(table, made[table, halo])


def _exchanged(ctx: Context, table: fx.Node, halo: Halo, node: fx.Node) -> fx.Node:
    """Adds the exchange of a table's halo rows; returns own rows and halo rows as one tensor."""
    assert ctx.parts is not None
    if table in ctx.written:
        raise PartitionError(f"{user_line(node)}: rows are gathered from a tensor that is written to in place.")
    structural = not value(table).is_floating_point() or table in ctx.structural
    if halo.times > 1:
        table = ctx.call(aten.reshape.default, table, [-1, halo.times, *value(table).shape[1:]], like=node)
    rows = ctx.call(own.halo_exchange.default, table, halo.send, halo.halo, ctx.parts.group, [], like=node)
    shape = tuple(map(int, value(table).shape[1:]))
    ctx.log.exchanges.append(ExchangeRecord(shape, value(table).dtype, structural, user_line(node)))
    joined = ctx.call(aten.cat.default, [table, rows], like=node)
    return joined if halo.times == 1 else ctx.call(aten.flatten.using_ints, joined, 0, 1, like=node)
