"""Whole training steps, Adam included: models of PyG's compile guide or with states on edges, in every way to run them.

The losses of the first steps are compared with those of a plain loop in float64 before any time is reported.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.graphs import GRAPHS
from benchmarks.cases.names import chosen
from benchmarks.cases.nested import map_tensors
from benchmarks.cases.registry import GUIDE_MODELS, Case, science_cases, select
from benchmarks.commands import driver
from benchmarks.measuring import counting, measure
from benchmarks.measuring.check import to_double
from benchmarks.measuring.comparison import Options
from benchmarks.measuring.losses import TOLERANCE, Loss, Make, Outcome, check, largest_error, plain_loop, whole_step
from benchmarks.reporting import stored, tables
from benchmarks.rows.variants import VARIANTS

NAME = "training"
HELP = "the models of guide or science with loss and Adam: plain loops and gnncompile.TrainStep"

CHECKED_STEPS = 20
HALF_TOLERANCE = 5e-2
"""The same as `losses.TOLERANCE` for parameters in 16 bits, which round each update. Eager may need more."""

OVER_EAGER, MOST_HALF_TOLERANCE = 1.5, 0.3
"""How many times eager's own error a row may have in 16 bits, since it rounds elsewhere; and the most it may have."""


@dataclass(frozen=True)
class TrainingRow:
    """One way to train."""

    name: str
    make: Make
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_ours: bool = False


TRAINING_ROWS = (
    *(TrainingRow(variant.name, plain_loop(variant.build), variant.devices, variant.is_ours) for variant in VARIANTS),
    TrainingRow("TrainStep", whole_step, is_ours=True),
)


