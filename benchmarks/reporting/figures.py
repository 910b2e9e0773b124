"""Draws the figures of the README from stored results, as SVG bars. No library is used, so equal numbers give equal
files. Colours follow the reader's light or dark mode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.reporting.readme_tables import COMPILE, number, times
from benchmarks.reporting.stored import Stored, best

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 760, 96, 150, 16, 16, 64
"""Pixels: width of the figure, margins left and right of the longest bar, height of a bar, gap between groups, space
above the first group.
"""

STYLE = """
    .page { fill: #ffffff; }
    text { font: 13px system-ui, sans-serif; fill: #24292f; }
    .title { font-weight: 600; font-size: 15px; }
    .bar0 { fill: #b6bcc4; } .bar1 { fill: #7d94b5; } .bar2 { fill: #1a7f5a; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; }
      text { fill: #e6edf3; }
      .bar0 { fill: #6b7280; } .bar1 { fill: #5f7fb0; } .bar2 { fill: #3fb68b; }
    }
"""

NAMES = ("eager", "torch.compile", "gnncompile")


@dataclass(frozen=True)
class Group:
    """Bars that are compared: a title, and the milliseconds of each row in `NAMES`."""

    name: str
    values: Sequence[float]


def bars(title: str, groups: Sequence[Group]) -> str:
    """Returns a bar chart as SVG. Each bar of gnncompile shows its speed-up over the bar above it."""
    longest = max(value for group in groups for value in group.values)
    height = TOP + len(groups) * (len(NAMES) * BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="page" width="{WIDTH}" height="{height}"/>',
        f'  <text class="title" x="8" y="20">{escape(title)}</text>',
    ]
    for place, name in enumerate(NAMES):
        x = 8 + place * 130
        lines.append(f'  <rect class="bar{place}" x="{x}" y="34" width="12" height="12"/>')
        lines.append(f'  <text x="{x + 18}" y="45">{escape(name)}</text>')
    for at, group in enumerate(groups):
        y = TOP + at * (len(NAMES) * BAR + GAP)
        lines.append(f'  <text x="8" y="{y + len(NAMES) * BAR // 2 + 5}">{escape(group.name)}</text>')
        for place, value in enumerate(group.values):
            length = max(value / longest * (WIDTH - LEFT - RIGHT), 1.0)
            top, bottom = y + place * BAR + 1, y + (place + 1) * BAR
            lines.append(f'  <rect class="bar{place}" x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 2}"/>')
            text = f"{number(value)} ms"
            if place == len(NAMES) - 1:
                text += f", {times(group.values[place - 1], value)} over torch.compile"
            lines.append(f'  <text x="{LEFT + length + 6:.1f}" y="{bottom - 3}">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _of_guide(title: str, file: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        groups = []
        for model, rows in Stored(folder / file).by("model").items():
            values = [best(rows, names, "median_ms") for names in (("eager",), COMPILE, ("gnncompile",))]
            if any(value is None for value in values):
                raise ValueError(f"{file}: {model} lacks one of {', '.join(NAMES)}; measure it again")
            groups.append(Group(model, [value for value in values if value is not None]))
        return bars(title, groups)

    return make


FIGURES: dict[str, Callable[[Path], str]] = {
    "speed-gpu.svg": _of_guide(
        "One H200, power-law graph of 2.3 million edges: forward and backward",
        "nvidia-h200/guide-powerlaw-arxiv-cuda.json",
    ),
    "speed-cpu.svg": _of_guide(
        "A 2-core CPU, graph of 200,000 edges: forward and backward",
        "cpu-xeon-2-cores/guide-guide-cpu.json",
    ),
}
"""The files of docs/figures, and the functions that draw them."""
