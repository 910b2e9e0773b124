"""One PyG layer at a time, forward + backward, against eager PyTorch, `torch.compile` and the machine's limit.

Parameters and features get gradients, as between the layers of a model; edge features do not. The suite `attention`
measures attention and max without linear layers; there every input gets a gradient.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.cases.inputs import ORDERS
from benchmarks.cases.layers import DTYPES
from benchmarks.cases.names import UnknownNameError, named, refuse_unknown
from benchmarks.cases.registry import Case, graphs_of, select
from benchmarks.commands import driver
from benchmarks.measuring import isolated, measure
from benchmarks.measuring.comparison import Row, run_case
from benchmarks.reporting import step_rows, tables
from benchmarks.rows.variants import Variant, for_device
from gnncompile.report.traffic import rates_of

NAME = "layers"
HELP = "one PyG layer at a time, forward + backward, with targets and the machine's limits"


@dataclass(frozen=True)
class Suite:
    """The defaults of a suite, for options that the command line does not give.

    Attributes:
        graph: the graph; None for all graphs of the suite, with the results in one file.
    """

    graph: str | None
    orders: tuple[str, ...]
    rows: tuple[str, ...]


SUITES = {
    "layers": Suite("guide", ORDERS, ("eager", "compile", "compile dynamic", "gnncompile")),
    "attention": Suite(None, ("sorted",), ("eager", "compile", "gnncompile")),
}
DEFAULT_ROWS = "; ".join(f"{name}: {','.join(suite.rows)}" for name, suite in SUITES.items())
# Columns that name a case.
KEY = ("graph", "model", "order")
CasesOf = Callable[[argparse.Namespace], list[Case]]
ISOLATED = "each in a process of its own, in turns, and checked after its times were taken"
SUMMARY_HEADER = [
    "",
    "eager ms",
    "compile ms",
    "gnncompile ms",
    "x eager",
    "x compile",
    "target",
    "",
    "peak MiB",
    "compile's",
    "limit ms",
    "x limit",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=1.0, rounds=5, rows=DEFAULT_ROWS)
    driver.add_sync_check(parser)
    driver.add_budget(parser)
    parser.add_argument("--suite", default="layers", choices=list(SUITES), help="(default: %(default)s)")
    graphs = dict.fromkeys(graph for suite in SUITES for graph in graphs_of(suite))
    parser.add_argument("--graph", choices=list(graphs), help="(default: guide; all of the attention suite)")
    parser.add_argument("--order", help="orders of the edges (default: all that the suite has)")
    parser.add_argument("--layers", help="comma-separated (default: all)")
    parser.add_argument(
        "--precisions", help="comma-separated, fp32 or bf16 (default: fp32; cases of attention have their own)"
    )
    add_row_limit(parser)
    add_isolate(parser)


def add_row_limit(parser: argparse.ArgumentParser) -> None:
    """Declares `--row-limit`."""
    parser.add_argument(
        "--row-limit",
        type=float,
        default=150.0,
        metavar="SECONDS",
        help="give up a row that takes longer to build and check, or would to be timed (default: %(default)s)",
    )


def add_isolate(parser: argparse.ArgumentParser) -> None:
    """Declares `--isolate`."""
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="run each row in a process of its own, which computes nothing else before its times are taken, so that "
        "the memory that the C library keeps is the row's; rows are checked afterwards, and need their memory at once",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    budget = driver.Budget(args.budget)
    device = torch.device(args.device)
    suite = SUITES[args.suite]
    variants = named(for_device(device), args.rows.split(",") if args.rows else suite.rows)
    name = f"{args.suite}-{_graph(args)}-{device.type}" if suite.graph else f"{args.suite}-{device.type}"
    return measure_cases(args, name, cases_of, variants, budget)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Returns the cases that the command line names."""
    models = args.layers.split(",") if args.layers else None
    orders = args.order.split(",") if args.order else SUITES[args.suite].orders
    cases = select(args.suite, _graph(args), models, orders)
    return in_precisions(cases, args.precisions.split(",")) if args.precisions else cases


def _graph(args: argparse.Namespace) -> str | None:
    return args.graph or SUITES[args.suite].graph


def in_precisions(cases: Sequence[Case], precisions: Sequence[str]) -> list[Case]:
    """Returns each case in each of the precisions, those of one layer together.

    Raises:
        UnknownNameError: a precision is not known, or the cases are those of `attention`, which have their own.
    """
    refuse_unknown("precisions", precisions, list(DTYPES))
    if any(case.suite == "attention" for case in cases):
        raise UnknownNameError("precisions: cases of the suite attention have their own, which --layers names")
    return [case.to(precision) for case in cases for precision in precisions]


