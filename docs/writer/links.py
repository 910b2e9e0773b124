"""Finds links of the documentation that lead nowhere, without a network: files that are not there, and anchors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DEFINED = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_IN_HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\"([^\"]+)\"")
_NAMED = re.compile(r"<a\b[^>]*?\b(?:id|name)=\"([^\"]+)\"")
_FENCE = re.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")


def pages(root: Path) -> list[Path]:
    """The pages of the documentation, sorted."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")])


def links(text: str) -> Iterator[tuple[int, str]]:
    """The targets of a page's links and images, with their lines; what stands in code is none."""
    plain = _without_code(text)
    for pattern in (_LINK, _DEFINED, _IN_HTML):
        for found in pattern.finditer(plain):
            yield plain.count("\n", 0, found.start(1)) + 1, found.group(1)


def broken(page: Path, root: Path) -> list[str]:
    """What is wrong with the links of a page, a line each; links to other hosts are not followed.

    Args:
        page: A file of Markdown.
        root: Of the repository, which links may not leave.
    """
    problems = []
    for line, target in links(page.read_text(encoding="utf-8")):
        why = _why_broken(page, unquote(target), root)
        if why:
            problems.append(f"{page.relative_to(root)}:{line}: {target}: {why}")
    return problems


def _why_broken(page: Path, target: str, root: Path) -> str:
    if _ELSEWHERE.match(target):
        return ""
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.is_relative_to(root.resolve()):
        return "leaves the repository"
    if not path.exists():
        return f"there is no {path.relative_to(root.resolve())}"
    if not anchor:
        return ""
    if path.suffix != ".md":
        return "" if re.fullmatch(r"L\d+(-L\d+)?", anchor) else "only pages of Markdown have anchors"
    if anchor in anchors(path):
        return ""
    return f"{path.relative_to(root.resolve())} has no heading with the anchor {anchor!r}"


@lru_cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page, as GitHub makes them of headings."""
    text = page.read_text(encoding="utf-8")
    found, seen = set(_NAMED.findall(_without_code(text))), Counter[str]()
    for heading in re.findall(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", _FENCE.sub("", text), re.MULTILINE):
        slug = _slug(heading)
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def _slug(heading: str) -> str:
    shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


def _without_code(text: str) -> str:
    """The text with code and comments blanked, each line where it was."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found.group())

    for pattern in (_FENCE, _COMMENT, re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")):
        text = pattern.sub(blank, text)
    return text
