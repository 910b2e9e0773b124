"""What passes share: the graph, the record of what they did, and how to add a node that knows its value."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gnncompile import _compat
from gnncompile.layout.structure_program import StructureProgram

aten = torch.ops.aten
own = torch.ops.gnncompile


@dataclass(frozen=True)
class RegionRecord:
    """A region that was formed: its program, the user's line, and how many gradient tensors it serves."""

    spec: str
    line: str
    shape: str


@dataclass(frozen=True)
class Skip:
    """Something that was not fused, why, and the user's line."""

    what: str
    reason: str
    line: str


@dataclass
class PassLog:
    """What the passes did to one captured graph.

    Attributes:
        padded: For each result, which of its dimensions are padded, and of which kind they are; None without padding.
        least: How many things of a kind there must be at least; None for as many as any number among the arguments.
    """

    regions: list[RegionRecord] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    hoisted: int = 0
    syncs: list[Skip] = field(default_factory=list)
    padded: list[dict[int, int]] | None = None
    least: list[tuple[int, int | None]] = field(default_factory=list)

    def position(self, spec: str, line: str) -> int:
        """Where among the regions the first one with this program and line is."""
        return next(i for i, r in enumerate(self.regions) if (r.spec, r.line) == (spec, line))


class Masked(_compat.Recapture):
    """A masked edge tensor reached something that would count dead edges; capture again without masks."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(what)
        self.skip = Skip(what, "reads edges whose removed self loops are only masked; captured with exact sizes", line)


class Nested(_compat.Recapture):
    """A graph that is not ours to take apart holds what only our passes understand; capture again as PyG wrote it."""

    def __init__(self, skip: Skip) -> None:
        super().__init__(skip.reason)
        self.skip = skip


PADDING = "padding of mini-batches to buckets"


class NotPadded(_compat.Recapture):
    """The graph does something with a padded mini-batch that can't be undone; run it with true sizes."""

    def __init__(self, what: str, line: str) -> None:
        super().__init__(what)
        self.skip = Skip(PADDING, what, line)


@dataclass(frozen=True)
class Front:
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
        whole: All padded inputs.
        fronts: Of a sampled mini-batch, the smallest first.
    """

    counts: fx.Node
    sizes: dict[Any, int] = field(default_factory=dict)
    values: dict[fx.Node, int] = field(default_factory=dict)
    whole: set[fx.Node] = field(default_factory=set)
    fronts: list[Front] = field(default_factory=list)

    def kind(self, size: Any) -> int | None:
        """Of which kind the things are of which there are so many; None for others."""
        return self.sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else None

    def is_front(self, kind: int | None, other: int | None) -> bool:
        """Whether things of one kind are the first of another kind."""
        if not self.fronts or kind is None or other is None:
            return False
        order = [self.kind(value(node).shape[0]) for node in (*(f.nodes for f in self.fronts), self.fronts[-1].sources)]
        order.append(self.values[self.fronts[0].of[1]])
        return kind in order and other in order and order.index(kind) < order.index(other)


class WrittenInput(_compat.Recapture):
    """The graph writes to an edge list that the caller took apart; capture again with the list itself."""


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
    options: dict[str, Any]
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
        return structural_nodes(self) if self.options["hoist"] else {}

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


def origins(node: fx.Node) -> tuple[str, ...]:
    """Names of the traced operations that a node was made for; of a traced one its own."""
    return node.meta.get("origins", (node.name,))  # type: ignore[no-any-return]


def carries_gradient(node: fx.Node) -> bool:
    """Whether a node's value can have a gradient at all: sizes and indices have none, whatever they were made from."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return found.is_floating_point() or found.is_complex()
    return isinstance(found, (tuple, list))


