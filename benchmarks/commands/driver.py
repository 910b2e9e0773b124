"""Shared parts of the subcommands that measure cases: options, the loop over the cases, and the files of results."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.cases.names import UnknownNameError
from benchmarks.cases.registry import Case
from benchmarks.measuring import environment
from benchmarks.measuring.comparison import Options, Row, run_case
from benchmarks.reporting import step_rows, tables
from benchmarks.rows.variants import Variant

Records = list[dict[str, Any]]


def add_arguments(
    parser: argparse.ArgumentParser, seconds: float | None, rounds: int | None, rows: str = "all"
) -> None:
    """Declares the options that every subcommand has.

    Args:
        parser: the subcommand's parser.
        seconds: the default time per row; None if the subcommand does not time steps.
        rounds: the default number of turns; None if the subcommand has no turns.
        rows: the text in the help of `--rows` for its default.
    """
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="cpu, cuda or cuda:1 (default: %(default)s)")
    parser.add_argument("--rows", help=f"comma-separated names of rows, as the table has them (default: {rows})")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="timed per row (default: %(default)s)")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="turns of each row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke test: little time per row, results under out/")
    parser.add_argument("--out", type=Path, help="folder of the CSV and JSON (default: benchmarks/results/<machine>)")


def add_sync_check(parser: argparse.ArgumentParser) -> None:
    """Declares `--sync-check`, for subcommands that run steps of models."""
    parser.add_argument(
        "--sync-check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on CUDA: run one step of gnncompile with every host synchronisation an error",
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Declares `--budget`."""
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no further case after this time (default: no limit)"
    )


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Declares `--scale` of the suite science."""
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="in the suite science, share of the nodes and edges of each model, for small machines",
    )


def options(args: argparse.Namespace, **others: Any) -> Options:
    """Returns the settings that the command line gives; `others` are fields that it does not set."""
    how = replace(Options(), seed=args.seed, **others)
    if not how.timed:
        return how
    seconds, rounds = (min(args.seconds, 0.3), min(args.rounds, 2)) if args.quick else (args.seconds, args.rounds)
    return replace(how, seconds=seconds, rounds=rounds)


def device_of_triton(args: argparse.Namespace) -> torch.device:
    """Returns the device of the command line, which must run Triton's kernels, if only in Triton's interpreter.

    Raises:
        UnknownNameError: the device is no GPU, and kernels are not interpreted.
    """
    device = torch.device(args.device)
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnknownNameError(f"device: got {device}, expected cuda (or TRITON_INTERPRET=1, where times say nothing)")
    return device


def _facts(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    """Returns the environment, which is printed and stored with the results."""
    return environment.describe(device, ["python", "-m", "benchmarks", *args.argv])


def _folder(args: argparse.Namespace, device: torch.device) -> Path:
    """Returns the folder for results."""
    root = environment.ROOT
    default = root / "out" / "benchmarks" if args.quick else root / "benchmarks" / "results"
    return args.out or default / environment.machine_slug(device)


def _print_written(results: tables.Results) -> None:
    """Prints the paths of the written files, relative to the repository if they are inside."""
    root = environment.ROOT
    print("\nwritten:", *(path.relative_to(root) if path.is_relative_to(root) else path for path in results.paths))


class Budget:
    """A time limit for all cases together.

    Args:
        seconds: no case is started after this time; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.left_out: list[str] = []
        self._start = time.monotonic()

    def allows(self, name: str) -> bool:
        """Whether a case may start; remembers the cases that may not."""
        if self.seconds is None or time.monotonic() - self._start < self.seconds:
            return True
        self.left_out.append(name)
        return False

    def __str__(self) -> str:
        return f"left out, over the budget of {self.seconds:g} s: {', '.join(self.left_out)}" if self.left_out else ""


class Benchmark(Protocol):
    """A case that can be measured; `str()` describes it in full."""

    @property
    def name(self) -> str:
        """The name, for the progress."""

    @property
    def label(self) -> str:
        """The name, extended so that it differs from all other cases."""


