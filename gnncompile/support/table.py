"""The table of support as a page of Markdown, and back from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

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


def page(progress: Callable[[str], None] = lambda line: None) -> str:
    """Runs all cases and returns the page."""
    sizes = ", ".join(f"({nodes}, {edges})" for nodes, edges in LADDER)
    parts = [_HEAD.format(ladder=sizes)]
    for name, cases in SECTIONS.items():
        rows, good = [], 0
        for case in cases:
            if isinstance(case, Absent):
                rows.append(f"| {case.name} | | | | | | {case.why} |")
                continue
            result = check(case)
            good += result.passes
            rows.append(row(result))
            progress(rows[-1])
        count = sum(isinstance(case, Case) for case in cases)
        head = "| | whole | graphs | syncs | regions | equal | |\n|---|---|---|---|---|---|---|"
        parts.append("\n".join([f"## {package(name)}: {good} of {count}\n", head, *rows]) + "\n")
    return "\n".join(parts)


def package(section: str) -> str:
    """The package that a section is about."""
    return "torch_geometric.utils" if section == "utils" else f"torch_geometric.nn.{section}"


def row(result: Result) -> str:
    """A case's line of the table."""
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
