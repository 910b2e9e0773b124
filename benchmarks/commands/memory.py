"""Peak memory of forward and backward, in every way to run a model; outputs and gradients are checked first.

Parameters and inputs are not counted. `kept` is the memory that the forward keeps for the backward. `edge tensors` is
the peak in units of one float32 tensor of size [num_edges, channels].
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cases.graphs import GRAPHS
from benchmarks.cases.names import named
from benchmarks.cases.registry import Case, graphs_of, select
from benchmarks.commands import driver
from benchmarks.measuring import measure
from benchmarks.measuring.comparison import Row, run_case
from benchmarks.reporting import stored, tables
from benchmarks.rows.variants import VARIANTS

NAME = "memory"
HELP = "peak memory of forward + backward, of the guide's models or of one layer at a time"

SUITES = ("guide", "layers", "attention")
ROWS = ("eager", "compile", "compile dynamic", "gnncompile")
"""The rows to measure. Rows with CUDA graphs are left out: they allocate their memory when they are recorded."""

HEADER = ["", "peak MiB", "x eager", "x compile", "forward MiB", "kept MiB", "edge tensors", "error"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=None, rounds=None, rows=", ".join(ROWS))
    driver.add_budget(parser)
    parser.add_argument("--suite", default="guide", choices=SUITES, help="(default: %(default)s)")
    known = dict.fromkeys([*GRAPHS, *graphs_of("attention")])
    parser.add_argument("--graph", default="guide", choices=list(known), help="(default: %(default)s)")
    parser.add_argument("--models", help="models or layers, comma-separated (default: all)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    models = args.models.split(",") if args.models else None
    order = "sorted" if args.suite == "attention" else "random"
    cases = select(args.suite, args.graph, models, (order,))
    variants = named(VARIANTS, args.rows.split(",") if args.rows else ROWS)
    input_grad = args.suite != "guide"
    how = driver.options(args, timed=False, sync_check=False, input_grad=input_grad)

    def measure_case(case: Case, progress: driver.Progress) -> tuple[str, driver.Records]:
        rows = run_case(case, variants, device, how, progress)
        return format_case(case, rows), [record(case, row, rows) for row in rows]

    more = {
        "MiB": measure.peak_memory_definition(device),
        "features": "require a gradient" if input_grad else "require no gradient",
    }
    stem = f"memory-{args.suite}-{args.graph}-{device.type}"
    key = ("graph", "model", "order")
    return driver.run(args, stem, cases, measure_case, more=more, key=key, budget=driver.Budget(args.budget))


def record(case: Case, row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    found, verdict = row.memory, row.verdict
    over_eager, over_compile = ratios(row, rows)
    columns = {"suite": case.suite, "graph": case.graph.name, "model": case.name, "order": case.order}
    return {
        **stored.labelled(row.variant, row, **columns),
        "peak_mib": found and found.peak,
        "forward_mib": found and found.forward,
        "kept_mib": found and found.kept,
        "over_eager": over_eager,
        "over_compile": over_compile,
        "edge_tensors": found and found.peak / edge_tensor_mib(case),
        "worst_tensor": verdict and verdict.name,
        "worst_error": verdict and verdict.error,
        "worst_tolerance": verdict and verdict.tolerance,
    }


def ratios(row: Row, rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """Returns the peak of eager, and of the best row of plain `torch.compile`, each over the peak of a row."""
    if row.memory is None or row.memory.peak <= 0:
        return None, None
    eager = [other.memory.peak for other in rows if other.variant.name == "eager" and other.memory]
    plain = [other.memory.peak for other in rows if other.variant.is_baseline and other.memory]
    return (eager[0] / row.memory.peak if eager else None, min(plain) / row.memory.peak if plain else None)


def edge_tensor_mib(case: Case) -> float:
    """Returns the size of a float32 tensor `[num_edges, channels]` in MiB."""
    return case.graph.num_edges * case.graph.channels * 4 / measure.MIB


def format_case(case: Case, rows: Sequence[Row]) -> str:
    """Returns the table of one case; a row that is wrong or failed says so."""
    cells, notes = [], []
    for row in rows:
        found = row.memory
        if row.status != "ok":
            notes.append(f"{row.variant.name}: {row.status}: {row.message}")
        cells.append(
            [
                row.variant.name,
                f"{found.peak:.1f}" if found else row.status,
                *(f"{ratio:.2f}" if ratio else "" for ratio in ratios(row, rows)),
                f"{found.forward:.1f}" if found else "",
                f"{found.kept:.1f}" if found else "",
                f"{found.peak / edge_tensor_mib(case):.2f}" if found else "",
                f"{row.verdict.error:.0e}" if row.verdict else "",
            ]
        )
    return "\n".join([tables.text_table(HEADER, cells), *notes])
