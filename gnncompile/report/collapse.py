"""Makes a model's graph small enough to read, by merging operations that belong together into one box."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import networkx as nx

from gnncompile.report.model_graph import STRUCTURE, Box

MOST = 40
"""The number of boxes that can still be read at a glance; graphs with more boxes are drawn in less detail."""

NAMES = 3
"""The most names of operations that a box shows."""

_OWN_BOX = frozenset({"linear", "mm", "addmm", "bmm", "matmul", "baddbmm", "lstm", "gru", "conv1d", "conv2d"})
"""Operations that always begin a new box, because most of the time is spent in them."""

_ALONE = frozenset({"input", "output"})


def collapsed(graph: nx.DiGraph, most: int = MOST) -> nx.DiGraph:
    """Merges chains of operations into one node each, and then merges more until at most `most` nodes are left.

    Each further step merges the nodes of a module that are in the same regions or all left to Inductor. The first step
    takes the innermost modules, the next their parents, and so on up to the model. Merging never makes a cycle.

    Args:
        graph: :attr:`~gnncompile.report.model_graph.ModelGraph.before` or ``after``: nodes with a ``"box"``.
        most: The number of nodes to aim for. A model with many regions or inputs may keep more.

    Returns:
        A new graph. Each node has the name of the first node that was merged into it.
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
    """Merges all operations that leave the step for the structure program into one node, unless that makes a cycle.
    Usually they read nothing but inputs.
    """
    structure = [n for n, box in graph.nodes(data="box") if box.kind == STRUCTURE]
    made = _quotient(graph, {n: structure[0] if n in set(structure) else n for n in graph})
    return made if nx.is_directed_acyclic_graph(made) else graph


def _box(graph: nx.DiGraph, node: str) -> Box:
    return graph.nodes[node]["box"]  # type: ignore[no-any-return]


def layer(module: str) -> str:
    """Returns the part of a module's path that names its layer: ``convs.0`` for ``convs.0.aggr_module``."""
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
    """Returns the kind by which boxes are merged: operations that are gone count as left to Inductor."""
    return "dense" if box.kind == "gone" else box.kind


def _chains(graph: nx.DiGraph, boxes: dict[str, Box]) -> dict[str, str]:
    """Returns the first node of each node's chain. The nodes of a chain have the same kind and regions, and only the
    next node reads each of them.
    """
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
    """Merges nodes with the same key, as far as that makes no cycle.

    Each node gets a level: the level of its predecessor if both have the same key, else one more. Then nodes move down
    to the level of their successor (or one less, if the keys differ), as far as possible. Nodes with the same key and
    level are merged. Every edge between merged nodes goes to a higher level, so there is no cycle.
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
    """Returns the graph whose nodes are groups; `of` gives the group of each node."""
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
    """Returns the names of the operations as a label. It leaves out views and gone operations if others remain."""
    moving = [box for box in boxes if not box.free]
    kept = [box for box in moving if box.kind != "gone"] or moving or boxes
    shown = [o.name for box in kept for o in box.operations]
    names = sorted(dict.fromkeys(shown), key=lambda name: not name.startswith("segment"))
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f", +{more}" if more > 0 else "")
