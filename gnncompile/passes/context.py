"""The state of one captured graph during the passes, with methods that add nodes and their fake values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
    autocasts,
    carries_gradient,
    enters_autocast,
    is_switch,
    origins,
    structural_nodes,
    value,
    written_nodes,
)
from gnncompile.passes.log import PassLog, Skip, user_line
from gnncompile.passes.partitioned.parts import Parts


@dataclass(frozen=True)
class HopPrefix:
    """The edges to the first nodes of a sampled mini-batch. Their sources are the first nodes too.

    Attributes:
        of: The sources and destinations of all edges; the edges of the prefix come first.
        nodes: A tensor ``[nodes, 0]``, whose size is the number of destinations.
        sources: A tensor ``[sources, 0]``, whose size is the number of sources.
        ends: The sources and destinations of the prefix, int32 ``[edges]`` each.
        rowptr: The row pointer by destination.
        by_source: rowptr, col and edge by source; empty if they did not come with the mini-batch.
    """

    of: tuple[fx.Node, fx.Node]
    nodes: fx.Node
    sources: fx.Node
    ends: tuple[fx.Node, fx.Node]
    rowptr: fx.Node
    by_source: list[fx.Node]


@dataclass
class PaddedInputs:
    """The row types, valid rows and hop prefixes of a graph's padded inputs.

    Attributes:
        counts: The number of valid rows of each row type, int64 ``[kinds]``.
        sizes: From the symbol of a padded size to the row type.
        values: From padded inputs that hold indices to the row type that they index.
        tensors: All padded inputs.
        hop_prefixes: The hop prefixes of a sampled mini-batch, the smallest first.
    """

    counts: fx.Node
    sizes: dict[Any, int] = field(default_factory=dict)
    values: dict[fx.Node, int] = field(default_factory=dict)
    tensors: set[fx.Node] = field(default_factory=set)
    hop_prefixes: list[HopPrefix] = field(default_factory=list)

    def kind(self, size: Any) -> int | None:
        """Returns the row type that has this padded size, or None for other sizes."""
        return self.sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else None

    def is_hop_prefix(self, kind: int | None, other: int | None) -> bool:
        """Whether the rows of type `kind` are the first rows of type `other`."""
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
    """One graph during the passes.

    Attributes:
        gm: The graph in aten ops. Every node has its fake value in ``meta["val"]``.
        fake_mode: The mode of those fake values.
        needs_grad: Nodes that a gradient flows through.
        options: The options of gnncompile; some turn passes off.
        stored: Values per edge that regions read instead of computing them, since that costs less or since other
            operations read them too.
        seeds: From a dropout in a message to the node of the seed that its mask is made from.
        layouts: Layouts that came with the inputs: from an index and the other ends to rowptr, col and edge. `edge` is
            missing where the edges are already in the order of the layout.
        padded: The padded inputs, or None if no input is padded.
        edge_lists: Pairs of inputs that are the two rows of one edge list of the caller.
        leads_on: Whether another captured graph may take the results as its inputs.
        parts: The partition whose part the graph runs over; None for a whole graph.
        structure: The structure program, or None until ``hoist_structure`` splits it off.
    """

    gm: fx.GraphModule
    fake_mode: Any
    needs_grad: set[fx.Node]
    options: Options
    log: PassLog = field(default_factory=PassLog)
    shared_nodes: dict[str, fx.Node] = field(default_factory=dict)
    stored: set[fx.Node] = field(default_factory=set)
    seeds: dict[fx.Node, fx.Node] = field(default_factory=dict)
    layouts: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = field(default_factory=dict)
    padded: PaddedInputs | None = None
    edge_lists: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)
    leads_on: bool = False
    parts: Parts | None = None
    structure: StructureProgram | None = None

    @cached_property
    def written(self) -> set[fx.Node]:
        """The result of :func:`written_nodes` at the first access."""
        return written_nodes(self.graph)

    @cached_property
    def structural(self) -> dict[fx.Node, bool]:
        """The nodes that compute graph structure, found at the first access; empty if structure stays in the step."""
        return structural_nodes(self.graph, self.written) if self.options.hoist else {}

    @cached_property
    def switches(self) -> dict[fx.Node, int]:
        """The number of switches (of grad mode or autocast) before each node; empty for a graph without switches."""
        count, found = 0, {}
        for node in self.gm.graph.nodes:
            count += node.op == "call_function" and is_switch(node)
            found[node] = count
        return found if count else {}

    @cached_property
    def _has_autocast(self) -> bool:
        return any(enters_autocast(node) for node in self.graph.nodes)

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.gm.graph

    def same_mode(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes run under the same gradient and autocast modes."""
        return not self.switches or self.switches.get(node) == self.switches.get(other)

    def movable(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether a node and its inputs keep their values, and the node runs under the modes of another node."""
        return self.same_mode(node, other) and self.written.isdisjoint([node, *node.all_input_nodes])

    def find_value(self, node: fx.Node) -> None:
        """Computes the fake value of a call from the fake values of its arguments, in the call's autocast modes."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with self.tracing_at(node):
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def tracing_at(self, node: fx.Node) -> Iterator[None]:
        """Operations make fake values in this context, in the autocast modes that a node runs in."""
        with self.fake_mode, self.autocast_of(node):
            yield

    def autocast_of(self, node: fx.Node) -> AbstractContextManager[object]:
        """Returns the autocast modes that a node runs in, as a context."""
        modes = ExitStack()
        for kind, dtype, enabled, _ in reversed(autocasts(node) if self._has_autocast else ()):
            modes.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        return modes

    def call(self, target: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """Adds a call at the current insertion point, with its fake value and the user's line of `like`."""
        node = self.graph.call_function(target, args, kwargs)
        self.find_value(node)
        self._mark_gradient(node)
        if like is not None:
            node.meta["origins"] = origins(like)
            node.meta.update({name: like.meta[name] for name in _HANDED_ON if name in like.meta})
            if like in self.__dict__.get("switches", ()):  # read already
                self.switches[node] = self.switches[like]
        return node

    @property
    def runs_post_grad(self) -> bool:
        """Whether passes run on the differentiated graph."""
        return self.options.inductor and not self.options.double_backward

    @property
    def is_plain(self) -> bool:
        """Whether the graph is captured for graphs as they are: neither padded nor for one part of a partition."""
        return self.parts is None and self.padded is None

    @contextmanager
    def after(self, nodes: Iterable[Any]) -> Iterator[None]:
        """Adds nodes right after the last of some nodes, inside this block. Sizes that are numbers do not count."""
        last = max(n for n in nodes if isinstance(n, fx.Node))
        with self.graph.inserting_after(last):
            marker = self.graph.call_function(torch.ops.aten.sym_size.int, (last, 0))
        with self.graph.inserting_before(marker):
            yield
        self.graph.erase_node(marker)

    def _mark_gradient(self, node: fx.Node) -> None:
        """Adds a new node to :attr:`needs_grad` if a gradient flows through it."""
        if carries_gradient(node) and any(n in self.needs_grad for n in node.all_input_nodes):
            self.needs_grad.add(node)

    def in_dtype_of(self, node: fx.Node, other: fx.Node) -> fx.Node:
        """Returns a node in the dtype of another one, at the current insertion point.

        Under autocast an operation may have another dtype than the operations that replace it.
        """
        dtype = value(other).dtype
        return node if value(node).dtype == dtype else self.call(aten._to_copy.default, node, dtype=dtype, like=other)

    def added(self, terms: Sequence[Any], like: fx.Node) -> Any:
        """Adds the sum of tensors, from left to right, at the current insertion point, and returns its node."""
        return reduce(lambda a, b: self.call(aten.add.Tensor, a, b, like=like), terms)

    def inputs_first(self) -> fx.Node:
        """Moves all inputs before all operations, and returns the last input."""
        inputs: list[fx.Node] = [n for n in self.graph.nodes if n.op == "placeholder"]
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node in inputs:
            first.prepend(node)
        return inputs[-1]

    def inline(self, function: Callable[..., Any], *args: Any, like: fx.Node | None = None) -> fx.Node:
        """Adds the operations of a function at the current insertion point. Returns the node of its one result."""
        inputs = [a for a in args if isinstance(a, fx.Node)]
        places = iter(range(len(inputs)))
        where = [next(places) if isinstance(a, fx.Node) else None for a in args]

        def run(*values: Any) -> Any:
            return function(*(a if w is None else values[w] for a, w in zip(args, where, strict=True)))

        trace: Any = make_fx(run, pre_dispatch=True)
        with self.fake_mode if like is None else self.tracing_at(like):
            traced = trace(*map(value, inputs))
        copies = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        for inner in traced.graph.nodes:
            if inner.op == "output":
                made: fx.Node = copies[inner.args[0]]
                return made
            if inner.op != "placeholder":
                copies[inner] = self.graph.node_copy(inner, lambda n: copies[n])
                self._mark_gradient(copies[inner])
                if like is not None:
                    copies[inner].meta["origins"] = origins(like)
                    if "stack_trace" in like.meta:
                        copies[inner].meta["stack_trace"] = like.meta["stack_trace"]
        raise AssertionError("a graph has an output")

    def forget_erased(self) -> None:
        """Forgets shared nodes that are no longer in the graph."""
        left = set(self.graph.nodes)
        self.shared_nodes = {key: node for key, node in self.shared_nodes.items() if node in left}

    def skip(self, what: str, reason: str, node: fx.Node) -> None:
        """Records that an operation was not fused, and why."""
        found = Skip(what, reason, user_line(node))
        if found not in self.log.skipped:
            self.log.skipped.append(found)

    def unskip(self, what: str, reason: str, node: fx.Node) -> None:
        """Forgets that an operation was not fused: a later pass has fused it after all."""
        gone = Skip(what, reason, user_line(node))
        self.log.skipped[:] = [skip for skip in self.log.skipped if skip != gone]


_HANDED_ON = ("stack_trace", "recompute", "ac_graph_id")
"""The metadata that a new node takes from `like`: the user's line, and the marks of a checkpoint."""
