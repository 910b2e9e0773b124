"""Clients of a server: answers are checked, then threads ask for answers and note how long they wait.

This file imports nothing of gnncompile, because a process that only loads a package runs it too.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.measuring.errors import first_line
from benchmarks.measuring.processes import ProcessError

Serve = Callable[..., Tensor]

TOLERANCE = 1e-4
"""The largest difference of an answer, relative to the largest number in all answers."""

PASSES = 3
"""How often all requests are answered before the first time is taken. CUDA graphs replay from the third call on."""


@dataclass
class Served:
    """The outcome of one number of clients.

    Attributes:
        clients: the threads that ask.
        status: `ok`, WRONG, FAILED or SKIPPED.
        message: the reason if the status is not `ok`.
        error: the largest relative difference of an answer.
        p50_us: the median time of an answer.
        p99_us: the time within which 99 of 100 answers come.
        per_s: the answers of all clients in a second.
    """

    clients: int = 1
    status: str = "ok"
    message: str = ""
    error: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    per_s: float | None = None

    def fail(self, error: BaseException) -> None:
        """Marks the outcome as failed."""
        self.status = "FAILED"
        self.message = str(error) if isinstance(error, ProcessError) else first_line(error)

    def is_right(self, found: Sequence[Tensor], expected: Tensor) -> bool:
        """Whether answers are right. Notes their error, and what is wrong.

        Args:
            found: the answer to each request, `[num_nodes, channels]`, on any device.
            expected: all answers in float64, on the CPU, one below the other.
        """
        difference = (torch.cat([one.cpu() for one in found]) - expected).abs().max() / expected.abs().max()
        self.error = float(difference)
        if self.error <= TOLERANCE:  # a NaN is wrong too
            return True
        self.status, self.message = "WRONG", f"answers differ by {self.error:.1e}, tolerance {TOLERANCE:.0e}"
        return False


@torch.no_grad()
def measure(
    serve: Serve,
    requests: Sequence[tuple[Any, ...]],
    expected: Tensor,
    clients: Sequence[int],
    seconds: float,
    device: torch.device,
    in_one_thread: bool = False,
) -> list[Served]:
    """Checks answers, then times them with each number of clients. Errors are not raised, but noted.

    Args:
        serve: answers a request.
        requests: the arguments of each request, on the device.
        expected: all answers in float64, on the CPU.
        clients: the numbers of clients.
        seconds: how long the clients ask.
        device: the device that answers.
        in_one_thread: whether only the current thread can ask.

    Returns:
        An outcome for each number of clients; a single one if the answers fail or are wrong before any time is taken.
    """
    first = Served()
    try:
        for _ in range(PASSES):
            # Copied at once: a CUDA graph writes each answer to the same memory.
            if not first.is_right([serve(*_new(request)).cpu() for request in requests], expected):
                return [first]
    except Exception as error:
        first.fail(error)
        return [first]
    return [
        _timed(replace(first, clients=count), serve, requests, expected, seconds, device, in_one_thread)
        for count in clients
    ]


def _timed(
    made: Served,
    serve: Serve,
    requests: Sequence[tuple[Any, ...]],
    expected: Tensor,
    seconds: float,
    device: torch.device,
    in_one_thread: bool,
) -> Served:
    """Returns the outcome of one number of clients. Their last answers are checked before it has times."""
    if in_one_thread and made.clients > 1:
        made.status, made.message = "SKIPPED", "answers in the thread that compiled it alone"
        return made
    try:
        asked = _Clients(serve, requests, made.clients, seconds, device)
        asked.run()
        if made.is_right(asked.last, expected):
            times = sorted(each * 1e6 for own in asked.times for each in own)
            made.p50_us, made.p99_us = statistics.median(times), times[int(0.99 * len(times))]
            made.per_s = len(times) / asked.took
    except Exception as error:
        made.fail(error)
    return made


class _Clients:
    """Threads that ask. A single client is the current thread; on a GPU each of several has a stream of its own.

    Attributes:
        times: the seconds of each answer, for each client.
        last: the answers after the time is over, one for each request, on the CPU.
        took: the seconds until the last client has its last timed answer.
    """

    def __init__(
        self,
        serve: Serve,
        requests: Sequence[tuple[Any, ...]],
        clients: int,
        seconds: float,
        device: torch.device,
    ) -> None:
        self.serve, self.requests, self.clients, self.seconds, self.device = serve, requests, clients, seconds, device
        self.times: list[list[float]] = [[] for _ in range(clients)]
        self.last: list[Tensor] = [torch.empty(0)] * len(requests)
        self.took = 0.0
        self._errors: list[Exception] = []

    def run(self) -> None:
        """Asks until the time is over.

        Raises:
            Exception: the first error of a client.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._start = time.perf_counter()
        if self.clients == 1:
            self._ask(0)
            return
        threads = [threading.Thread(target=self._in_thread, args=(k,), daemon=True) for k in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _in_thread(self, first: int) -> None:
        on_gpu = self.device.type == "cuda"
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(self.device)) if on_gpu else _NOTHING:
                self._ask(first)
        except Exception as error:
            self._errors.append(error)

    def _ask(self, first: int) -> None:
        at, own, stop = first, self.times[first], self._start + self.seconds
        while not own or time.perf_counter() < stop:
            request = _new(self.requests[at % len(self.requests)])
            self._wait()
            start = time.perf_counter()
            self.serve(*request)
            self._wait()
            own.append(time.perf_counter() - start)
            at += 1
        self.took = max(self.took, time.perf_counter() - self._start)
        for at in range(first, len(self.requests), self.clients):
            self.last[at] = self.serve(*_new(self.requests[at])).cpu()

    def _wait(self) -> None:
        """Waits on a GPU for the work of this client, not for that of others."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


_NOTHING = contextlib.nullcontext()


def _new(request: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a copy of a request: a new graph to the server."""
    copied: tuple[Any, ...] = pytree.tree_map(torch.clone, request)
    return copied
