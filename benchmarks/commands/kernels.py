"""One aggregation, the sum of `x` over incoming edges, forward only; all structure is made beforehand.

On a GPU `us` is the device's time per call while further calls are queued. `call us` is the wall clock of a single call
with synchronisation, the host's work included. Data that fits into the caches stays there from call to call.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.graphs import KERNEL_GRAPHS, Graph
from benchmarks.cases.names import UnknownNameError
from benchmarks.commands import driver
from benchmarks.measuring import counting, measure
from benchmarks.measuring.comparison import Options
from benchmarks.measuring.errors import first_line
from benchmarks.reporting import stored, tables
from benchmarks.rows.kernels import KernelRow, Structure, exact, rows_for

NAME = "kernels"
HELP = "the sum over neighbours alone, against cuSPARSE and others"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Tolerances of ||found - exact|| / ||exact||. Adding 100,000 values one by one in float32 has an error of about 1e-5. A
# result that is rounded to bfloat16 once has an error of 2e-3. Adding in bfloat16 passes for rows with few edges, and
# fails on hubs. Each row's error stands in benchmarks/results/nvidia-h200/kernels-cuda.json.
TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
SMALL_GRAPHS = ("guide", "hub", "even")


@dataclass(frozen=True)
class KernelCase:
    """One graph, one width and one type."""

    graph: Graph
    width: int
    dtype: torch.dtype

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the rows that are gathered along edges."""
        return self.graph.num_edges * self.width * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The graph, width and type."""
        return f"{self.graph.name}, {self.width} x {str(self.dtype).removeprefix('torch.')}"

    @property
    def label(self) -> str:
        """The name, which differs from those of all other cases."""
        return self.name

    def __str__(self) -> str:
        return f"{self.name}; {self.graph}"


@dataclass
class KernelResult:
    """The outcome of one row. `status` is `ok`, FAILED, WRONG or SKIPPED; only rows that are `ok` have a time."""

    row: KernelRow
    status: str = "ok"
    message: str = ""
    error: float | None = None
    timing: measure.Timing | None = None
    call_ms: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=0.3, rounds=5)
    driver.add_budget(parser)
    parser.add_argument("--widths", default="16,32,64,128,256", help="channels, comma-separated (default: %(default)s)")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--graphs",
        help=f"comma-separated, of {', '.join(KERNEL_GRAPHS)} (default: all on CUDA, else {', '.join(SMALL_GRAPHS)})",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    graphs = _graphs(args.graphs, device)
    dtypes = [_known("dtypes", name, DTYPES) for name in args.dtypes.split(",")]
    widths = [int(width) for width in args.widths.split(",")]
    rows = rows_for(device, args.rows)
    how = driver.options(args)
    made: dict[str, Structure] = {}

    def measure_case(case: KernelCase, progress: Callable[[str], None]) -> tuple[str, driver.Records]:
        graph = case.graph
        if graph.name not in made:  # the cases of a graph come one after the other
            made.clear()
            measure.free(device)
            made[graph.name] = Structure(graph.make().to(device), graph.num_nodes)
        found = run_kernels(case, made[graph.name], rows, device, how, progress)
        return format_case(case, found), [record(case, one, found) for one in found]

    status = driver.run(
        args,
        f"kernels-{device.type}",
        [KernelCase(graph, width, dtype) for graph in graphs for dtype in dtypes for width in widths],
        measure_case,
        key=("graph", "dtype", "width"),
        summary=lambda records: summary(records, rows),
        budget=driver.Budget(args.budget),
        others_may_be_wrong=True,
    )
    counting.reset()
    return status


def _graphs(names: str | None, device: torch.device) -> list[Graph]:
    chosen = names.split(",") if names else KERNEL_GRAPHS if device.type == "cuda" else SMALL_GRAPHS
    return [_known("graphs", name, KERNEL_GRAPHS) for name in chosen]


def _known(argument: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UnknownNameError(f"{argument}: got {name!r}, expected some of {', '.join(known)}")
    return known[name]


@torch.no_grad()
def run_kernels(
    case: KernelCase,
    structure: Structure,
    rows: Sequence[KernelRow],
    device: torch.device,
    how: Options,
    progress: Callable[[str], None] = lambda message: None,
) -> list[KernelResult]:
    """Measures one case: builds and checks each row, then times the right rows in turns."""
    generator = torch.Generator(device).manual_seed(how.seed)
    # Values are from 0 to 1, because rounding would look larger than it is if values cancelled out.
    x = torch.rand(structure.num_nodes, case.width, generator=generator, device=device).to(case.dtype)
    progress("sums in float64")
    expected = exact(structure, x)
    results, steps = [KernelResult(row) for row in rows], {}
    # One function compiled by gnncompile runs every width and type, so Dynamo's limit on recompiles must be high.
    with torch._dynamo.config.patch(recompile_limit=64):
        for result in results:
            progress(f"{result.row.name}: build and check")
            step = _prepare(result, case, structure, x, expected, device)
            measure.free(device)
            if step is not None:
                steps[result.row.name] = step
        progress(f"timing {len(steps)} rows")
        try:
            timings = _time(steps, device, how)
        except Exception as error:
            timings = {}
            for result in results:
                if result.status == "ok":
                    result.status, result.message = "FAILED", f"in timing: {first_line(error)}"
        for result in results:
            result.timing, result.call_ms = timings.get(result.row.name, (None, None))
    progress("")
    return results


def _prepare(
    result: KernelResult, case: KernelCase, structure: Structure, x: Tensor, expected: Tensor, device: torch.device
) -> Callable[[], Tensor] | None:
    """Builds and checks one row; returns None if it must not be timed."""
    missing = _why_skipped(result.row, case, device)
    if missing:
        result.status, result.message = "SKIPPED", missing
        return None
    try:
        aggregate = result.row.build(structure, case.dtype)
        aggregate(x)
        found = aggregate(x)
        result.error = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))
    except torch.OutOfMemoryError as error:
        result.status, result.message = "SKIPPED", f"out of memory: {first_line(error)}"
        return None
    except Exception as error:
        result.status, result.message = "FAILED", first_line(error)
        return None
    tolerance = TOLERANCES[case.dtype]
    if not result.error <= tolerance:  # a NaN is wrong too
        result.status, result.message = "WRONG", f"relative error {result.error:.1e}, tolerance {tolerance:.0e}"
        return None
    return lambda: aggregate(x)


def _why_skipped(row: KernelRow, case: KernelCase, device: torch.device) -> str:
    """Returns why a row is not tried; "" if it is. On a CPU, memory is checked first: running out ends the process."""
    if not row.is_installed:
        return f"torch {torch.__version__} has no {row.option}" if row.option else f"{row.package} is not installed"
    if device.type == "cpu" and row.stores_messages and hasattr(os, "sysconf"):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if case.gathered_bytes > 0.8 * available:
            return f"out of memory: gathered rows of {case.gathered_bytes / 2**30:.0f} GiB"
    return ""


def _time(
    steps: Mapping[str, Callable[[], Tensor]], device: torch.device, how: Options
) -> dict[str, tuple[measure.Timing, float]]:
    """Returns the time of each row (on a GPU that of the device alone), and the median time of single calls, in ms."""
    if device.type != "cuda":
        timings = measure.interleaved(steps, device, how.seconds, how.rounds, warmup=2)
        return {name: (timing, timing.median) for name, timing in timings.items()}
    timings = measure.queued(steps, device, how.seconds, how.rounds)
    return {
        name: (timings[name], median(measure.time_step(step, device) for _ in range(10)))
        for name, step in steps.items()
    }


def over_sparse(result: KernelResult, results: Sequence[KernelResult]) -> float | None:
    """Returns how many times faster a row is than the vendor's sparse product."""
    sparse = [other.timing.median for other in results if other.row.is_sparse and other.timing]
    return sparse[0] / result.timing.median if sparse and result.timing else None


