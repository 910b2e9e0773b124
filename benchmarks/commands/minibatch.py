"""Training on streams of mini-batches whose sizes change, loading included.

The losses of the first steps are compared with those of a plain loop in float64 before any time is reported.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from benchmarks.cases.minibatches import CASES, MiniBatchCase, take
from benchmarks.cases.names import chosen, named
from benchmarks.commands import driver
from benchmarks.measuring import counting, measure
from benchmarks.measuring.comparison import Options
from benchmarks.measuring.losses import TOLERANCE, Make, Outcome, check, plain_loop, whole_step
from benchmarks.reporting import stored, tables
from benchmarks.rows.variants import VARIANTS

NAME = "minibatch"
HELP = "training on streams of mini-batches: plain loops, gnncompile with its loader, with buckets, TrainStep"

CHECKED_STEPS = 8

Step = Callable[[Data], Tensor]


def _plain(loader: Any, device: torch.device) -> Iterable[Data]:
    return (data.to(device, non_blocking=True) for data in loader)


def _prepared(buckets: bool) -> Callable[[Any, torch.device], Iterable[Data]]:
    def wrap(loader: Any, device: torch.device) -> Iterable[Data]:
        import gnncompile

        return gnncompile.loader(loader, device, buckets)

    return wrap


@dataclass(frozen=True)
class MiniBatchRow:
    """One way to train: `make` makes a step of a model, `load` wraps the loader.

    Attributes:
        only_seeds: whether the row is only for loops that cut results to the seeds; it tells gnncompile so.
    """

    name: str
    make: Make
    load: Callable[[Any, torch.device], Iterable[Data]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_ours: bool = False
    only_seeds: bool = False


_BUILDS = {variant.name: variant.build for variant in VARIANTS}


def _only_seeds(model: nn.Module) -> Any:
    import gnncompile

    return gnncompile.compile(model, mode="reduce-overhead", options={"only_seeds": True})


ROWS = (
    MiniBatchRow("eager", plain_loop(_BUILDS["eager"]), _plain),
    MiniBatchRow("compile dynamic", plain_loop(_BUILDS["compile dynamic"]), _plain),
    MiniBatchRow("gnncompile", plain_loop(_BUILDS["gnncompile"]), _prepared(False), is_ours=True),
    MiniBatchRow("r-o buckets", plain_loop(_BUILDS["gnncompile r-o"]), _prepared(True), ("cuda",), True),
    MiniBatchRow(
        "r-o buckets, only seeds",
        plain_loop(_only_seeds),
        _prepared(True),
        ("cuda",),
        is_ours=True,
        only_seeds=True,
    ),
    MiniBatchRow("TrainStep buckets", whole_step, _prepared(True), is_ours=True),
)


@dataclass
class MiniBatchResult(Outcome):
    """The outcome of one row.

    Attributes:
        timing: the time of a step on mini-batches that are on the device already.
        device_ms: the time of such a step on the device alone.
        loop_ms: the time per mini-batch in the whole loop, loading included.
        recompiles: the number of recompiles in the whole loop, after the checks and timings before it.
        sync: the operation that waits for the device in a step, if there is one.
    """

    row: MiniBatchRow = field(kw_only=True)
    timing: measure.Timing | None = None
    device_ms: float | None = None
    loop_ms: float | None = None
    recompiles: int | None = None
    sync: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=3.0, rounds=10)
    names = ",".join(case.name for case in CASES)
    parser.add_argument("--cases", default=names, help="comma-separated (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=1000, help="mini-batches of a loop (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes that load (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    cases = named(CASES, args.cases.split(","))
    rows = chosen([row for row in ROWS if device.type in row.devices], args.rows)
    how = driver.options(args)

    def measure_case(case: MiniBatchCase, progress: driver.Progress) -> tuple[str, driver.Records]:
        fitting = [row for row in rows if case.cut_in_loop or not row.only_seeds]
        results = _Measurement(case, fitting, device, how, args.batches, args.workers, progress).run()
        return format_case(results), [record(case, result, results) for result in results]

    return driver.run(args, f"minibatch-{device.type}", cases, measure_case, key=("case",))


class _Measurement:
    """Measures one case: builds and checks each row, times steps in turns, then whole loops one after the other."""

    def __init__(
        self,
        case: MiniBatchCase,
        rows: Sequence[MiniBatchRow],
        device: torch.device,
        how: Options,
        batches: int,
        workers: int,
        progress: Callable[[str], None],
    ) -> None:
        self.case, self.device, self.how = case, device, how
        self.batches, self.workers, self.progress = batches, workers, progress
        self.results = [MiniBatchResult(row=row) for row in rows]
        counting.reset()

    def run(self) -> list[MiniBatchResult]:
        """Measures all rows."""
        torch.manual_seed(self.how.seed)
        model = self.case.model().to(self.device)
        self.progress("losses in float64")
        expected = self._losses(_plain, self._step(plain_loop(lambda m: m), copy.deepcopy(model).double()), double=True)
        steps: dict[str, Step] = {}
        kept: dict[str, list[Data]] = {}
        with torch._dynamo.config.patch(recompile_limit=64):
            for result in self.results:
                name = result.row.name
                self.progress(f"{name}: build and check")
                step = self._prepare(result, model, expected)
                if step is not None:
                    steps[name], kept[name] = step, list(self._load(result.row, self.case.kept, 0))
            self._time_steps(steps, kept)
            for result in self.results:
                if result.row.name in steps:
                    self.progress(f"{result.row.name}: whole loop")
                    self._time_loop(result, steps[result.row.name])
        self.progress("")
        return self.results

    def _load(self, row: MiniBatchRow, batches: int, workers: int) -> Iterable[Data]:
        return row.load(self.case.loader(batches, workers), self.device)

    def _step(self, make: Make, model: nn.Module) -> Step:
        step = make(model, self.case.loss)
        return lambda data: step(self.case.arguments(data), self.case.target(data))

    def _losses(self, load: Callable[..., Iterable[Data]], step: Step, double: bool = False) -> Tensor:
        found = []
        for data in take(load(self.case.loader(CHECKED_STEPS, 0), self.device), CHECKED_STEPS):
            if double:
                data.apply(lambda value: value.double() if value.is_floating_point() else value)
            found.append(step(data).double())
        return torch.stack(found)

    def _prepare(self, result: MiniBatchResult, model: nn.Module, expected: Tensor) -> Step | None:
        """Builds and checks one row; returns None if it failed or is wrong."""
        # Rounding errors of float32 grow from step to step, also in eager. So three times eager's error is allowed.
        plain = next((one.error for one in self.results if one.row.name == "eager" and one.error is not None), 0.0)
        tolerance = float("inf") if result.row.name == "eager" else max(TOLERANCE, 3 * plain)
        build = partial(self._step, result.row.make, copy.deepcopy(model))
        return check(result, build, partial(self._losses, result.row.load), expected, tolerance)

    def _time_steps(self, steps: dict[str, Step], kept: dict[str, list[Data]]) -> None:
        self.progress(f"timing steps of {len(steps)} rows")
        number = self.case.kept

        def all_of(name: str) -> Callable[[], None]:
            def run() -> None:
                for data in kept[name]:
                    steps[name](data)

            return run

        rounds = {name: all_of(name) for name in steps}
        timings = measure.interleaved(rounds, self.device, self.how.seconds, self.how.rounds)
        alone = measure.queued(rounds, self.device) if self.device.type == "cuda" else {}
        for result in self.results:
            name = result.row.name
            if name not in timings:
                continue
            one = timings[name]
            median, p10, p90, minimum = (ms / number for ms in (one.median, one.p10, one.p90, one.minimum))
            result.timing = measure.Timing(median, p10, p90, minimum, one.steps * number)
            if name in alone:
                result.device_ms = alone[name].median / number
                result.sync = measure.sync_error(rounds[name], self.device)

    def _time_loop(self, result: MiniBatchResult, step: Step) -> None:
        before = counting.mark()
        loader = self._load(result.row, self.batches, self.workers)
        measure.synchronize(self.device)
        start = time.perf_counter()
        for data in loader:
            step(data)
        measure.synchronize(self.device)
        result.loop_ms = (time.perf_counter() - start) * 1e3 / self.batches
        result.recompiles = counting.since(before).graphs


def _over(result: MiniBatchResult, other: str, results: Sequence[MiniBatchResult], what: str) -> float | None:
    def ms(one: MiniBatchResult) -> float | None:
        if what == "loop":
            return one.loop_ms
        return one.timing.median if one.timing is not None else None

    base = next((ms(one) for one in results if one.row.name == other), None)
    mine = ms(result)
    return base / mine if base and mine else None


def format_case(results: Sequence[MiniBatchResult]) -> str:
    """Returns the table of one case; a row without a time gives the reason."""
    header = [
        "",
        "step ms",
        "x eager",
        "x compile",
        "device ms",
        "loop ms",
        "x eager",
        "x compile",
        "captured",
        "error",
    ]
    cells, notes = [], []
    for result in results:
        if result.status != "ok":
            notes.append(f"{result.row.name}: {result.status}: {result.message}")
        if result.sync:
            notes.append(f"{result.row.name}: waits for the device: {result.sync}")
        ratios = [
            _over(result, name, results, what) for what in ("step", "loop") for name in ("eager", "compile dynamic")
        ]
        shown = [f"{ratio:.2f}" if ratio else "" for ratio in ratios]
        cells.append(
            [
                result.row.name,
                f"{result.timing.median:.3f}" if result.timing else result.status,
                *shown[:2],
                f"{result.device_ms:.3f}" if result.device_ms else "",
                f"{result.loop_ms:.3f}" if result.loop_ms else "",
                *shown[2:],
                "" if result.recompiles is None else str(result.recompiles),
                f"{result.error:.0e}" if result.error is not None else "",
            ]
        )
    return "\n".join([tables.text_table(header, cells), *notes])


def record(case: MiniBatchCase, result: MiniBatchResult, results: Sequence[MiniBatchResult]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    timing = result.timing
    return {
        **stored.labelled(result.row, result, case=case.name),
        "step_ms": timing and timing.median,
        "step_p10_ms": timing and timing.p10,
        "step_p90_ms": timing and timing.p90,
        "device_ms": result.device_ms,
        "loop_ms": result.loop_ms,
        "step_over_eager": _over(result, "eager", results, "step"),
        "step_over_compile": _over(result, "compile dynamic", results, "step"),
        "loop_over_eager": _over(result, "eager", results, "loop"),
        "loop_over_compile": _over(result, "compile dynamic", results, "loop"),
        "captured_in_loop": result.recompiles,
        "waits": result.sync,
        "error": result.error,
    }
