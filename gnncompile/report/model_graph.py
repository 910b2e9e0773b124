"""A model's graph before and after the passes, as networkx graphs that say what became of each operation."""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import networkx as nx
import torch
from torch import fx

from gnncompile import _compat
from gnncompile.ir.printer import summary
from gnncompile.ir.region import parse
from gnncompile.layout.structure_program import StructureProgram
from gnncompile.passes.analysis import makes_new_tensor, origins, own, structural_nodes, written_nodes
from gnncompile.passes.context import Context
from gnncompile.passes.log import user_line

TIMES = "\N{MULTIPLICATION SIGN}"

STRUCTURE = "structure"
"""The node that stands for the structure program."""


@dataclass(frozen=True)
class Operation:
    """One operation of a traced graph.

    Attributes:
        name: Its name in torch; for a segment reduction followed by the kind of reduction.
        result: Type and sizes of its result on the traced inputs; "" for a number.
        line: The user's line that the operation came from.
    """

    name: str
    result: str
    line: str


@dataclass(frozen=True)
class Box:
    """The operations that a node of a model's graph stands for: the node's attribute ``"box"``.

    Attributes:
        kind: ``"input"``, ``"output"``, ``"region"`` (fused into a region, or the region itself), ``"structure"`` (runs
            once per distinct graph), ``"dense"`` (left to Inductor) or ``"gone"`` (rewritten or not needed).
        label: A few words to show.
        operations: The operations, in order.
        regions: Indices of the regions, counted over the whole report.
        module: Path of the module that runs the operations, such as ``"convs.0"``; "" for the model itself.
        free: Whether the operation is a view, which moves no bytes.
        bytes: The bytes that the operations read and write if each runs on its own.
    """

    kind: str
    label: str
    operations: tuple[Operation, ...]
    regions: tuple[int, ...] = ()
    module: str = ""
    free: bool = False
    bytes: float = 0.0


@dataclass(frozen=True)
class ModelGraph:
    """One captured graph.

    Attributes:
        before: The traced graph, with a node for each aten operation; sizes and parameters have no node.
        after: The graph after the passes, with a node for each region and one for the structure program.
    """

    before: nx.DiGraph
    after: nx.DiGraph


@dataclass(frozen=True)
class _Traced:
    """The facts to keep about a traced operation: a pass may remove its node before the report is made."""

    box: Box
    readers: tuple[str, ...]
    structural: bool
    integer: bool


