"""The table of support as a page of Markdown, and back from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from gnncompile.support.aggr import AGGR
from gnncompile.support.case import LADDER, Absent, Case
from gnncompile.support.check import Result, check
from gnncompile.support.conv import CONV
from gnncompile.support.models import MODELS
from gnncompile.support.norm import NORM
from gnncompile.support.pool import POOL
from gnncompile.support.utils import UTILS

SECTIONS: dict[str, tuple[Case | Absent, ...]] = {
    "conv": CONV,
    "aggr": AGGR,
    "norm": NORM,
    "pool": POOL,
    "models": MODELS,
    "utils": UTILS,
}
"""The cases of each package of ``torch_geometric.nn``, and of ``torch_geometric.utils``."""

_HEAD = """# What of PyG is supported

Made by `python -m gnncompile support`; a test runs part of it again and compares. Every case is trained one step, eager
and compiled, on graphs of {ladder} nodes and edges, one after the other, in float64
(in float32 where PyG itself makes some of that type).

- whole: captured without a graph break
- graphs: captured over all sizes (1 is what is wanted)
- syncs: times that a step waits for the device, once it has seen the graph; where a size depends on what is learned or
  drawn, the note says so
- regions: fused kernels of the forward
- equal: outputs and all gradients as in eager, on every size that eager takes (zeros are as good as no gradient)
"""


def measure(progress: Callable[[Result], None] = lambda result: None) -> dict[str, list[Result | Absent]]:
    """Runs all cases.

    Args:
        progress: Called with each result.

    Returns:
        What became of the cases of each section, with what can't be one.
    """
    found: dict[str, list[Result | Absent]] = {}
    for name, cases in SECTIONS.items():
        found[name] = []
        for case in cases:
            if isinstance(case, Absent):
                found[name].append(case)
                continue
            result = check(case)
            found[name].append(result)
            progress(result)
    return found


def page(results: Mapping[str, Sequence[Result | Absent]]) -> str:
    """The page of what :func:`measure` found."""
    sizes = ", ".join(f"({nodes}, {edges})" for nodes, edges in LADDER)
    parts = [_HEAD.format(ladder=sizes)]
    for name, found in results.items():
        ran = [result for result in found if isinstance(result, Result)]
        title = f"## {package(name)}: {sum(result.passes for result in ran)} of {len(ran)}\n"
        head = "| | whole | graphs | syncs | regions | equal | |\n|---|---|---|---|---|---|---|"
        parts.append("\n".join([title, head, *map(row, found)]) + "\n")
    return "\n".join(parts)


def package(section: str) -> str:
    """The package that a section is about."""
    return "torch_geometric.utils" if section == "utils" else f"torch_geometric.nn.{section}"


def row(result: Result | Absent) -> str:
    """A case's line of the table."""
    if isinstance(result, Absent):
        return f"| {result.name} | | | | | | {result.why} |"
    if not result.graphs and result.eager and not result.wrong:
        return f"| {result.name} | | | | | | eager: {_plain(result.eager)} |"
    notes = [f"eager: {result.eager}"] if result.eager else []
    notes += [result.wrong] if result.wrong else []
    notes += [f"must ask for {result.asks_for}"] if result.asks else []
    notes += [] if result.passes else list(result.why)
    cells = [_sign(result.breaks == 0), str(result.graphs), str(result.syncs), str(result.regions)]
    return f"| {' | '.join([result.name, *cells, _sign(not result.wrong), _plain('; '.join(notes))])} |"


def _sign(good: bool) -> str:
    return "yes" if good else "no"


def _plain(text: str) -> str:
    """Without what ends a cell or differs between machines."""
    return re.sub(r"\s+", " ", text.replace("|", "/"))[:160]


def rows_of(text: str) -> dict[str, str]:
    """The lines of a page by the names of their cases."""
    found = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return {line.split(" | ")[0].removeprefix("| ").strip(): line for line in found}


def exported(cases: Sequence[Case | Absent]) -> set[str]:
    """PyG's names that a section speaks of, without the variants in brackets."""
    return {re.sub(r" \[.*\]$", "", case.name) for case in cases}
