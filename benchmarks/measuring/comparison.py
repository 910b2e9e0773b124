"""Runs one case in every variant: builds and checks each, times them in turns, and checks again."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.registry import Case
from benchmarks.measuring import counting, measure
from benchmarks.measuring.check import Reference, Verdict
from benchmarks.measuring.deadline import deadline
from benchmarks.measuring.errors import first_line
from benchmarks.measuring.step import Step
from benchmarks.rows.variants import Variant

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How a case is measured.

    Attributes:
        seconds: the time to measure each row for.
        rounds: the number of turns of each row.
        input_grad: whether the features, and further inputs that the case names, require a gradient.
        sync_check: whether one step of gnncompile runs with every host sync raising an error (CUDA only).
        seed: the seed of parameters and inputs.
        warmup: the number of untimed steps before the first turn.
        row_limit: seconds after which building and checking a row is stopped; None for no limit.
        timed: whether rows are timed; if not, they are only checked and their memory is measured.
    """

    seconds: float = 3.0
    rounds: int = 10
    input_grad: bool = False
    sync_check: bool = True
    seed: int = 0
    warmup: int = 5
    row_limit: float | None = None
    timed: bool = True


@dataclass
class Row:
    """The outcome of one variant; only rows whose `status` is `ok` have a time.

    Attributes:
        device_ms: on a GPU, the time of a step on the device alone, without the host's time to launch it.
    """

    variant: Variant
    status: str = "ok"  # or WRONG or FAILED
    message: str = ""
    verdict: Verdict | None = None
    timing: measure.Timing | None = None
    device_ms: float | None = None
    memory: measure.Memory | None = None
    first_s: float | None = None  # the first step, compilation included
    graphs: int | None = None
    graph_breaks: int | None = None
    recompiles: int | None = None
    syncs: str | None = None

    def fail(self, status: str, message: str) -> None:
        """Marks the row as wrong or failed, and drops its measurements."""
        self.status, self.message = status, message
        self.timing = self.device_ms = self.memory = None


def run_case(
    case: Case, variants: Sequence[Variant], device: torch.device, options: Options, progress: Progress
) -> list[Row]:
    """Measures one case; the rows come in the order of `variants`.

    Errors of a row, or of the reference of all rows, are not raised: the row's message holds them.
    """
    # Reset only once: a reset drops compiled code, and all rows must stay compiled to be timed in turns.
    counting.reset()
    model, inputs = model_and_inputs(case, device, options)
    rows, steps = [Row(variant) for variant in variants], {}
    progress("reference in float64")
    try:
        reference = reference_of(case, model, inputs, options.seed)
    except Exception as error:
        for row in rows:
            row.fail("FAILED", f"no reference: {first_line(error)}")
        return rows

    # All rows share the code of the model's classes, so Dynamo's limit on recompiles must be high enough for all.
    with torch._dynamo.config.patch(recompile_limit=64):
        for row in rows:
            if refuse(row, case, device):
                continue
            progress(f"{row.variant.name}: build and check")
            step = _prepare(row, model, inputs, reference, device, options)
            if step is not None:
                steps[row.variant.name] = step
            else:
                measure.free(device)
        if options.timed:
            _time(rows, steps, reference, device, options, progress)
    progress("")
    steps.clear()
    counting.reset()
    measure.free(device)
    return rows


def model_and_inputs(case: Case, device: torch.device, options: Options) -> tuple[nn.Module, tuple[Any, ...]]:
    """Returns the model of a case and its arguments, the same in every process."""
    inputs = case.inputs(device, options.seed)
    return case.model(device, options.seed), case.with_gradients(inputs) if options.input_grad else inputs


def refuse(row: Row, case: Case, device: torch.device) -> bool:
    """Whether a row must not be run on a device; marks it as failed then."""
    reason = case.ends_process(device) if row.variant.is_baseline else ""
    if reason:
        row.fail("FAILED", reason)
    return bool(reason)


