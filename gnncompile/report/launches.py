"""Watches which kernels run, how many bytes they move and how long they take, and finds each kernel's region."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gnncompile.capture.compiled_callable import CompiledCallable
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.device import device_of
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import Region, parse
from gnncompile.ir.vjp import vjp
from gnncompile.report import traffic
from gnncompile.report.traffic import Work
from gnncompile.runtime.launch import Kernel, watched

RUNS, WARMUP = 10, 2
"""The number of timed calls, and of calls before them that are not timed."""


@dataclass(frozen=True)
class Launch:
    """One launch of a region's kernel in a call.

    Attributes:
        region: The program that the kernel computes.
        kernel: The kernel.
        gradient: Whether it ran in the backward.
        moved: The bytes that it moves; None for the reference interpreter, which runs many operations.
        limit: The bytes that any kernel must move, even if it reads the data of each edge only once.
        milliseconds: The median time; None if not measured.
    """

    region: Region
    kernel: Kernel
    gradient: bool
    moved: Work | None
    limit: Work
    milliseconds: float | None = None


@dataclass(frozen=True)
class Measured:
    """Median times of a call, in milliseconds; `backward` is None if nothing has a gradient."""

    launches: tuple[Launch, ...]
    forward: float
    backward: float | None


@dataclass
class _Log:
    """Collects launches, and times them if `timed`."""

    gradient: bool = False
    timed: bool = False
    found: list[Launch] = field(default_factory=list)
    clocks: list[Callable[[], float]] = field(default_factory=list)

    def __call__(
        self,
        region: Region,
        kernel: Kernel,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[], None],
    ) -> None:
        given = tensors, layout, outputs
        moved = None if kernel.gathered is None else traffic.counted(region, kernel.gathered, *given)
        limit = traffic.counted(region, traffic.least(region), *given)
        self.found.append(Launch(region, kernel, self.gradient, moved, limit))
        if self.timed:
            self.clocks.append(_timed(start, layout[0].device))
        else:
            start()


def _timed(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Runs a function. Returns a function that waits for the device and then gives the time in milliseconds."""
    if not device_of(device).has_streams:
        begin = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - begin)
        return lambda: taken
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        first.record()
        run()
        last.record()

    def elapsed() -> float:
        last.synchronize()
        return float(first.elapsed_time(last))

    return elapsed


def seen(run: Callable[[], Any]) -> tuple[Any, tuple[Launch, ...]]:
    """Runs a function; returns its result and the launches of its kernels."""
    log = _Log()
    with watched(log):
        result = run()
    return result, tuple(log.found)


def measure_steps(program: CompiledCallable, compiled: Any, args: Any, kwargs: Any, device: torch.device) -> Measured:
    """Times forward and backward of a compiled model, and each launch in them.

    No recording is replayed meanwhile. Gradients of the sum of all results, with respect to parameters and inputs, are
    computed and thrown away. Afterwards buffers (such as those of batch norms) and random number generators have their
    earlier state again.
    """
    forwards, backwards, runs = [], [], []
    with ExitStack() as stack:
        stack.enter_context(_unrecorded(program))
        stack.enter_context(_untouched(program.target, device))
        for _ in range(WARMUP + RUNS):
            forward, backward, logs = _step(program, compiled, args, kwargs, device)
            forwards.append(forward)
            backwards.append(backward)
            runs.append(logs)
    first = runs[WARMUP]
    times: dict[tuple[Any, int], list[float]] = defaultdict(list)
    for logs in runs[WARMUP:]:
        for key, clock in zip(_keys(logs), logs.clocks, strict=True):
            times[key].append(clock())
    launches = tuple(
        Launch(one.region, one.kernel, one.gradient, one.moved, one.limit, median(times[key]))
        for one, key in zip(first.found, _keys(first), strict=True)
    )
    taken = [b for b in backwards[WARMUP:] if b is not None]
    return Measured(launches, median(forwards[WARMUP:]), median(taken) if taken else None)


def _keys(log: _Log) -> list[tuple[Any, int]]:
    """Returns a key for each launch: its program, and the number of earlier launches of that program."""
    count: dict[Any, int] = defaultdict(int)
    keys = []
    for one in log.found:
        what = one.region.spec, one.gradient
        keys.append((what, count[what]))
        count[what] += 1
    return keys


def _step(
    program: CompiledCallable, compiled: Any, args: Any, kwargs: Any, device: torch.device
) -> tuple[float, float | None, _Log]:
    log = _Log(timed=True)
    with watched(log):
        begin = _now(device)
        result = compiled(*args, **kwargs)
        middle = _now(device)
        log.gradient = True
        backward = _backward(program, result, args, kwargs)
        end = _now(device)
    return 1e3 * (middle - begin), 1e3 * (end - middle) if backward else None, log


