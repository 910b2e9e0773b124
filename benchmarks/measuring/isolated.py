"""Runs one case with a process for each row, which computes nothing else before its times are taken.

In one process, the reference and other rows change how much memory the C library keeps, and with it the times of a
row. Here the rows still take turns: each process works only when the parent process asks it to.
"""

import copy
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.registry import Case
from benchmarks.measuring import comparison, counting, measure
from benchmarks.measuring.comparison import Options, Progress, Row
from benchmarks.measuring.errors import first_line
from benchmarks.measuring.processes import ProcessError, kill_session
from benchmarks.measuring.step import Step
from benchmarks.rows.variants import Variant

MakeCase = Callable[[], Case]
HOST, DEVICE = "host", "device"
END_S = 10.0
"""The seconds in which a process ends by itself."""


def run_case(
    make_case: MakeCase,
    variants: Sequence[Variant],
    device: torch.device,
    options: Options,
    progress: Progress,
) -> list[Row]:
    """Measures one case; the rows come in the order of `variants`.

    Each row is checked after its times and its memory were measured, on the results of a step after the last turn.
    A row whose process dies, has an error or is over the limit is a failed row.

    Args:
        make_case: makes the case, in each process; it can be pickled, and so can `build` of each variant.
        variants: the rows.
        device: the device of all rows.
        options: the settings. The limit of a row holds for each of its answers: first steps, warm-up, turn, memory.
        progress: shows progress.
    """
    case = make_case()
    remotes = [RemoteRow(Row(variant), options.row_limit) for variant in variants]
    with ExitStack() as stack:
        for remote in remotes:
            if not comparison.refuse(remote.row, case, device):
                progress(f"{remote.row.variant.name}: build")
                stack.callback(remote.end, 0.0)
                remote.start(make_case, device, options)
        if options.timed:
            _time(remotes, device, options, progress)
        for remote in remotes:
            if remote.row.status == "ok":
                progress(f"{remote.row.variant.name}: memory and check")
                remote.finish()
    progress("")
    return [remote.row for remote in remotes]


def _time(remotes: Sequence["RemoteRow"], device: torch.device, options: Options, progress: Progress) -> None:
    def show(done: int) -> None:
        progress(f"timing: round {done} of {options.rounds}")

    measure.take_turns([RemoteTurns(remote, HOST) for remote in remotes], options.rounds, show)
    if device.type == "cuda":
        measure.take_turns([RemoteTurns(remote, DEVICE) for remote in remotes], measure.QUEUED_ROUNDS)


class RemoteRow:
    """A row in the parent process: asks the process of the row to work, and waits for the answer.

    An error marks the row as failed and ends its process. A failed row is asked nothing more.

    Args:
        row: the row.
        limit: the seconds that the row's own work may take; None for no limit.
    """

    def __init__(self, row: Row, limit: float | None) -> None:
        self.row, self.limit = row, limit
        self._process: SpawnProcess | None = None

    def start(self, make_case: MakeCase, device: torch.device, options: Options) -> None:
        """Starts the process, and lets it build the row and run its first steps."""
        context = multiprocessing.get_context("spawn")  # a forked process would begin with the parent's memory
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, make_case, self.row.variant, device, options))
        process.start()
        self._process = process
        theirs.close()  # so that the end of the process closes the pipe
        self.ask("set_up", limited=False)
        self.ask("build")

    def ask(self, name: str, *arguments: Any, limited: bool = True) -> Any:
        """Calls a method of the row's `IsolatedRow`. Returns its result; None if the row has failed."""
        if self.row.status != "ok":
            return None
        try:
            self._connection.send((name, arguments))
            return self._answer(self.limit if limited else None)
        except ProcessError as error:
            self.row.fail("FAILED", str(error))
        except (EOFError, OSError):
            self.row.fail("FAILED", self._exit_status())
        self.end(0.0)
        return None

    def finish(self) -> None:
        """Measures memory, checks the results and ends the process. The row then has its measurements."""
        self.ask("measure")
        found = self.ask("check", limited=False)
        if found is not None:
            self.row = replace(found, variant=self.row.variant)
        self.end()

    def end(self, patience: float = END_S) -> None:
        """Lets the process end by itself for some seconds. Then kills it, with all processes that it started."""
        if self._process is not None:
            self._connection.close()
            self._process.join(patience)
            self._process.kill()
            if self._process.pid is not None:
                kill_session(self._process.pid)
            self._process.join()
            self._process = None

    def _answer(self, limit: float | None) -> Any:
        """Waits for the end of the work, and returns its result."""
        if not self._connection.poll(limit):
            raise ProcessError(f"took longer than {limit:g} s")
        error, result = self._connection.recv()
        if error:
            raise ProcessError(error)
        return result

    def _exit_status(self) -> str:
        assert self._process is not None
        self._process.join()
        return f"its process ended with exit status {self._process.exitcode}"


