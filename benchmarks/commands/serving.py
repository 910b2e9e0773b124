"""Latencies of answers to requests: eager, torch.compile, AOTInductor, gnncompile in the process, and its package.

Each request is a new graph to the server: its edge list is another tensor in every call, so nothing is remembered. In
the rows "with kept layout", the caller keeps the layouts of the graphs. Answers are compared with eager in float64
before any time is reported. With several clients, each is a thread. A package is made once for each model, and serves
all of its cases.
"""

import argparse
import copy
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.package.package import load_package
from torch.utils import _pytree as pytree

from benchmarks.cases.names import UnknownNameError, chosen
from benchmarks.cases.serving import CASES, Request, ServingCase, dynamic_shapes
from benchmarks.commands import driver
from benchmarks.measuring.comparison import first_line
from benchmarks.measuring.losses import Outcome
from benchmarks.reporting import stored, tables

NAME = "serving"
HELP = "latencies of a served model: eager, torch.compile, AOTInductor, and packages of gnncompile"

TOLERANCE = 1e-4
REQUESTS = 8
MOST_CLIENTS = 4

Serve = Callable[..., Tensor]


def _eager(model: nn.Module, request: Request, folder: Path) -> Serve:
    return model


def _compiled(model: nn.Module, request: Request, folder: Path) -> Serve:
    return torch.compile(model, dynamic=True)


def _loaded(path: str, name: str) -> Serve:
    # One runner for each thread: calls of one runner wait for each other.
    return load_package(path, name, num_runners=MOST_CLIENTS)


def _aot(model: nn.Module, request: Request, folder: Path) -> Serve:
    path = folder / "aot.pt2"
    if not path.exists():
        program = torch.export.export(model, request, dynamic_shapes=dynamic_shapes(request))  # type: ignore[arg-type]
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return _loaded(str(path), "model")


def _gnncompile(model: nn.Module, request: Request, folder: Path) -> Serve:
    import gnncompile

    return gnncompile.compile(model)


PACKAGE, REQUESTS_FILE, ANSWERS = "package.pt2", "requests.pt", "answers.pt"


def _packaged(model: nn.Module, request: Request, folder: Path) -> str:
    import gnncompile

    path = folder / PACKAGE
    if not path.exists():
        gnncompile.package(model, request, path, keep_layout=True)
    return str(path)


def _package(model: nn.Module, request: Request, folder: Path) -> Serve:
    return _loaded(_packaged(model, request, folder), "model")


class _Kept:
    """A package whose caller keeps the layouts: called with a layout before the arguments of the model."""

    def __init__(self, model: nn.Module, request: Request, folder: Path) -> None:
        path = _packaged(model, request, folder)
        self.layout_of, self.served = _loaded(path, "layout"), _loaded(path, "with_layout")

    def __call__(self, *given: Any) -> Tensor:
        return self.served(*given)


@dataclass(frozen=True)
class ServingRow:
    """One way to serve.

    Attributes:
        make: makes a function that answers requests.
        options: the options of the server in C++, which answers in place of Python; None for a row in Python.
    """

    name: str
    make: Callable[[nn.Module, Request, Path], Serve]
    is_ours: bool = False
    options: tuple[str, ...] | None = None


ROWS = (
    ServingRow("eager", _eager),
    ServingRow("torch.compile", _compiled),
    ServingRow("AOTInductor", _aot),
    ServingRow("gnncompile", _gnncompile, is_ours=True),
    ServingRow("package", _package, is_ours=True),
    ServingRow("package with kept layout", _Kept, is_ours=True),
    ServingRow("package in C++", _package, is_ours=True, options=()),
    ServingRow("package with kept layout in C++", _Kept, is_ours=True, options=("--layout", "once")),
)


