"""Pieces of the text of Triton kernels."""

from __future__ import annotations

import math


def masked(masks: list[str], other: str = "") -> str:
    """The arguments of a load or a store that its masks need, after a leading comma."""
    if not masks:
        return ""
    return f", mask={' & '.join(masks)}{f', other={other}' if other else ''}"


def literal(value: float) -> str:
    """A number."""
    if math.isfinite(value):
        return repr(value) if math.copysign(1.0, value) > 0 else f"({value!r})"
    return f'float("{value!r}")'


def without_parentheses(text: str) -> str:
    """Drops a pair of parentheses around a whole expression."""
    if not text.startswith("("):
        return text
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:-1] if at == len(text) - 1 else text
    return text
