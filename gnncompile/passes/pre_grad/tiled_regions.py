"""Forms regions with linear layers of any width on edges.

A region takes in reductions over the same edges whose messages share layers. A value that is computed from a layer, and
that other operations read as well (the state of an edge), becomes a result of the region, with a row per edge.

Before: ``e = e + linear(relu(linear(e, w) + a[src] + b[dst]), v)``; ``segment_reduce(e, dst, n, "sum")``; `e` goes on
After:  ``region([e, w, a, b, v], csr(dst, src), "<program>")`` with the results `e` and its sum
Why it pays: hidden rows of edges are neither written nor kept for the backward, which computes them again. The state
is read and written once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile import _compat, tuning
from gnncompile.device import device_of
from gnncompile.ir.bits import storage_type
from gnncompile.ir.region import Output, Region
from gnncompile.passes.analysis import aten, drop_unused, is_switch, own, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import RegionRecord, user_line
from gnncompile.passes.pointwise import NotFusable
from gnncompile.passes.pre_grad import edge_linears
from gnncompile.passes.pre_grad.layouts import Layouts
from gnncompile.passes.pre_grad.message import FLOATS
from gnncompile.passes.pre_grad.moving import to_move
from gnncompile.passes.pre_grad.stored_rows import readers_outside, sums_of_states
from gnncompile.passes.pre_grad.tiled_message import TiledMessage

_KINDS = ("sum", "mean", "max", "min")


def form(ctx: Context, layouts: Layouts) -> None:
    """Replaces reductions, and the layers on edges that they read, by regions."""
    if not ctx.options.edge_layers:
        return
    done: set[fx.Node] = set()
    for node in list(ctx.graph.nodes):
        if node not in done and _may_be_reduced(ctx, node) and _reads_layer(ctx, node):
            done.update(_Forming(ctx, layouts, node).run())
    drop_unused(ctx.graph)


def _may_be_reduced(ctx: Context, node: fx.Node) -> bool:
    """Whether a node is a reduction that a walk in tiles computes."""
    args: Any = node.args
    if node.target is not own.segment_reduce.default or args[3] not in _KINDS or node in ctx.written:
        return False
    src, index = args[:2]
    device = device_of(value(node).device)
    if not device.walks_tiles or not (device.runs_triton or _compat.has_products()) or value(src).dim() != 2:
        return False
    return value(src).dtype in FLOATS and index not in ctx.written


def _reads_layer(ctx: Context, node: fx.Node) -> bool:
    """Whether the message of a reduction reads a linear layer that no walk by rows computes."""
    layers = [at for at in _message(node) if at.target is aten.linear.default]
    return any(_is_wide(layer) and edge_linears.refusal(ctx, layer) for layer in layers)


def _is_wide(layer: fx.Node) -> bool:
    """Whether storing the rows of a layer, or the rows that it reads, costs more than computing them again."""
    weight: Any = layer.args[1]
    return any(int(size) >= tuning.TILES.layer_width for size in value(weight).shape)


def _message(reduction: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes with a row per edge from which the message of a reduction is computed."""
    message: Any = reduction.args[0]
    rows = value(message).shape[0]
    met: set[fx.Node] = set()
    todo = [message]
    while todo:
        at = todo.pop()
        if at in met or at.op != "call_function" or not isinstance(value(at), torch.Tensor):
            continue
        if value(at).dim() == 0 or not same_size(value(at).shape[0], rows):
            continue
        met.add(at)
        yield at
        if at.target not in (own.segment_reduce.default, own.region.default):
            todo.extend(at.all_input_nodes)


@dataclass
class _Draft:
    """A region, before it is placed in the graph.

    Attributes:
        message: The messages.
        reductions: The reductions that the region computes, with their region nodes.
        states: The values per edge that become results, with their region nodes.
    """

    message: TiledMessage
    reductions: dict[fx.Node, int]
    states: dict[fx.Node, int]

    def results(self) -> dict[fx.Node, int]:
        """Returns all nodes of the graph that the region's results replace."""
        return {**self.reductions, **self.states}

    def inside(self) -> set[fx.Node]:
        """Returns the nodes of the graph that the region takes the place of."""
        return {*self.message.computed(), *self.reductions}


