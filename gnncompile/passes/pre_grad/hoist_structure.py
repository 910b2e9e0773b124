"""Computations that depend only on the structure of the graph leave the step.

Before: one graph that builds self loops, degrees, normalisation and CSR layouts from ``edge_index`` every time, and
        waits for the device where a size depends on the data (``unique``, ``x[mask]``).
After:  a structure program, run once per distinct graph and cached, and a rest that takes its results as inputs.
Why it pays: in full-batch training the structure never changes, and building it costs more than a layer.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from gnncompile.layout.structure_program import StructureProgram
from gnncompile.passes.analysis import aten, drop_unused, makes_new_tensor, needed_for, structural_nodes, value
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Moves structure from ``ctx.gm`` to ``ctx.structure``. ``ctx.gm`` gains one input per result of the program.

    If another graph may take the results as inputs (``ctx.leads_on``), results that are structure leave the graph: see
    :attr:`StructureProgram.copied`.
    """
    structural = structural_nodes(ctx.graph, ctx.written)
    _carry_numbers(ctx, structural)
    frontier, rest = _frontier(ctx, structural)
    if not frontier:
        return
    copied = _copied(ctx, frontier) if ctx.leads_on else ()
    program = _extract(ctx, frontier, copied)
    after = ctx.inputs_first()
    for node in frontier:
        with ctx.graph.inserting_after(after):
            after = ctx.graph.placeholder(f"structure_{node.name}")
        after.meta.update({key: found for key, found in node.meta.items() if key != "unbacked_bindings"})
        _replace(ctx, node, after, rest)
    drop_unused(ctx.graph)
    ctx.log.hoisted = sum(
        n.op == "call_function" and n.target is not operator.getitem for n in program.module.graph.nodes
    )
    ctx.structure = program


def _carry_numbers(ctx: Context, structural: dict[fx.Node, bool]) -> None:
    """Carries each number that an operation reads from structure as a dimension of a tensor without elements.

    A number that may be negative becomes the difference of two dimensions.
    """
    for node in list(ctx.graph.nodes):
        if structural.get(node) and isinstance(value(node), torch.SymInt) and not _is_arithmetic(node):
            users = [u for u in node.users if u not in structural or _is_arithmetic(u)]
            if users:
                with ctx.graph.inserting_before(node.next):
                    number = _carried(ctx, node, structural)
                for user in users:
                    user.replace_input_with(node, number)


def _carried(ctx: Context, node: fx.Node, structural: dict[fx.Node, bool]) -> fx.Node:
    made = []
    if statically_known_true(value(node) >= 0):
        made.append(ctx.call(aten.empty.memory_format, [node, 0]))
        made.append(ctx.call(aten.sym_size.int, made[0], 0))
    else:
        parts = [ctx.call(torch.sym_max, n, 0) for n in (node, ctx.call(operator.neg, node))]
        made += [parts[1].args[0], *parts, ctx.call(aten.empty.memory_format, [*parts, 0])]  # type: ignore[list-item]
        sizes = [ctx.call(aten.sym_size.int, made[-1], at) for at in range(2)]
        made += [*sizes, ctx.call(operator.sub, *sizes)]
        made[-1].meta["val"] = value(node)
    structural.update(dict.fromkeys(made, True))
    return made[-1]


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a number is computed from other numbers and from sizes of tensors only."""
    return not isinstance(node.target, torch._ops.OpOverload) or node.target is aten.sym_size.int


def _frontier(ctx: Context, structural: dict[fx.Node, bool]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Returns the structural tensors that the rest reads, in the order of the graph, and the nodes of the rest.

    Only tensors that depend on integer data count. Arithmetic of sizes and constants is left to Inductor.
    """
    found: set[fx.Node] = set()
    rest = {n for n in ctx.graph.nodes if n not in structural}
    todo = list(rest)
    while todo:
        node = todo.pop()
        for source in node.all_input_nodes:
            if source in rest or source in found or source.op == "placeholder":
                continue
            moved = structural[source] and isinstance(value(source), torch.Tensor)
            # A value that is returned to the caller stays in the rest if it may alias an input.
            if moved and (node.op != "output" or _shares_no_memory(source)):
                found.add(source)
            else:
                rest.add(source)
                todo.append(source)
    return [n for n in ctx.graph.nodes if n in found], rest


def _shares_no_memory(node: fx.Node) -> bool:
    while node.op == "call_function" and not makes_new_tensor(node):
        node = node.all_input_nodes[0]
    return node.op == "call_function"


def _replace(ctx: Context, node: fx.Node, result: fx.Node, rest: set[fx.Node]) -> None:
    """Makes the rest read a cached result. The caller gets a copy, since it may write to its result."""
    for user in [u for u in node.users if u in rest]:
        if user.op == "output":
            with ctx.graph.inserting_before(user):
                user.replace_input_with(node, ctx.call(aten.clone.default, result))
        else:
            user.replace_input_with(node, result)


def _copied(ctx: Context, frontier: list[fx.Node]) -> tuple[tuple[int, int], ...]:
    """Removes the results that are structure. Returns the index of each among the results and in `frontier`."""
    output: fx.Node = next(n for n in ctx.graph.nodes if n.op == "output")
    results: Any = output.args[0]
    positions = {node: at for at, node in enumerate(frontier)}
    found = tuple((at, positions[node]) for at, node in enumerate(results) if node in positions)
    output.args = (type(results)(r for r in results if r not in positions),)
    return found


def _extract(ctx: Context, frontier: list[fx.Node], copied: tuple[tuple[int, int], ...]) -> StructureProgram:
    needed = needed_for(frontier)
    graph, copies, positions = fx.Graph(), {}, []
    inputs = [n for n in ctx.graph.nodes if n.op == "placeholder"]
    for at, node in enumerate(inputs):
        if node in needed:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            positions.append(at)
    for node in ctx.graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in frontier))
    program = fx.GraphModule(ctx.gm, graph)
    given, results = (tuple(value(n) for n in nodes) for nodes in (inputs, frontier))
    return StructureProgram(program, tuple(positions), given, results, copied)
