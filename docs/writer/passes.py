"""The table of passes in docs/how/passes.md, made from what the file of each pass says of itself."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path

from docs.writer import marked

FIRST = "<!-- passes -->"
PAGE = "docs/how/passes.md"


@dataclass(frozen=True)
class Pass:
    """What a pass says.

    Attributes:
        name: The name of its file.
        folder: The folder of its file.
        what: The first sentences.
        changes: Pairs of before and after.
        why: Why it pays.
        option: The option that turns it off, if there is one.
    """

    name: str
    folder: str
    what: str
    changes: tuple[tuple[str, str], ...]
    why: str
    option: str | None = None


def described(name: str, text: str, option: str | None = None, folder: str = "") -> Pass:
    """Reads the docstring of a pass.

    Raises:
        ValueError: It lacks a part.
    """
    parts = re.split(r"^(Before|After|Why it pays):[ \t]*", text, flags=re.MULTILINE)
    what, said = parts[0].strip(), list(zip(parts[1::2], (one.strip() for one in parts[2::2]), strict=True))
    why = [one for label, one in said if label == "Why it pays"]
    before, after = ([one for label, one in said if label == kind] for kind in ("Before", "After"))
    if not what or len(why) != 1 or not before or len(before) != len(after):
        raise ValueError(f"{name}: found {[label for label, _ in said]}, expected Before, After and Why it pays")
    return Pass(
        name,
        folder,
        _joined(what),
        tuple(zip(map(_joined, before), map(_joined, after), strict=True)),
        _joined(why[0]),
        option,
    )


def table(passes: list[Pass]) -> str:
    """The passes as a table of Markdown."""
    lines = ["| | pass | before | after | why it pays |", "|---|---|---|---|---|"]
    for number, one in enumerate(passes, 1):
        option = f" (option `{one.option}`)" if one.option else ""
        name = f"[{one.name}](../../{one.folder}/{one.name}.py){option}<br>{one.what}"
        before, after = ("<br><br>".join(pair[k] for pair in one.changes) for k in (0, 1))
        cells = [str(number), name, before, after, one.why]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def page(root: Path) -> str:
    """The page with its table made anew.

    Raises:
        ValueError: The page has no place for the table.
    """
    return marked.page(root / PAGE, PAGE, FIRST, table(in_order(root)))


def in_order(root: Path) -> list[Pass]:
    """All passes in the order in which they run."""
    manager = importlib.import_module("gnncompile.passes.manager")
    found = []
    for one in (*manager.PRE_GRAD, *manager.JOINT, *manager.POST_GRAD):
        folder, _, name = one.run.__module__.replace(".", "/").rpartition("/")
        source = (root / folder / f"{name}.py").read_text(encoding="utf-8")
        found.append(described(name, ast.get_docstring(ast.parse(source)) or "", one.option, folder))
    return found


def _joined(text: str) -> str:
    """Lines of a docstring as one, with code as Markdown has it."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))
