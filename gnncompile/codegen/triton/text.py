"""Helpers that write pieces of Triton code."""

from __future__ import annotations

import math


def masked(masks: list[str], other: str = "") -> str:
    """Returns the mask arguments of a load or a store, after a leading comma; ``""`` without masks."""
    if not masks:
        return ""
    return f", mask={' & '.join(masks)}{f', other={other}' if other else ''}"


def literal(value: float) -> str:
    """Returns a number as Triton code."""
    if math.isfinite(value):
        return repr(value) if math.copysign(1.0, value) > 0 else f"({value!r})"
    return f'float("{value!r}")'


def without_parentheses(text: str) -> str:
    """Removes a pair of parentheses that encloses the whole expression, if there is one."""
    if not text.startswith("("):
        return text
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:-1] if at == len(text) - 1 else text
    return text
