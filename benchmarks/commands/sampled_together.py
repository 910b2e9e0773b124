"""Whole epochs on sampled neighbourhoods on several processes, each with its share of the seeds.

The processes train one model in ``DistributedDataParallel``. Parameters must be the same bits in all processes. Losses
must be those of a plain loop in float64 that has the mini-batches of all processes. The first process also trains
alone, on all seeds.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from benchmarks.cases.sampled import SampledCase
from benchmarks.measuring import environment, measure
from benchmarks.measuring.losses import LEARNING_RATE, TOLERANCE, Loss
from benchmarks.reporting import tables
from benchmarks.rows.sampled import SampledRow
from examples import common

CHECKED_STEPS = 20

UNTIMED_EPOCHS = 3
"""The last mini-batch of an epoch is smaller than the others. In the third epoch, its step is recorded too."""


@dataclass(frozen=True)
class Together:
    """The outcome of one row.

    Attributes:
        name: the name of the row.
        alone_s: the seconds of an epoch of the first process alone.
        together_s: the seconds of an epoch of all processes.
        batches: the mini-batches of one process, alone and together.
        error: the largest relative difference of a loss from those of the plain loop.
        problem: why the row is wrong, or an empty string.
    """

    name: str
    alone_s: float
    together_s: float
    batches: tuple[int, int]
    error: float
    problem: str


def run(args: argparse.Namespace, cases: Sequence[SampledCase], rows: Sequence[SampledRow], loss: Loss) -> int:
    """Runs the benchmark in each process that torchrun has started; the exit status is 1 if a row is wrong."""
    device = common.join_processes(args.device, "-m benchmarks sampled")
    status, size = 0, dist.get_world_size()
    facts = environment.describe(device, ["torchrun", f"--nproc-per-node={size}", "-m", "benchmarks", *args.argv])
    _say(tables.header_lines(facts))
    for case in cases:
        header = ["", "one, epoch s", f"{size}, epoch s", "faster", "batches of each", "error"]
        found = [_Row(case, row, args, device, loss).measure() for row in rows]
        cells = [[*_cells(one)] for one in found]
        _say(f"\n{case}, on {size} processes\n{tables.text_table(header, cells)}")
        for one in found:
            status |= bool(one.problem)
            _say(f"{one.name}: WRONG: {one.problem}" if one.problem else "")
    dist.destroy_process_group()
    return status


def _cells(one: Together) -> tuple[str, ...]:
    if one.problem:
        return (one.name, "", "", "", "", f"{one.error:.0e}")
    seconds = f"{one.alone_s:.3f}", f"{one.together_s:.3f}", f"{one.alone_s / one.together_s:.2f}"
    return one.name, *seconds, f"{one.batches[0]}, {one.batches[1]}", f"{one.error:.0e}"


class _Row:
    """One way to train, alone and together."""

    def __init__(
        self, case: SampledCase, row: SampledRow, args: argparse.Namespace, device: torch.device, loss: Loss
    ) -> None:
        self.case, self.row, self.device, self.loss, self.seed = case, row, device, loss, args.seed
        self.rounds = 1 if args.quick else args.rounds
        self.workers = 0 if args.quick or args.workers is None else args.workers
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(self.seed)
        self.model = case.model().to(device)

    def measure(self) -> Together:
        """Checks the row, then times epochs together and alone."""
        loader = self._loader((self.rank, self.size))
        devices = [self.device] if self.device.type == "cuda" else None
        replica = DistributedDataParallel(copy.deepcopy(self.model), devices)
        step = self.row.make(replica, self.loss)
        losses = self._steps(loader, self.rank, step)
        error, problem = self._check(losses, replica.module)
        if problem:
            return Together(self.row.name, 0, 0, (0, 0), error, problem)
        together, batches = self._epochs(loader, step)
        del step, replica, loader
        measure.free(self.device)
        alone = (0.0, 0)
        if self.rank == 0:
            alone = self._epochs(self._loader((0, 1)), self.row.make(self.model, self.loss), alone=True)
        dist.barrier()
        return Together(self.row.name, alone[0], together, (alone[1], batches), error, "")

    def _loader(self, share: tuple[int, int]) -> Iterable[Data]:
        return self.row.load(replace(self.case, share=share), self.device, self.workers)

    def _steps(self, loader: Iterable[Data], rank: int, step: Any) -> Tensor:
        """Returns the losses of the first steps of a process, ``[CHECKED_STEPS]``."""
        return torch.stack([step(*_arguments(batch)).double() for batch in self._batches(loader, rank)])

    def _batches(self, loader: Iterable[Data], rank: int) -> Iterable[Data]:
        torch.manual_seed(self.seed + rank)
        return islice(chain.from_iterable(repeat(loader)), CHECKED_STEPS)

    def _check(self, losses: Tensor, module: nn.Module) -> tuple[float, str]:
        """Returns the error, and what is wrong: the same values in all processes."""
        mine = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        first = mine.clone()
        dist.broadcast(first, 0)
        differ = self._agree(float(not torch.equal(mine, first)))
        every = [torch.zeros_like(losses) for _ in range(self.size)]
        dist.all_gather(every, losses)
        error = 0.0
        if self.rank == 0:
            expected = self._plain_losses(len(losses))
            error = float(((torch.stack(every) - expected) / expected).abs().max())
        error = self._agree(error)
        if differ:
            return error, f"parameters differ between processes after {len(losses)} steps"
        if not error <= TOLERANCE:
            return error, f"losses differ by {error:.1e} from those of one process, tolerance {TOLERANCE:.0e}"
        return error, ""

    def _plain_losses(self, steps: int) -> Tensor:
        """Returns the losses of a plain loop over the mini-batches of all processes, ``[processes, steps]``."""
        model = copy.deepcopy(self.model).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        loaders = [self._loader((rank, self.size)) for rank in range(self.size)]
        batches = [list(self._batches(loader, rank)) for rank, loader in enumerate(loaders)]
        losses = []
        for of_step in zip(*batches, strict=True):
            optimizer.zero_grad()
            found = []
            for inputs, target in map(_arguments, of_step):
                one = self.loss(model(*inputs), target)
                (one / self.size).backward()
                found.append(one.detach())
            optimizer.step()
            losses.append(torch.stack(found))
        assert len(losses) == steps
        return torch.stack(losses, 1)

    def _agree(self, value: float) -> float:
        """Returns the largest value of all processes. A NaN stays one."""
        held = torch.tensor(value, dtype=torch.float64, device=self.device)
        every = [torch.zeros_like(held) for _ in range(self.size)]
        dist.all_gather(every, held)
        return float(torch.stack(every).max())

    def _epochs(self, loader: Iterable[Data], step: Any, alone: bool = False) -> tuple[float, int]:
        """Returns the median seconds of an epoch, and its mini-batches."""
        times, batches = [], 0
        for turn in range(UNTIMED_EPOCHS + self.rounds):
            torch.manual_seed(self.seed + turn)
            if not alone:
                dist.barrier()
            measure.synchronize(self.device)
            start = time.perf_counter()
            batches = 0
            for batch in loader:
                step(*_arguments(batch))
                batches += 1
            measure.synchronize(self.device)
            seconds = time.perf_counter() - start
            times.append(seconds if alone else self._agree(seconds))
        return statistics.median(times[UNTIMED_EPOCHS:]), batches


def _arguments(batch: Data) -> tuple[tuple[Any, ...], Any]:
    return (batch.x, batch.edge_index), (batch.y, batch.batch_size)


def _say(text: str) -> None:
    if dist.get_rank() == 0 and text:
        print(text, flush=True)
