"""One captured graph on its way through the passes, and how to add a node that knows its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gnncompile.layout.structure_program import StructureProgram
from gnncompile.options import Options
from gnncompile.passes.analysis import (
    aten,
    carries_gradient,
    is_switch,
    origins,
    structural_nodes,
    value,
    written_nodes,
)
from gnncompile.passes.log import PassLog, Skip, user_line


@dataclass(frozen=True)
class HopPrefix:
    """The edges to the first nodes of a sampled mini-batch; they come from the first of all sources.

    Attributes:
        of: The ends of all edges, of which these come first.
        nodes: ``[nodes, 0]``.
        sources: ``[sources, 0]``.
        ends: Sources and destinations, int32 ``[edges]``.
        rowptr: By destination.
        by_source: rowptr, col and edge by source; none if they did not come with the mini-batch.
    """

    of: tuple[fx.Node, fx.Node]
    nodes: fx.Node
    sources: fx.Node
    ends: tuple[fx.Node, fx.Node]
    rowptr: fx.Node
    by_source: list[fx.Node]


@dataclass
class PaddedInputs:
    """What is known of a graph's padded inputs.

    Attributes:
        counts: How many things there are of each kind, int64 ``[kinds]``.
        sizes: For the size of padded inputs, of which kind the things are.
        values: For padded inputs that number things, of which kind these are.
        tensors: All padded inputs.
        hop_prefixes: Of a sampled mini-batch, the smallest first.
    """

    counts: fx.Node
    sizes: dict[Any, int] = field(default_factory=dict)
    values: dict[fx.Node, int] = field(default_factory=dict)
    tensors: set[fx.Node] = field(default_factory=set)
    hop_prefixes: list[HopPrefix] = field(default_factory=list)

    def kind(self, size: Any) -> int | None:
        """Of which kind the things are of which there are so many; None for others."""
        return self.sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else None

    def is_hop_prefix(self, kind: int | None, other: int | None) -> bool:
        """Whether things of one kind are the first of another kind."""
        if not self.hop_prefixes or kind is None or other is None:
            return False
        order = [
            self.kind(value(node).shape[0])
            for node in (*(f.nodes for f in self.hop_prefixes), self.hop_prefixes[-1].sources)
        ]
        order.append(self.values[self.hop_prefixes[0].of[1]])
        return kind in order and other in order and order.index(kind) < order.index(other)


@dataclass
class Context:
    """One graph on its way through the passes.

    Attributes:
        gm: The graph, in aten ops, every node with its fake value in ``meta["val"]``.
        fake_mode: The mode of those fake values.
        needs_grad: Nodes that a gradient flows through.
        options: What the user turned off.
        seeds: What the masks of dropouts in messages are made from.
        layouts: Layouts that came with the inputs: for an index and the other ends, rowptr, col and edge (none where
            the edges are in that order).
        padded: What is known of padded inputs, if there are any.
        edge_lists: Inputs that are both rows of an edge list of the caller's.
        leads_on: Whether another captured graph may go on with the results.
        structure: The structure program, once it is split off.
    """

    gm: fx.GraphModule
    fake_mode: Any
    needs_grad: set[fx.Node]
    options: Options
    log: PassLog = field(default_factory=PassLog)
    shared_nodes: dict[str, fx.Node] = field(default_factory=dict)
    seeds: dict[fx.Node, fx.Node] = field(default_factory=dict)
    layouts: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = field(default_factory=dict)
    padded: PaddedInputs | None = None
    edge_lists: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)
    leads_on: bool = False
    structure: StructureProgram | None = None

    @cached_property
    def written(self) -> set[fx.Node]:
        """:func:`written_nodes` at the time when they are first asked for."""
        return written_nodes(self.graph)

    @cached_property
    def structural(self) -> dict[fx.Node, bool]:
        """:func:`structural_nodes` at the time of region forming; empty where structure is not hoisted."""
        return structural_nodes(self.graph, self.written) if self.options.hoist else {}

    @cached_property
    def switches(self) -> dict[fx.Node, int]:
        """For each node how many switches (of gradients, autocast) stand before it; empty without any."""
        count, found = 0, {}
        for node in self.gm.graph.nodes:
            count += node.op == "call_function" and is_switch(node)
            found[node] = count
        return found if count else {}

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.gm.graph

    def same_mode(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes run under the same gradient and autocast modes."""
        return not self.switches or self.switches.get(node) == self.switches.get(other)

    def find_value(self, node: fx.Node) -> None:
        """Works out the fake value of a call, of those of what it reads."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with self.fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def call(self, target: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """Adds a call at the current insertion point, with its fake value (and the user's line of `like`)."""
        node = self.graph.call_function(target, args, kwargs)
        self.find_value(node)
        if carries_gradient(node) and any(n in self.needs_grad for n in node.all_input_nodes):
            self.needs_grad.add(node)
        if like is not None:
            node.meta["origins"] = origins(like)
            node.meta.update({name: like.meta[name] for name in _HANDED_ON if name in like.meta})
        return node

    def added(self, terms: Sequence[Any], like: fx.Node) -> Any:
        """Adds the additions of tensors, from left to right, at the current insertion point."""
        return reduce(lambda a, b: self.call(aten.add.Tensor, a, b, like=like), terms)

    def inputs_first(self) -> fx.Node:
        """Moves all inputs in front of all operations, and returns the last one."""
        inputs: list[fx.Node] = [n for n in self.graph.nodes if n.op == "placeholder"]
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node in inputs:
            first.prepend(node)
        return inputs[-1]

    def inline(self, function: Callable[..., Any], *args: Any, like: fx.Node | None = None) -> fx.Node:
        """Adds the operations of a function that returns one tensor at the current insertion point."""
        inputs = [a for a in args if isinstance(a, fx.Node)]
        places = iter(range(len(inputs)))
        where = [next(places) if isinstance(a, fx.Node) else None for a in args]

        def run(*values: Any) -> Any:
            return function(*(a if w is None else values[w] for a, w in zip(args, where, strict=True)))

        trace: Any = make_fx(run, pre_dispatch=True)
        with self.fake_mode:
            traced = trace(*map(value, inputs))
        copies = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        for inner in traced.graph.nodes:
            if inner.op == "output":
                made: fx.Node = copies[inner.args[0]]
                return made
            if inner.op != "placeholder":
                copies[inner] = self.graph.node_copy(inner, lambda n: copies[n])
                if like is not None:
                    copies[inner].meta["origins"] = origins(like)
                    if "stack_trace" in like.meta:
                        copies[inner].meta["stack_trace"] = like.meta["stack_trace"]
        raise AssertionError("a graph has an output")

    def skip(self, what: str, reason: str, node: fx.Node) -> None:
        """Records that something was not fused."""
        found = Skip(what, reason, user_line(node))
        if found not in self.log.skipped:
            self.log.skipped.append(found)


_HANDED_ON = ("stack_trace", "recompute", "ac_graph_id")
"""What a node has of the one that it was made for: the user's line, and whether it is in a checkpoint."""