def reference_of(case: Case, model: nn.Module, inputs: tuple[Any, ...], seed: int) -> Reference:
    """Returns the reference that all rows of a case are checked against, with random weights for the output."""
    model = case.reference(model)
    with torch.no_grad():
        output = model(*inputs)
    return Reference(model, inputs, draw_weights(output, seed))


def draw_weights(output: Tensor, seed: int) -> Tensor:
    """Returns random weights for an output, of its shape and dtype and on its device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(output.shape, generator=generator).to(output)


def _prepare(
    row: Row,
    model: nn.Module,
    inputs: tuple[Any, ...],
    reference: Reference,
    device: torch.device,
    options: Options,
) -> Step | None:
    """Builds and checks one row, and measures everything except its time. Returns None if it failed or is wrong."""
    alive_before = measure.alive(device)
    try:
        own = copy.deepcopy(model)
        with deadline(options.row_limit):
            step = Step(row.variant.build(own), own, inputs, reference.weights)
            row.verdict = _run_and_check(row, step, reference, device, options)
        if not row.verdict.ok:
            row.fail("WRONG", str(row.verdict))
            return None
        measure_once(row, step, device, options, alive_before)
    except Exception as error:
        row.fail("FAILED", first_line(error))
        return None
    return step


def _run_and_check(row: Row, step: Step, reference: Reference, device: torch.device, options: Options) -> Verdict:
    """Runs three steps, and checks the results of the first and of the third."""
    start = run_first_step(row, step, device)
    verdict = reference.check(step.results())
    run_next_steps(row, step, start, device, options)
    return reference.check(step.results()) if verdict.ok else verdict


def run_first_step(row: Row, step: Step, device: torch.device) -> counting.Mark:
    """Times the first step of a row and counts its graph breaks. Returns the mark of its beginning."""
    start = counting.mark()
    begin = time.perf_counter()
    step()
    measure.synchronize(device)
    row.first_s = time.perf_counter() - begin
    row.graph_breaks = counting.since(start).graph_breaks
    return start


def run_next_steps(row: Row, step: Step, start: counting.Mark, device: torch.device, options: Options) -> None:
    """Runs two more steps, and counts captured graphs and recompiles since the mark `start`.

    By the third step a recording or an automatic recompile may have happened.

    Raises:
        TimeoutError: to time the row would take longer than the limit of a row.
    """
    step_ms = [measure.time_step(step, device) for _ in range(2)][-1]
    least_ms = measure.least_ms(step_ms, options.seconds, options.rounds, options.warmup)
    if options.row_limit is not None and least_ms > options.row_limit * 1e3:
        raise TimeoutError(f"{step_ms:.0f} ms per step: timing it would take longer than {options.row_limit:g} s")
    counts = counting.since(start)
    row.graphs, row.recompiles = counts.graphs, counts.recompiles


def measure_once(row: Row, step: Step, device: torch.device, options: Options, alive_before: int) -> None:
    """Measures what one step of a row shows: its memory, and host syncs of gnncompile."""
    if row.variant.is_ours and options.sync_check and device.type == "cuda":
        row.syncs = measure.sync_error(step, device) or "none"
    step.clear()
    row.memory = measure.memory(step.forward, step.backward, device, alive_before)
    step.clear()


def _time(
    rows: Sequence[Row],
    steps: dict[str, Step],
    reference: Reference,
    device: torch.device,
    options: Options,
    progress: Progress,
) -> None:
    if not steps:
        return
    progress(f"timing {len(steps)} rows")
    timings = measure.interleaved(
        steps,
        device,
        options.seconds,
        options.rounds,
        options.warmup,
        on_round=lambda done: progress(f"timing: round {done} of {options.rounds}"),
    )
    alone = measure.queued(steps, device) if device.type == "cuda" else {}
    for row in rows:
        step = steps.get(row.variant.name)
        if step is None:
            continue
        step()
        verdict = reference.check(step.results())
        if verdict.ok:
            row.timing = timings[row.variant.name]
            row.device_ms = alone[row.variant.name].median if alone else None
        else:
            row.fail("WRONG", f"after timing: {verdict}")
