"""Thousands of steps on mini-batches of changing size: memory and time stay flat, captures and recordings bounded.

    python -m tests.long_run [--steps 10000] [--device cuda] [--inductor] [SCENARIO...]

Prints what each scenario held and took early on and at its end; the exit status is 1 if anything grew.
On a CPU, recordings are stood in for by tapes of operations (tests/tape.py), which replay slowly.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.options import DEFAULTS
from tests.tape import tapes

MIB = 2**20
TENSORS, MEMORY, SLOWER = 64, 32 * MIB, 1.5
"""What may be held more at the end than after a fifth of the steps, and how much longer a step may take. A mini-batch
more may be under way in a loader's thread.
"""

Run = Callable[[Any], Any]


class Net(nn.Module):
    """Self loops, attention, statistics and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = GCNConv(4, 8), nn.BatchNorm1d(8), GATConv(8, 4, heads=2)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        return self.last(global_mean_pool(self.second(x, edge_index), batch, size))


@dataclass
class Held:
    """What a process holds, and how long one in ten of its last steps took at most, undisturbed by other work."""

    tensors: int
    resident: int
    on_device: int
    milliseconds: float
    remembered: int

    @classmethod
    def now(cls, seconds: list[float]) -> Held:
        """After the steps that took so long, and beside what is remembered of graphs, which comes and goes."""
        remembered = gnncompile.cache_info().entries
        gnncompile.clear_cache()
        tensors = live_tensors()
        on_device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return cls(tensors, resident_bytes(), on_device, 1e3 * statistics.quantiles(seconds, n=10)[0], remembered)


@dataclass
class Outcome:
    """Of one scenario."""

    early: Held
    late: Held
    captured: int
    recordings: int

    def grown(self, timed: bool) -> list[str]:
        """What is not bounded, in words."""
        early, late = self.early, self.late
        found = {
            "tensors": late.tensors > early.tensors + TENSORS,
            "memory of the process": late.resident > early.resident + MEMORY,
            "memory of the device": late.on_device > early.on_device + MEMORY,
            "time": timed and late.milliseconds > SLOWER * early.milliseconds,
            "captured graphs": self.captured > 2,  # with padding, and without
            "recordings": self.recordings > DEFAULTS.recordings,
            "remembered graphs": late.remembered > 4 * DEFAULTS.structure_cache_entries,
        }
        return [name for name, is_so in found.items() if is_so]


def live_tensors() -> int:
    """Of the whole process."""
    gc.collect()
    # The loader's thread must not go on meanwhile: Python can't finish a tuple that someone else has got hold of.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    try:
        return sum(issubclass(type(held), Tensor) for held in gc.get_objects())
    finally:
        sys.setswitchinterval(interval)


def resident_bytes() -> int:
    """Memory of the process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def graphs(few_edges: tuple[int, ...] = (0, 1)) -> list[Data]:
    """Graphs of 2 to 9 nodes (batch norm takes no single row), many with one of these numbers of edges."""
    choice, g = random.Random(0), torch.Generator().manual_seed(0)
    sizes = [(choice.randint(2, 9), choice.choice([*few_edges, choice.randint(4, 30)])) for _ in range(200)]
    return [
        Data(x=torch.randn(n, 4, generator=g), edge_index=torch.randint(n, (2, e), generator=g), y=torch.zeros(1, 2))
        for n, e in sizes
    ]


def batches(device: str) -> Iterator[Batch]:
    """Without an end: one to six graphs each, which are tensors of their own in every batch."""
    made, choice = graphs(), random.Random(1)
    while True:
        yield Batch.from_data_list(choice.sample(made, choice.randint(1, 6))).to(device)


def padded(device: str) -> Iterator[Any]:
    """Without an end: to buckets."""
    return _loaded(device, ())


def mostly_padded(device: str) -> Iterator[Any]:
    """Without an end: but for those with fewer than two edges, or as many as graphs, which have their true sizes."""
    return _loaded(device, (0, 1))


def _loaded(device: str, few_edges: tuple[int, ...]) -> Iterator[Any]:
    made = DataLoader(graphs(few_edges), batch_size=3, shuffle=True, drop_last=True)
    loader = gnncompile.loader(made, device, buckets=2)
    while True:
        yield from loader


def arguments(data: Any) -> tuple[Any, ...]:
    """What the model takes."""
    return data.x, data.edge_index, data.batch, data.num_graphs


def plain_loop(model: Any) -> Run:
    """A step of a training loop as users write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(data: Any) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(*arguments(data)), data.y))
        optimizer.step()

    return run