@dataclass
class ServingResult(Outcome):
    """The outcome of one row with some clients.

    Attributes:
        clients: the threads that ask.
        p50_us: the median time of an answer.
        p99_us: the time within which 99 of 100 answers come.
        per_s: the answers of all clients in a second.
    """

    row: ServingRow = field(kw_only=True)
    clients: int = 1
    p50_us: float | None = None
    p99_us: float | None = None
    per_s: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=3, rounds=None)
    parser.set_defaults(device="cpu")
    parser.add_argument("--cases", help="comma-separated, as GAT-guide (default: all; with --quick: GCN-single)")
    parser.add_argument("--clients", default="1,4", help="comma-separated numbers of threads (default: %(default)s)")
    parser.add_argument("--server", type=Path, help="examples/serving/server as built by CMake, for the rows in C++")
    parser.add_argument(
        "--soak", type=int, default=0, help="also ask the server so many times, and tell its memory (needs --server)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    if args.soak and args.server is None:
        raise UnknownNameError("--soak: got no --server, expected examples/serving/server as built by CMake")
    if args.device != "cpu":
        raise UnknownNameError(f"--device: got {args.device}, expected cpu, for which packages are made")
    names = args.cases or ("GCN-single" if args.quick else "")
    cases = chosen(CASES, names)
    rows = [row for row in chosen(ROWS, args.rows) if args.server is not None or row.options is None]
    clients = [int(text) for text in args.clients.split(",")]
    seconds = 0.2 if args.quick else args.seconds

    with tempfile.TemporaryDirectory() as made:

        def measure_case(case: ServingCase, progress: driver.Progress) -> tuple[str, driver.Records]:
            folder = Path(made) / case.model_name
            folder.mkdir(exist_ok=True)
            measurement = _Measurement(case, rows, clients, seconds, args.server, args.seed, progress, folder)
            results = measurement.run()
            soaked = [measurement.soak(args.soak, clients[-1])] if args.soak else []
            return "\n".join([format_case(results), *soaked]), [record(case, result, results) for result in results]

        more = {"latencies": f"{seconds} s for each row and number of clients"}
        return driver.run(args, "serving-cpu", cases, measure_case, key=("case",), more=more)


class _Measurement:
    """Measures one case: makes and checks each row, then times its answers."""

    def __init__(
        self,
        case: ServingCase,
        rows: Sequence[ServingRow],
        clients: Sequence[int],
        seconds: float,
        server: Path | None,
        seed: int,
        progress: driver.Progress,
        folder: Path,
    ) -> None:
        self.case, self.rows, self.clients, self.seconds, self.folder = case, rows, clients, seconds, folder
        self.server, self.progress = server, progress
        self.requests = case.requests(REQUESTS, seed)

    @torch.no_grad()
    def run(self) -> list[ServingResult]:
        """Measures all rows."""
        model = self.case.model()
        exact = copy.deepcopy(model).double()
        self.expected = torch.cat([exact(*_double(request)) for request in self.requests])
        results = []
        for row in self.rows:
            self.progress(f"{row.name}: build and check")
            first = ServingResult(row=row)
            serve = self._prepare(first, model)
            if serve is None:
                results.append(first)
                continue
            for clients in self.clients:
                self.progress(f"{row.name}: {clients} clients")
                made = ServingResult(row=row, clients=clients, error=first.error)
                if row.options is None:
                    self._in_python(made, serve)
                else:
                    self._in_cpp(made, row.options)
                results.append(made)
        self.progress("")
        return results

    def _given(self, serve: Serve) -> list[tuple[Any, ...]]:
        if not isinstance(serve, _Kept):
            return list(self.requests)
        return [(serve.layout_of(*request), *request) for request in self.requests]

    def _prepare(self, result: ServingResult, model: nn.Module) -> Serve | None:
        """Makes and checks one row; returns None if it failed or is wrong."""
        try:
            serve = result.row.make(copy.deepcopy(model), self.requests[0], self.folder)
            found = torch.cat([serve(*given) for given in self._given(serve)])
        except Exception as error:
            result.status, result.message = "FAILED", first_line(error)
            return None
        return serve if self._is_right(result, found) else None

    def _is_right(self, result: ServingResult, found: Tensor) -> bool:
        """Compares answers with eager in float64, and says so in the result if they differ."""
        result.error = float((found - self.expected).abs().max() / self.expected.abs().max())
        if result.error <= TOLERANCE:  # a NaN is wrong too
            return True
        result.status, result.message = "WRONG", f"answers differ by {result.error:.1e}, tolerance {TOLERANCE:.0e}"
        return False

    def _in_python(self, result: ServingResult, serve: Serve) -> None:
        times: list[list[float]] = [[] for _ in range(result.clients)]
        given = self._given(serve)
        stop = time.perf_counter() + self.seconds

        def ask(own: list[float], first: int) -> None:
            with torch.no_grad():
                at = first
                while not own or time.perf_counter() < stop:
                    request = pytree.tree_map(torch.clone, given[at % REQUESTS])  # a new graph to the server
                    start = time.perf_counter()
                    serve(*request)
                    own.append(time.perf_counter() - start)
                    at += 1

        threads = [threading.Thread(target=ask, args=(own, first)) for first, own in enumerate(times)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        found = sorted(each * 1e6 for own in times for each in own)
        result.p50_us, result.p99_us = statistics.median(found), found[int(0.99 * len(found))]
        result.per_s = len(found) / took

    def _in_cpp(self, result: ServingResult, options: tuple[str, ...]) -> None:
        options = ("--threads", str(result.clients), *options)
        requests = [list(request) for request in self.requests]
        speed = self._ask(requests, 3, options)["per second"]
        found = self._ask(requests, max(int(self.seconds * speed / REQUESTS), 1), options)
        given = torch.load(self.folder / ANSWERS, weights_only=False)
        refused = next((one for one in given if isinstance(one, str)), None)
        if refused is not None:
            result.status, result.message = "FAILED", refused.splitlines()[0]
        elif self._is_right(result, torch.cat([one for (one,) in given])):
            result.p50_us, result.p99_us, result.per_s = found["p50"], found["p99"], found["per second"]

    def _ask(self, requests: list[list[Tensor]], repeat: int, options: Sequence[str]) -> dict[str, float]:
        """Asks the server in C++ for the answers to all requests so many times; returns what it reports."""
        assert self.server is not None
        torch.save(requests, self.folder / REQUESTS_FILE)
        files = [self.server, self.folder / PACKAGE, self.folder / REQUESTS_FILE, self.folder / ANSWERS]
        command = [*map(str, files), *options, "--repeat", str(repeat)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def soak(self, times: int, clients: int) -> str:
        """Returns a line about the server's memory after a tenth of so many requests, and after all.

        One of nine requests has an edge to a node that is not there, and is refused.
        """
        x, edge_index, *rest = self.requests[0]
        requests = [*map(list, self.requests), [x, edge_index + x.size(0), *rest]]
        memory = []
        for share in (times // 10, times):
            self.progress(f"soak: {share:,} requests")
            found = self._ask(requests, -(-share // len(requests)), ("--threads", str(clients)))
            memory.append(found["MiB after"])
        return (
            f"soak: {times:,} requests of {clients} clients to the package in C++, a ninth refused: {memory[0]:,} MiB "
            f"after {times // 10:,}, {memory[1]:,} MiB after all"
        )


def _double(request: Request) -> list[Tensor]:
    return [one.double() if one.is_floating_point() else one for one in request]


def _over(result: ServingResult, results: Sequence[ServingResult]) -> float | None:
    """How many times as fast as AOTInductor a row's median is."""
    base = [one.p50_us for one in results if one.row.name == "AOTInductor" and one.clients == result.clients]
    return base[0] / result.p50_us if base and base[0] and result.p50_us else None


def format_case(results: Sequence[ServingResult]) -> str:
    """Returns the table of one case; a row without a time gives the reason."""
    header = ["", "clients", "p50 us", "p99 us", "answers / s", "x AOTInductor", "error"]
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
    }
