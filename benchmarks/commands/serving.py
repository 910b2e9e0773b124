"""Latencies of answers to requests: eager, torch.compile, AOTInductor, gnncompile in the process, and its package.

Each request is a new graph to the server: its edge list is another tensor in every call, so nothing is remembered. In
the rows "with kept layout", the caller keeps the layouts of the graphs. Answers are compared with eager in float64
before any time is reported. With several clients, each is a thread. A package is made once for each model, and serves
all of its cases. It is made in one process, and answers in another one, which has not imported gnncompile.

On a GPU, the inputs of a request are on the GPU before its time begins, and the time ends when the answer is complete
there. Each of several clients has a stream of its own.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.names import UnknownNameError, chosen
from benchmarks.cases.serving import CASES, Request, ServingCase
from benchmarks.commands import driver
from benchmarks.commands.layers import add_row_limit
from benchmarks.measuring import counting, measure
from benchmarks.measuring.answers import measure_package
from benchmarks.measuring.clients import Served
from benchmarks.measuring.clients import measure as measure_clients
from benchmarks.measuring.deadline import deadline
from benchmarks.measuring.packages import Packages
from benchmarks.measuring.processes import ProcessError
from benchmarks.reporting import stored, tables
from benchmarks.rows.serving import OURS, ServingRow, for_device

NAME = "serving"
HELP = "latencies of a served model: eager, torch.compile, AOTInductor, and packages of gnncompile"

REQUESTS = 8


@dataclass
class ServingResult(Served):
    """The outcome of one row with some clients.

    Attributes:
        example: the case whose first request was the example of the row's package; None without a package.
    """

    row: ServingRow = field(kw_only=True)
    example: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=3, rounds=None)
    parser.add_argument("--cases", help="comma-separated, as GAT-guide (default: all; with --quick: GCN-single)")
    parser.add_argument("--clients", default="1,4", help="comma-separated numbers of threads (default: %(default)s)")
    parser.add_argument("--server", type=Path, help="examples/serving/server as built by CMake, for the rows in C++")
    parser.add_argument(
        "--soak", type=int, default=0, help="also ask the server so many times, and tell its memory (needs --server)"
    )
    driver.add_budget(parser)
    add_row_limit(parser)
    parser.set_defaults(row_limit=300.0)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    if args.soak and args.server is None:
        raise UnknownNameError("--soak: got no --server, expected examples/serving/server as built by CMake")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnknownNameError(f"--device: got {args.device}, expected cpu, since this machine has no GPU for torch")
    fitting = for_device(device, args.server is not None)
    if not fitting:
        raise UnknownNameError(f"--device: got {args.device}, expected cpu or cuda, for which packages are made")
    cases = chosen(CASES, args.cases or ("GCN-single" if args.quick else ""))
    rows = chosen(fitting, args.rows)
    clients = [int(text) for text in args.clients.split(",")]
    seconds = 0.2 if args.quick else args.seconds
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else ""

    with tempfile.TemporaryDirectory() as made:
        keep = any(row.keeps_layout for row in rows)
        packages = Packages(Path(made), device, args.seed, args.row_limit, keep)
        packages.make(sorted({row.package for row in rows if row.package}), cases)

        def measure_case(case: ServingCase, progress: driver.Progress) -> tuple[str, driver.Records]:
            measurement = Measurement(case, rows, clients, seconds, packages, progress, args.server)
            results = measurement.run()
            soaked = [measurement.soak(args.soak, clients[-1])] if args.soak else []
            text = "\n".join([format_case(results, card), *soaked])
            return text, [record(case, result, results) for result in results]

        more = {"latencies": f"{seconds} s for each row and number of clients"}
        budget = driver.Budget(args.budget)
        stem = f"serving-{device.type}"
        return driver.run(args, stem, cases, measure_case, key=("case",), more=more, budget=budget)


class Measurement:
    """Measures one case: makes and checks each row, then times its answers.

    Args:
        case: the case.
        rows: the rows of the table.
        clients: the numbers of threads that ask.
        seconds: how long each number of threads asks.
        packages: makes the packages; its device answers, and its limit holds for each row.
        progress: shows what is done.
        server: the server in C++, for the rows that need it.
    """

    def __init__(
        self,
        case: ServingCase,
        rows: Sequence[ServingRow],
        clients: Sequence[int],
        seconds: float,
        packages: Packages,
        progress: driver.Progress,
        server: Path | None = None,
    ) -> None:
        self.case, self.rows, self.clients, self.seconds = case, rows, clients, seconds
        self.packages, self.progress, self.server = packages, progress, server
        self.device, self.limit = packages.device, packages.limit
        self.requests: list[Request] = []
        self.expected = torch.empty(0)

    @torch.no_grad()
    def run(self) -> list[ServingResult]:
        """Measures all rows. Errors of a row, or of the reference of all rows, are not raised but noted.

        The reference is computed on the CPU: rows with packages are still measured after a row has broken the GPU for
        this process.
        """
        self.progress("answers in float64")
        try:
            counting.reset()
            self.requests = self.case.requests(REQUESTS, self.packages.seed)
            exact = self.case.model().double()
            self.expected = torch.cat([exact(*_double(request)) for request in self.requests])
        except Exception as error:
            first = Served()
            first.fail(error)
            return [ServingResult(**asdict(first), row=row) for row in self.rows]
        results = []
        # All rows share the code of the model's classes, so Dynamo's limit on recompiles must be high enough for all.
        with torch._dynamo.config.patch(recompile_limit=64):
            for row in self.rows:
                served = self._measure(row)
                example = self.packages.example(row.package, self.case)
                results += [ServingResult(**asdict(one), row=row, example=example) for one in served]
        self.progress("")
        return results

    def _measure(self, row: ServingRow) -> list[Served]:
        """Measures one row. The result is a single one if the row fails before it has times."""
        first = Served()
        try:
            if row.make is not None:
                return self._here(row)
            self.progress(f"{row.name}: package")
            path = str(self.packages.path(row.package, self.case))
            self.progress(f"{row.name}: check and time")
            if row.in_cpp:
                return [self._in_cpp(path, count, row.keeps_layout) for count in self.clients]
            given = (self.requests, self.expected, self.clients, self.seconds, self.device, self.limit)
            return measure_package(path, *given, keeps_layout=row.keeps_layout)
        except Exception as error:
            first.fail(error)
        return [first]

    def _here(self, row: ServingRow) -> list[Served]:
        assert row.make is not None
        self.progress(f"{row.name}: build, check and time")
        measure.free(self.device)
        requests = [tuple(one.to(self.device) for one in request) for request in self.requests]
        with deadline(self.limit + self.seconds * len(self.clients)):
            serve = row.make(self.case.model(self.device))
            given = (requests, self.expected, self.clients, self.seconds, self.device)
            return measure_clients(serve, *given, in_one_thread=row.in_one_thread)

    def _in_cpp(self, path: str, clients: int, keeps_layout: bool) -> Served:
        made = Served(clients=clients)
        options = ["--threads", str(clients), *(("--layout", "once") if keeps_layout else ())]
        requests = [list(request) for request in self.requests]
        try:
            limit = self.limit + 2 * self.seconds
            speed = self._ask(path, requests, 3, options, limit)["per second"]
            found = self._ask(path, requests, max(int(self.seconds * speed / REQUESTS), 1), options, limit)
        except ProcessError as error:
            made.fail(error)
            return made
        given = torch.load(Path(path).with_name("answers.pt"), weights_only=False)
        refused = next((one for one in given if isinstance(one, str)), None)
        if refused is not None:
            made.fail(ProcessError(refused.splitlines()[0]))
        elif made.is_right([one for (one,) in given], self.expected):
            made.p50_us, made.p99_us, made.per_s = found["p50"], found["p99"], found["per second"]
        return made

    def _ask(
        self, path: str, requests: list[list[Tensor]], repeat: int, options: Sequence[str], limit: float | None
    ) -> dict[str, float]:
        """Asks the server in C++ for the answers to all requests so many times; returns what it reports.

        Raises:
            ProcessError: the server takes too long, or ends with an error.
        """
        assert self.server is not None
        asked, answers = (Path(path).with_name(name) for name in ("requests.pt", "answers.pt"))
        torch.save(requests, asked)
        on_gpu = ("--device", str(self.device)) if self.device.type == "cuda" else ()
        files = [self.server, path, asked, answers]
        command = [*map(str, files), *options, *on_gpu, "--repeat", str(repeat)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"took longer than {limit:g} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"the server ended with status {done.returncode}"]
            raise ProcessError(lines[-1])
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def soak(self, times: int, clients: int) -> str:
        """Returns a line about the server's memory after a tenth of so many requests, and after all.

        One of nine requests has an edge to a node that is not there, and is refused.
        """
        memory = []
        try:
            path = str(self.packages.path(OURS, self.case))
            requests = [list(request) for request in self.case.requests(REQUESTS, self.packages.seed)]
            x, edge_index, *rest = requests[0]
            requests.append([x, edge_index + x.size(0), *rest])
            for share in (times // 10, times):
                self.progress(f"soak: {share:,} requests")
                options = ("--threads", str(clients))
                found = self._ask(path, requests, -(-share // len(requests)), options, limit=None)
                memory.append(found["MiB after"])
        except ProcessError as error:
            return f"soak: FAILED: {error}"
        return (
            f"soak: {times:,} requests of {clients} clients to the package in C++, a ninth refused: {memory[0]:,} MiB "
            f"after {times // 10:,}, {memory[1]:,} MiB after all"
        )


def _double(request: Request) -> list[Tensor]:
    return [one.double() if one.is_floating_point() else one for one in request]


def _over(result: ServingResult, results: Sequence[ServingResult]) -> float | None:
    """How many times as fast as AOTInductor a row's median is; in C++, as AOTInductor in C++."""
    baselines = [one for one in results if one.row.package == "AOTInductor" and one.row.in_cpp == result.row.in_cpp]
    base = [one.p50_us for one in baselines if one.clients == result.clients]
    return base[0] / result.p50_us if base and base[0] and result.p50_us else None


def format_case(results: Sequence[ServingResult], card: str = "") -> str:
    """Returns the table of one case; a row without a time gives the reason.

    Args:
        results: the outcomes.
        card: the name of the GPU, for the head of the table.
    """
    header = [card, "clients", "p50 us", "p99 us", "answers / s", "x AOTInductor", "error"]
    cells, notes = [], []
    for result in results:
        if result.status != "ok":
            notes.append(f"{result.row.name}: {result.status}: {result.message}")
        times = [f"{value:,.0f}" if value is not None else "" for value in (result.p50_us, result.p99_us, result.per_s)]
        over = _over(result, results)
        error = f"{result.error:.0e}" if result.error is not None else ""
        cells.append([result.row.name, str(result.clients), *times, "" if over is None else f"{over:.2f}", error])
    return "\n".join([tables.text_table(header, cells), *notes])


def record(case: ServingCase, result: ServingResult, results: Sequence[ServingResult]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    return {
        **stored.labelled(result.row, result, case=case.name, clients=result.clients),
        "p50_us": result.p50_us,
        "p99_us": result.p99_us,
        "per_s": result.per_s,
        "over_aot": _over(result, results),
        "error": result.error,
        "example": result.example,
    }
