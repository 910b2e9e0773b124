"""The look of a model's graph on a page and in a picture: boxes, positions, colours and texts."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from gnncompile.report.collapse import collapsed, layer
from gnncompile.report.layered import Layout, layered
from gnncompile.report.model_graph import STRUCTURE, Box

LETTER, SMALL_LETTER = 7.3, 5.8
"""Width in pixels of a letter of a box's first and second line: a little more than the average."""

LONGEST = 34
"""The most letters of a line."""


@dataclass(frozen=True)
class Colour:
    """A hue in four shades: for edges and bars (`light`), and for the inside of a box (`pale`), on a light page; `dark`
    and `deep` are the same on a dark page.
    """

    light: str
    pale: str
    dark: str
    deep: str


PALETTE = (
    Colour("#2f6fde", "#dbe7fb", "#7aa7f7", "#1f3358"),
    Colour("#d9680f", "#fbe4d0", "#f29a55", "#523113"),
    Colour("#1f8f5f", "#d5f0e3", "#5cc99a", "#15402e"),
    Colour("#b13bb0", "#f5dcf5", "#df85de", "#481f48"),
    Colour("#b88a00", "#f8edc8", "#e0bb4a", "#443608"),
    Colour("#0e8fa8", "#d2eff5", "#58c4d9", "#0d3d48"),
    Colour("#cf3a4b", "#fbdbdf", "#f08390", "#521d24"),
    Colour("#6a52d1", "#e3ddfa", "#a596f2", "#2d2460"),
)
"""The colours of the regions, in order; the ninth region has the first colour again."""

GREY = Colour("#8a8f98", "#eceef1", "#8f959e", "#2c3036")
"""The colour of the structure program."""


FAR = 2
"""The most layers that an edge from an input or from structure passes down; a box further below gets a mark instead."""


@dataclass(frozen=True)
class Picture:
    """A graph that is ready to be drawn.

    Attributes:
        graph: The graph, merged to few enough nodes; each node has a ``"box"``.
        layout: The positions of the nodes.
        notched: For each node that reads inputs or structure from far above: the nodes that it reads. A mark on the box
            replaces these edges.
    """

    graph: nx.DiGraph
    layout: Layout
    notched: dict[str, list[str]]


def pictured(graph: nx.DiGraph) -> Picture:
    """Prepares one of the graphs of a :class:`~gnncompile.report.model_graph.ModelGraph` for drawing."""
    small = collapsed(graph)
    small.remove_nodes_from([n for n in nx.isolates(small) if small.nodes[n]["box"].kind == "input"])
    depth = {n: k for k, row in enumerate(nx.topological_generations(small)) for n in row}
    # A node without predecessors would be at the top; it is drawn right above its topmost reader instead.
    depth.update({n: min(depth[s] for s in small[n]) - 1 for n in small if not small.in_degree(n) and small[n]})
    notched: dict[str, list[str]] = {}
    for a, b in list(small.edges):
        if small.nodes[a]["box"].kind in ("input", STRUCTURE) and depth[b] - depth[a] > FAR:
            small.remove_edge(a, b)
            notched.setdefault(b, []).append(a)
    layout = layered(small, lambda n: box_size(small.nodes[n]["box"]))
    return Picture(small, layout, notched)


def box_lines(box: Box) -> tuple[str, str]:
    """Returns the two lines of text in a box: its label, then its layer and result, or a number of operations."""
    first, result = _cut(box.label), box.operations[-1].result.replace("float32 ", "") if box.operations else ""
    if box.kind == "structure" and len(box.operations) > 1:
        return first, f"{len(box.operations)} operations, once per graph"
    if box.kind == "input":
        return first, "" if len(box.operations) > 1 else _cut(result)
    return first, _cut(" · ".join(filter(None, (layer(box.module), result))))


def box_size(box: Box) -> tuple[float, float]:
    """Returns the width and height of a box in pixels."""
    first, second = box_lines(box)
    width = max(len(first) * LETTER, len(second) * SMALL_LETTER) + 22
    return max(width, 64.0), 40.0 if second else 26.0


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def many(count: int, what: str) -> str:
    """Returns a count with its noun in singular or plural: "1 region", "2 regions"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
