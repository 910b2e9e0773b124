"""Over one part of a graph, the rows that edges read of other parts are exchanged, once for each gathered tensor.

Before: ``index_select(x, 0, src)``, where `src` counts own rows and then halo rows, and `x` holds own rows
After:  ``index_select(halo_exchange(x, send), 0, src)``, where the exchange returns own rows, then halo rows
Why it pays: linear layers have found their place by now, so rows are exchanged where they are narrow. What only depends
        on the graph, as degrees, is exchanged once per graph.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from gnncompile.exc import PartitionError
from gnncompile.passes.analysis import aten, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import ExchangeRecord, user_line
from gnncompile.passes.partitioned.parts import Halo

_VIEWS = {aten.view.default, aten.reshape.default}


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
    shape = tuple(map(int, value(table).shape[1:]))
    sent = shape if halo.times == 1 else (halo.times, *shape)
    ctx.log.exchanges.append(ExchangeRecord(sent, value(table).dtype, structural, user_line(node)))
    rows = _as_rows(ctx, table, halo.times, node)
    joined = ctx.call(own.halo_exchange.default, rows, halo.send, halo.halo, ctx.parts.group, [], like=node)
    if halo.times == 1 and tuple(value(rows).shape[1:]) == shape:
        return joined
    return ctx.call(aten.reshape.default, joined, [-1, *shape], like=node)


def _as_rows(ctx: Context, table: fx.Node, times: int, node: fx.Node) -> fx.Node:
    """Returns a table with one row of columns per node. Its producer may then write right into the exchanged rows."""
    while times == 1 and table.target in _VIEWS and value(table).dim() > 2:
        source: Any = table.args[0]
        if not same_size(value(table).shape[0], value(source).shape[0]) or source in ctx.written:
            break
        table = source
    columns = times * math.prod(map(int, value(table).shape[1:]))
    if columns == 0 or (times == 1 and value(table).dim() <= 2):
        return table
    return ctx.call(aten.reshape.default, table, [-1, columns], like=node)
