"""What depends only on the structure of the graph leaves the step.

Before: one graph that builds self loops, degrees, normalisation and CSR layouts from ``edge_index`` every time.
After:  a structure program, run once per distinct graph and remembered, and a rest that takes its results as inputs.
Why it pays: in full-batch training the structure never changes, and building it costs more than a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile.passes.context import Context, structural_nodes, value


@dataclass(frozen=True)
class Hoisted:
    """The structure program of a graph.

    Attributes:
        program: Takes the graph inputs named by `inputs`, returns one result per added input of the rest.
        inputs: Positions among the captured graph's inputs.
        results: Fake values of the results.
    """

    program: fx.GraphModule
    inputs: tuple[int, ...]
    results: tuple[Any, ...]


def run(ctx: Context) -> Hoisted | None:
    """Moves structure out of ``ctx.gm``, which gains one input per result; None where there is nothing to move."""
    structural = structural_nodes(ctx)
    frontier = [n for n in ctx.graph.nodes if n in structural and _worth_moving(n, structural)]
    if not frontier:
        return None
    hoisted = _extract(ctx, frontier)
    inputs = [n for n in ctx.graph.nodes if n.op == "placeholder"]
    after = inputs[-1]
    for node in frontier:
        with ctx.graph.inserting_after(after):
            after = ctx.graph.placeholder(f"structure_{node.name}")
        after.meta.update(node.meta)
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user not in structural)
    ctx.graph.eliminate_dead_code()
    ctx.record.hoisted = len(hoisted.program.graph.nodes)
    return hoisted


def _worth_moving(node: fx.Node, structural: dict[fx.Node, bool]) -> bool:
    """Results that the rest reads and that come from data; plain sizes and constants are left to Inductor."""
    if node.op == "placeholder" or not structural[node]:
        return False
    if not isinstance(value(node), torch.Tensor):
        return False
    users = [u for u in node.users if u not in structural]
    # A value handed to the caller stays where it is: it may alias an input.
    return any(u.op != "output" for u in users)


def _extract(ctx: Context, frontier: list[fx.Node]) -> Hoisted:
    needed: set[fx.Node] = set()
    todo = list(frontier)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(node.all_input_nodes)
    graph, copies, positions = fx.Graph(), {}, []
    inputs = [n for n in ctx.graph.nodes if n.op == "placeholder"]
    for at, node in enumerate(inputs):
        if node in needed:
            copies[node] = graph.placeholder(node.name)
            positions.append(at)
    for node in ctx.graph.nodes:
        if node in needed and node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in frontier))
    program = fx.GraphModule(ctx.gm, graph)
    return Hoisted(program, tuple(positions), tuple(value(n) for n in frontier))
