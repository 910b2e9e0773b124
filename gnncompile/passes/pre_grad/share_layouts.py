"""Regions that read nothing at the other end of edges walk a layout that is there for other regions.

Before: ``a = csr(row, col, n, m); y = region([x], a); b = csr(row, row, n, n); z = region([e], b)``
After:  ``a = csr(row, col, n, m); y = region([x], a); z = region([e], a)``
Why it pays: the edges are sorted once less for each new graph. Gradients of both regions walk the same edges in the
same order, so that one can read what the other repeats for each edge.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile.ir.region import Region, parse
from gnncompile.passes.analysis import own
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    layouts = ctx.graph.find_nodes(op="call_function", target=own.csr.default)
    for layout in layouts:
        if layout.args[0] is layout.args[1] and _ignores_other_end(layout):
            found = next((other for other in layouts if _can_replace(layout, other)), None)
            if found is not None:
                _replace(layout, found)


def _ignores_other_end(layout: fx.Node) -> bool:
    """Whether only regions walk a layout, and none reads rows at the other end of its edges."""
    parts = list(layout.users)
    readers = [reader for part in parts if part.args[1] == 1 for reader in part.users]
    return all(part.target is operator.getitem for part in parts) and all(map(_reads_own_rows, readers))


def _reads_own_rows(reader: fx.Node) -> bool:
    """Whether a node is a region that reads no rows at the other end of edges."""
    if reader.target is not own.region.default:
        return False
    given: Any = reader.args
    region: Region = parse(given[2])
    return len(given[1]) == 3 and not region.needs_opposite


def _can_replace(layout: fx.Node, other: fx.Node) -> bool:
    """Whether another layout has the same edges in the same order, and is or can be made before this one is read."""
    if other.args[0] is other.args[1] or any(_argument(other, k) != _argument(layout, k) for k in (0, 2, 4, 5)):
        return False
    parts = _parts(other)
    if any(part.args[1] not in parts for part in layout.users):
        return False
    return _can_precede(other, layout) or all(
        parts[part.args[1]] < reader for part in layout.users for reader in part.users
    )


def _can_precede(other: fx.Node, layout: fx.Node) -> bool:
    return all(given < layout for given in other.all_input_nodes)


def _argument(layout: fx.Node, k: int) -> Any:
    """Returns an argument of a layout: index, other, num_rows, num_columns, alive, wrap_rows or wrap_columns."""
    return layout.args[k] if k < len(layout.args) else False


def _parts(layout: fx.Node) -> dict[Any, fx.Node]:
    """Returns the nodes that pick rowptr, col and edge of a layout, by their number."""
    return {part.args[1]: part for part in layout.users if part.target is operator.getitem}


def _replace(layout: fx.Node, other: fx.Node) -> None:
    """Lets the readers of a layout read another one."""
    parts = _parts(other)
    if layout < other and _can_precede(other, layout):
        for node in (other, *parts.values()):
            layout.prepend(node)
    for part in list(layout.users):
        part.replace_all_uses_with(parts[part.args[1]])
        layout.graph.erase_node(part)
    layout.graph.erase_node(layout)
