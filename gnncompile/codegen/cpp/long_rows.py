"""Long rows are summed part by part in C++ kernels, so that the sum over a million edges is as exact as float32 can be.

Added up one after the other, a million numbers of one sign lose all but three digits. Rows of no more than :data:`PART`
edges are summed as if there were no parts.
"""

from __future__ import annotations

from collections.abc import Sequence

PART = 512
"""Edges that are added up before their sum is added to that of the row: about the root of how many a long row has."""

Sum = tuple[str, int]
"""The name of an accumulator and its number of elements; one alone is no array."""


_LONG = f"__builtin_expect(end - begin > {PART}, 0)"


def opening(sums: Sequence[Sum]) -> list[str]:
    """What stands before the loop over the edges ``p`` of a part, which goes from ``part`` to ``until``."""
    lines = [f"T whole_{name}{f'[{size}]' if size > 1 else ''};" for name, size in sums]
    lines += [f"if ({_LONG}) {_each(f'whole_{name}', size)} = 0;" for name, size in sums]
    lines += [
        "for (int64_t part = begin, until = -1; until != end; part = until) {",
        f"  const bool more = __builtin_expect(end - part > {PART}, 0);",
        f"  until = more ? part + {PART} : end;",
    ]
    return lines


def closing(sums: Sequence[Sum]) -> list[str]:
    """What stands behind that loop."""
    lines = ["  if (more) {"]
    for name, size in sums:
        lines += [f"    {_each(f'whole_{name}', size)} += {_element(name, size)};", f"    {_each(name, size)} = 0;"]
    lines += ["  }", "}"]
    lines += [f"if ({_LONG}) {_each(name, size)} += {_element(f'whole_{name}', size)};" for name, size in sums]
    return lines


def _each(name: str, size: int) -> str:
    return f"for (int i = 0; i < {size}; ++i) {name}[i]" if size > 1 else name


def _element(name: str, size: int) -> str:
    return f"{name}[i]" if size > 1 else name