class _Forming:
    """Forms the region around a reduction, with as many other reductions as share its layers.

    Args:
        ctx: The context of the passes.
        layouts: The layouts of all regions.
        first: The reduction.
    """

    def __init__(self, ctx: Context, layouts: Layouts, first: fx.Node) -> None:
        self.ctx, self.layouts, self.first = ctx, layouts, first
        nodes = ctx.graph.nodes if ctx.switches else ()
        self.switches = [n for n in nodes if n.op == "call_function" and is_switch(n) and n < first]
        self.why = ""
        self.better: set[fx.Node] = set()

    def run(self) -> list[fx.Node]:
        """Forms the region, and returns the reductions that it computes; none if there is no region."""
        made = self._attempt([self.first])
        if made is None:
            self.ctx.skip("linear layer stored per edge", self.why, self.first)
            return []
        for other in self._others():
            if self._shares(made, other):
                made = self._attempt([*made.reductions, other], made.message.stored) or made
        if not self._pays(made):
            return []
        self._place(made)
        return list(made.reductions)

    def _pays(self, made: _Draft) -> bool:
        """Whether the region saves more than the library would save that multiplies faster."""
        why = self._cost(made)
        if why:
            self.ctx.skip("linear layer stored per edge", why, self.first)
        return not why

    def _cost(self, made: _Draft) -> str:
        """Returns why the region does not pay; empty if it does."""
        nodes, first = made.message.builder.nodes, value(self.first)
        device, widest = device_of(first.device), max(n.shape[1] for n in nodes)
        dtype = made.message.factor(first.dtype)
        most = device.widest_tile(dtype, bool(made.states))
        layers = sum(n.op == "linear" and min(n.shape[1], nodes[n.args[0]].shape[1]) > 1 for n in nodes)
        if not device.walks_layers(dtype):
            return f"the library computes layers of {dtype} faster on this device"
        if widest > most:
            return f"found a value of {widest} channels, a walk takes at most {most}"
        if layers > device.most_tiled_layers:
            return f"found {layers} layers, a walk pays for at most {device.most_tiled_layers}"
        alone = not made.states or not device.runs_triton
        if alone and made.message.depth() <= 1 and not device.walks_one_layer(dtype):
            return "the library computes one layer faster"
        return ""

    def _others(self) -> list[fx.Node]:
        """Returns later reductions over the same edges."""
        found = self.ctx.graph.find_nodes(op="call_function", target=own.segment_reduce.default)
        same = [n for n in found if n.args[1:3] == self.first.args[1:3] and n > self.first]
        return [n for n in same if _may_be_reduced(self.ctx, n) and self.ctx.same_mode(n, self.first)]

    def _shares(self, made: _Draft, other: fx.Node) -> bool:
        """Whether a reduction reads a state, or a value from which the states are computed."""
        deep = {n for n, at in made.message.computed().items() if made.message.has_layer(at)}
        return any(n in deep for n in _message(other))

    def _attempt(self, reductions: list[fx.Node], stored: frozenset[fx.Node] = frozenset()) -> _Draft | None:
        """Returns a region of these reductions; values that can't be its results are stored outside."""
        while True:
            made = self._build(reductions, stored)
            if made is not None and (more := sums_of_states(made.message, reductions)):
                stored |= more
                self.better |= more
                continue
            if made is None or not any(map(made.message.has_layer, made.reductions.values())):
                self.why = self.why or "its values are used where the region can't have computed them yet"
                return None
            late = self._too_late(made)
            if not late:
                return made
            if late & set(reductions):
                self.why = "the results are needed before all values that the region reads"
                return None
            stored |= late

    def _build(self, reductions: list[fx.Node], stored: frozenset[fx.Node]) -> _Draft | None:
        message = TiledMessage(self.ctx, reductions[-1], stored)
        try:
            found = {node: _reduced(message, node) for node in reductions}
        except NotFusable as reason:
            self.why = str(reason)
            return None
        return _Draft(message, found, _states(message, set(reductions)))

    def _too_late(self, made: _Draft) -> frozenset[fx.Node]:
        """Returns the results that are read before the last tensor that the region reads, or that can't be results."""
        layout = self.layouts.of(made.message)
        inputs = self._inputs(made)
        unmasked = self.layouts.is_unmasked(layout)
        results, inside = made.results(), made.inside()
        outside = {node: readers_outside(node, inside if node in made.states else ()) for node in results}
        first = min((user for users in outside.values() for user in users), default=None)
        if first is not None and max(inputs) > first and not _switch_between(first, max(inputs)):
            self._move_up(inputs, first, results)
        last = max(inputs)
        return frozenset(
            node
            for node, at in results.items()
            if node in inputs
            or any(user <= last for user in outside[node])
            or (node in made.states and not (unmasked and _holds(made, node, at)))
        )

    def _inputs(self, made: _Draft) -> list[fx.Node]:
        """Returns the nodes after which the region may stand: what it reads, and the last switch of grad mode."""
        tensors = [tensor for tensor, _ in made.message.tensors]
        return [*self.layouts.of(made.message), *tensors, *self.switches]

    def _move_up(self, inputs: list[fx.Node], first: fx.Node, results: Iterable[fx.Node]) -> None:
        """Moves the region's inputs before the first reader of a result. Nothing moves if one depends on a result."""
        found = to_move(inputs, first, set(results), self.ctx.written)
        for node in found or ():
            first.prepend(node)

    # The graph.

    def _place(self, made: _Draft) -> None:
        """Puts the region into the graph, after the last tensor that it reads."""
        message, ctx = made.message, self.ctx
        outputs = [_output(message, node, at) for node, at in made.results().items()]
        region = message.builder.finish(outputs)
        with ctx.after(self._inputs(made)):
            region, call = self.layouts.call(message, region, like=self.first)
            items = [ctx.call(operator.getitem, call, k, like=node) for k, node in enumerate(made.results())]
        self._replace(made, items)
        ctx.stored |= self.better & message.stored
        self._log(made, region)

    def _replace(self, made: _Draft, items: Iterable[fx.Node]) -> None:
        inside = made.inside()
        for node, item in zip(made.results(), items, strict=True):
            for user in readers_outside(node, inside if node in made.states else ()):
                user.replace_input_with(node, item)

    def _log(self, made: _Draft, region: Region) -> None:
        for what, reason, node in made.message.skipped:
            self.ctx.skip(what, reason, node)
        shape = ", ".join(str(tuple(value(node).shape)) for node in made.results())
        self.ctx.log.regions.append(RegionRecord(region.spec, user_line(self.first), shape))


