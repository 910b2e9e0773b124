"""Writes a report as one HTML page without external files."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from os import PathLike
from pathlib import Path

from gnncompile.report.look import PALETTE, Picture, box_lines, many, pictured
from gnncompile.report.model_graph import TIMES, Box
from gnncompile.report.page import SCRIPT, STYLE, colours
from gnncompile.report.tables import Findings, KernelReport, RegionReport
from gnncompile.report.traffic import rates_of

BAR = 220.0
"""Width of the longest bar, in pixels."""

KINDS = {
    "input": "An input.",
    "output": "What the model returns.",
    "structure": "Depends on the structure of the graph alone: runs once per distinct graph, outside the step.",
    "dense": "Left to Inductor.",
    "gone": "Gone: written in another way, or needed by nobody.",
}


def write(report: Findings, path: str | PathLike[str]) -> None:
    """Writes a report to a file: see :meth:`gnncompile.Report.to_html`."""
    Path(path).write_text(page(report), encoding="utf-8", errors="replace")


def page(report: Findings) -> str:
    """Returns the page as HTML text."""
    style = STYLE + colours()
    policy = f"default-src 'none'; style-src 'sha256-{_digest(style)}'; script-src 'sha256-{_digest(SCRIPT)}'"
    pictures = [(pictured(g.before), pictured(g.after)) for g in report.graphs]
    operations = [sum(b.kind not in ("input", "output") for _, b in g.before.nodes(data="box")) for g in report.graphs]
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{_text(report.model)}: gnncompile</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        f"<style>{style}</style>\n</head>\n<body>",
        *_header(report),
        '<main>\n<div class="split">\n<div>',
    ]
    for k, pair in enumerate(pictures):
        if len(pictures) > 1:
            parts.append(f"<h2>Graph {k + 1} of {len(pictures)}</h2>")
        titles = f"before: {operations[k]} operations", "after"
        parts.append('<div class="pair">')
        parts += [_figure(one, f"g{k}{title[0]}", title) for one, title in zip(pair, titles, strict=True)]
        parts.append("</div>")
    parts.append(
        '</div>\n<aside id="panel" aria-live="polite"><p class="soft">Point at a box for what it does, the line it '
        "came from and its kernel. Click to keep it here, Escape to let go.</p></aside>\n</div>"
    )
    parts += [*_regions(report), *_skipped(report)]
    parts.append(f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n")
    return "\n".join(parts)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(value: object) -> str:
    """Returns a value as escaped text: whatever the user's code contains, it can't act as markup."""
    return escape(
        re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0001fffd]", "�", str(value))
    )


def _header(report: Findings) -> Iterable[str]:
    facts = [
        many(len(report.regions), "region"),
        f"{many(report.structure_nodes, 'operation')} on graph structure run once per graph",
        many(report.captured_graphs, "captured graph"),
        many(report.graph_breaks, "graph break"),
        many(report.recompiles, "recompile"),
        f"{many(report.host_syncs, 'host sync')} in a steady call",
        report.device,
    ]
    yield f"<header>\n<h1>{_text(report.model)}</h1>\n<p>{_text(' · '.join(facts))}</p>"
    if report.forward is not None:
        yield f"<p>{_text(_times(report))}</p>"
    shown = [
        f'<span><span class="swatch r{k % len(PALETTE)}"></span>region {k}</span>'
        for k in range(min(len(report.regions), 8))
    ]
    yield '<div class="legend">' + "".join(
        [
            *shown,
            '<span><span class="swatch structure"></span>runs once per distinct graph; a grey mark on a box: reads '
            "that, or an input, from far above</span>",
            '<span><span class="swatch"></span>left to Inductor</span>',
            '<span><span class="swatch gone"></span>gone</span>',
            "<span>sizes of float32 unless they say otherwise</span>",
            '<button id="size" type="button">full size</button>',
        ]
    )
    yield "</div>\n</header>"


def _times(report: Findings) -> str:
    kernels = [k for r in report.regions for k in r.kernels] + list(report.others)
    spent = [sum(k.milliseconds or 0.0 for k in kernels if k.gradient == g) for g in (False, True)]
    text = f"forward {_ms(report.forward)}, {_ms(spent[0])} of it in regions"
    if report.backward is not None:
        text += f"; backward {_ms(report.backward)}, {_ms(spent[1])} of it in regions"
    return f"{text} (medians, the host waiting for each call)"


def _figure(picture: Picture, name: str, title: str) -> str:
    layout = picture.layout
    width, height = layout.width + 8, layout.height + 8
    parts = [
        f"<figure><figcaption>{_text(title)}</figcaption>",
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="-4 -4 {width:.0f} {height:.0f}" role="group" aria-label="{_text(title)}">',
    ]
    parts += [_route(points) for points in layout.routes.values()]
    abouts = []
    for k, node in enumerate(layout.places):
        parts.append(_box(picture, str(node), f"{name}{k}"))
        abouts.append(f'<template id="{name}{k}">{_about(picture, str(node))}</template>')
    return "\n".join([*parts, "</svg>", *abouts, "</figure>"])


def _route(points: Sequence[tuple[float, float]]) -> str:
    path = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        path.append(
            f"L{x1:.1f} {y1:.1f}" if x0 == x1 else f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
        )
    x, y = points[-1]
    head = f"M{x - 3:.1f} {y - 5:.1f}L{x + 3:.1f} {y - 5:.1f}L{x:.1f} {y:.1f}Z"
    return f'<path class="route" d="{"".join(path)}"/><path class="head" d="{head}"/>'


def _box(picture: Picture, node: str, about: str) -> str:
    box, place = picture.graph.nodes[node]["box"], picture.layout.places[node]
    x, y = place.x - place.width / 2, place.y - place.height / 2
    region = str(box.regions[0]) if box.kind == "region" else ""
    colour = f" r{box.regions[0] % len(PALETTE)}" if region else ""
    first, second = box_lines(box)
    radius = place.height / 2 if box.kind in ("input", "output") else 5
    parts = [
        f'<g class="box {box.kind}{colour}" tabindex="0" role="button" data-about="{about}" data-region="{region}">',
        f"<title>{_text(_plain(box))}</title>",
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" rx="{radius:.1f}"/>',
        f'<text x="{place.x:.1f}" y="{place.y + (-3 if second else 4):.1f}">{_text(first)}</text>',
    ]
    if second:
        parts.append(f'<text class="result" x="{place.x:.1f}" y="{place.y + 12:.1f}">{_text(second)}</text>')
    if node in picture.notched:
        parts.append(f'<path class="mark" d="M{x + 9:.1f} {y - 5:.1f}h10v5h-10z"/>')
    return "".join([*parts, "</g>"])


def _plain(box: Box) -> str:
    return "\n".join([box.label, *(f"{o.name}: {o.result}  {o.line}" for o in box.operations)])


def _about(picture: Picture, node: str) -> str:
    box = picture.graph.nodes[node]["box"]
    parts = [f"<h3>{_text(box.label)}</h3>"]
    if box.kind == "region":
        what = "Fused into " + " and ".join(f"region {r}" for r in box.regions)
        if not box.label.startswith("region"):
            parts.append(f"<p>{_text(what)}{_text(f', in {box.module}' if box.module else '')}.</p>")
    else:
        parts.append(f"<p>{KINDS[box.kind]}</p>")
        if box.module:
            parts.append(f'<p class="soft">in {_text(box.module)}</p>')
    if node in picture.notched:
        names = ", ".join(picture.graph.nodes[n]["box"].label for n in picture.notched[node])
        parts.append(f'<p class="soft">reads, from far above: {_text(names)}</p>')
    listed = [f"<li><b>{_text(o.name)}</b> {_text(o.result)}{_line(o.line)}</li>" for o in box.operations]
    if box.bytes:
        parts.append(f'<p class="soft">{_size(box.bytes)} read and written, were each operation run on its own</p>')
    return "".join([*parts, "<ul>", *listed, "</ul>"] if listed else parts)


def _line(line: str) -> str:
    return "" if line in ("", "?") else f'<br><span class="line soft">{_text(line)}</span>'


def _regions(report: Findings) -> Iterable[str]:
    if not report.regions:
        return
    longest = max(
        [k.moved.bytes for r in report.regions for k in r.kernels if k.moved]
        + [r.unfused for r in report.regions]
        + [1]
    )
    yield (
        '<h2>Regions</h2>\n<p class="soft">Bytes are counted from the program of a kernel, not measured: a row for '
        "each edge that it gathers, everything else once. The limit is one walk over the edges. What caches save is "
        "not taken off. Unfused is what the operations read and write, each on its own.</p>"
        '\n<div class="wide"><table>\n<tr><th>kernel</th><th>what</th><th></th><th class="number">moved</th>'
        '<th class="number">limit</th><th class="number">unfused</th><th class="number">time</th>'
        '<th class="number">reached</th></tr>'
    )
    for k, region in enumerate(report.regions):
        for kernel in region.kernels:
            yield _row(k, region, kernel, longest)
    yield "</table></div>"
    for k, region in enumerate(report.regions):
        yield f'<article id="region-{k}" class="r{k % len(PALETTE)}"><h3>region {k}: {_text(region.what)}</h3>'
        yield f"<p>result {_text(region.result)}{_line(region.line)}</p>"
        yield from (_kernel(kernel, report.device) for kernel in region.kernels)
        yield "</article>"


def _row(k: int, region: RegionReport, kernel: KernelReport, longest: float) -> str:
    unfused = 0.0 if kernel.gradient else region.unfused
    name = f"region {k}" + (", gradient" if kernel.gradient else "")
    times = f" {TIMES} {kernel.launches}" if kernel.launches > 1 else ""
    cells = [
        _size(kernel.moved.bytes) if kernel.moved else "",
        _size(kernel.limit.bytes) if kernel.limit else "",
        _size(unfused) if unfused else "",
        _ms(kernel.milliseconds),
        _reached(kernel),
    ]
    return (
        f'<tr class="r{k % len(PALETTE)}"><td><span class="swatch"></span>{name}{times}</td>'
        f"<td>{_text('' if kernel.gradient else region.what)}</td><td>{_bars(kernel, unfused, longest)}</td>"
        + "".join(f'<td class="number">{cell}</td>' for cell in cells)
        + "</tr>"
    )


def _bars(kernel: KernelReport, unfused: float, longest: float) -> str:
    if kernel.moved is None or kernel.limit is None:
        return ""
    scale = BAR / longest
    rows = [("bar unfused", unfused, 0, 12), ("bar", kernel.moved.bytes, 0, 8), ("bar limit", kernel.limit.bytes, 8, 4)]
    rects = [
        f'<rect class="{name}" x="0" y="{y}" width="{max(count * scale, 0.5 * (count > 0)):.1f}" height="{height}"/>'
        for name, count, y, height in rows
    ]
    text = f"moved {_size(kernel.moved.bytes)}, limit {_size(kernel.limit.bytes)}"
    return f'<svg width="{BAR:.0f}" height="14" role="img" aria-label="{text}">{"".join(rects)}</svg>'


def _kernel(kernel: KernelReport, device: str) -> str:
    by = {"cpp": "C++", "triton": "Triton", "reference": "reference interpreter"}[kernel.generator]
    facts = [f"gradient, {by}" if kernel.gradient else f"kernel, {by}"]
    if not kernel.launches:
        facts.append("not seen in a step: runs once per graph, or for other sizes")
    if kernel.moved is not None and kernel.limit is not None:
        facts.append(f"{_size(kernel.moved.gathered)} gathered, {_size(kernel.moved.streamed)} streamed")
        facts.append(f"limit {_size(kernel.limit.bytes)}")
        rates = rates_of(device)
        if rates is not None:
            facts.append(f"{_ms(kernel.limit.milliseconds(rates))} at least on this device")
    if kernel.milliseconds is not None:
        facts.append(f"took {_ms(kernel.milliseconds)}")
    source = f'<details class="source"><summary>generated source</summary><pre>{_text(kernel.source)}</pre></details>'
    if kernel.generator == "reference":
        source = '<p class="soft">The reference interpreter runs it; there is no source.</p>'
    program = f"<details><summary>program</summary><pre>{_text(kernel.program)}</pre></details>"
    return f'<div class="kernel"><p>{_text("; ".join(facts))}</p>{program}{source}</div>'


def _skipped(report: Findings) -> Iterable[str]:
    yield "<h2>Not fused</h2>"
    if report.skipped:
        yield '<div class="wide"><table>\n<tr><th>what</th><th>why</th><th>from</th></tr>'
        for skip in report.skipped:
            line = f'<span class="line">{_text(skip.line)}</span>'
            yield f"<tr><td>{_text(skip.what)}</td><td>{_text(skip.reason)}</td><td>{line}</td></tr>"
        yield "</table></div>"
    else:
        yield '<p class="soft">Nothing was skipped.</p>'
    if report.notes:
        yield "<h2>Notes</h2>\n<ul>" + "".join(f"<li>{_text(note)}</li>" for note in report.notes) + "</ul>"


def _reached(kernel: KernelReport) -> str:
    if not kernel.milliseconds or kernel.moved is None:
        return ""
    return f"{kernel.moved.bytes * kernel.launches / kernel.milliseconds / 1e6:.3g} GB/s"


def _ms(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.3g} ms"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
