"""Places the nodes of an acyclic graph in layers, from top to bottom, with short edges and few crossings.

The steps are the usual ones (Sugiyama, Tagawa, Toda: Methods for visual understanding of hierarchical system
structures, 1981). Each node gets a layer. An edge that passes a layer gets a dummy node there. The nodes of each layer
are ordered by the barycenters of their neighbours. Then each node is placed as near to its neighbours as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx as nx

GAP = 14.0
"""Pixels between two boxes of a layer."""

LAYER_GAP = 30.0
"""Pixels between two layers."""

DUMMY = 6.0
"""Width in pixels of a dummy node, where an edge passes a layer."""

SWEEPS = 8
"""The number of sweeps down (each layer ordered by the layer above), and of sweeps up."""


@dataclass(frozen=True)
class Place:
    """A box: its centre and its size, in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """The positions of all nodes and edges, in pixels.

    Attributes:
        places: The place of each node.
        routes: The route of each edge: points from the lower side of one box to the upper side of another.
        width: The width of the drawing, which begins at 0.
        height: The height of the drawing, which begins at 0.
    """

    places: dict[Hashable, Place]
    routes: dict[tuple[Hashable, Hashable], list[tuple[float, float]]]
    width: float
    height: float


def layered(graph: nx.DiGraph, size: Callable[[Any], tuple[float, float]]) -> Layout:
    """Computes the positions of a graph's nodes and edges.

    Args:
        graph: An acyclic graph, whose edges go down from a node to its readers.
        size: Gives the width and height of a node.

    Raises:
        networkx.NetworkXUnfeasible: The graph has a cycle.
    """
    layer = _layers(graph)
    full, chains = _with_dummies(graph, layer)
    sizes = {n: size(n) if n in graph else (DUMMY, 0.0) for n in full}
    rows = _ordered(full)
    xs = _coordinates(full, rows, {n: w for n, (w, _) in sizes.items()})
    left = min((xs[n] - sizes[n][0] / 2 for n in full), default=0.0)
    places, passing, top = {}, {}, 0.0
    for row in rows:
        height = max(sizes[n][1] for n in row)
        for n in row:
            if n in graph:
                places[n] = Place(xs[n] - left, top + height / 2, *sizes[n])
            else:
                passing[n] = [(xs[n] - left, top), (xs[n] - left, top + height)]
        top += height + LAYER_GAP
    routes = {}
    for (a, b), chain in chains.items():
        start = places[a].x, places[a].y + places[a].height / 2
        end = places[b].x, places[b].y - places[b].height / 2
        routes[a, b] = [start, *(point for n in chain for point in passing[n]), end]
    width = max((xs[n] - left + sizes[n][0] / 2 for n in full), default=0.0)
    return Layout(places, routes, width, max(top - LAYER_GAP, 0.0))


def _layers(graph: nx.DiGraph) -> dict[Hashable, int]:
    """Returns the layer of each node: the length of the longest path to it. A node without predecessors is placed right
    above its topmost reader.
    """
    layer = {n: k for k, generation in enumerate(nx.topological_generations(graph)) for n in generation}
    for n in graph:
        if not graph.in_degree(n) and graph.out_degree(n):
            layer[n] = min(layer[s] for s in graph.successors(n)) - 1
    used = {k: at for at, k in enumerate(sorted(set(layer.values())))}
    return {n: used[k] for n, k in layer.items()}


def _with_dummies(graph: nx.DiGraph, layer: dict[Hashable, int]) -> tuple[nx.DiGraph, dict[Any, list[Hashable]]]:
    """Cuts each edge that passes layers into edges between neighbouring layers.

    Returns:
        The graph with dummy nodes, and the dummy nodes of each edge.
    """
    full, chains = nx.DiGraph(), {}
    full.add_nodes_from((n, {"layer": k}) for n, k in layer.items())
    for a, b in graph.edges:
        chain: list[Hashable] = [("dummy", a, b, k) for k in range(layer[a] + 1, layer[b])]
        full.add_nodes_from((n, {"layer": layer[a] + 1 + k}) for k, n in enumerate(chain))
        nx.add_path(full, [a, *chain, b])
        chains[a, b] = chain
    return full, chains


