"""Runs all cases, writes the support table as a Markdown page, and reads the rows of such a page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import starmap
from multiprocessing import get_context
from typing import Any

import torch

from gnncompile.support.aggr import AGGR
from gnncompile.support.case import LADDER, Absent, Case
from gnncompile.support.check import Result, check
from gnncompile.support.conv import CONV
from gnncompile.support.models import MODELS
from gnncompile.support.norm import NORM
from gnncompile.support.options import options_of
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
"""The cases by section: a package of ``torch_geometric.nn``, or ``torch_geometric.utils``."""

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
- inference: whether all of this holds in `eval()` under `torch.no_grad()`

`python -m gnncompile support --options` runs each layer with one option changed, and writes a page like this one.
"""

_OPTIONS_HEAD = """# Options of PyG's layers

Made by `python -m gnncompile support --options`; a test runs part of it again. The first case of each layer in
[the table of support](support.md) with one option of its constructor changed, or with one more argument of its call.
The options are read from the signatures of PyG's classes. Sizes: {ladder} nodes and edges.

- training: one captured graph without a graph break, no wait for the device, outputs and gradients as in eager (with
  dropout the numbers are not compared: random numbers of compiled code are others)
- inference: likewise in `eval()` under `torch.no_grad()`
- an empty cell: eager itself refuses
"""


Pair = tuple[Result, Result]
"""The results of a case in training and in inference."""

Progress = Callable[[str], None]


def measure(
    progress: Progress = lambda line: None, only: str = "", inductor: bool = False, jobs: int = 1
) -> dict[str, list[Any]]:
    """Runs all cases, in training and in inference.

    Args:
        progress: Called with the table line of each result.
        only: A regular expression that the names of cases must match; "" for all cases.
        inductor: Whether Inductor compiles the operations outside regions.
        jobs: The number of processes that run cases.

    Returns:
        For each section, a :data:`Pair` for each case, and each :class:`Absent` name as it is.
    """
    tasks = [(section, case.name, False, inductor) for section, cases in SECTIONS.items() for case in _ran(cases, only)]
    pairs = {task[:2]: pair for task, pair in _results(tasks, jobs, lambda pair: progress(row(*pair)))}
    return {
        section: [c if isinstance(c, Absent) else pairs[section, c.name] for c in cases if _has(pairs, section, c)]
        for section, cases in SECTIONS.items()
    }


def _ran(cases: Sequence[Case | Absent], only: str) -> list[Case]:
    return [case for case in cases if isinstance(case, Case) and re.search(only, case.name)]


def _has(pairs: Mapping[tuple[str, str], Pair], section: str, case: Case | Absent) -> bool:
    return isinstance(case, Absent) or (section, case.name) in pairs


def measure_options(progress: Progress = lambda line: None, only: str = "", jobs: int = 1) -> dict[str, list[Pair]]:
    """Runs the cases with one option changed (:mod:`gnncompile.support.options`), as :func:`measure` does."""
    tasks = [
        (section, case.name, True, False)
        for section, cases in SECTIONS.items()
        for case in _ran(options_of(section, cases), only)
    ]
    found: dict[str, list[Pair]] = {}
    for task, pair in _results(tasks, jobs, lambda pair: progress(option_row(*pair))):
        found.setdefault(task[0], []).append(pair)
    return found


_Task = tuple[str, str, bool, bool]
"""A case to run: its section, its name, whether an option is changed, whether Inductor compiles."""


def _results(tasks: Sequence[_Task], jobs: int, progress: Callable[[Pair], None]) -> Iterator[tuple[_Task, Pair]]:
    """Runs the tasks and yields each with its results, in order."""
    with ExitStack() as stack:
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)))
            pairs: Iterable[Pair] = pool.map(_both, tasks)
        else:
            pairs = map(_both, tasks)
        for task, pair in zip(tasks, pairs, strict=True):
            progress(pair)
            yield task, pair


def _both(task: _Task) -> Pair:
    section, name, changed, inductor = task
    cases = options_of(section, SECTIONS[section], name) if changed else SECTIONS[section]
    (case,) = [c for c in cases if c.name == name]
    assert isinstance(case, Case)
    warnings.simplefilter("ignore")
    return check(case, inductor=inductor), check(case, inference=True, inductor=inductor)


