"""What a model's graph looks like, on a page and in a picture: its boxes, where they are, colours, texts."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from gnncompile.report.collapse import collapsed, layer
from gnncompile.report.layered import Layout, layered
from gnncompile.report.model_graph import STRUCTURE, Box

LETTER, SMALL_LETTER = 7.3, 5.8
"""Widths of a letter of the first and the second line, in pixels, on average and a little more."""

LONGEST = 34
"""Letters of a line."""


@dataclass(frozen=True)
class Colour:
    """A hue: of edges and bars, and of a box's inside, on light and on dark."""

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
"""One after the other for the regions; from the ninth on again."""

GREY = Colour("#8a8f98", "#eceef1", "#8f959e", "#2c3036")
"""Of the structure program."""


FAR = 2
"""Layers that an edge from an input or from structure goes down at most; a box further below gets a mark."""


@dataclass(frozen=True)
class Picture:
    """A graph that is ready to be drawn.

    Attributes:
        graph: With few enough nodes; each has a ``"box"``.
        layout: Where these are.
        notched: Nodes that read inputs or structure from far above: these, in place of edges.
    """

    graph: nx.DiGraph
    layout: Layout
    notched: dict[str, list[str]]


def pictured(graph: nx.DiGraph) -> Picture:
    """Makes one of the graphs of a :class:`~gnncompile.report.model_graph.ModelGraph` ready to be drawn."""
    small = collapsed(graph)
    small.remove_nodes_from([n for n in nx.isolates(small) if small.nodes[n]["box"].kind == "input"])
    depth = {n: k for k, row in enumerate(nx.topological_generations(small)) for n in row}
    # What stands at the top because nothing stands above it is drawn right above its first reader.
    depth.update({n: min(depth[s] for s in small[n]) - 1 for n in small if not small.in_degree(n) and small[n]})
    notched: dict[str, list[str]] = {}
    for a, b in list(small.edges):
        if small.nodes[a]["box"].kind in ("input", STRUCTURE) and depth[b] - depth[a] > FAR:
            small.remove_edge(a, b)
            notched.setdefault(b, []).append(a)
    layout = layered(small, lambda n: box_size(small.nodes[n]["box"]))
    return Picture(small, layout, notched)


def box_lines(box: Box) -> tuple[str, str]:
    """The two lines in a box: what it is, and its result; or what it stands for."""
    first, result = _cut(box.label), box.operations[-1].result.replace("float32 ", "") if box.operations else ""
    if box.kind == "structure" and len(box.operations) > 1:
        return first, f"{len(box.operations)} operations, once per graph"
    if box.kind == "input":
        return first, "" if len(box.operations) > 1 else _cut(result)
    return first, _cut(" · ".join(filter(None, (layer(box.module), result))))


def box_size(box: Box) -> tuple[float, float]:
    """Width and height of a box in pixels."""
    first, second = box_lines(box)
    width = max(len(first) * LETTER, len(second) * SMALL_LETTER) + 22
    return max(width, 64.0), 40.0 if second else 26.0


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def many(count: int, what: str) -> str:
    """So many of something, in words: "1 region", "2 regions"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
