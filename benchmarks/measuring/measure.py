"""Measures time and memory of steps. Time is wall clock with synchronisation; rows take turns, so drift affects all."""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

import gnncompile

StepFunction = Callable[[], object]
MIB = 1024 * 1024


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step over `steps` single measurements."""

    median: float
    p10: float
    p90: float
    minimum: float
    steps: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> "Timing":
        """Summarises single measurements."""
        p10, median, p90 = (float(value) for value in np.quantile(milliseconds, (0.1, 0.5, 0.9)))
        return cls(median, p10, p90, min(milliseconds), len(milliseconds))


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Frees the memory of an earlier row, so that the next row does not run out of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_step(step: StepFunction, device: torch.device) -> float:
    """Returns the milliseconds of one step."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


class Turns(Protocol):
    """A row whose time is taken in turns with others."""

    def warm_up(self) -> None:
        """Prepares the turns."""

    def take(self, number: int) -> None:
        """Takes the turn of round `number`."""


def take_turns(rows: Sequence[Turns], rounds: int, on_round: Callable[[int], None] | None = None) -> None:
    """Warms all rows up, then gives each row a turn in every round.

    Args:
        rows: the rows, in the order of their turns.
        rounds: the number of turns of each row.
        on_round: called with the number of finished rounds, to show progress.
    """
    for row in rows:
        row.warm_up()
    for number in range(rounds):
        for row in rows:
            row.take(number)
        if on_round is not None:
            on_round(number + 1)


class HostTurns:
    """The turns of a step, timed by the host. A slow step (`is_slow`) gets two turns of one step, without warm-up.

    Args:
        step: the step to time.
        device: the device that it runs on.
        seconds: the approximate time to measure it for.
        rounds: the number of turns.
        warmup: untimed runs before the first round; one more precedes each turn.
    """

    def __init__(
        self, step: StepFunction, device: torch.device, seconds: float = 3.0, rounds: int = 10, warmup: int = 5
    ) -> None:
        self.step, self.device = step, device
        self.seconds, self.rounds, self.warmup = seconds, rounds, warmup
        self.samples: list[float] = []
        self._per_round: int | None = None  # None for a slow step

    def warm_up(self) -> None:
        """Runs the untimed steps, and chooses the number of steps of each turn."""
        _wait_for_builds()
        once = time_step(self.step, self.device)
        if is_slow(once, self.seconds):
            return
        for _ in range(self.warmup):
            once = time_step(self.step, self.device)
        self._per_round = max(2, min(200, round(self.seconds * 1e3 / self.rounds / max(once, 1e-3))))

    def take(self, number: int) -> None:
        """Times the steps of one turn."""
        if self._per_round is not None:
            self.step()  # brings caches back to this row's data
            self.samples.extend(time_step(self.step, self.device) for _ in range(self._per_round))
        elif number < 2:
            self.samples.append(time_step(self.step, self.device))


