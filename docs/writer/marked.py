"""Generated parts of a page: the text between two comments of HTML."""

from __future__ import annotations

from pathlib import Path

LAST = "<!-- end -->"


def page(file: Path, name: str, first: str, made: str) -> str:
    """Returns a page with the text between `first` and :data:`LAST` replaced by `made`.

    Args:
        file: The page.
        name: What errors call the page.
        first: The comment before the generated part.
        made: The generated part.

    Raises:
        ValueError: The page has no place for the generated part.
    """
    text = file.read_text(encoding="utf-8")
    head, _, rest = text.partition(first)
    if text.count(first) != 1 or LAST not in rest:
        raise ValueError(f"{name}: found no place for the table, expected `{first}` and `{LAST}`")
    return f"{head}{first}\n{made}\n{LAST}{rest.partition(LAST)[2]}"
