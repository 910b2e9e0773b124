"""Time until the first forward and backward have run; each start is a process of its own.

The models are those of the guide of PyG, unless another suite is named.

There are three starts, which `--starts` may narrow: with empty cache folders (cold), with the folders that the cold
start left (second), and with empty folders after `torch.compiler.load_cache_artifacts` (artifacts). Imports are not
counted. Output and gradients are compared with float64 before any time is reported. Other programs lengthen the wall
clock, so CPU time is reported too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.names import chosen, refuse_unknown
from benchmarks.cases.registry import GUIDE_MODELS, Case, select
from benchmarks.commands import driver
from benchmarks.measuring import environment, phases
from benchmarks.measuring.comparison import reference_of
from benchmarks.measuring.start import Start, inputs_of
from benchmarks.reporting import stored, tables
from benchmarks.rows.variants import VARIANTS, Variant

NAME = "compile-time"
HELP = "models of a suite: time of the first step with and without caches on disk, and where it goes"

ROWS = ("compile", "compile dynamic", "gnncompile")
SUITES = ("guide", "layers", "science")
STARTS = ("cold", "second", "artifacts")
LIMIT = 600
"""Seconds after which a process is stopped."""


@dataclass
class StartsOfRow:
    """The reports of the processes of one row; only rows whose `status` is `ok` have times."""

    variant: Variant
    status: str = "ok"  # or WRONG or FAILED
    message: str = ""
    found: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {start: [] for start in STARTS})

    def median(self, start: str, quantity: str) -> float | None:
        """Returns the median of a quantity over the rounds."""
        values = [one[quantity] for one in self.found[start]]
        return statistics.median(values) if values else None

    def phases(self, start: str) -> dict[str, float]:
        """Returns the median of each phase; the medians need not add up to the median of the total."""
        of = [one["phases"] for one in self.found[start]]
        return {name: statistics.median(one[name] for one in of) for name in of[0]} if of else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=None, rounds=3, rows=", ".join(ROWS))
    driver.add_budget(parser)
    parser.add_argument(
        "--starts", default=",".join(STARTS), help="comma-separated; a cold one is always made (default: %(default)s)"
    )
    parser.add_argument("--suite", default="guide", choices=SUITES, help="(default: %(default)s)")
    parser.add_argument("--graph", help="(default: guide; in the suite science, each model has its own)")
    parser.add_argument("--models", help=f"comma-separated (default: {','.join(GUIDE_MODELS)} in the suite guide)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device, budget = torch.device(args.device), driver.Budget(args.budget)
    starts = args.starts.split(",")
    refuse_unknown("starts", starts, STARTS)
    graph = args.graph or (None if args.suite == "science" else "guide")
    cases = select(args.suite, graph, _models(args))
    variants = chosen(VARIANTS, args.rows or ",".join(ROWS))
    rounds = 1 if args.quick else args.rounds

    def measure(case: Case, progress: driver.Progress) -> tuple[str, driver.Records]:
        rows = run_case(case, variants, device, rounds, args.seed, progress, starts)
        return format_case(rows), [record(case, row, rows) for row in rows]

    more = {
        "seconds": f"first forward and backward, imports not counted; median of {rounds} processes each",
        "of processors": "of all threads, and of the C++ compilers that were run",
    }
    name = "compile-time" if args.suite == "guide" else f"compile-time-{args.suite}"
    return driver.run(args, name, cases, measure, more=more, budget=budget)


def _models(args: argparse.Namespace) -> list[str] | None:
    if args.models is not None:
        return list(args.models.split(","))
    return list(GUIDE_MODELS) if args.suite == "guide" else None


def run_case(
    case: Case,
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
    starts: Sequence[str] = STARTS,
) -> list[StartsOfRow]:
    """Runs the processes of one case, taking rows in turns; returns the rows in the order of `variants`.

    A cold start comes first even if `starts` leaves it out, because the others need what it leaves.
    """
    rows = [StartsOfRow(variant) for variant in variants]
    with tempfile.TemporaryDirectory(prefix="compile-time-") as name:
        folder = Path(name)
        progress("reference in float64")
        model, inputs = case.model(device, seed), inputs_of(case, device, seed)
        torch.save(reference_of(case, model, inputs, seed), folder / "reference")
        for number in range(rounds):
            for row in rows:
                if row.status == "ok":
                    where = folder / f"{number}-{row.variant.name.replace(' ', '-')}"  # no blanks: compilers are called
                    start = Start(
                        case.name,
                        case.graph.name,
                        row.variant.name,
                        str(device),
                        seed,
                        str(folder / "reference"),
                        str(folder / "result"),
                        suite=case.suite,
                    )
                    told = partial(_in_round, progress, number)
                    _run_row(row, start, where, starts, told)
    progress("")
    return rows


def _in_round(progress: Callable[[str], None], number: int, text: str) -> None:
    progress(f"round {number + 1}: {text}")


def _run_row(
    row: StartsOfRow, start: Start, folder: Path, starts: Sequence[str], progress: Callable[[str], None]
) -> None:
    """Runs the starts of a row in fresh folders, the cold one first."""
    file = str(folder / "artifacts")
    kept, empty = folder / "kept", folder / "empty"
    plan = {
        "cold": (replace(start, save=file), kept),
        "second": (start, kept),
        "artifacts": (replace(start, load=file), empty),
    }
    for name, (what, caches) in plan.items():
        if name != "cold" and name not in starts:
            continue
        progress(f"{row.variant.name}, {name}")
        result = run_process(what, caches)
        if result["status"] != "ok":
            row.status, row.message = result["status"], f"{name}: {result['message']}"
            row.found = {start: [] for start in STARTS}
            return
        row.found[name].append(result)


def run_process(start: Start, caches: Path) -> dict[str, Any]:
    """Runs one start with all disk caches in one folder; errors are not raised but stored in the result."""
    caches.mkdir(parents=True, exist_ok=True)
    variables = {"TORCHINDUCTOR_CACHE_DIR": "torch", "GNNCOMPILE_CACHE_DIR": "gnncompile", "TRITON_CACHE_DIR": "triton"}
    places = {variable: str(caches / name) for variable, name in variables.items()}
    Path(start.result).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.measuring.start", start.text()]
    try:
        done = subprocess.run(
            command, cwd=environment.ROOT, env={**os.environ, **places}, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"status": "FAILED", "message": f"took longer than {LIMIT} s"}
    if not Path(start.result).exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"status": "FAILED", "message": f"exit status {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(Path(start.result).read_text())
    return result


def ratios(row: StartsOfRow, rows: Sequence[StartsOfRow], quantity: str = "seconds") -> dict[str, float | None]:
    """Returns cold start over each cold start of `torch.compile`, and the other starts over the cold one."""
    cold = row.median("cold", quantity)
    others = {f"over {r.variant.name}": r.median("cold", quantity) for r in rows if r.variant.is_baseline}
    found = {name: cold / other if cold and other else None for name, other in others.items()}
    for name in STARTS[1:]:
        seconds = row.median(name, quantity)
        found[f"{name} / cold"] = seconds / cold if cold and seconds else None
    return found


def format_case(rows: Sequence[StartsOfRow]) -> str:
    """Returns the tables of one case: the times with their ratios, then the time of each phase."""
    header = ["", *(f"{start} s" for start in STARTS), *ratios(rows[0], rows), "hits", "misses"]
    cells, notes = [], []
    for row in rows:
        if row.status != "ok":
            notes.append(f"{row.variant.name}: {row.status}: {row.message}")
        missing = "" if row.status == "ok" else row.status
        counts = [row.median("second", "hits"), row.median("second", "misses")]
        for quantity, name in (("seconds", row.variant.name), ("cpu_seconds", "  of processors")):
            times = [row.median(start, quantity) for start in STARTS]
            cells.append(
                [
                    name,
                    *(f"{time:.1f}" if time is not None else missing for time in times),
                    *(f"{share:.2f}" if share is not None else "" for share in ratios(row, rows, quantity).values()),
                    *(f"{count:g}" if count is not None and quantity == "seconds" else "" for count in counts),
                ]
            )
    parts = [
        [f"{row.variant.name}, {start}", *(f"{seconds:.2f}" for seconds in spent.values())]
        for start in STARTS
        for row in rows
        if (spent := row.phases(start))
    ]
    where = tables.text_table(["seconds in", *phases.PHASES, phases.OTHER], parts)
    return "\n".join([tables.text_table(header, cells), *notes, "", where])


def record(case: Case, row: StartsOfRow, rows: Sequence[StartsOfRow]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    found = stored.labelled(row.variant, row, graph=case.graph.name, model=case.name)
    for start in STARTS:
        for quantity in ("seconds", "cpu_seconds", "hits", "misses"):
            found[f"{start}_{quantity}"] = row.median(start, quantity)
    for unit, mark in (("seconds", ""), ("cpu_seconds", "cpu ")):
        found.update({mark + name: ratio for name, ratio in ratios(row, rows, unit).items()})
    for start in STARTS:
        found.update({f"{start} in {phase}": seconds for phase, seconds in row.phases(start).items()})
    return found
