"""Finds the blocks of code of a page, what they need, and what they are said to print.

- A block of Python that starts with `# needs: ...` runs only where that is met, see :data:`NEEDS`.
- A block of text behind `<!-- printed -->` is what the block of Python in front of it prints.
- A comment `<!-- setup ... -->` holds Python that the blocks behind it rely on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SETUP, PRINTED = "<!-- setup", "<!-- printed -->"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


NEEDS: dict[str, Callable[[], bool]] = {
    "an NVIDIA GPU": _has_gpu,
}
"""What a block may need, and whether it is there."""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        line: Of its first line of code, from 1.
        language: What the fence says, such as "python".
        code: The text.
        printed: What it is said to print; None if nothing is said.
    """

    line: int
    language: str
    code: str
    printed: str | None = None

    @property
    def needs(self) -> str | None:
        """What it needs beyond Python, PyTorch and PyG.

        Raises:
            ValueError: it is none of :data:`NEEDS`.
        """
        found = re.match(r"# needs: (.+)", self.code)
        if found is None:
            return None
        if found.group(1) not in NEEDS:
            raise ValueError(f"line {self.line}: needs {found.group(1)!r}, expected one of {', '.join(NEEDS)}")
        return found.group(1)


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order.

    Raises:
        ValueError: A fence or comment has no end, or a block of Python is not told to be one.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    at, printed = 0, False
    while at < len(lines):
        line, fence = lines[at], re.match(r"\s*(```+)(\w*)", lines[at])
        if fence is not None:
            end = _end(page, lines, at, fence.group(1))
            body = "\n".join(lines[at + 1 : end])
            if printed:
                found[-1] = _prints(page, found[-1], body)
            else:
                found.append(Block(at + 2, fence.group(2), body))
            at, printed = end, False
        elif line.startswith(SETUP):
            end = _end(page, lines, at, "-->")
            found.append(Block(at + 2, "python", "\n".join(lines[at + 1 : end])))
            at = end
        elif line.strip() == PRINTED:
            printed = True
        at += 1
    return found


def _end(page: Path, lines: list[str], at: int, closing: str) -> int:
    for end in range(at + 1, len(lines)):
        if lines[end].strip() == closing:
            return end
    raise ValueError(f"{page.name}:{at + 1}: found no end, expected a line `{closing}`")


def _prints(page: Path, block: Block, text: str) -> Block:
    if block.language != "python":
        raise ValueError(
            f"{page.name}:{block.line}: found {block.language!r} in front of what is printed, expected Python"
        )
    return Block(block.line, block.language, block.code, text)


def alike(text: str) -> str:
    """What is printed, without what differs between machines and releases: names of symbols, lines of code, widths of
    columns, times.
    """
    text = re.sub(r"\bs\d+\b", "s", text)
    text = re.sub(r"(\.py):\d+", r"\1", text)
    text = re.sub(r"-{2,}", "--", text)
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