def terabytes_per_second(case: KernelCase, result: KernelResult) -> float | None:
    """Returns gathered bytes over time; each edge counts as one row, and caches are ignored."""
    return case.gathered_bytes / result.timing.median / 1e9 if result.timing else None


def format_case(case: KernelCase, results: Sequence[KernelResult]) -> str:
    """Returns the table of one case; a row without a time gives the reason."""
    sparse = next((result.row.name for result in results if result.row.is_sparse), "sparse")
    header = ["", "us", "p10 .. p90", "call us", "TB/s", f"x {sparse}", "error"]
    cells, notes = [], []
    for result in results:
        timing, ratio, rate = result.timing, over_sparse(result, results), terabytes_per_second(case, result)
        if result.status != "ok":
            notes.append(f"{result.row.name}: {result.status}: {result.message}")
        cells.append(
            [
                result.row.name,
                f"{timing.median * 1e3:.1f}" if timing else result.status,
                f"{timing.p10 * 1e3:.1f} .. {timing.p90 * 1e3:.1f}" if timing else "",
                f"{result.call_ms * 1e3:.1f}" if result.call_ms is not None else "",
                f"{rate:.3g}" if rate else "",
                f"{ratio:.2f}" if ratio else "",
                f"{result.error:.0e}" if result.error is not None else "",
            ]
        )
    return "\n".join([tables.text_table(header, cells), *notes])


def record(case: KernelCase, result: KernelResult, results: Sequence[KernelResult]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    timing = result.timing
    dtype = str(case.dtype).removeprefix("torch.")
    return {
        **stored.labelled(result.row, result, graph=case.graph.name, dtype=dtype, width=case.width),
        "us": timing and timing.median * 1e3,
        "p10_us": timing and timing.p10 * 1e3,
        "p90_us": timing and timing.p90 * 1e3,
        "call_us": None if result.call_ms is None else result.call_ms * 1e3,
        "gathered_tb_per_s": terabytes_per_second(case, result),
        "over_sparse": over_sparse(result, results),
        "error": result.error,
    }


def summary(records: Sequence[dict[str, Any]], rows: Sequence[KernelRow]) -> str:
    """Returns one line per case: the microseconds of each row, then gnncompile's gathered TB/s and its ratio."""
    ours = next((row.name for row in rows if row.is_ours), "")
    header = ["us", *(row.name for row in rows), "TB/s", "x sparse"]
    lines: dict[tuple[str, int, str], list[str]] = {}
    last: dict[tuple[str, int, str], list[str]] = {}
    for one in records:
        key = (one["graph"], one["width"], one["dtype"])
        lines.setdefault(key, []).append(f"{one['us']:.1f}" if one["us"] else one["status"])
        if one["row"] == ours:
            columns = (one["gathered_tb_per_s"], one["over_sparse"])
            last[key] = ["" if value is None else f"{value:.3g}" for value in columns]
    cells = [[f"{key[0]}, {key[1]} x {key[2]}", *times, *last.get(key, ["", ""])] for key, times in lines.items()]
    return tables.text_table(header, cells)
