"""C++ code that sums long rows part by part, so that a float32 sum over a million edges stays accurate.

If a million numbers of one sign are added one after the other, the sum keeps only three digits. Rows of at most
:data:`PART` edges are summed in one part.
"""

from __future__ import annotations

from collections.abc import Sequence

PART = 512
"""Number of edges in a part, whose sum is added to the row's sum: about the square root of a long row's degree."""

Sum = tuple[str, int]
"""The name of an accumulator and its number of elements. An accumulator of one element is a scalar."""


_LONG = f"__builtin_expect(end - begin > {PART}, 0)"


def opening(sums: Sequence[Sum]) -> list[str]:
    """Returns the lines before the loop over the edges ``p`` of a part, which go from ``part`` to ``until``."""
    lines = [f"T whole_{name}{f'[{size}]' if size > 1 else ''};" for name, size in sums]
    lines += [f"if ({_LONG}) {_each(f'whole_{name}', size)} = 0;" for name, size in sums]
    lines += [
        "for (int64_t part = begin, until = -1; until != end; part = until) {",
        f"  const bool more = __builtin_expect(end - part > {PART}, 0);",
        f"  until = more ? part + {PART} : end;",
    ]
    return lines


def closing(sums: Sequence[Sum]) -> list[str]:
    """Returns the lines after the loop that :func:`opening` describes."""
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
