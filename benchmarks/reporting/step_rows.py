"""Prints and stores the rows of cases whose steps are timed."""

from collections.abc import Sequence
from typing import Any

from benchmarks.cases.registry import Case
from benchmarks.measuring.comparison import Row
from benchmarks.reporting import stored, tables

HEADER = [
    "",
    "ms",
    "p10 .. p90",
    "x eager",
    "x compile",
    "device ms",
    "peak MiB",
    "first s",
    "graphs",
    "breaks",
    "recompiles",
    "error",
]


def format_case(rows: Sequence[Row]) -> str:
    """Returns the table of one case; a row that is wrong or failed says so and has no time."""
    cells, notes = [], []
    for row in rows:
        timing, ratios = row.timing, speedups(row, rows)
        if row.status != "ok":
            notes.append(f"{row.variant.name}: {row.status}: {row.message}")
        if row.syncs is not None:
            notes.append(f"{row.variant.name}: syncs: {row.syncs}")
        cells.append(
            [
                row.variant.name,
                f"{timing.median:.3f}" if timing else row.status,
                f"{timing.p10:.3f} .. {timing.p90:.3f}" if timing else "",
                *(f"{ratio:.2f}" if ratio else "" for ratio in ratios),
                f"{row.device_ms:.3f}" if row.device_ms else "",
                f"{row.memory.peak:.1f}" if row.memory else "",
                f"{row.first_s:.1f}" if row.first_s is not None else "",
                *("" if count is None else str(count) for count in (row.graphs, row.graph_breaks, row.recompiles)),
                f"{row.verdict.error:.0e}" if row.verdict else "",
            ]
        )
    return "\n".join([tables.text_table(HEADER, cells), *notes])


def speedups(row: Row, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Returns how many times faster a row is than eager, and than the best row of plain `torch.compile`."""
    eager = [other.timing.median for other in rows if other.variant.name == "eager" and other.timing]
    plain = [other.timing.median for other in rows if other.variant.is_baseline and other.timing]
    if row.timing is None:
        return None, None
    return (eager[0] / row.timing.median if eager else None, min(plain) / row.timing.median if plain else None)


def record(case: Case, row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    timing, verdict = row.timing, row.verdict
    over_eager, over_compile = speedups(row, rows)
    return {
        **stored.labelled(row.variant, row, suite=case.suite, graph=case.graph.name, model=case.name),
        "median_ms": timing and timing.median,
        "p10_ms": timing and timing.p10,
        "p90_ms": timing and timing.p90,
        "min_ms": timing and timing.minimum,
        "steps": timing and timing.steps,
        "device_ms": row.device_ms,
        "over_eager": over_eager,
        "over_compile": over_compile,
        "peak_mib": row.memory and row.memory.peak,
        "first_s": row.first_s,
        "graphs": row.graphs,
        "graph_breaks": row.graph_breaks,
        "recompiles": row.recompiles,
        "worst_tensor": verdict and verdict.name,
        "worst_error": verdict and verdict.error,
        "worst_tolerance": verdict and verdict.tolerance,
        "syncs": row.syncs,
    }