def interleaved(
    steps: Mapping[str, StepFunction],
    device: torch.device,
    seconds: float = 3.0,
    rounds: int = 10,
    warmup: int = 5,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Times several steps, by name, in turns; see :class:`HostTurns` and :func:`take_turns`."""
    turns = {name: HostTurns(step, device, seconds, rounds, warmup) for name, step in steps.items()}
    take_turns(list(turns.values()), rounds, on_round)
    return {name: Timing.of(row.samples) for name, row in turns.items()}


def _wait_for_builds() -> None:
    """Waits for the extension that gnncompile builds in the background once per machine, like `gnncompile.warmup`."""
    native = sys.modules.get("gnncompile.cudagraphs.native")  # not imported if gnncompile is not measured
    if native is not None and native.begun():
        native.wait()


QUEUED_ROUNDS = 5
"""The usual number of turns of `QueuedTurns`."""


class QueuedTurns:
    """The turns of a call on a CUDA device, without the host's time to launch it.

    The device is kept waiting until all calls of a turn are queued. So between two events the device works without a
    pause, unless a call waits for the device itself. One measurement is the time of a turn, divided by its calls.

    Args:
        step: the call to time.
        device: a CUDA device.
        seconds: the approximate time to measure it for.
        rounds: the number of turns.
    """

    def __init__(
        self, step: StepFunction, device: torch.device, seconds: float = 0.3, rounds: int = QUEUED_ROUNDS
    ) -> None:
        self.step, self.device = step, device
        self.seconds, self.rounds = seconds, rounds
        self.samples: list[float] = []
        self._once = 0.0

    def warm_up(self) -> None:
        """Runs the call, and notes the time of one."""
        self._once = [time_step(self.step, self.device) for _ in range(4)][-1]

    def take(self, number: int) -> None:
        """Times the calls of one turn."""
        calls = max(1, min(50, round(self.seconds * 1e3 / self.rounds / self._once)))
        self.step()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # torch has no public function to keep the device busy. A cycle is about half a nanosecond. A call that
        # takes milliseconds keeps the device busy by itself.
        torch.cuda._sleep(round(calls * min(self._once, 0.5) * 1.5e-3 * 2e9))
        start.record()
        for _ in range(calls):
            self.step()
        end.record()
        synchronize(self.device)
        self.samples.append(start.elapsed_time(end) / calls)


def queued(
    steps: Mapping[str, StepFunction], device: torch.device, seconds: float = 0.3, rounds: int = QUEUED_ROUNDS
) -> dict[str, Timing]:
    """Times calls on a CUDA device, by name, in turns; see :class:`QueuedTurns`."""
    turns = {name: QueuedTurns(step, device, seconds, rounds) for name, step in steps.items()}
    take_turns(list(turns.values()), rounds)
    return {name: Timing.of(row.samples) for name, row in turns.items()}


def is_slow(step_ms: float, seconds: float) -> bool:
    """Whether one step takes longer than `seconds`, and longer than a second."""
    return step_ms > 1e3 * max(seconds, 1.0)


def least_ms(step_ms: float, seconds: float, rounds: int, warmup: int) -> float:
    """Returns the least time in milliseconds that `interleaved` needs for a step."""
    return step_ms * (3 if is_slow(step_ms, seconds) else warmup + 1 + 3 * rounds)


def peak_memory_definition(device: torch.device) -> str:
    """Returns a text that says what `memory` measures on this device."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated over one step, less what was alive before the row was built"
    return (
        "largest sum of bytes that one step holds from torch's CPU allocator, with what gnncompile keeps for the next "
        "step, without parameters and inputs"
    )


def alive(device: torch.device) -> int:
    """Returns the bytes in use on a CUDA device, including workspaces of matrix products; 0 on a CPU.

    The first matrix product allocates these workspaces, and CUDA graph recording drops them. If some readings lacked
    them, they would be charged to the next row.
    """
    if device.type != "cuda":
        return 0
    x = torch.ones(8, 8, device=device)
    torch.addmm(x[0], x, x @ x)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@dataclass(frozen=True)
class Memory:
    """MiB of one step, as `peak_memory_definition` says.

    Attributes:
        peak: the most memory at any time.
        forward: the most memory during the forward.
        kept: the memory that the forward keeps for the backward, its result included.
    """

    peak: float
    forward: float
    kept: float


def memory(forward: StepFunction, backward: StepFunction, device: torch.device, alive_before: int = 0) -> Memory:
    """Measures one step.

    Args:
        forward: the first half of the step. Nothing of an earlier step may be alive, so clear it before.
        backward: the second half of the step.
        device: the device that it runs on.
        alive_before: bytes on a CUDA device that do not belong to the step.
    """
    if device.type != "cuda":
        return _memory_of_cpu_allocator(forward, backward)
    alive(device)
    peaks, kept = [], 0
    for half in (forward, backward):
        torch.cuda.reset_peak_memory_stats(device)
        half()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - alive_before)
        kept = kept if len(peaks) > 1 else torch.cuda.memory_allocated(device) - alive_before
    return Memory(max(peaks) / MIB, peaks[0] / MIB, kept / MIB)


def peak_memory(step: StepFunction, device: torch.device, alive_before: int = 0) -> float:
    """Returns the peak memory of a step without separate halves, in MiB; see `memory`."""
    return memory(step, lambda: None, device, alive_before).peak


def reserved(device: torch.device) -> int:
    """Returns the bytes that torch holds of a CUDA device after it gave back what is free; 0 on a CPU."""
    free(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def repeated_memory_definition(device: torch.device) -> str:
    """Returns a text that says what `repeated_memory` measures on this device."""
    if device.type != "cuda":
        return peak_memory_definition(device)
    return "torch.cuda.max_memory_reserved over a step that ran before, less what was reserved before the row was built"


def repeated_memory(step: StepFunction, device: torch.device, before: int) -> float:
    """Returns the MiB of a step that ran before and may be a recorded one; on CUDA with the row's parameters.

    A recorded step allocates nothing when it is replayed: its tensors stay in the memory that the CUDA graph has
    reserved. Therefore what is reserved counts, for steps of every kind.

    Args:
        step: the step.
        device: the device that it runs on.
        before: what `reserved` returned before the row was built.
    """
    if device.type != "cuda":
        return peak_memory(step, device)
    free(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_reserved(device) - before) / MIB


def _memory_of_cpu_allocator(forward: StepFunction, backward: StepFunction) -> Memory:
    """Measures memory on a CPU with the profiler, which logs what torch allocates and frees, also in compiled code.

    Memory that gnncompile keeps between steps is freed before, so that the step allocates it again.
    """
    gnncompile.release_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps the profiler's messages out of the progress
    activities, mark = [torch.profiler.ProfilerActivity.CPU], "benchmarks: backward"
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        forward()
        with torch.profiler.record_function(mark):
            backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    middle = min(float(event["ts"]) for event in events if event.get("name") == mark)
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    live, kept, peaks = 0, 0, [0, 0]
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        half = int(float(event["ts"]) >= middle)
        live += int(event["args"]["Bytes"])
        peaks[half] = max(peaks[half], live)
        kept = kept if half else live
    return Memory(max(peaks) / MIB, peaks[0] / MIB, kept / MIB)


def sync_error(step: StepFunction, device: torch.device) -> str | None:
    """Runs one step in which every sync is an error, on CUDA only. Returns the error's first line; None without one."""
    torch.cuda.synchronize(device)
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    return None
