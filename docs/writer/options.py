"""The table of options in docs/debugging.md, made of their help texts."""

from __future__ import annotations

from pathlib import Path

from docs.writer import marked
from gnncompile.options import DEFAULTS, HELP

FIRST = "<!-- options -->"
PAGE = "docs/debugging.md"


def table() -> str:
    """One row for each option, with a value that is not the default."""
    lines = ["| option (another value than its default) | what the option is for | default |", "|---|---|---|"]
    for name, text in HELP.items():
        default = getattr(DEFAULTS, name)
        other = not default if isinstance(default, bool) else default // 4
        lines.append(f'| `options={{"{name}": {other}}}` | {text} | {_shown(default)} |')
    return "\n".join(lines)


def page(root: Path) -> str:
    """The page with its table made anew.

    Raises:
        ValueError: The page has no place for the table.
    """
    return marked.page(root / PAGE, PAGE, FIRST, table())


def _shown(default: bool | int) -> str:
    is_large = not isinstance(default, bool) and default >= 2**30
    return f"{default // 2**30} GiB" if is_large else str(default)
