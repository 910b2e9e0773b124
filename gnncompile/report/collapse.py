"""Makes a model's graph small enough to be read: operations that belong together become one box."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import networkx as nx

from gnncompile.report.model_graph import STRUCTURE, Box

MOST = 40
"""Boxes that are read at a glance, about; what has more is drawn in less detail."""

NAMES = 3
"""Names of operations that a box shows."""

_OWN_BOX = frozenset({"linear", "mm", "addmm", "bmm", "matmul", "baddbmm", "lstm", "gru", "conv1d", "conv2d"})
"""Operations that begin a box, as what the time goes into."""

_ALONE = frozenset({"input", "output"})


def collapsed(graph: nx.DiGraph, most: int = MOST) -> nx.DiGraph:
    """The graph with chains of operations as one node each; in less and less detail until there are at most `most`.

    Further steps put together what a module has in one region (or left to Inductor), then what a module and its
    children have, and so on up to the model. What is put together never makes a cycle.

    Args:
        graph: :attr:`~gnncompile.report.model_graph.ModelGraph.before` or ``after``: nodes with a ``"box"``.
        most: How many nodes there should be at most. There may be more where a model has as many regions or inputs.

    Returns:
        A new graph; a node of it is named after the first one that it stands for.
    """
    graph = _with_one_structure(graph)
    boxes = dict(graph.nodes(data="box"))
    deepest = max((box.module.count(".") + 1 for box in boxes.values() if box.module), default=0)
    chains = _chains(graph, boxes)
    found = _merged(graph, chains.__getitem__)
    for depth in range(deepest, -1, -1):
        if len(found) <= most:
            return found
        found = _merged(graph, partial(_part, boxes, depth))
    if len(found) > most:
        found = _merged(found, lambda n: ("input",) if _box(found, n).kind == "input" else n)
    return found


def _with_one_structure(graph: nx.DiGraph) -> nx.DiGraph:
    """All that leaves the step as one node: it reads nothing but inputs, as a rule."""
    structure = [n for n, box in graph.nodes(data="box") if box.kind == STRUCTURE]
    made = _quotient(graph, {n: structure[0] if n in set(structure) else n for n in graph})
    return made if nx.is_directed_acyclic_graph(made) else graph


def _box(graph: nx.DiGraph, node: str) -> Box:
    return graph.nodes[node]["box"]  # type: ignore[no-any-return]


def layer(module: str) -> str:
    """The part of a module's path that says which layer it is: ``convs.0`` of ``convs.0.aggr_module``."""
    parts = module.split(".")
    numbers = [k for k, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:1])


def _part(boxes: dict[str, Box], depth: int, node: str) -> Hashable:
    box = boxes[node]
    if box.kind in _ALONE:
        return node
    inside = "" if box.kind == "region" else ".".join(box.module.split(".")[:depth])
    return _kind(box), box.regions, inside


def _kind(box: Box) -> str:
    """What is gone goes with what is left to Inductor: it stood among that."""
    return "dense" if box.kind == "gone" else box.kind


def _chains(graph: nx.DiGraph, boxes: dict[str, Box]) -> dict[str, str]:
    """For each node the first one of the chain that it is in: of one kind and region, each read by the next alone."""
    first: dict[str, str] = {}
    for node in nx.topological_sort(graph):
        first[node] = node
        box, before = boxes[node], list(graph.predecessors(node))
        if len(before) != 1 or box.kind in _ALONE:
            continue
        other = boxes[before[0]]
        joins = box.operations[0].name not in _OWN_BOX if box.operations else False
        if joins and graph.out_degree(before[0]) == 1 and (_kind(box), box.regions) == (_kind(other), other.regions):
            first[node] = first[before[0]]
    return first


def _merged(graph: nx.DiGraph, key: Callable[[str], Hashable]) -> nx.DiGraph:
    """The graph with nodes of one key as one, as far as that leaves it without cycles.

    A node has a level: that of what it reads if that has its key, else one more; then, as far as there is room, that
    of what reads it, or one less. Nodes of one key and level are one; every edge between two of these goes to a higher
    level.
    """
    order = list(nx.lexicographical_topological_sort(graph, key=_positions(graph).__getitem__))
    keys = {n: key(n) for n in order}
    level: dict[str, int] = {}
    for n in order:
        level[n] = max((level[p] + (keys[p] != keys[n]) for p in graph.predecessors(n)), default=0)
    for n in reversed(order):
        level[n] = min((level[s] - (keys[s] != keys[n]) for s in graph.successors(n)), default=level[n])
    first: dict[tuple[Hashable, int], str] = {}
    of = {node: first.setdefault((keys[node], level[node]), node) for node in order}
    return _quotient(graph, of)


def _quotient(graph: nx.DiGraph, of: dict[str, str]) -> nx.DiGraph:
    """The graph of the groups that nodes are in."""
    members: dict[str, list[Box]] = {}
    for node in graph:
        members.setdefault(of[node], []).append(_box(graph, node))
    made = nx.DiGraph()
    made.add_nodes_from((name, {"box": _joined(boxes)}) for name, boxes in members.items())
    made.add_edges_from((of[a], of[b]) for a, b in graph.edges if of[a] != of[b])
    return made


def _positions(graph: nx.DiGraph) -> dict[str, int]:
    return {node: at for at, node in enumerate(graph)}


def _joined(boxes: list[Box]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    operations = tuple(o for box in boxes for o in box.operations)
    regions = tuple(sorted({r for box in boxes for r in box.regions}))
    module = _common([box.module for box in boxes])
    label = f"{len(boxes)} inputs" if boxes[0].kind == "input" else _label(boxes)
    free = all(box.free for box in boxes)
    kinds = {box.kind for box in boxes}
    kind = _kind(boxes[0]) if len(kinds) > 1 else boxes[0].kind
    return Box(kind, label, operations, regions, module, free, sum(box.bytes for box in boxes))


def _common(modules: list[str]) -> str:
    parts = [m.split(".") for m in modules if m]
    shared = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return ".".join(shared)


def _label(boxes: list[Box]) -> str:
    """What the operations are; views, and what is gone, left out if there is anything else."""
    moving = [box for box in boxes if not box.free]
    kept = [box for box in moving if box.kind != "gone"] or moving or boxes
    shown = [o.name for box in kept for o in box.operations]
    names = sorted(dict.fromkeys(shown), key=lambda name: not name.startswith("segment"))
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f", +{more}" if more > 0 else "")
