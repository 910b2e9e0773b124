"""Which kernels ran, what they moved, how long they took, and which region each of them belongs to."""

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
from gnncompile.ir.region import REDUCTIONS, Region, parse
from gnncompile.ir.vjp import vjp
from gnncompile.report import traffic
from gnncompile.report.traffic import Work
from gnncompile.runtime.launch import Kernel, watched

RUNS, WARMUP = 10, 2
"""Calls that are timed, and calls before these."""


@dataclass(frozen=True)
class Launch:
    """One launch of a region's kernel in a call.

    Attributes:
        region: What the kernel computes.
        kernel: The kernel.
        gradient: Whether it ran in the backward.
        moved: What it moves; None for the reference interpreter, which is many operations.
        limit: What a kernel moves at least that reads everything of an edge once.
        milliseconds: The median; None if not measured.
    """

    region: Region
    kernel: Kernel
    gradient: bool
    moved: Work | None
    limit: Work
    milliseconds: float | None = None


@dataclass(frozen=True)
class Measured:
    """Times of a call: medians, in milliseconds; the backward's is None where nothing has a gradient."""

    launches: tuple[Launch, ...]
    forward: float
    backward: float | None


@dataclass
class _Log:
    """Watches launches."""

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
    """Runs something; what comes back gives the milliseconds that it took, when the device has come to its end."""
    if device.type != "cuda":
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
    """The result of something that runs kernels, and their launches."""
    log = _Log()
    with watched(log):
        result = run()
    return result, tuple(log.found)


def measure_steps(program: CompiledCallable, compiled: Any, args: Any, kwargs: Any, device: torch.device) -> Measured:
    """Times forward and backward of a compiled model, and each launch in them.

    Nothing is replayed from recordings meanwhile. Gradients are taken of the sum of all results with respect to
    parameters and inputs, and thrown away; buffers (as of batch norms) and the state of the random number generators
    are as before when it is over.
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
    """A launch by its program, and how often that ran before."""
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _backward(program: CompiledCallable, result: Any, args: Any, kwargs: Any) -> bool:
    """Takes gradients, if there is anything that has one."""
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
    if isinstance(program.target, torch.nn.Module):
        given += [p for p in program.target.parameters() if p.requires_grad]
    if results and given:
        torch.autograd.grad(results, given, [torch.ones_like(r) for r in results], allow_unused=True)
    return bool(results and given)


@contextmanager
def _unrecorded(program: CompiledCallable) -> Iterator[None]:
    """Launches that are replayed can't be seen."""
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
    """Gives buffers that were written to, and the state of the random number generators, back as they were."""
    buffers = list(target.buffers()) if isinstance(target, torch.nn.Module) else []
    kept = [(b, b._version, b.clone()) for b in buffers]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, version, copy in kept:
            if buffer._version != version:
                buffer.copy_(copy)


def assigned(
    launches: Sequence[Launch], specs: Sequence[str], wanted: Sequence[tuple[bool, ...]]
) -> list[list[Launch]]:
    """The launches of each region: its own kernel, row-wise arithmetic behind it included, and those of its gradient.

    Args:
        launches: Of one call.
        specs: The regions.
        wanted: For each region, of which tensors a gradient may be taken; () for none.

    Returns:
        A list for each region, and a last one of launches that fit none.
    """
    found: list[list[Launch]] = [[] for _ in range(len(specs) + 1)]
    regions = [parse(spec) for spec in specs]
    for gradient in (False, True):
        fits = [frozenset([_signature(r)]) for r in regions]
        if gradient:  # which may run the forward again
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
                # Regions alike run in order, and their gradients the other way around.
                found[at[(-1 - turn if gradient else turn) % len(at)]].append(launch)
    return found


Signature = tuple[str, frozenset[Any]]


def _best(launched: Signature, fits: Sequence[frozenset[Signature]]) -> tuple[int, ...]:
    """The regions whose kernel a launch is: all that it computes over edges, and as little more as there is."""
    matches = {
        at: max((len(s[1]) for s in signatures if s[0] == launched[0] and s[1] <= launched[1]), default=0)
        for at, signatures in enumerate(fits)
    }
    most = max(matches.values(), default=0)
    return tuple(at for at, count in matches.items() if count == most) if most else ()


def _signature(region: Region) -> Signature:
    """What a region computes over edges; row-wise arithmetic may be added to that."""
    texts: list[Any] = []
    for node in region.nodes:
        texts.append(hash((node.op, node.value, node.space, node.shape, *(texts[a] for a in node.args))))
    ends = {i for i, n in enumerate(region.nodes) if n.op in (*REDUCTIONS, "softmax", "outer")}
    ends |= {o.node for o in region.outputs if region.per_edge(o)}
    return region.by.value, frozenset(texts[i] for i in ends)


@lru_cache(maxsize=256)
def _gradients(region: Region, wanted: tuple[bool, ...]) -> frozenset[Signature]:
    """The signatures of the kernels that a region's gradient may be made of.

    Which outputs have a cotangent is not known before the backward: all of them, the first few, or a few single ones.
    """
    if not any(wanted):
        return frozenset()
    count = len(region.outputs)
    cases = {tuple(k < n for k in range(count)) for n in range(1, count + 1)}
    cases |= {tuple(k in few for k in range(count)) for n in (1, 2) for few in combinations(range(count), n)}
    stages = [stage for given in cases for stage in vjp(region, wanted, given).stages]
    return frozenset(_signature(s.region) for s in stages if s.region.walks_edges)