def _now(device: torch.device) -> float:
    if device_of(device).has_streams:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _backward(program: CompiledCallable, result: Any, args: Any, kwargs: Any) -> bool:
    """Computes gradients; returns whether anything has one."""
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    if isinstance(program.target, torch.nn.Module):
        given += [p for p in program.target.parameters() if p.requires_grad]
    if results and given:
        torch.autograd.grad(results, given, [torch.ones_like(r) for r in results], allow_unused=True)
    return bool(results and given)


@contextmanager
def _unrecorded(program: CompiledCallable) -> Iterator[None]:
    """Turns recordings off in the block, because launches inside a replay can't be watched."""
    held = [c.recordings for c in program.backend.captured if isinstance(c.recordings, CudaGraphPool)]
    reasons = [r.reason for r in held]
    for recordings in held:
        recordings.reason = recordings.reason or "it is being measured"
    try:
        yield
    finally:
        for recordings, reason in zip(held, reasons, strict=True):
            recordings.reason = reason


@contextmanager
def _untouched(target: Any, device: torch.device) -> Iterator[None]:
    """Restores buffers and the state of the random number generators after the block."""
    buffers = list(target.buffers()) if isinstance(target, torch.nn.Module) else []
    kept = [(b, b._version, b.clone()) for b in buffers]
    with torch.random.fork_rng([device] if device_of(device).has_random_state else []):
        yield
    with torch.no_grad():
        for buffer, version, copy in kept:
            if buffer._version != version:
                buffer.copy_(copy)


def assigned(
    launches: Sequence[Launch], specs: Sequence[str], wanted: Sequence[tuple[bool, ...]]
) -> list[list[Launch]]:
    """Assigns each launch to a region: as the region's own kernel (with its epilogue), or as one of its gradient's.

    Args:
        launches: The launches of one call.
        specs: The regions.
        wanted: For each region, whether a gradient of each tensor may be wanted; () if none is.

    Returns:
        A list of launches for each region, and a last list of launches that fit no region.
    """
    found: list[list[Launch]] = [[] for _ in range(len(specs) + 1)]
    regions = [parse(spec) for spec in specs]
    for gradient in (False, True):
        fits = [frozenset([_signature(r)]) for r in regions]
        if gradient:  # a backward may run the forward's kernel again
            fits = [own | _gradients(r, w) for own, r, w in zip(fits, regions, wanted, strict=True)]
        turns: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        for launch in launches:
            if launch.gradient == gradient:
                at = _best(_signature(launch.region), fits)
                if not at:
                    found[-1].append(launch)
                    continue
                turn = turns[launch.region.spec, at]
                turns[launch.region.spec, at] += 1
                # Equal regions run in order, and their gradients in reverse order.
                found[at[(-1 - turn if gradient else turn) % len(at)]].append(launch)
    return found


Signature = tuple[str, frozenset[Any]]


def _best(launched: Signature, fits: Sequence[frozenset[Signature]]) -> tuple[int, ...]:
    """Returns the regions that a launch may belong to. A region fits if the launch computes all that the region
    computes over edges; among regions that fit, those that compute most are taken.
    """
    matches = {
        at: max((len(s[1]) for s in signatures if s[0] == launched[0] and s[1] <= launched[1]), default=0)
        for at, signatures in enumerate(fits)
    }
    most = max(matches.values(), default=0)
    return tuple(at for at, count in matches.items() if count == most) if most else ()


def _signature(region: Region) -> Signature:
    """Returns hashes of a region's computations over edges. An epilogue, which is row-wise, does not change them."""
    texts: list[Any] = []
    for node in region.nodes:
        texts.append(hash((node.op, node.value, node.space, node.shape, *(texts[a] for a in node.args))))
    ends = {i for i, n in enumerate(region.nodes) if n.op in (*REDUCTIONS, "softmax", "outer")}
    ends |= {o.node for o in region.outputs if region.per_edge(o)}
    return region.by.value, frozenset(texts[i] for i in ends)


@lru_cache(maxsize=256)
def _gradients(region: Region, wanted: tuple[bool, ...]) -> frozenset[Signature]:
    """Returns the signatures of all kernels that a region's gradient may run.

    Which outputs have a cotangent is not known before the backward. Tried are the first n outputs for each n, and any
    one or two outputs.
    """
    if not any(wanted):
        return frozenset()
    count = len(region.outputs)
    cases = {tuple(k < n for k in range(count)) for n in range(1, count + 1)}
    cases |= {tuple(k in few for k in range(count)) for n in (1, 2) for few in combinations(range(count), n)}
    stages = [stage for given in cases for stage in vjp(region, wanted, given).stages]
    return frozenset(_signature(s.region) for s in stages if s.region.walks_edges)
