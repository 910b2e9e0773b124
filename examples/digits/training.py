"""Trains one task one way, and measures it."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import counting, measure

from .tasks import Batch, Task

WARMUP = 5  # steps not timed: the first compile, the second often compiles again


def _gnncompile(model: nn.Module) -> Callable[..., Any]:
    import gnncompile

    return gnncompile.compile(model)


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda model: model,
    "torch.compile": torch.compile,
    "gnncompile": _gnncompile,
}


@dataclass
class Run:
    """One line of the demo's table. What was not reached is None; `error` says why."""

    task: str
    model: str
    way: str
    step_ms: float | None = None
    total_s: float | None = None
    peak_mib: float | None = None
    accuracy: float | None = None  # percent of the test set
    graph_breaks: int | None = None
    recompiles: int | None = None
    error: str = ""


def train(task: Task, way: str, device: torch.device, seed: int, progress: Callable[[str], None]) -> Run:
    """Trains a fresh model from the seed and returns what was measured; a crash becomes the run's `error`."""
    run = Run(task.name, task.model_name, way)
    counting.reset()
    gc.collect()
    alive_before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    torch.manual_seed(seed)
    model = task.make_model().to(device)
    try:
        runner = WAYS[way](model)
        _fit(run, task, model, runner, device, progress)
        run.peak_mib = measure.peak_memory(_step_only(task, model, runner), device, alive_before)
        model.zero_grad(set_to_none=True)
        progress("testing")
        run.accuracy = _accuracy(task, model, runner)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        run.error = f"{type(error).__name__}: {lines[0] if lines else ''}"
    progress("")
    return run


def explain(task: Task, device: torch.device, seed: int) -> str:
    """Returns gnncompile's report on the task's model, for its first training batch."""
    import gnncompile

    torch.manual_seed(seed)
    model = task.make_model().to(device)
    return str(gnncompile.explain(model, *next(task.train_batches(0)).inputs))


def _fit(
    run: Run,
    task: Task,
    model: nn.Module,
    runner: Callable[..., Any],
    device: torch.device,
    progress: Callable[[str], None],
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=task.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)
    start, shown = counting.mark(), 0.0
    milliseconds: list[float] = []
    begin = time.perf_counter()
    for epoch in range(task.epochs):
        for batch in task.train_batches(epoch):
            milliseconds.append(measure.time_step(lambda batch=batch: _train_step(batch, runner, optimizer), device))
            if len(milliseconds) == 1:
                run.graph_breaks = counting.since(start).graph_breaks
            if time.perf_counter() - shown > 0.5:
                shown = time.perf_counter()
                progress(f"epoch {epoch + 1} of {task.epochs}, {milliseconds[-1]:.1f} ms per step")
        scheduler.step()
    run.total_s = time.perf_counter() - begin
    run.recompiles = counting.since(start).recompiles
    run.step_ms = median(milliseconds[WARMUP:] or milliseconds)


def _train_step(batch: Batch, runner: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    batch.loss(runner).backward()
    optimizer.step()


def _step_only(task: Task, model: nn.Module, runner: Callable[..., Any]) -> Callable[[], None]:
    """Forward and backward on the first batch, parameters unchanged."""
    batch = next(task.train_batches(0))
    model.zero_grad(set_to_none=True)
    return lambda: batch.loss(runner).backward()


@torch.no_grad()
def _accuracy(task: Task, model: nn.Module, runner: Callable[..., Any]) -> float:
    if isinstance(runner, nn.Module):
        runner.eval()
    model.eval()
    right = total = 0
    for batch in task.test_batches():
        right += int((batch.logits(runner).argmax(dim=1) == batch.labels).sum())
        total += len(batch.labels)
    return 100.0 * right / total
