"""Compares two files of results row by row: which rows got slower, take more memory, or fail only now.

A row got worse if a median or its peak memory grew by a factor above --threshold. Rows that are in only one file are
listed. The exit status is 1 if a row got worse.
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases.names import refuse_unknown
from benchmarks.reporting import tables
from benchmarks.reporting.readme_tables import number
from benchmarks.reporting.stored import CASE, Record, Stored

NAME = "compare"
HELP = "shows what got slower from one file of results to another"

QUANTITIES = {
    "median_ms": "ms",
    "device_ms": "device ms",
    "us": "us",
    "p50_us": "p50 us",
    "step_ms": "step ms",
    "loop_ms": "loop ms",
    "cold_seconds": "cold s",
    "second_seconds": "second s",
    "peak_mib": "peak MiB",
}
"""Columns that are compared; lower values are better."""

LEAST_MIB = 1.0
"""Smaller amounts of memory are ignored: they come from the allocator's rounding and from a few small tensors."""

MACHINE = ("cpu", "gpu", "torch", "triton", "torch-geometric")
"""Facts of the environment that must be equal for times to be comparable."""


@dataclass(frozen=True)
class Change:
    """One quantity of one row.

    Attributes:
        ratio: the later value over the earlier one; infinite if the row fails only now, None if a file lacks it.
        verdict: `worse`, `better`, `same`, `gone` or `new`.
    """

    case: str
    row: str
    quantity: str
    before: float | str | None
    after: float | str | None
    ratio: float | None
    verdict: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    parser.add_argument("before", type=Path, help="JSON of results")
    parser.add_argument("after", type=Path, help="JSON of results of the same benchmark, later")
    parser.add_argument("--threshold", type=float, default=1.1, help="worse is beyond it (default: %(default)s)")
    parser.add_argument("--rows", help="comma-separated names of rows (default: all)")
    parser.add_argument("--quantities", help=f"comma-separated, of: {', '.join(QUANTITIES.values())} (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on standard output")


def run(args: argparse.Namespace) -> int:
    """Compares two files; returns the exit status."""
    if not args.threshold >= 1:
        print(f"error: --threshold: got {args.threshold:g}, expected 1 or more", file=sys.stderr)
        return 2
    quantities = args.quantities.split(",") if args.quantities else list(QUANTITIES.values())
    try:
        refuse_unknown("--quantities", quantities, list(QUANTITIES.values()))
        before, after = Stored(args.before), Stored(args.after)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = args.rows.split(",") if args.rows else None
    changes = compare(before.rows, after.rows, args.threshold, names, quantities)
    if not any(change.ratio is not None for change in changes):
        print("error: the files have no row in common; expected two of one benchmark", file=sys.stderr)
        return 2
    for fact in MACHINE:
        one, other = before.environment.get(fact, "none"), after.environment.get(fact, "none")
        if one != other:
            print(f"{fact}: {one}, then {other}: times may differ for that", file=sys.stderr)
    if args.json:
        print(json.dumps([_plain(change) for change in changes], indent=1))
    else:
        print(text(changes))
    return int(any(change.verdict == "worse" for change in changes))


def compare(
    before: Sequence[Record],
    after: Sequence[Record],
    threshold: float,
    names: Sequence[str] | None = None,
    quantities: Collection[str] = QUANTITIES.values(),
) -> list[Change]:
    """Returns the change of every quantity of every row; quantities that got worse come first.

    Rows that are in one file only, and rows that fail in one file only, are returned whatever is compared.

    Args:
        before: rows of the earlier results.
        after: rows of the later results.
        threshold: a quantity got worse if its ratio is above this, and better if it is below the reciprocal.
        names: the names of the rows to compare; None for all.
        quantities: what to compare, of the values of `QUANTITIES`.
    """
    first, second = ({_key(row): row for row in rows} for rows in (before, after))
    changes = []
    for key in dict.fromkeys([*first, *second]):
        if names is None or key[-1] in names:
            changes += _changes(key, first.get(key), second.get(key), threshold, quantities)
    order = ("worse", "gone", "new", "better", "same")
    return sorted(changes, key=lambda change: (order.index(change.verdict), -(change.ratio or 0.0)))


def _key(row: Record) -> tuple[str, ...]:
    return (*(str(row[name]) for name in CASE[1:] if row.get(name) is not None), row["row"])


def _changes(
    key: tuple[str, ...], before: Record | None, after: Record | None, threshold: float, quantities: Collection[str]
) -> list[Change]:
    case, row = ", ".join(key[:-1]), key[-1]
    if before is None or after is None:
        was, now = (None if one is None else one["status"] for one in (before, after))
        return [Change(case, row, "", was, now, None, "gone" if after is None else "new")]
    if "ok" in (before["status"], after["status"]) and before["status"] != after["status"]:
        ratio, verdict = (math.inf, "worse") if before["status"] == "ok" else (0.0, "better")
        return [Change(case, row, "status", before["status"], after["status"], ratio, verdict)]
    changes = []
    for column, what in QUANTITIES.items():
        one, other = before.get(column), after.get(column)
        if what not in quantities or not one or not other:  # not asked for, not measured, or zero
            continue
        if min(one, other) < 0:  # memory of CUDA graphs that was allocated before the measurement
            continue
        ratio = other / one
        verdict = "worse" if ratio > threshold else "better" if ratio < 1 / threshold else "same"
        if column == "peak_mib" and abs(one - other) < LEAST_MIB:
            verdict = "same"
        changes.append(Change(case, row, what, one, other, ratio, verdict))
    return changes


def text(changes: Sequence[Change]) -> str:
    """Returns the changes as a table, and the number of unchanged quantities."""
    header = ["case", "row", "", "before", "after", "ratio", ""]
    shown = [change for change in changes if change.verdict != "same"]

    def cell(value: float | str | None) -> str:
        return value if isinstance(value, str) else number(value)

    cells = [
        [
            change.case,
            change.row,
            change.quantity,
            cell(change.before),
            cell(change.after),
            f"{change.ratio:.2f}" if change.ratio and math.isfinite(change.ratio) else "",
            change.verdict,
        ]
        for change in shown
    ]
    same = f"{len(changes) - len(shown)} of {len(changes)} much the same"
    return "\n".join([tables.text_table(header, cells, left=3), "", same]) if cells else same


def _plain(change: Change) -> dict[str, Any]:
    found = asdict(change)
    if change.ratio is not None and not math.isfinite(change.ratio):
        found["ratio"] = None  # JSON has no infinity
    return found