@dataclass
class Trace:
    """Observes the passes on one captured graph: see :class:`gnncompile.passes.manager.Observer`.

    Attributes:
        parameters: Names of the parameters of the model's forward, which name the inputs.
        wanted: For each region, by its index in the log, whether a gradient of each of its tensors is wanted.
    """

    parameters: Sequence[str]
    wanted: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    _before: dict[str, _Traced] = field(default_factory=dict)
    _edges: list[tuple[str, str]] = field(default_factory=list)
    _fates: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    _inputs: list[str] = field(default_factory=list)
    _shown_inputs: dict[str, str] = field(default_factory=dict)
    _after: nx.DiGraph = field(default_factory=nx.DiGraph)

    def before(self, ctx: Context, sources: list[str]) -> None:
        """Remembers the traced graph."""
        inputs = [n for n in ctx.graph.nodes if n.op == "placeholder"]
        self._inputs = [n.name for n in inputs]
        for node, source in zip(inputs, sources, strict=True):
            if not source.startswith(_MODEL) and isinstance(node.meta.get("val"), torch.Tensor):
                self._shown_inputs[node.name] = input_name(source, self.parameters)
        # ctx.structural and ctx.written are not used: the context would cache them as of before the first pass.
        structural = structural_nodes(ctx.graph, written_nodes(ctx.graph)) if ctx.options.hoist else {}
        shown = _shown(ctx.graph, self._shown_inputs)
        self._edges = _edges(ctx.graph, shown)
        for node in ctx.graph.nodes:
            # Hidden nodes are kept too: their readers decide what became of the nodes before them.
            box = _box(node, self._shown_inputs) if shown.get(node) == node.name else _HIDDEN
            readers, integer = tuple(u.name for u in node.users), any(map(_is_integer, _tensors(node)))
            self._before[node.name] = _Traced(box, readers, node in structural, integer)

    def after(self, ctx: Context, structure: StructureProgram | None) -> None:
        """Finds out what became of each operation."""
        regions, found = {}, _Records(ctx)
        graphs = [ctx.graph] if structure is None else [ctx.graph, structure.module.graph]
        for graph in graphs:
            for call in graph.find_nodes(op="call_function", target=own.region.default):
                regions[call] = found.position(call)
                self.wanted[regions[call]] = tuple(t in ctx.needs_grad for t in call.args[0])
        seeds: dict[str, set[int]] = defaultdict(set)
        for call, at in regions.items():
            for name in origins(call):
                seeds[name].add(at)
        rewritten = [{name for n in graph.nodes for name in origins(n)} for graph in graphs]
        self._decide([{n.name for n in graph.nodes} for graph in graphs], rewritten, seeds)
        self._after = self._graph_after(ctx, structure, regions)

    def model_graph(self, first: int) -> ModelGraph:
        """Returns the graph before and after the passes; `first` is the index of its first region in the report."""
        before = nx.DiGraph()
        for name, traced in self._before.items():
            if traced.box is not _HIDDEN:
                kind, regions = self._fates[name]
                before.add_node(name, box=replace(traced.box, kind=kind, regions=tuple(first + r for r in regions)))
        before.add_edges_from(self._edges)
        after = self._after.copy()
        for _, data in after.nodes(data=True):
            box = data["box"]
            if box.kind == "region":
                name = box.operations[0].name
                at = first + box.regions[0]
                data["box"] = replace(box, label=f"region {at}: {name.split(' of ')[0]}", regions=(at,))
        return ModelGraph(before, after)

    def _decide(self, alive: list[set[str]], rewritten: list[set[str]], seeds: dict[str, set[int]]) -> None:
        """Decides what became of each operation: by the graphs that still hold it, by the regions that it was fused
        into, or by what became of its readers.
        """
        for name in reversed(self._before):  # readers first
            traced = self._before[name]
            kind, regions = traced.box.kind, tuple(sorted(seeds.get(name, ())))
            if kind == "dense":
                read_by = [self._fates[r] for r in traced.readers if r in self._fates]
                taken = sorted({k for fate, found in read_by if fate == "region" for k in found})
                if regions:
                    kind = "region"
                elif name in alive[0] and not (len(alive) > 1 and name in alive[1]):
                    kind = "dense"
                elif traced.structural or name in alive[-1]:
                    kind = STRUCTURE
                elif taken and not traced.integer:
                    kind, regions = "region", tuple(taken)
                elif name not in rewritten[0]:
                    kind = STRUCTURE if name in rewritten[-1] else "gone"
            self._fates[name] = kind, regions

    def _graph_after(self, ctx: Context, structure: StructureProgram | None, regions: dict[fx.Node, int]) -> nx.DiGraph:
        made = nx.DiGraph()
        shown = _shown(ctx.graph, self._shown_inputs)
        if structure is not None:
            program = structure.module.graph
            operations = [n for n in program.nodes if n.op == "call_function" and n.target is not operator.getitem]
            listed = tuple(_operation(n) for n in operations)
            made.add_node(STRUCTURE, box=Box(STRUCTURE, "structure program", listed))
            for call in program.find_nodes(op="call_function", target=own.region.default):
                made.add_node(call.name, box=_region_box(ctx, regions[call], "once per graph"))
                made.add_edge(STRUCTURE, call.name)
            for at in structure.inputs:
                if self._inputs[at] in self._shown_inputs:
                    made.add_edge(self._inputs[at], STRUCTURE)
            for node in ctx.graph.nodes:
                if node.op == "placeholder" and node.name not in self._inputs:
                    shown[node] = STRUCTURE
        for node in ctx.graph.nodes:
            if shown.get(node) == node.name:
                if node in regions:
                    box = _region_box(ctx, regions[node], _result(_tensors(node)[0]))
                else:
                    box = _box(node, self._shown_inputs)
                made.add_node(node.name, box=box)
        made.add_edges_from(_edges(ctx.graph, shown))
        return made