@dataclass
class TrainingResult(Outcome):
    """The outcome of one row.

    Attributes:
        device_ms: the time on the GPU alone, without the host.
        peak_mib: the memory of a step, as `measure.repeated_memory` says.
    """

    row: TrainingRow = field(kw_only=True)
    timing: measure.Timing | None = None
    device_ms: float | None = None
    peak_mib: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=3.0, rounds=10)
    driver.add_budget(parser)
    driver.add_scale(parser)
    parser.add_argument("--suite", default="guide", choices=("guide", "science"), help="(default: %(default)s)")
    parser.add_argument(
        "--graph", default="guide", choices=list(GRAPHS), help="of the suite guide (default: %(default)s)"
    )
    parser.add_argument(
        "--models",
        help="comma-separated; in the suite science with a precision, such as 'EGNN bf16' "
        f"(default: {','.join(GUIDE_MODELS)}, or all in float32)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device, budget = torch.device(args.device), driver.Budget(args.budget)
    cases, where = cases_of(args)
    rows = chosen([row for row in TRAINING_ROWS if device.type in row.devices], args.rows)
    how = driver.options(args)

    def measure_case(case: Case, progress: driver.Progress) -> tuple[str, driver.Records]:
        results = run_training(case, rows, device, how, progress)
        return format_case(results), [record(case, result, results) for result in results]

    more = {"peak MiB": measure.repeated_memory_definition(device)}
    return driver.run(args, f"training-{where}-{device.type}", cases, measure_case, more=more, budget=budget)


def cases_of(args: argparse.Namespace) -> tuple[list[Case], str]:
    """Returns the cases that the command line names, and the name of the graph or suite that they belong to."""
    if args.suite == "guide":
        return select("guide", args.graph, args.models.split(",") if args.models else GUIDE_MODELS), args.graph
    return science_cases(args.models.split(",") if args.models else None, args.scale), "science"


@dataclass(frozen=True)
class Task:
    """What a model is trained for.

    Attributes:
        loss: the loss of the model's output and the target.
        target: the class of each node, `[nodes]`, or numbers of the shape of the output.
        halves: whether the model computes in 16 bits.
    """

    loss: Loss
    target: Tensor
    halves: bool = False


def task_of(case: Case, model: torch.nn.Module, inputs: tuple[Any, ...], seed: int) -> Task:
    """Returns the task of a case: random classes for the models of the guide, and random numbers for the others."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    if case.suite == "guide":
        target = torch.randint(case.graph.channels, (case.graph.num_nodes,), generator=generator)
        return Task(F.cross_entropy, target.to(device))
    with torch.no_grad():
        out = model(*inputs)
    numbers = torch.randn(out.shape, generator=generator).to(device)
    return Task(_squared_error, numbers, halves=out.dtype != torch.float32)


def _squared_error(out: Tensor, target: Tensor) -> Tensor:
    """The mean squared error, in float32 for outputs in 16 bits."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    return F.mse_loss(out.to(dtype), target.to(dtype))


def run_training(
    case: Case, rows: Sequence[TrainingRow], device: torch.device, how: Options, progress: driver.Progress
) -> list[TrainingResult]:
    """Measures one case: builds and checks each row, then times the right rows in turns."""
    counting.reset()
    model, inputs = case.model(device, how.seed), case.inputs(device, how.seed)
    task = task_of(case, copy.deepcopy(model), inputs, how.seed + 2)
    progress("losses in float64")
    expected = eager_losses(copy.deepcopy(model).double(), map_tensors(to_double, inputs), task)
    tolerance = TOLERANCE
    if task.halves:
        own = largest_error(eager_losses(copy.deepcopy(model), inputs, task), expected)
        tolerance = min(max(HALF_TOLERANCE, OVER_EAGER * own), MOST_HALF_TOLERANCE)
    measure.free(device)
    results = [TrainingResult(row=row) for row in rows]
    steps: dict[str, Callable[[], Tensor]] = {}

    def build(row: TrainingRow) -> Callable[[], Tensor]:
        step = row.make(copy.deepcopy(model), task.loss)
        return lambda: step(inputs, task.target)

    with torch._dynamo.config.patch(recompile_limit=64):
        for result in results:
            progress(f"{result.row.name}: build and check")
            before = measure.reserved(device)
            step = check(result, partial(build, result.row), _first_losses, expected, tolerance)
            measure.free(device)
            if step is not None:
                steps[result.row.name] = step
                result.peak_mib = measure.repeated_memory(step, device, before)
        progress(f"timing {len(steps)} rows")
        timings = measure.interleaved(steps, device, how.seconds, how.rounds)
        alone = measure.queued(steps, device) if device.type == "cuda" else {}
    for result in results:
        result.timing = timings.get(result.row.name)
        result.device_ms = alone[result.row.name].median if result.row.name in alone else None
    progress("")
    return results


def eager_losses(model: torch.nn.Module, inputs: tuple[Any, ...], task: Task) -> Tensor:
    """Returns the losses of the first steps of a plain loop without a compiler, `[steps]`."""
    step = plain_loop(lambda m: m)(model, task.loss)
    return _first_losses(lambda: step(inputs, task.target))


def _first_losses(step: Callable[[], Tensor]) -> Tensor:
    return torch.stack([step() for _ in range(CHECKED_STEPS)])


def speedups(result: TrainingResult, results: Sequence[TrainingResult]) -> tuple[float | None, float | None]:
    """Returns how many times faster a row is than eager, and than the best of `torch.compile`, CUDA graphs included."""
    times = {other.row.name: other.timing.median for other in results if other.timing}
    best = [times[name] for name in ("compile", "compile dynamic", "reduce-overhead") if name in times]
    if result.timing is None:
        return None, None
    mine = result.timing.median
    return (times["eager"] / mine if "eager" in times else None, min(best) / mine if best else None)


def format_case(results: Sequence[TrainingResult]) -> str:
    """Returns the table of one case; a row without a time gives the reason."""
    header = ["", "ms", "p10 .. p90", "x eager", "x best compile", "device ms", "peak MiB", "error of losses"]
    cells, notes = [], []
    allowed = max((result.tolerance or 0 for result in results), default=0)
    if allowed > HALF_TOLERANCE:
        notes.append(f"Losses may differ by {allowed:.0e}, {OVER_EAGER} times eager's own error.")
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
                f"{result.peak_mib:.0f}" if result.peak_mib is not None else "",
                f"{result.error:.0e}" if result.error is not None else "",
            ]
        )
    return "\n".join([tables.text_table(header, cells), *notes])


def record(case: Case, result: TrainingResult, results: Sequence[TrainingResult]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    timing = result.timing
    over_eager, over_compile = speedups(result, results)
    return {
        **stored.labelled(result.row, result, graph=case.graph.name, model=case.name),
        "median_ms": timing and timing.median,
        "p10_ms": timing and timing.p10,
        "p90_ms": timing and timing.p90,
        "device_ms": result.device_ms,
        "peak_mib": result.peak_mib,
        "over_eager": over_eager,
        "over_best_compile": over_compile,
        "error": result.error,
    }