def measure_cases(
    args: argparse.Namespace, stem: str, cases_of: CasesOf, variants: Sequence[Variant], budget: driver.Budget
) -> int:
    """Measures cases that have targets and limits, with gradients of their inputs.

    Args:
        args: the command line, with the options of :func:`add_row_limit`, :func:`add_isolate` and
            `driver.add_sync_check`.
        stem: the stem of the names of the result files. Results of isolated rows have files of their own.
        cases_of: returns the cases of the command line, in order. Other processes call it too.
        variants: the rows of each table.
        budget: the time limit.

    Returns:
        The exit status: 1 if a row is wrong or gnncompile failed.
    """
    device, cases = torch.device(args.device), cases_of(args)

    def record(case: Case, row: Row, rows: Sequence[Row]) -> dict[str, Any]:
        return record_layer(case, row, rows, device)

    def describe(case: Case, rows: Sequence[Row]) -> str:
        return describe_layer(case, rows, device)

    def run_isolated(case: Case, *settings: Any) -> list[Row]:
        return isolated.run_case(partial(_nth_case, cases_of, args, cases.index(case)), *settings)

    how = driver.options(args, input_grad=True, sync_check=args.sync_check, warmup=2, row_limit=args.row_limit)
    steps = driver.measure_steps(variants, device, how, record, describe, run_isolated if args.isolate else run_case)
    more = {"peak MiB": measure.peak_memory_definition(device)}
    if args.isolate:
        stem, more["rows"] = f"{stem}-isolated", ISOLATED
    return driver.run(args, stem, cases, steps, more=more, key=KEY, summary=summary, budget=budget)


def _nth_case(cases_of: CasesOf, args: argparse.Namespace, index: int) -> Case:
    return cases_of(args)[index]


def limit_ms(case: Case, device: torch.device) -> float | None:
    """Returns the least milliseconds of a case; None if the device's rates were not measured."""
    rates = rates_of(device_name(device))
    work = case.limit()
    return work.milliseconds(rates) if work and rates else None


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def record_layer(case: Case, row: Row, rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """Returns one row as it is stored, with target and limit."""
    record = step_rows.record(case, row, rows)
    work, target, least_ms = case.limit(), case.target(device), limit_ms(case, device)
    assert work is not None and target is not None
    judged = row.variant.is_ours
    verdict = "SHORT"
    if row.status == "ok":
        measured = record["over_eager"], record["over_compile"], record["median_ms"]
        verdict = target.verdict(*measured, device=device_name(device))
    return {
        **record,
        "order": case.order,
        "target_over_eager": target.over_eager if judged else None,
        "target_over_compile": target.over_compile if judged else None,
        "target": str(target) if judged else None,
        "verdict": verdict if judged else None,
        "gathered_bytes": work.gathered,
        "streamed_bytes": work.streamed,
        "flops": work.flops,
        "limit_ms": least_ms,
        "over_limit": record["median_ms"] / least_ms if record["median_ms"] and least_ms else None,
    }


def describe_layer(case: Case, rows: Sequence[Row], device: torch.device) -> str:
    """Returns the lines under the table of a case: its limit, and whether the target is reached."""
    work, least_ms = case.limit(), limit_ms(case, device)
    lines = [f"limit: {work}" + (f": {least_ms:.3f} ms" if least_ms else "")]
    for row in rows:
        if row.variant.is_ours:
            record = record_layer(case, row, rows, device)
            times_limit = f"; {record['over_limit']:.1f}x the limit" if record["over_limit"] else ""
            lines.append(f"{row.variant.name}: target {record['target']}: {record['verdict']}{times_limit}")
    return "\n".join(lines)


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Returns one line per case, from the records of `record_layer`; it names the graph if there are several."""
    cases: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        cases.setdefault(tuple(record[column] for column in KEY), {})[record["row"]] = record
    several = len({record["graph"] for record in records}) > 1
    lines = [_summary_line(", ".join(case if several else case[1:]), rows) for case, rows in cases.items()]
    return tables.text_table(SUMMARY_HEADER, lines)


def _summary_line(name: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    nothing: dict[str, Any] = {"status": "", "median_ms": None}
    eager, ours = rows.get("eager", nothing), rows.get("gnncompile", nothing)
    plain = [rows[row] for row in ("compile", "compile dynamic") if row in rows]
    timed = [record for record in plain if record["median_ms"]]
    compiled = min(timed, key=lambda record: float(record["median_ms"])) if timed else (plain or [nothing])[0]

    def time(record: dict[str, Any]) -> str:
        return f"{record['median_ms']:.3f}" if record["median_ms"] else str(record["status"])

    def number(record: dict[str, Any], column: str, digits: int) -> str:
        value = record.get(column)
        return "" if value is None else f"{value:.{digits}f}"

    return [
        name,
        time(eager),
        time(compiled),
        time(ours),
        number(ours, "over_eager", 2),
        number(ours, "over_compile", 2),
        ours.get("target") or "",
        ours.get("verdict") or "",
        number(ours, "peak_mib", 0),
        number(compiled, "peak_mib", 0),
        number(ours or eager, "limit_ms", 3),
        number(ours, "over_limit", 1),
    ]