@dataclass(frozen=True)
class RemoteTurns:
    """The turns of a row in its process, by one of its clocks."""

    remote: RemoteRow
    clock: str

    def warm_up(self) -> None:
        """Prepares the turns."""
        self.remote.ask("warm_up", self.clock)

    def take(self, number: int) -> None:
        """Takes the turn of round `number`."""
        self.remote.ask("take", self.clock, number)


def _serve(connection: Connection, *settings: Any) -> None:
    """Runs the process of a row: calls the methods that the parent names, until the parent closes the pipe."""
    os.setsid()  # compilers that the row starts end with it
    isolated = IsolatedRow(*settings)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = "", getattr(isolated, name)(*arguments)
        except Exception as error:
            answer = first_line(error), None
        connection.send(answer)


class IsolatedRow:
    """A row in its own process. The parent process calls the methods in the order in which they stand here."""

    def __init__(self, make_case: MakeCase, variant: Variant, device: torch.device, options: Options) -> None:
        self.make_case, self.device, self.options = make_case, device, options
        self.row = Row(variant)

    def set_up(self) -> None:
        """Makes the model and its arguments."""
        counting.reset()
        self.case = self.make_case()
        self.model, self.inputs = comparison.model_and_inputs(self.case, self.device, self.options)
        if self.device.type == "cuda":
            _make_workspaces(self.device)

    def build(self) -> None:
        """Builds the row, and runs its first steps."""
        how, device = self.options, self.device
        self.alive_before = measure.alive(device)
        own = copy.deepcopy(self.model)
        draw = partial(comparison.draw_weights, seed=how.seed)
        self.step = Step(self.row.variant.build(own), own, self.inputs, draw)
        start = comparison.run_first_step(self.row, self.step, device)
        comparison.run_next_steps(self.row, self.step, start, device, how)
        self.turns: dict[str, measure.HostTurns | measure.QueuedTurns] = {
            HOST: measure.HostTurns(self.step, device, how.seconds, how.rounds, how.warmup),
            DEVICE: measure.QueuedTurns(self.step, device),
        }

    def warm_up(self, clock: str) -> None:
        """Prepares the turns of a clock."""
        self.turns[clock].warm_up()

    def take(self, clock: str, number: int) -> None:
        """Takes the turn of round `number`."""
        self.turns[clock].take(number)

    def measure(self) -> None:
        """Keeps the results of one more step, then measures the memory of a step."""
        self.timings = {clock: measure.Timing.of(one.samples) for clock, one in self.turns.items() if one.samples}
        self.step()
        # Copies on the CPU, so that they do not count as memory of a GPU.
        self.results = {name: _to(tensor, torch.device("cpu")) for name, tensor in self.step.results().items()}
        assert isinstance(self.step.weights, Tensor)
        alive_before = self.alive_before + self.step.weights.nbytes  # which the first step drew
        comparison.measure_once(self.row, self.step, self.device, self.options, alive_before)

    def check(self) -> Row:
        """Returns the row, with its times if the results are right."""
        del self.step, self.turns
        counting.reset()
        measure.free(self.device)
        try:
            reference = comparison.reference_of(self.case, self.model, self.inputs, self.options.seed)
        except Exception as error:
            raise RuntimeError(f"no reference: {first_line(error)}") from error
        verdict = reference.check({name: _to(tensor, self.device) for name, tensor in self.results.items()})
        self.row.verdict = verdict
        if verdict.ok:
            self.row.timing = self.timings.get(HOST)
            self.row.device_ms = self.timings[DEVICE].median if DEVICE in self.timings else None
        else:
            self.row.fail("WRONG", str(verdict))
        return self.row


def _make_workspaces(device: torch.device) -> None:
    """Lets torch allocate what it holds for products of a forward and of a backward, which is no memory of a row."""
    one = torch.ones(1, 1, device=device, requires_grad=True)
    (one @ one).backward()


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
