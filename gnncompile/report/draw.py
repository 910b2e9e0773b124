"""Draws a report with matplotlib: each captured graph before and after the passes, side by side."""

from __future__ import annotations

from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from gnncompile.exc import ArgumentError, MissingLibraryError
from gnncompile.report.layered import Place
from gnncompile.report.look import GREY, PALETTE, Picture, box_lines, many, pictured
from gnncompile.report.tables import Findings

ENDINGS = (".png", ".svg", ".pdf")
INCH = 90.0
"""Pixels of the layout per inch."""

MARGIN, HEAD, BETWEEN, NARROWEST = 24.0, 76.0, 60.0, 560.0
MOST_PIXELS = 2**15


def draw(report: Findings, path: str | PathLike[str]) -> None:
    """Draws a report to a file: see :meth:`gnncompile.Report.draw`."""
    ending = Path(fspath(path)).suffix.lower()
    if ending not in ENDINGS:
        raise ArgumentError(f"path: found {fspath(path)!r}, expected a name that ends in {', '.join(ENDINGS)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingLibraryError("report.draw needs matplotlib: pip install matplotlib") from missing
    rows = [[pictured(g.before), pictured(g.after)] for g in report.graphs]
    width = max((sum(one.layout.width for one in row) for row in rows), default=0.0)
    width = max(width, NARROWEST) + 2 * MARGIN + BETWEEN
    height = HEAD + sum(max(one.layout.height for one in row) + HEAD for row in rows) + MARGIN
    figure: Any = Figure(figsize=(width / INCH, height / INCH), facecolor="white")
    FigureCanvasAgg(figure)  # draws to files only, so no screen is needed
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _write(axes, MARGIN, 26, _title(report), fontsize=13, weight="bold")
    _write(axes, MARGIN, 58, _legend(), fontsize=8.5, color="#555")
    top = HEAD
    for k, row in enumerate(rows):
        left = MARGIN
        for name, picture in zip(("before", "after"), row, strict=True):
            which = f", graph {k + 1} of {len(rows)}" if len(rows) > 1 else ""
            _write(axes, left, top + 22, f"{name}{which}", fontsize=11, weight="bold", color="#333")
            _draw_picture(axes, picture, left, top + 44)
            left += picture.layout.width + BETWEEN
        top += max(one.layout.height for one in row) + HEAD
    dpi = min(2 * INCH, MOST_PIXELS / max(width, height) * INCH)
    figure.savefig(path, dpi=dpi, facecolor="white", metadata={"Date": None} if ending == ".svg" else None)


def _write(axes: Any, x: float, y: float, text: str, **how: Any) -> None:
    axes.text(x, y, text, va="center", parse_math=False, **how)


def _title(report: Findings) -> str:
    return f"{report.model}: {many(len(report.regions), 'region')}, {many(report.graph_breaks, 'graph break')}"


def _legend() -> str:
    texts = (
        "one colour: one kernel and those of its gradient;  white: left to Inductor;  dashed: gone;  sizes: of float32",
        "grey: runs once per distinct graph;  grey mark on a box: it reads that, or an input, from far above",
    )
    return "\n".join(texts)


def _draw_picture(axes: Any, picture: Picture, left: float, top: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    for route in picture.layout.routes.values():
        points = [(x + left, y + top) for x, y in route]
        vertices, codes = [points[0]], [Curve.MOVETO]
        for (x0, y0), (x1, y1) in pairwise(points):
            middle = (y0 + y1) / 2
            vertices += [(x0, middle), (x1, middle), (x1, y1)]
            codes += [Curve.CURVE4] * 3
        axes.add_patch(PathPatch(Curve(vertices, codes), fill=False, edgecolor="#9aa0a6", linewidth=0.9, zorder=1))
        x, y = points[-1]
        axes.fill([x - 3, x + 3, x], [y - 5, y - 5, y], color="#9aa0a6", zorder=2, linewidth=0)
    for node, place in picture.layout.places.items():
        moved = Place(place.x + left, place.y + top, place.width, place.height)
        _draw_box(axes, picture.graph.nodes[node]["box"], moved)
        if node in picture.notched:
            x, y = moved.x - moved.width / 2 + 14, moved.y - moved.height / 2
            axes.fill([x - 5, x + 5, x + 5, x - 5], [y - 5, y - 5, y, y], color=GREY.light, zorder=4, linewidth=0)


def _draw_box(axes: Any, box: Any, place: Place) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, edge, text = "#ffffff", "#8a8f98", "#202124"
    if box.kind == "region":
        edge = PALETTE[box.regions[0] % len(PALETTE)].light
        fill = PALETTE[box.regions[0] % len(PALETTE)].pale
    elif box.kind == "structure":
        fill, edge = GREY.pale, GREY.light
    round_by = place.height / 2 if box.kind in ("input", "output") else 5
    axes.add_patch(
        FancyBboxPatch(
            (place.x - place.width / 2 + round_by, place.y - place.height / 2 + round_by),
            place.width - 2 * round_by,
            place.height - 2 * round_by,
            boxstyle=f"round,pad={round_by},rounding_size={round_by}",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.8 if box.kind == "region" else 1.0,
            linestyle="--" if box.kind == "gone" else "-",
            zorder=3,
        )
    )
    first, second = box_lines(box)
    _write(axes, place.x, place.y - (7 if second else 0), first, fontsize=8.6, ha="center", color=text, zorder=4)
    if second:
        _write(axes, place.x, place.y + 8, second, fontsize=7, ha="center", color="#5f6368", zorder=4)
