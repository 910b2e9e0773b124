"""Docstrings, as they are written for Sphinx, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises):")
_ENTRY = re.compile(r"(\*{0,2}\w[\w., ]*?): (.*)", re.DOTALL)


def markdown(text: str) -> str:
    """A docstring, cleaned of its indentation, as Markdown."""
    parts = []
    for block in _blocks(text.splitlines()):
        first = block[0].strip()
        if _SECTION.fullmatch(first):
            parts += [f"**{first[:-1]}**", _entries(first[:-1], _dedented(block[1:]))]
        elif first == ".. math::":
            parts.append("\n".join(["```math", *_dedented(block[1:]), "```"]))
        elif first == ".. code-block:: python" or first.endswith("::"):
            said = _inline(first.removesuffix("::").removesuffix("Example").strip()) if first[0] != "." else ""
            parts += [f"{said}:"] if said else []
            parts.append(_code(_dedented(block[1:])))
        else:
            parts.append(_inline("\n".join(_dedented(block))))
    return "\n\n".join(parts)


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Paragraphs; a line that opens a section or code has what is indented below it with it."""
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        depth, end = _depth(lines[at]), at + 1
        while end < len(lines) and lines[end].strip() and not _opens(lines[end - 1]) and not _starts(lines[end]):
            end += 1
        if _opens(lines[end - 1]):
            if end - 1 > at:  # the text in front of it, and the line itself as a block of its own
                opening = lines[end - 1]
                yield lines[at : end - 1] if _starts(opening) else [*lines[at : end - 1], opening.rstrip(":") + ":"]
                at = end - 1
                if not _starts(opening):
                    lines[at] = " " * depth + "::"
                continue
            while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > depth):
                end += 1
        yield lines[at:end]
        at = end


def _starts(line: str) -> bool:
    return _SECTION.fullmatch(line.strip()) is not None or line.strip().startswith(".. ")


def _opens(line: str) -> bool:
    return _starts(line) or line.rstrip().endswith("::")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _dedented(lines: list[str]) -> list[str]:
    least = min((_depth(line) for line in lines if line.strip()), default=0)
    text = "\n".join(line[least:].rstrip() for line in lines).strip("\n")
    return text.split("\n")


def _entries(section: str, lines: list[str]) -> str:
    """The entries of a section as a list; what is returned is plain text."""
    if section == "Returns":
        return _inline("\n".join(lines))
    entries: list[list[str]] = []
    for line in lines:
        if line and not line.startswith(" "):
            entries.append([line])
        elif entries and line:
            entries[-1].append(line.strip())
    made = []
    for entry in entries:
        found = _ENTRY.fullmatch("\n".join(entry))
        names, said = (found.group(1), found.group(2)) if found else ("", "\n".join(entry))
        marked = ", ".join(f"`{name.strip()}`" for name in names.split(",")) if names else ""
        made.append(f"- {marked}: {_inline(said)}".replace("\n", "\n  ") if marked else f"- {_inline(said)}")
    return "\n".join(made)


def _code(lines: list[str]) -> str:
    code = "\n".join(lines)
    needs = ["# needs: an NVIDIA GPU"] if '"cuda"' in code else []
    return "\n".join(["```python", *needs, code, "```"])


def _inline(text: str) -> str:
    text = re.sub(r":math:`(.+?)`", r"$\1$", text, flags=re.DOTALL)
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return re.sub(r"`\"?([^`<\"]+?)\"?\s+<(https?://[^>]+)>`_", r"[\1](\2)", text)
