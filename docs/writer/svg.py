"""Pieces of SVG that follow the reader's light or dark mode, written without a library: equal numbers, equal files."""

from __future__ import annotations

from html import escape

STYLE = """
    .page { fill: #ffffff; }
    text { font: 13px system-ui, sans-serif; fill: #24292f; }
    .title { font-weight: 600; font-size: 15px; }
    .small { font-size: 11px; fill: #57606a; }
    .number { font-family: ui-monospace, monospace; text-anchor: middle; }
    .cell { fill: #f6f8fa; stroke: #8c959f; } .fill0 { fill: #b6bcc4; } .fill1 { fill: #1a7f5a; }
    .row0 { fill: #cfe8dd; stroke: #1a7f5a; } .row1 { fill: #d5e3f7; stroke: #4a75b0; }
    .row2 { fill: #f7e6c4; stroke: #a87a1f; } .row3 { fill: #ead9f2; stroke: #83509e; }
    .dead { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
    .line { stroke: #8c959f; fill: none; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; }
      text { fill: #e6edf3; }
      .small { fill: #9aa4b0; }
      .cell { fill: #21262d; stroke: #6e7681; } .fill0 { fill: #6b7280; } .fill1 { fill: #3fb68b; }
      .row0 { fill: #123f30; stroke: #3fb68b; } .row1 { fill: #1c3354; stroke: #7ba7e0; }
      .row2 { fill: #463612; stroke: #d9a93c; } .row3 { fill: #3d2549; stroke: #c08adb; }
    }
"""


class Canvas:
    """A picture under construction.

    Args:
        title: What it shows, written above it.
        width: In pixels.
        height: In pixels.
    """

    def __init__(self, title: str, width: int, height: int) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
            f"  <style>{STYLE}  </style>",
            f'  <rect class="page" width="{width}" height="{height}"/>',
        ]
        self.text(10, 22, title, "title")

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Writes a text; `y` is that of its base line."""
        of = f' class="{kind}"' if kind else ""
        self._lines.append(f'  <text{of} x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draws a rectangle."""
        self._lines.append(
            f'  <rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draws a line."""
        self._lines.append(f'  <path class="line" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>')

    def __str__(self) -> str:
        return "\n".join([*self._lines, "</svg>"]) + "\n"