def page(results: Mapping[str, Sequence[Any]]) -> str:
    """Returns the Markdown page for the results of :func:`measure`."""
    parts = [_HEAD.format(ladder=_ladder())]
    for name, found in results.items():
        ran = [pair for pair in found if not isinstance(pair, Absent)]
        title = f"## {package(name)}: {sum(_pass(pair) for pair in ran)} of {len(ran)}\n"
        head = "| | whole | graphs | syncs | regions | equal | inference | |\n|---|---|---|---|---|---|---|---|"
        lines = [absent_row(pair) if isinstance(pair, Absent) else row(*pair) for pair in found]
        parts.append("\n".join([title, head, *lines]) + "\n")
    return "\n".join(parts)


def options_page(results: Mapping[str, Sequence[Pair]]) -> str:
    """Returns the Markdown page for the results of :func:`measure_options`."""
    parts = [_OPTIONS_HEAD.format(ladder=_ladder())]
    for name, found in results.items():
        ran = [pair for pair in found if any(result.runs for result in pair)]
        title = f"## {package(name)}: {sum(_pass(pair) for pair in ran)} of {len(ran)}\n"
        parts.append(
            "\n".join([title, "| | training | inference | |\n|---|---|---|---|", *starmap(option_row, found)]) + "\n"
        )
    return "\n".join(parts)


def _ladder() -> str:
    return ", ".join(f"({nodes}, {edges})" for nodes, edges in LADDER)


def _pass(pair: Pair) -> bool:
    return all(result.passes or not result.runs for result in pair)


def package(section: str) -> str:
    """Returns the full name of a section's package."""
    return "torch_geometric.utils" if section == "utils" else f"torch_geometric.nn.{section}"


def absent_row(absent: Absent) -> str:
    """Returns the table line of a name that is not run."""
    return f"| {absent.name} | | | | | | | {absent.why} |"


def row(result: Result, inference: Result) -> str:
    """Returns the table line of a case."""
    if not result.runs and result.eager:
        return f"| {result.name} | | | | | | | eager: {_plain(result.eager)} |"
    notes = [f"eager: {result.eager}"] if result.eager else []
    notes += [result.wrong] if result.wrong else []
    notes += [f"must ask for {result.asks_for}"] if result.asks else []
    notes += [] if result.passes else list(result.why)
    notes += [] if inference.passes else _in_inference(inference)
    cells = [_sign(result.breaks == 0), str(result.graphs), str(result.syncs), str(result.regions)]
    cells += [_sign(not result.wrong), short(inference)]
    return f"| {' | '.join([result.name, *cells, _plain('; '.join(notes))])} |"


def option_row(result: Result, inference: Result) -> str:
    """Returns the table line of a case with one option changed."""
    notes = [] if result.passes or not result.runs else [result.wrong, *result.why]
    notes += [] if inference.passes or not inference.runs else _in_inference(inference)
    notes = notes or ([f"eager: {result.eager}"] if result.eager and not result.runs else [])
    return f"| {' | '.join([result.name, short(result), short(inference), _plain('; '.join(filter(None, notes)))])} |"


def _in_inference(result: Result) -> list[str]:
    return [f"inference: {note}" for note in (result.wrong, *result.why) if note]


def short(result: Result) -> str:
    """Returns the result of a case in a word or two; "" if eager can't run the case."""
    if not result.runs or result.passes:
        return "yes" if result.runs else ""
    if result.wrong:
        return "no"
    if result.breaks:
        return f"{result.breaks} breaks"
    return f"{result.graphs} graphs" if result.graphs != 1 else f"{result.syncs} syncs"


def _sign(good: bool) -> str:
    return "yes" if good else "no"


def _plain(text: str) -> str:
    """Returns a text fit for a table cell: without ``|``, with single spaces, and at most 160 characters long."""
    return re.sub(r"\s+", " ", text.replace("|", "/"))[:160]


def rows_of(text: str) -> dict[str, str]:
    """Returns the table lines of a page by the names of their cases."""
    found = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return {line.split(" | ")[0].removeprefix("| ").strip(): line for line in found}


def exported(cases: Sequence[Case | Absent]) -> set[str]:
    """Returns the names of PyG that a section's cases cover, without the variants in brackets."""
    return {re.sub(r" \[.*\]$", "", case.name) for case in cases}
