"""Runs thousands of steps on mini-batches of changing size.

Memory and time per step must not grow, and captures and recordings must stay bounded.

    python -m tests.long_run [--steps 10000] [--device cuda] [--inductor] [SCENARIO...]

Prints the memory and time of each scenario, early on and at its end. The exit status is 1 if anything grew. On a CPU,
tapes of operations (tests/tape.py) take the place of CUDA graphs; they replay slowly.
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
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs.pool import CudaGraphPool
from gnncompile.options import DEFAULTS
from tests.tape import tapes

MIB = 2**20
TENSORS, MEMORY, SLOWER = 64, 32 * MIB, 1.5
"""Limits on growth from early on to the end: tensors, bytes, and the ratio of the times of a step.

One more mini-batch may be in the loader's thread.
"""

Run = Callable[[Any], Any]


class Net(nn.Module):
    """A model with self loops, attention, batch statistics and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = GCNConv(4, 8), nn.BatchNorm1d(8), GATConv(8, 4, heads=2)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()
        return self.last(global_mean_pool(self.second(x, edge_index), batch, size))


@dataclass
class Held:
    """The memory of a process, and the time of its steps: the first decile, which other work hardly disturbs."""

    tensors: int
    resident: int
    on_device: int
    milliseconds: float
    remembered: int

    @classmethod
    def now(cls, seconds: list[float]) -> Held:
        """Returns the present state, after steps that took `seconds`. First clears the cache of graphs."""
        remembered = gnncompile.cache_info().entries
        gnncompile.clear_cache()
        tensors = live_tensors()
        on_device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        return cls(tensors, resident_bytes(), on_device, 1e3 * statistics.quantiles(seconds, n=10)[0], remembered)


@dataclass
class Outcome:
    """The result of one scenario."""

    early: Held
    late: Held
    captured: int
    recordings: int

    def grown(self, timed: bool) -> list[str]:
        """Returns the names of quantities that grew too much."""
        early, late = self.early, self.late
        found = {
            "tensors": late.tensors > early.tensors + TENSORS,
            "memory of the process": late.resident > early.resident + MEMORY,
            "memory of the device": late.on_device > early.on_device + MEMORY,
            "time": timed and late.milliseconds > SLOWER * early.milliseconds,
            "captured graphs": self.captured > 2,  # one with padding, and one without
            "recordings": self.recordings > DEFAULTS.recordings,
            "remembered graphs": late.remembered > 4 * DEFAULTS.structure_cache_entries,
        }
        return [name for name, is_so in found.items() if is_so]


def live_tensors() -> int:
    """Returns the number of tensors in the process."""
    gc.collect()
    # The loader's thread must not run meanwhile: Python can't finish a tuple to which another reference exists.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e3)
    try:
        return sum(issubclass(type(held), Tensor) for held in gc.get_objects())
    finally:
        sys.setswitchinterval(interval)


def resident_bytes() -> int:
    """Returns the resident memory of the process in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class SampledNet(nn.Module):
    """A model of the nodes of a sampled neighbourhood."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(4, 8), SAGEConv(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def graphs(few_edges: tuple[int, ...] = (0, 1)) -> list[Data]:
    """Returns graphs of 2 to 9 nodes; batch norm needs two rows. Many have a number of edges from `few_edges`."""
    choice, g = random.Random(0), torch.Generator().manual_seed(0)
    sizes = [(choice.randint(2, 9), choice.choice([*few_edges, choice.randint(4, 30)])) for _ in range(200)]
    return [
        Data(x=torch.randn(n, 4, generator=g), edge_index=torch.randint(n, (2, e), generator=g), y=torch.zeros(1, 2))
        for n, e in sizes
    ]


def batches(device: str) -> Iterator[Batch]:
    """Yields batches without end, of one to six graphs each. Every batch has new tensors."""
    made, choice = graphs(), random.Random(1)
    while True:
        yield Batch.from_data_list(choice.sample(made, choice.randint(1, 6))).to(device)


def padded(device: str) -> Iterator[Any]:
    """Yields batches without end, all padded to buckets."""
    return _loaded(device, ())


def mostly_padded(device: str) -> Iterator[Any]:
    """Yields batches without end, most of them padded.

    A batch with fewer than two edges, or with as many edges as graphs, keeps its true size.
    """
    return _loaded(device, (0, 1))


