"""The benchmark of PyG's compile guide: GCN, GraphSAGE, GIN and GAT, 3 layers, default options, forward + backward.

The features do not require a gradient, as in training; --input-grad makes them, as PyG's own benchmark helper does.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import environment, measure, tables
from .cases import GUIDE_MODELS, Case, select
from .comparison import Options, Row, run_case
from .graphs import GRAPHS
from .variants import for_device, named

NAME = "guide"
HELP = "PyG's compile guide: four models, forward + backward, every way to run them"

HEADER = [
    "",
    "ms",
    "p10 .. p90",
    "x eager",
    "x compile",
    "peak MiB",
    "first s",
    "graphs",
    "breaks",
    "recompiles",
    "error",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="cpu, cuda or cuda:1 (default: %(default)s)")
    parser.add_argument("--graph", default="guide", choices=list(GRAPHS), help="(default: %(default)s)")
    parser.add_argument("--models", default=",".join(GUIDE_MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rows", help="comma-separated names of rows, as the table has them (default: all)")
    parser.add_argument("--seconds", type=float, default=4.0, help="timed per row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input-grad", action="store_true", help="also compute the gradient of the features")
    parser.add_argument(
        "--sync-check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on CUDA: run one step of gnncompile with every host synchronisation an error",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: little time per row, results under out/")
    parser.add_argument("--out", type=Path, help="folder of the CSV and JSON (default: benchmarks/results/<machine>)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    try:
        cases = select("guide", args.graph, args.models.split(","))
        variants = for_device(device)
        if args.rows:
            variants = named(variants, args.rows.split(","))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds, rounds = (min(args.seconds, 0.3), min(args.rounds, 2)) if args.quick else (args.seconds, args.rounds)
    options = Options(seconds, rounds, args.input_grad, args.sync_check, args.seed)

    facts = environment.describe(device, ["python", "-m", "benchmarks", *args.argv])
    facts["peak MiB"] = measure.peak_memory_definition(device)
    facts["features"] = "require a gradient" if args.input_grad else "require no gradient"
    print(tables.header_lines(facts), flush=True)
    records: list[dict[str, Any]] = []
    failed = False
    for number, case in enumerate(cases, 1):
        rows = run_case(case, variants, device, options, _progress(f"[{number}/{len(cases)}] {case.name}"))
        print(f"\n{case}\n{format_case(rows)}", flush=True)
        records += [record(case, row, rows) for row in rows]
        failed = failed or any(row.status == "WRONG" or (row.variant.is_ours and row.status != "ok") for row in rows)
    root = environment.ROOT
    default = root / "out" / "benchmarks" if args.quick else root / "benchmarks" / "results"
    folder = args.out or default / environment.machine_slug(device)
    paths = tables.write_results(folder, f"guide-{args.graph}-{device.type}", facts, records)
    print("\nwritten:", *(path.relative_to(root) if path.is_relative_to(root) else path for path in paths))
    return 1 if failed else 0


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
                f"{row.peak_mib:.1f}" if row.peak_mib is not None else "",
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
    """Returns one row as it is stored; what was not measured is None."""
    timing, verdict = row.timing, row.verdict
    over_eager, over_compile = speedups(row, rows)
    return {
        "suite": case.suite,
        "graph": case.graph.name,
        "model": case.name,
        "row": row.variant.name,
        "status": row.status,
        "message": row.message,
        "median_ms": timing and timing.median,
        "p10_ms": timing and timing.p10,
        "p90_ms": timing and timing.p90,
        "min_ms": timing and timing.minimum,
        "steps": timing and timing.steps,
        "over_eager": over_eager,
        "over_compile": over_compile,
        "peak_mib": row.peak_mib,
        "first_s": row.first_s,
        "graphs": row.graphs,
        "graph_breaks": row.graph_breaks,
        "recompiles": row.recompiles,
        "worst_tensor": verdict and verdict.name,
        "worst_error": verdict and verdict.error,
        "worst_tolerance": verdict and verdict.tolerance,
        "syncs": row.syncs,
    }


def _progress(prefix: str) -> Callable[[str], None]:
    """On a terminal one line that changes, and ends with an empty message; in a log one line per message."""
    terminal = sys.stderr.isatty()

    def show(message: str) -> None:
        if terminal:
            print(f"\r\033[K{prefix + ': ' + message if message else ''}", end="", file=sys.stderr, flush=True)
        elif message and not message.startswith("timing: round"):
            print(f"{prefix}: {message}", file=sys.stderr, flush=True)

    return show
