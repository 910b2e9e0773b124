"""Regions that read the same rows over the same edges share one walk. Runs before differentiation.

Before: ``a = region([x], csr, "max")[0]; b = region([x], csr, "sum of squares")[0]``
After:  ``both = region([x], csr, "max, sum of squares"); a = both[0]; b = both[1]``
Why it pays: rows are gathered once for all aggregations of a layer, and once again for the gradients of all of them.
The state of an edge is stored by the walk that also sums it.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from gnncompile.ir.merge import Part, merge
from gnncompile.ir.region import Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import (
    aten,
    drop_unused,
    is_switch,
    origins,
    own,
    structural_nodes,
    value,
    written_nodes,
)
from gnncompile.passes.context import Context
from gnncompile.passes.log import RegionRecord, user_line
from gnncompile.passes.pre_grad.moving import to_move

MOST_REDUCTIONS = 8
"""The most reductions and softmaxes in one region: each keeps a row of its own in registers."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    written = written_nodes(ctx.graph)
    calls = _calls(ctx, written)
    while calls:
        calls.sort(key=lambda call: call.node)  # an earlier merge may have moved some
        group = _group(ctx, calls, written)
        calls = [c for c in calls if c not in group]
        if len(group) > 1:
            _replace(ctx, group, written)
    drop_unused(ctx.graph)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a region that may be merged.

    Attributes:
        node: The call.
        region: Its region.
        kept: Indices of the outputs that are read.
        rows: The tensors that the region reads once per edge, and the elements per edge.
        mode: The number of switches (of grad mode or autocast) before the call.
    """

    node: fx.Node
    region: Region
    kept: tuple[int, ...]
    rows: dict[fx.Node, int]
    mode: int

    @property
    def part(self) -> Part:
        return Part(self.region, self.node.args[0], self.kept)  # type: ignore[arg-type]

    def layout(self) -> list[fx.Node]:
        return list(self.node.args[1])  # type: ignore[arg-type]

    def edges(self) -> tuple[Any, ...]:
        """Returns the arguments of the layout, with the other end of the edges only if the region reads it."""
        index, other, num_rows, num_columns, alive = self.layout()[0].args[0].args[:5]  # type: ignore[union-attr]
        ends = (other, num_columns) if self.region.needs_opposite else ()
        return (index, num_rows, alive, *ends)


def _calls(ctx: Context, written: set[fx.Node]) -> list[_Call]:
    if len(ctx.graph.find_nodes(op="call_function", target=own.region.default)) < 2:
        return []
    structural, switches = structural_nodes(ctx.graph, ctx.written), 0
    found = []
    for node in ctx.graph.nodes:
        switches += node.op == "call_function" and is_switch(node)
        if node.target is own.region.default and node not in structural and node not in written:
            call = _call(node, switches)
            if call.kept and not call.region.tiled:
                found.append(call)
    return found


def _call(node: fx.Node, mode: int) -> _Call:
    region: Region = parse(node.args[2])  # type: ignore[arg-type]
    kept = tuple(sorted({int(user.args[1]) for user in node.users}))  # type: ignore[arg-type]
    rows: dict[fx.Node, int] = {}
    for read in region.inputs:
        if read.space not in (region.by, Space.PARAMETER, Space.FEATURE):
            rows[node.args[0][int(read.value or 0)]] = prod(read.shape)  # type: ignore[index]
    return _Call(node, region, kept, rows, mode)


def _group(ctx: Context, calls: list[_Call], written: set[fx.Node]) -> list[_Call]:
    """Returns the first call, and the calls that can share its walk."""
    group = calls[:1]
    for call in calls[1:]:
        if not any(_alike(call, other) and _share(call, other) for other in group):
            continue
        if not all(_alike(call, other) for other in group) or _before(call, group, written) is None:
            continue
        tried = merge([c.part for c in (*group, call)])
        if tried.region.grid not in {c.region.grid for c in (*group, call)}:
            continue  # one call tiles rows, another heads: the merged tile would be larger than each needs
        if len(tried.region.reductions) + len(tried.region.softmaxes) > MOST_REDUCTIONS:
            ctx.skip("one walk for several aggregations", f"a region holds {MOST_REDUCTIONS} reductions", call.node)
            continue
        group.append(call)
    return group


def _alike(one: _Call, other: _Call) -> bool:
    """Whether two calls walk the same edges, with the same compute type and the same mode."""
    if one.region.by is not other.region.by or one.region.compute != other.region.compute or one.mode != other.mode:
        return False
    return all(a is b or a == b for a, b in zip(one.edges(), other.edges(), strict=False))


def _share(one: _Call, other: _Call) -> bool:
    """Whether two regions share a softmax, or at least half of the elements that the smaller region gathers."""
    common = sum(size for node, size in one.rows.items() if node in other.rows)
    if common == 0:
        return False
    if 2 * common >= min(sum(one.rows.values()), sum(other.rows.values())):
        return True
    both = len(one.region.softmaxes) + len(other.region.softmaxes)
    return len(merge([one.part, other.part]).region.softmaxes) < both


def _before(call: _Call, group: list[_Call], written: set[fx.Node]) -> list[fx.Node] | None:
    """Returns the nodes that must move before the first call of a group, so that `call` may join. None if one cannot.

    A node that depends on a member's result cannot move: the merged region would depend on itself.
    """
    return to_move(call.node.all_input_nodes, group[0].node, {c.node for c in group}, written)


def _replace(ctx: Context, group: list[_Call], written: set[fx.Node]) -> None:
    """Replaces the calls of a group by one merged call, at the place of the first."""
    first = group[0].node
    for k, call in enumerate(group[1:], 1):
        for node in _before(call, group[:k], written) or []:
            first.prepend(node)
    merged = merge([c.part for c in group])
    tensors = list(merged.tensors)
    region = with_residuals(merged.region, tuple(t in ctx.needs_grad for t in tensors))
    verify(region)
    with ctx.graph.inserting_before(first):
        out = ctx.call(own.region.default, tensors, _layout(group), region.spec, like=first)
        out.meta["origins"] = tuple(name for c in group for name in origins(c.node))
        items = [ctx.call(operator.getitem, out, k, like=first) for k in range(len(merged.region.outputs))]
    _record(ctx, group, region, items)
    for call, places in zip(group, merged.outputs, strict=True):
        position = dict(zip(call.kept, places, strict=True))
        for user in list(call.node.users):
            result = items[position[user.args[1]]]  # type: ignore[index]
            if out in ctx.needs_grad and call.node not in ctx.needs_grad:
                result = _without_gradient(ctx, result)
            user.replace_all_uses_with(result)
            ctx.graph.erase_node(user)
        ctx.graph.erase_node(call.node)


def _without_gradient(ctx: Context, result: fx.Node) -> fx.Node:
    """Detaches a result whose original call needed no gradient, since the merged call needs one."""
    with ctx.graph.inserting_after(result):
        made = ctx.call(aten.detach.default, result, like=result)
    ctx.needs_grad.discard(made)
    return made


def _layout(group: list[_Call]) -> list[fx.Node]:
    """Returns a layout that serves all calls: with the other end of the edges and its walk, if any call needs them."""
    return max(group, key=lambda c: (c.region.needs_opposite, len(c.layout()))).layout()


def _record(ctx: Context, group: list[_Call], region: Region, items: list[fx.Node]) -> None:
    """Replaces the log records of the group by one record, at the place of the first."""
    records, places = ctx.log.regions, []
    for call in group:
        places.append(ctx.log.position(call.region.spec, user_line(call.node)))
        del records[places[-1]]
    shapes = Counter(str(tuple(value(item).shape)) for item in items)
    shape = ", ".join(f"{count} x {text}" if count > 1 else text for text, count in shapes.items())
    records.insert(places[0], RegionRecord(region.spec, user_line(group[0].node), shape))