def _loaded(device: str, few_edges: tuple[int, ...]) -> Iterator[Any]:
    made = DataLoader(graphs(few_edges), batch_size=3, shuffle=True, drop_last=True)
    loader = gnncompile.loader(made, device, buckets=2)
    while True:
        yield from loader


def sampled(device: str) -> Iterator[Any]:
    """Yields sampled neighbourhoods without end, padded to buckets; on a GPU they are sampled there."""
    torch.manual_seed(0)
    graph = Data(x=torch.randn(3000, 4), edge_index=torch.randint(3000, (2, 40_000)), y=torch.randn(3000, 2))
    source = NeighborLoader(graph, [5, 5], batch_size=32, shuffle=True)
    loader = gnncompile.loader(source, device, buckets=2)
    while True:
        yield from loader


def loss_of_seeds(found: Tensor, target: tuple[Tensor, Any]) -> Tensor:
    """Returns the loss of a mini-batch's seeds. The target is the labels of all nodes, and the number of seeds."""
    labels, seeds = target
    return F.mse_loss(found[:seeds], labels[:seeds])


def arguments(data: Any) -> tuple[Any, ...]:
    """Returns the arguments of the model."""
    return data.x, data.edge_index, data.batch, data.num_graphs


def plain_loop(model: Any) -> Run:
    """Returns a function that does one step of a plain training loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(data: Any) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(*arguments(data)), data.y))
        optimizer.step()

    return run


def inference(model: Any) -> Run:
    """Returns a function that calls the model without gradients."""
    model.eval()

    def run(data: Any) -> None:
        with torch.no_grad():
            model(*arguments(data))

    return run


def train_step(whole: Any) -> Run:
    """Returns a function that does one step of a `TrainStep`."""
    return lambda data: whole(*arguments(data), target=data.y)


def sampled_step(whole: Any) -> Run:
    """Returns a function that does one step of a `TrainStep` on a sampled neighbourhood."""
    return lambda data: whole(data.x, data.edge_index, target=(data.y, data.batch_size))


@dataclass(frozen=True)
class Scenario:
    """What is run.

    Attributes:
        source: Yields mini-batches on a device.
        loop: Makes the function of a step, of a compiled model or of a `TrainStep`.
        mode: The mode in which the model is compiled.
        loss: The loss of a `TrainStep`, or None for a compiled model.
        net: Makes the model.
    """

    source: Callable[[str], Iterator[Any]]
    loop: Callable[[Any], Run]
    mode: str | None = None
    loss: Callable[..., Tensor] | None = None
    net: Callable[[], nn.Module] = Net


SCENARIOS = {
    "training": Scenario(batches, plain_loop),
    "inference": Scenario(batches, inference),
    "recorded": Scenario(padded, plain_loop, "reduce-overhead"),
    "whole step": Scenario(padded, train_step, loss=F.mse_loss),
    "odd sizes": Scenario(mostly_padded, plain_loop, "reduce-overhead"),
    "sampled": Scenario(sampled, sampled_step, loss=loss_of_seeds, net=SampledNet),
}


def run(name: str, steps: int, device: str = "cpu", inductor: bool = False) -> Outcome:
    """Runs a scenario.

    Args:
        name: A key of :data:`SCENARIOS`.
        steps: The number of steps.
        device: "cpu" or "cuda".
        inductor: Whether Inductor compiles the operations outside regions.
    """
    chosen = SCENARIOS[name]
    torch.manual_seed(0)
    model, options = chosen.net().to(device), {"inductor": inductor}
    with tapes() if device == "cpu" else nullcontext():
        if chosen.loss is None:
            made: Any = gnncompile.compile(model, mode=chosen.mode, options=options)
            program: Any = callable_of(made)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            made = gnncompile.TrainStep(model, chosen.loss, optimizer, options=options)
            program = made._program
        early, late = _drive(chosen.loop(made), chosen.source(device), steps)
        every = [c.recordings for c in program.backend.captured if isinstance(c.recordings, CudaGraphPool)]
        every += [plan.recordings for plan in made._plans] if chosen.loss is not None else []
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
    """Runs the scenarios that the command line names; returns 1 if anything grew."""
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