def _ordered(full: nx.DiGraph) -> list[list[Hashable]]:
    """Returns the nodes of each layer from left to right, in the order with the fewest crossings of all sweeps."""
    rows: list[list[Hashable]] = [
        [] for _ in range(max(nx.get_node_attributes(full, "layer").values(), default=-1) + 1)
    ]
    for n in _depth_first(full):
        rows[full.nodes[n]["layer"]].append(n)
    best, fewest = [list(r) for r in rows], _crossings(full, rows)
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for k in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            fixed = {n: at for at, n in enumerate(rows[k - 1 if down else k + 1])}
            neighbours = full.pred if down else full.succ
            rows[k] = _by_barycenter(rows[k], fixed, neighbours)
        count = _crossings(full, rows)
        if count < fewest:
            best, fewest = [list(r) for r in rows], count
    return best


def _depth_first(full: nx.DiGraph) -> Iterable[Hashable]:
    return nx.dfs_preorder_nodes(full.to_undirected(as_view=True))  # type: ignore[no-any-return]


def _by_barycenter(row: Sequence[Hashable], fixed: dict[Hashable, int], neighbours: Any) -> list[Hashable]:
    """Sorts a layer by the mean position of each node's neighbours; a node without neighbours keeps its position."""
    key = {}
    for at, n in enumerate(row):
        near = [fixed[m] for m in neighbours[n]]
        key[n] = sum(near) / len(near) if near else float(at)
    return sorted(row, key=lambda n: key[n])


def _crossings(full: nx.DiGraph, rows: Sequence[Sequence[Hashable]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        place = {n: at for at, n in enumerate(lower)}
        ends = [p for n in upper for p in sorted(place[m] for m in full.succ[n])]
        count += sum(a > b for k, a in enumerate(ends) for b in ends[k + 1 :])
    return count


def _coordinates(
    full: nx.DiGraph, rows: Sequence[Sequence[Hashable]], width: dict[Hashable, float]
) -> dict[Any, float]:
    """Returns the x coordinate of each node, near the mean of its neighbours; long edges stay straight."""
    xs: dict[Any, float] = {}
    for row in rows:
        at = -sum(width[n] + GAP for n in row) / 2
        for n in row:
            xs[n] = at + width[n] / 2
            at += width[n] + GAP
    for sweep in range(4 * SWEEPS):
        for row in rows if sweep % 2 == 1 else reversed(rows):
            above, below = (full.pred, full.succ) if sweep % 2 == 1 else (full.succ, full.pred)
            wanted, weights = [], []
            for n in row:
                near = list(above[n] or below[n])
                pulls = [_pull(n, m) for m in near]
                pulled = sum(p * xs[m] for p, m in zip(pulls, near, strict=True))
                wanted.append(pulled / sum(pulls) if near else sum(xs[m] for m in row) / len(row))
                passes = _is_dummy(n) and all(map(_is_dummy, (*full.pred[n], *full.succ[n])))
                weights.append(4.0 if passes else 0.2 if _is_dummy(n) else 1.0 + len(near) if near else 0.01)
            apart = [(width[a] + width[b]) / 2 + GAP for a, b in pairwise(row)]
            xs.update(zip(row, _apart(wanted, weights, apart), strict=True))
    return xs


def _pull(node: Hashable, neighbour: Hashable) -> float:
    """Returns the weight with which a neighbour attracts a node. Edges from far away attract a box only a little."""
    if _is_dummy(node):
        return 4.0 if _is_dummy(neighbour) else 1.0
    return 0.1 if _is_dummy(neighbour) else 1.0


def _is_dummy(node: Hashable) -> bool:
    return isinstance(node, tuple) and len(node) == 4 and node[0] == "dummy"


def _apart(wanted: Sequence[float], weights: Sequence[float], apart: Sequence[float]) -> list[float]:
    """Returns the points nearest to the wanted points (by weighted least squares) that keep their order and distances.

    After subtracting the distances this is an isotonic regression: points that would change their order share a mean.
    """
    offsets = [0.0]
    for gap in apart:
        offsets.append(offsets[-1] + gap)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, count
    for x, offset, weight in zip(wanted, offsets, weights, strict=True):
        blocks.append((x - offset, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (m1, w1, c1), (m2, w2, c2) = blocks[-2:]
            blocks[-2:] = [((m1 * w1 + m2 * w2) / (w1 + w2), w1 + w2, c1 + c2)]
    flat = [mean for mean, _, count in blocks for _ in range(count)]
    return [x + offset for x, offset in zip(flat, offsets, strict=True)]