B = TypeVar("B", bound=Benchmark)
Progress = Callable[[str], None]
RunCase = Callable[[Case, Sequence[Variant], torch.device, Options, Progress], list[Row]]


def run(
    args: argparse.Namespace,
    stem: str,
    cases: Sequence[B],
    measure: Callable[[B, Progress], tuple[str, Records]],
    *,
    more: Mapping[str, str] | None = None,
    key: Sequence[str] = (),
    summary: Callable[[Records], str] | None = None,
    budget: Budget | None = None,
    others_may_be_wrong: bool = False,
) -> int:
    """Measures, prints and stores case by case, so that an interrupted run keeps the results so far.

    Args:
        args: the command line.
        stem: the stem of the names of the result files.
        cases: the cases to measure, in order.
        measure: measures a case; returns the table to print and the rows to store, each with its `row` (the name),
            `status` and `ours`.
        more: further facts of the environment.
        key: columns that name a case, if the files keep cases of earlier runs (see `tables.Results`).
        summary: makes the text that is printed at the end.
        budget: the time limit; None for no limit.
        others_may_be_wrong: whether rows other than gnncompile's may have wrong results.

    Returns:
        The exit status: 1 if a row is wrong or one of gnncompile failed.
    """
    device = torch.device(args.device)
    facts = {**_facts(args, device), **(more or {})}
    print(tables.header_lines(facts), flush=True)
    results = tables.Results(_folder(args, device), stem, facts, key)
    own = {name: facts[name] for name in ("date", "commit")} if key else {}
    records: Records = []
    for number, case in enumerate(cases, 1):
        if budget is not None and not budget.allows(case.label):
            continue
        text, found = measure(case, progress(f"[{number}/{len(cases)}] {case.name}"))
        print(f"\n{case}\n{text}", flush=True)
        records += [{**one, **own} for one in found]
        results.write(records)
    if summary is not None:
        print(f"\n{summary(records)}")
    if budget is not None and budget.left_out:
        print(budget)
    _print_written(results)
    return int(any(_is_failure(one, others_may_be_wrong) for one in records))


def _is_failure(record: Mapping[str, Any], others_may_be_wrong: bool) -> bool:
    if record["ours"]:
        return record["status"] not in ("ok", "SKIPPED")
    return record["status"] == "WRONG" and not others_may_be_wrong


def measure_steps(
    variants: Sequence[Variant],
    device: torch.device,
    how: Options,
    record: Callable[[Case, Row, Sequence[Row]], dict[str, Any]] = step_rows.record,
    describe: Callable[[Case, Sequence[Row]], str] = lambda case, rows: "",
    run_rows: RunCase = run_case,
) -> Callable[[Case, Progress], tuple[str, Records]]:
    """Returns the argument `measure` of `run`, for cases whose steps are timed.

    Args:
        variants: the rows of each table.
        device: the device to run on.
        how: the settings.
        record: converts a row to the record that is stored.
        describe: returns lines to print under the table of a case.
        run_rows: measures the rows of a case, as `comparison.run_case` does.
    """

    def measure(case: Case, progress: Progress) -> tuple[str, Records]:
        rows = run_rows(case, variants, device, how, progress)
        text = "\n".join(part for part in (step_rows.format_case(rows), describe(case, rows)) if part)
        return text, [record(case, row, rows) for row in rows]

    return measure


def progress(prefix: str) -> Progress:
    """Returns a function that shows progress: on a terminal in one line, which an empty message clears; in a log with
    one line per message.
    """
    terminal = sys.stderr.isatty()

    def show(message: str) -> None:
        if terminal:
            print(f"\r\033[K{prefix + ': ' + message if message else ''}", end="", file=sys.stderr, flush=True)
        elif message and not message.startswith("timing: round"):
            print(f"{prefix}: {message}", file=sys.stderr, flush=True)

    return show