def inference(model: Any) -> Run:
    """A call that needs no gradient."""
    model.eval()

    def run(data: Any) -> None:
        with torch.no_grad():
            model(*arguments(data))

    return run


SCENARIOS: dict[str, tuple[Callable[[str], Iterator[Any]], str | None, Callable[[Any], Run] | None]] = {
    "training": (batches, None, plain_loop),
    "inference": (batches, None, inference),
    "recorded": (padded, "reduce-overhead", plain_loop),
    "whole step": (padded, None, None),
    "odd sizes": (mostly_padded, "reduce-overhead", plain_loop),
}
"""Where mini-batches come from, the mode, and what is done with each; None for a `TrainStep`."""


def run(name: str, steps: int, device: str = "cpu", inductor: bool = False) -> Outcome:
    """Runs a scenario.

    Args:
        name: Of :data:`SCENARIOS`.
        steps: How many.
        device: Where.
        inductor: Whether Inductor compiles what is not ours.
    """
    source, mode, loop = SCENARIOS[name]
    torch.manual_seed(0)
    model, options = Net().to(device), {"inductor": inductor}
    with tapes() if device == "cpu" else nullcontext():
        if loop is not None:
            compiled = gnncompile.compile(model, mode=mode, options=options)
            step, program = loop(compiled), callable_of(compiled)
        else:
            whole = gnncompile.TrainStep(
                model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=1e-3), options=options
            )
            step, program = lambda data: whole(*arguments(data), target=data.y), whole._program
        assert program is not None
        early, late = _drive(step, source(device), steps)
        every = [c.recordings for c in program.backend.captured if isinstance(c.recordings, CudaGraphPool)]
        every += [plan.recordings for plan in whole._plans] if loop is None else []
        recordings = max((len(one.recorded) for one in every), default=0)
        return Outcome(early, late, len(program.backend.captured), recordings)


def _drive(step: Run, source: Iterator[Any], steps: int) -> tuple[Held, Held]:
    fifth, seconds, early = max(steps // 5, 2), [], None
    for number in range(steps):
        data = next(source)
        clock = time.perf_counter if data.x.is_cuda else time.thread_time
        began = clock()
        step(data)
        if data.x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(clock() - began)
        if number + 1 == 2 * fifth:
            early = Held.now(seconds[fifth:])
    assert early is not None
    return early, Held.now(seconds[-fifth:])


def main() -> int:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "scenario", nargs="*", choices=[*SCENARIOS, []], help=f"of {', '.join(SCENARIOS)}; default: all"
    )
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--inductor", action="store_true", help="compile what is not ours with Inductor")
    args = parser.parse_args()
    failed = False
    print(f"torch {torch.__version__}, {args.device}, {args.steps} steps each\n")
    print(
        f"{'':12}{'tensors':>14}{'process MiB':>16}{'device MiB':>16}{'ms, 1 in 10':>16}"
        "  captured  recordings  remembered"
    )
    for name in args.scenario or SCENARIOS:
        found = run(name, args.steps, args.device, args.inductor)
        early, late, grown = found.early, found.late, found.grown(timed=True)
        failed |= bool(grown)
        print(
            f"{name:12}{f'{early.tensors}, {late.tensors}':>14}"
            f"{f'{early.resident / MIB:.0f}, {late.resident / MIB:.0f}':>16}"
            f"{f'{early.on_device / MIB:.1f}, {late.on_device / MIB:.1f}':>16}"
            f"{f'{early.milliseconds:.2f}, {late.milliseconds:.2f}':>16}"
            f"{found.captured:10}{found.recordings:12}{late.remembered:12}"
            f"{'  grew: ' + ', '.join(grown) if grown else ''}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
