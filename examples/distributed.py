"""Trains a graph classifier on several processes: eager, and compiled by gnncompile, in ``DistributedDataParallel``.

    torchrun --nproc-per-node 2 examples/distributed.py            one process per GPU (NCCL), or on CPUs (gloo)
    torchrun --nproc-per-node 2 examples/distributed.py --quick    a smoke test

The data is that of demo.py, handwritten digits as graphs of their inked pixels, and ships with scikit-learn. PyG's
``DataLoader`` gives each process its share, by torch's ``DistributedSampler``. The exit status is 1 if losses differ.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gnncompile
from examples import common
from examples.digits import data

TOLERANCE = 0.01  # of the first epoch's mean loss: rounding differs from one way to the next, and grows while training


class Classifier(nn.Module):
    """PyG's GIN with batch normalisation, a sum over the nodes of each graph, and a linear layer."""

    def __init__(self, layers: int, channels: int = 64) -> None:
        super().__init__()
        self.gnn = GIN(3, channels, layers, norm="batch_norm")
        self.lin = nn.Linear(channels, data.NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        return self.lin(global_add_pool(self.gnn(x, edge_index), batch, num_graphs))


# A step takes a batch of this process and returns its loss; all processes step together.
Step = Callable[[Batch], Tensor]


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch, batch.num_graphs), batch.y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return eager(gnncompile.compile(model), optimizer)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    step = gnncompile.TrainStep(model, F.cross_entropy, optimizer)
    return lambda batch: step(batch.x, batch.edge_index, batch.batch, batch.num_graphs, target=batch.y)


WAYS = {"eager": eager, "gnncompile": compiled, "TrainStep": whole}


def batches(graphs: list[Data], size: int, epoch: int, device: torch.device) -> Iterator[Batch]:
    """This process's share of an epoch, as many batches of as many graphs as any other's."""
    sampler = DistributedSampler(graphs, shuffle=True, seed=0, drop_last=True)
    sampler.set_epoch(epoch)
    for batch in DataLoader(graphs, size, sampler=sampler, drop_last=True):
        yield batch.to(device)


def train(way: str, graphs: list[Data], args: argparse.Namespace, device: torch.device) -> tuple[float, list[float]]:
    """Trains a fresh model; returns milliseconds per step and the mean loss over all processes of each epoch."""
    torch.manual_seed(0)
    devices = [device] if device.type == "cuda" else None
    replica = DistributedDataParallel(Classifier(args.layers).to(device), device_ids=devices)
    step = WAYS[way](replica, torch.optim.Adam(replica.parameters(), lr=0.002))
    times, means = [], []
    for epoch in range(args.epochs):
        losses = []
        for batch in batches(graphs, args.batch_size, epoch, device):
            start = now(device)
            losses.append(step(batch))
            times.append(now(device) - start)
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        means.append(mean.item() / dist.get_world_size())
    return 1000 * median(times[len(times) // args.epochs :]), means  # the first epoch compiles


def agree(means: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * expected[0] for a, b in zip(means, expected, strict=True))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="default: all; with --quick the first two")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=64, help="graphs per process (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two layers, two epochs")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.layers = min(args.epochs, 2), min(args.layers, 2)
    args.ways = args.ways or list(WAYS)[: 2 if args.quick else None]
    return args


def main() -> int:
    args = parse_args()
    device = common.join_processes(args.device, "examples/distributed.py")
    say: Callable[[Any], None] = print if dist.get_rank() == 0 else lambda text: None
    graphs, _ = data.images_as_graphs()
    say(f"{dist.get_world_size()} processes on {device.type}, {args.batch_size} graphs each per step")
    runs = {}
    for way in args.ways:
        runs[way] = train(way, graphs, args, device)
        faster = runs[args.ways[0]][0] / runs[way][0]
        say(f"{way:12}{runs[way][0]:8.2f} ms/step {faster:6.2f}x   loss {', '.join(f'{m:.4f}' for m in runs[way][1])}")
    first = runs[args.ways[0]][1]
    differ = [way for way, (_, means) in runs.items() if not agree(means, first)]
    within = f"within {TOLERANCE:.0%} of the first"
    say(f"PROBLEM: losses differ from those of {args.ways[0]}: {differ}" if differ else f"Losses agree {within}.")
    dist.destroy_process_group()
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
