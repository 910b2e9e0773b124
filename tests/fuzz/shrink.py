"""Makes a finding small: removes results, lines and sizes, and simplifies settings, while the check still fails."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz.check import Case, Finding, NotComparable, check
from tests.fuzz.graphs import Size
from tests.fuzz.program import FLOATS, Line, Program


def finding(case: Case) -> str | None:
    """Returns the finding of a case as text, or None."""
    try:
        check(case)
    except NotComparable:
        return None
    except Finding as found:
        return str(found)
    return None


def shrink(case: Case, seconds: float = 300) -> Case:
    """Returns a smaller case that still fails; stops after `seconds`, or when no smaller case fails."""
    end = time.perf_counter() + seconds
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            if time.perf_counter() > end:
                return case
            if finding(smaller) is not None:
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for at in range(len(case.sizes)):
        if len(case.sizes) > 1:
            yield replace(case, sizes=case.sizes[:at] + case.sizes[at + 1 :])
    assert isinstance(case.program, Program)
    for program in dict.fromkeys(_programs(case.program)):
        if len(program.lines) + len(program.results) < len(case.program.lines) + len(case.program.results):
            yield replace(case, program=program)
    plain = {
        "way": ("training", "inference"),
        "engine": ("op by op", "passes"),
        "kernels": ("reference",),
        "dtype": ("float64",),
        "frozen": ((),),
        "reuse": (True,),
        "sizes": ((Size(),), (Size(4, 5, 2, 3, 2),)),
    }
    for name, values in plain.items():
        if getattr(case, name) in values or (case.device != "cpu" and name in ("engine", "kernels")):
            continue
        for value in values:
            yield replace(case, **{name: value})


def _programs(program: Program) -> Iterator[Program]:
    lines, results = program.lines, program.results
    for at in range(len(results)):
        if len(results) > 1:
            yield Program(lines, results[:at] + results[at + 1 :]).pruned()
    for at in reversed(range(len(lines))):
        name = lines[at].name
        if name in results:
            # A value that the line reads becomes a result instead of the line, whatever its shape.
            for read in sorted(lines[at].reads):
                if any(line.name == read for line in lines[:at]) and read not in results:
                    yield Program(lines, tuple(read if r == name else r for r in results)).pruned()
        for other in [*(line.name for line in lines[:at]), *FLOATS]:
            # Readers of the line read another value instead. If the shapes do not fit, eager raises.
            if other in lines[at].reads or other in FLOATS:
                yield Program(tuple(_renamed(line, name, other) for line in lines), results).pruned()


def _renamed(line: Line, old: str, new: str) -> Line:
    return replace(line, text=re.sub(rf"\b{old}\b", new, line.text))
