"""Whole steps of training, Adam included: the models of PyG's compile guide, in every way to run them.

The losses of the first steps are compared with those of a plain loop in float64 before any time is reported.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import counting, driver, measure, tables
from .cases import GUIDE_MODELS, Case, select
from .comparison import Options, first_line
from .graphs import GRAPHS
from .variants import VARIANTS, Runner, named

NAME = "training"
HELP = "the same models with loss and Adam: plain loops and gnncompile.TrainStep"

CHECKED_STEPS = 20
TOLERANCE = 1e-3
"""Relative, of each loss: rounding grows from step to step."""

LEARNING_RATE = 1e-3

TrainingStep = Callable[[], Tensor]


def _train_step(model: nn.Module, inputs: tuple[Any, ...], target: Tensor) -> TrainingStep:
    import gnncompile

    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    step = gnncompile.TrainStep(model, F.cross_entropy, optimizer)
    return lambda: step(*inputs, target=target)


def _loop(build: Callable[[nn.Module], Runner]) -> Callable[[nn.Module, tuple[Any, ...], Tensor], TrainingStep]:
    def make(model: nn.Module, inputs: tuple[Any, ...], target: Tensor) -> TrainingStep:
        runner = build(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

        def step() -> Tensor:
            if target.is_cuda:
                # CUDA graphs of torch.compile reuse the last step's memory: tell them that it is no longer looked at.
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            loss = F.cross_entropy(runner(*inputs), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return make


@dataclass(frozen=True)
class TrainingRow:
    """One way to train: `make` takes a model, its arguments and the targets."""

    name: str
    make: Callable[[nn.Module, tuple[Any, ...], Tensor], TrainingStep]
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_ours: bool = False


TRAINING_ROWS = (
    *(TrainingRow(variant.name, _loop(variant.build), variant.devices, variant.is_ours) for variant in VARIANTS),
    TrainingRow("TrainStep", _train_step, is_ours=True),
)


@dataclass
class TrainingResult:
    """The outcome of one row: times only if `status` is `ok`.

    Attributes:
        error: the largest relative difference of a loss.
        device_ms: the time of the device alone, on a GPU.
    """

    row: TrainingRow
    status: str = "ok"
    message: str = ""
    error: float | None = None
    timing: measure.Timing | None = None
    device_ms: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=3.0, rounds=10)
    parser.add_argument("--graph", default="guide", choices=list(GRAPHS), help="(default: %(default)s)")
    parser.add_argument("--models", default=",".join(GUIDE_MODELS), help="comma-separated (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    rows = [row for row in TRAINING_ROWS if device.type in row.devices]
    try:
        cases = select("guide", args.graph, args.models.split(","))
        rows = named(rows, args.rows.split(",")) if args.rows else rows
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    facts = driver.facts(args, device)
    print(tables.header_lines(facts), flush=True)
    stored = tables.Results(driver.folder(args, device), f"training-{args.graph}-{device.type}", facts)
    records: driver.Records = []
    how = driver.options(args)
    for number, case in enumerate(cases, 1):
        results = run_training(case, rows, device, how, driver.progress(f"[{number}/{len(cases)}] {case.name}"))
        print(f"\n{case}\n{format_case(results)}", flush=True)
        records += [record(case, result, results) for result in results]
        stored.write(records)
    driver.print_written(stored)
    wrong = {"WRONG"} | {one["status"] for one in records if one["ours"] and one["status"] != "ok"}
    return int(any(one["status"] in wrong for one in records))


def run_training(
    case: Case, rows: Sequence[TrainingRow], device: torch.device, how: Options, progress: Callable[[str], None]
) -> list[TrainingResult]:
    """Measures one case: builds and checks each row, then times those that are right in turns."""
    counting.reset()
    model, inputs = case.model(device, how.seed), case.inputs(device, how.seed)
    generator = torch.Generator().manual_seed(how.seed + 2)
    target = torch.randint(case.graph.channels, (case.graph.num_nodes,), generator=generator).to(device)
    progress("losses in float64")
    exact = _loop(lambda m: m)(copy.deepcopy(model).double(), (inputs[0].double(), *inputs[1:]), target)
    expected = torch.stack([exact() for _ in range(CHECKED_STEPS)])
    results, steps = [TrainingResult(row) for row in rows], {}
    with torch._dynamo.config.patch(recompile_limit=64):
        for result in results:
            progress(f"{result.row.name}: build and check")
            step = _prepare(result, copy.deepcopy(model), inputs, target, expected)
            measure.free(device)
            if step is not None:
                steps[result.row.name] = step
        progress(f"timing {len(steps)} rows")
        timings = measure.interleaved(steps, device, how.seconds, how.rounds)
        alone = measure.queued(steps, device) if device.type == "cuda" else {}
    for result in results:
        result.timing = timings.get(result.row.name)
        result.device_ms = alone[result.row.name].median if result.row.name in alone else None
    progress("")
    return results


def _prepare(
    result: TrainingResult, model: nn.Module, inputs: tuple[Any, ...], target: Tensor, expected: Tensor
) -> TrainingStep | None:
    """Builds and checks one row; None if it failed or is wrong."""
    try:
        step = result.row.make(model, inputs, target)
        losses = torch.stack([step() for _ in range(CHECKED_STEPS)])
    except Exception as error:
        result.status, result.message = "FAILED", first_line(error)
        return None
    result.error = float(((losses - expected) / expected).abs().max())
    if not result.error <= TOLERANCE:  # a NaN is wrong too
        result.status, result.message = "WRONG", f"losses differ by {result.error:.1e}, tolerance {TOLERANCE:.0e}"
        return None
    return step


def speedups(result: TrainingResult, results: Sequence[TrainingResult]) -> tuple[float | None, float | None]:
    """Returns how many times faster a row is than eager, and than the best of `torch.compile`, CUDA graphs included."""
    times = {other.row.name: other.timing.median for other in results if other.timing}
    best = [times[name] for name in ("compile", "compile dynamic", "reduce-overhead") if name in times]
    if result.timing is None:
        return None, None
    mine = result.timing.median
    return (times["eager"] / mine if "eager" in times else None, min(best) / mine if best else None)


def format_case(results: Sequence[TrainingResult]) -> str:
    """Returns the table of one case; a row without a time says why."""
    header = ["", "ms", "p10 .. p90", "x eager", "x best compile", "device ms", "error of losses"]
    cells, notes = [], []
    for result in results:
        timing, ratios = result.timing, speedups(result, results)
        if result.status != "ok":
            notes.append(f"{result.row.name}: {result.status}: {result.message}")
        cells.append(
            [
                result.row.name,
                f"{timing.median:.3f}" if timing else result.status,
                f"{timing.p10:.3f} .. {timing.p90:.3f}" if timing else "",
                *(f"{ratio:.2f}" if ratio else "" for ratio in ratios),
                f"{result.device_ms:.3f}" if result.device_ms else "",
                f"{result.error:.0e}" if result.error is not None else "",
            ]
        )
    return "\n".join([tables.text_table(header, cells), *notes])


def record(case: Case, result: TrainingResult, results: Sequence[TrainingResult]) -> dict[str, Any]:
    """Returns one row as it is stored; what was not measured is None."""
    timing = result.timing
    over_eager, over_compile = speedups(result, results)
    return {
        "graph": case.graph.name,
        "model": case.name,
        "row": result.row.name,
        "ours": result.row.is_ours,
        "status": result.status,
        "message": result.message,
        "median_ms": timing and timing.median,
        "p10_ms": timing and timing.p10,
        "p90_ms": timing and timing.p90,
        "device_ms": result.device_ms,
        "over_eager": over_eager,
        "over_best_compile": over_compile,
        "error": result.error,
    }