def unfused_bytes(graph: nx.DiGraph) -> dict[int, float]:
    """Returns, for each region, the bytes that its operations read and write if each runs on its own.

    Args:
        graph: :attr:`ModelGraph.before`.
    """
    found: Counter[int] = Counter()
    for _, box in graph.nodes(data="box"):
        if box.kind == "region":
            found[box.regions[0]] += box.bytes
    return dict(found)


class _Records:
    """Finds the record in the log of each region's call. Calls with the same program and line have their records in the
    same order.
    """

    def __init__(self, ctx: Context) -> None:
        self.records, self.taken = ctx.log.regions, set[int]()

    def position(self, call: fx.Node) -> int:
        key = call.args[2], user_line(call)
        alike = [i for i, r in enumerate(self.records) if (r.spec, r.line) == key]
        alike = alike or [i for i, r in enumerate(self.records) if r.spec == key[0]]
        at = next((i for i in alike if i not in self.taken), alike[0])
        self.taken.add(at)
        return at


_MODEL = "L['target']"
_HIDDEN = Box("dense", "", ())


def input_name(source: str, parameters: Sequence[str]) -> str:
    """Returns the user's name of an input: ``L['args'][0]`` is the first parameter of the forward."""
    found = re.fullmatch(r"L\['(args|kwargs)'\]\[(?:(\d+)|'([^']*)')\](.*)", source)
    if found is None:
        return source
    _, number, name, rest = found.groups()
    if number is not None:
        name = parameters[int(number)] if int(number) < len(parameters) else f"args[{number}]"
    return f"{name}{rest}"


def _shown(graph: fx.Graph, inputs: dict[str, str]) -> dict[fx.Node, str]:
    """Maps each node of a traced graph to the node of the picture that shows it. Sizes and parameters are not shown."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in found:
            found[node] = found[node.args[0]]
        elif node.op == "output" or node.name in inputs or (node.op == "call_function" and _tensors(node)):
            found[node] = node.name
    return found


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    found = node.meta.get("val")
    several = found if isinstance(found, (list, tuple)) else [found]
    return [t for t in several if isinstance(t, torch.Tensor)]


def _edges(graph: fx.Graph, shown: dict[fx.Node, str]) -> list[tuple[str, str]]:
    found: dict[tuple[str, str], None] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if node in shown and source in shown and shown[node] != shown[source]:
                found[shown[source], shown[node]] = None
    return list(found)


def _box(node: fx.Node, inputs: dict[str, str]) -> Box:
    if node.op == "output":
        return Box("output", "output", ())
    operation = _operation(node)
    if node.op == "placeholder":
        return Box("input", inputs[node.name], (replace(operation, name=inputs[node.name]),))
    free = not makes_new_tensor(node)
    moved = 0.0 if free else sum(_bytes(t) for n in (node, *node.all_input_nodes) for t in _tensors(n))
    return Box("dense", operation.name, (operation,), module=_module(node), free=free, bytes=moved)


def _region_box(ctx: Context, at: int, result: str) -> Box:
    record = ctx.log.regions[at]
    return Box("region", "region", (Operation(summary(parse(record.spec)), result, record.line),), (at,))


def _operation(node: fx.Node) -> Operation:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
    else:
        name = getattr(target, "__name__", str(target))
    if target is own.segment_reduce.default:
        name = f"segment {node.args[3]}"
    elif target is own.segment_softmax.default:
        name = "segment softmax"
    return Operation(name, ", ".join(map(_result, _tensors(node))), user_line(node))


def _result(tensor: torch.Tensor) -> str:
    sizes = [_compat.size_now(s) for s in tensor.shape]
    text = f" {TIMES} ".join("?" if s is None else f"{s:,}" for s in sizes) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {text}"


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _bytes(tensor: torch.Tensor) -> float:
    count = tensor.element_size()
    for size in tensor.shape:
        count *= _compat.size_now(size) or 0
    return float(count)


def _module(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]", r".\1\2", path.removeprefix(_MODEL))
    return path.strip(".")