def _switch_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether grad mode or autocast changes between two nodes."""
    while first is not last:
        first = first.next
        if first.op == "call_function" and is_switch(first):
            return True
    return False


def _reduced(message: TiledMessage, node: fx.Node) -> int:
    """Returns the region node of a reduction."""
    src, _, _, kind = node.args
    return message.reduced(str(kind), message.builder.on_edges(message.lower(src, (1,), strict=True)))  # type: ignore[arg-type]


def _states(message: TiledMessage, reductions: set[fx.Node]) -> dict[fx.Node, int]:
    """Returns the values that are computed from a layer, and that nodes outside of the region read."""
    computed = message.computed()
    inside = reductions.union(computed)
    read = {node: at for node, at in computed.items() if readers_outside(node, inside) and message.has_layer(at)}
    return {node: message.builder.on_edges(at) for node, at in read.items()}


def _holds(made: _Draft, node: fx.Node, at: int) -> bool:
    """Whether a value per edge of the region has all elements of a tensor, and a type that is stored."""
    trailing = [int(size) for size in value(node).shape[1:]]
    return value(node).dtype in FLOATS and math.prod(trailing) == math.prod(made.message.builder.nodes[at].shape)


def _output(message: TiledMessage, node: fx.Node, at: int) -> Output:
    trailing = tuple(int(size) for size in value(node).shape[1:])
    return Output(at, storage_type(value(node).dtype), trailing)