def value(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def is_tensor(node: Any) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1."""
    return isinstance(size, int) and size == 1


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every graph, without adding a guard."""
    return bool(statically_known_true(a == b))


def known_size(size: Any) -> int | None:
    """A size that is the same number for every graph, without adding a guard; None for others."""
    now = _compat.size_now(size)
    return now if now is not None and same_size(size, now) else None


def guarded_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; where they only happen to be, a graph in which they are not is captured anew."""
    if same_size(a, b):
        return True
    now = _compat.size_now(a)
    return now is not None and now == _compat.size_now(b) and bool(a == b)


def alike(one: Any, other: Any) -> bool:
    """Whether two nodes are tensors of the same type and size, for every graph."""
    return same_shape(one, other) and value(one).dtype == value(other).dtype


def same_shape(one: Any, other: Any) -> bool:
    """Whether two nodes are tensors of the same size, for every graph."""
    if not is_tensor(one) or not is_tensor(other):
        return False
    a, b = value(one).shape, value(other).shape
    return len(a) == len(b) and all(map(same_size, a, b))


def is_packed(fake: torch.Tensor) -> bool:
    """Whether the elements stand in memory row after row, for every graph."""
    expected: Any = 1
    for size, stride in zip(reversed(fake.shape), reversed(fake.stride()), strict=True):
        if not is_one(size) and not same_size(stride, expected):
            return False
        expected = expected * size
    return True


def per_row(factor: Any) -> bool:
    """Whether a factor, a number or a tensor, is the same for all features of a row."""
    if not is_tensor(factor):
        return True
    shape = value(factor).shape
    return len(shape) == 0 or (isinstance(shape[-1], int) and shape[-1] == 1)


def sums_rows(node: fx.Node) -> bool:
    """Whether a node sums over the rows of a matrix, in the type that it has."""
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    return node.args[1] in ([0], [-2]) and value(node.all_input_nodes[0]).dim() == 2


def is_switch(node: fx.Node) -> bool:
    """Whether a node changes how later nodes run (grad mode, autocast)."""
    return getattr(node.target, "__name__", "") in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


# PyG writes the code of propagate() to temporary files, named after the layer.
_WRITTEN_BY_OTHERS = re.compile(r"site-packages|torch_geometric|_(propagate|edge_updater)_\w+\.py")

_OURS = re.compile(r"gnncompile/(capture|substitutes)/")


def user_line(node: fx.Node) -> str:
    """``file:line: code`` of the innermost frame of the user's code, else of the PyG layer, that made a node."""
    return line_of(node.meta.get("stack_trace") or "")


def line_of(stack: str) -> str:
    """Likewise of a stack as Python prints it."""
    trace = stack.strip().splitlines()
    frames = [i for i, text in enumerate(trace) if text.lstrip().startswith('File "')]
    # Of our own code only what stands for a whole layer has a line worth naming, and only where nothing else has.
    others = [i for i in frames if not _OURS.search(trace[i])]
    frames = others or [i for i in frames if "gnncompile/substitutes/nn/conv" in trace[i]]
    if not frames:
        return "?"
    users = [i for i in frames if not _WRITTEN_BY_OTHERS.search(trace[i])]
    layers = [i for i in frames if "torch_geometric/nn/conv" in trace[i] and "message_passing.py" not in trace[i]]
    at = (users or layers or frames)[-1]
    path, line = trace[at].split('"')[1], trace[at].split("line ")[1].split(",")[0]
    code = trace[at + 1].strip() if at + 1 < len(trace) else ""
    return f"{'/'.join(path.split('/')[-2:])}:{line}: {code}"


FRESH_EXCEPT = {
    "contiguous",
    "detach",
    "dropout",
    "expand_as",
    "feature_dropout",
    "flatten",
    "reshape",
    "reshape_as",
    "to",
    "type_as",
    "view_as",
}
"""Composite ops whose schema says nothing of it but which may return their argument itself."""


def makes_new_tensor(node: fx.Node) -> bool:
    """Whether a node's tensor shares memory with no other."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if any(r.alias_info is not None for r in schema.returns):
        return False
    return schema.name.split("::")[1] not in FRESH_EXCEPT


def mutates(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


_WITH_STATISTICS = (aten.batch_norm.default, aten.instance_norm.default)
"""They write to running statistics in training, though their schemas do not say so."""


def drop_unused(graph: fx.Graph) -> None:
    """Removes what nothing reads, unless it writes to something, or draws random numbers."""
    graph.eliminate_dead_code(lambda node: mutates(node) or _updates_statistics(node) or node.is_impure())


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a normalisation updates running statistics."""
    return node.target in _WITH_STATISTICS and node.args[3] is not None and node.args[5] is not False


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def same_when_repeated(graph: fx.Graph) -> bool:
    """Whether to run a graph twice is known to be the same as to run it once: it writes to nothing that was there
    before, and draws no random numbers.
    """
    return not any(map(_may_leave_something, graph.nodes))


def _may_leave_something(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return mutates(node) or _updates_statistics(node) or depends_on_chance(node)
    # Of what is no operator no schema says it; arithmetic of sizes makes numbers.
    return not is_switch(node) and not isinstance(node.meta.get("val"), _NUMBERS)


def written_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory something in the graph writes to, directly or through a view."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and mutates(node):
            todo = _written_arguments(node)
            while todo:
                at = todo.pop()
                if at not in found:
                    found.add(at)
                    todo.extend([] if makes_new_tensor(at) else _aliased_arguments(at))
    for node in graph.nodes:
        if node.op == "call_function" and not makes_new_tensor(node) and found & set(_aliased_arguments(node)):
            found.add(node)
    return found


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to, by its schema; not the indices and values that it only reads."""
    return _aliased_arguments(node, only_written=True)


def _aliased_arguments(node: fx.Node, only_written: bool = False) -> list[fx.Node]:
    """The arguments whose memory the result of an operation may be, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(argument.alias_info is not None for argument in schema.arguments):
        return node.all_input_nodes  # it does not say
    found: list[fx.Node] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.is_write or not only_written):
            given = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(given, found.append)
    return found


def structural_nodes(ctx: Context) -> dict[fx.Node, bool]:
    """Nodes computed from integer inputs and sizes alone, and whether integers (data, not only sizes) enter."""
    found: dict[fx.Node, bool] = {}
    for node in ctx.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            if isinstance(val, torch.SymInt):
                found[node] = False
            elif isinstance(val, torch.Tensor) and not _is_float(val) and node not in ctx.written:
                found[node] = True
        elif node.op == "call_function" and node not in ctx.written and not mutates(node) and not is_switch(node):
            if node.target is aten.sym_size.int and node.args[0].op == "placeholder":
                found[node] = False
            elif _same_each_time(node) and all(s in found for s in node.all_input_nodes):
                found[node] = any(found[s] for s in node.all_input_nodes)
    return found


def _same_each_time(node: fx.Node) -> bool:
    """Whether a node has a value, and the same one for the same arguments."""
    return not depends_on_chance(node) and node.meta.get("val") is not None


def depends_on_chance(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    name, tags = str(node.target), getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or any(part in name for part in ("rand", "dropout"))


def _is_float(val: torch.Tensor) -> bool:
    return val.is_floating_point() or val.is_complex()
