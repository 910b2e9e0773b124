"""Trains a node classifier on sampled neighbourhoods, on several processes that share the seeds of each epoch.

    torchrun --nproc-per-node 2 examples/sampled_two_gpus.py            one process per GPU (NCCL), or on CPUs (gloo)
    torchrun --nproc-per-node 2 examples/sampled_two_gpus.py --quick    a smoke test

Each process has the whole graph and samples around its own seeds, and ``DistributedDataParallel`` averages gradients.
The graph is random; the label of a node can be learned from its features and its neighbours. The first process also
trains alone: a plain loop over the mini-batches of all processes. The exit status is 1 if its losses differ, or if the
processes end with different parameters.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gnncompile
from examples import common
from gnncompile import testing

CLASSES = 8
TOLERANCE = 1e-3  # of the loss: rounding differs, and grows while training


def random_graph(nodes: int) -> Data:
    """A graph with hubs. The features of a node are those of its class, with noise; half of the nodes have labels."""
    data = testing.power_law(nodes, 10 * nodes, max_degree=nodes // 20, channels=None, seed=0)
    generator = torch.Generator().manual_seed(0)
    data.y = torch.randint(CLASSES, (nodes,), generator=generator)
    data.x = F.one_hot(data.y, 16).float() + torch.randn(nodes, 16, generator=generator)
    data.train_index = torch.randperm(nodes, generator=generator)[: nodes // 2]
    return data


class Loader:
    """The mini-batches of one process: an equal number in each, without overlap, and others in each epoch."""

    def __init__(self, data: Data, rank: int, args: argparse.Namespace, device: torch.device) -> None:
        plain = Data(x=data.x, y=data.y, edge_index=data.edge_index)
        self.order = DistributedSampler(data.train_index, dist.get_world_size(), rank)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
            source = NeighborLoader(
                plain, [10, 5], input_nodes=data.train_index, sampler=self.order, batch_size=args.batch_size
            )
        self.loader = gnncompile.loader(source, device=device, buckets=True)
        self.rank = rank

    def epoch(self, number: int):
        self.order.set_epoch(number)
        torch.manual_seed(1000 * number + self.rank)  # processes draw different neighbours
        return self.loader


def make(args: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)  # parameters start equal in all processes
    return GraphSAGE(16, args.channels, num_layers=2, out_channels=CLASSES).to(device)


def loss_of_seeds(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def train(data: Data, args: argparse.Namespace, device: torch.device) -> tuple[list[float], nn.Module, float]:
    """Returns the mean loss of each epoch over all processes, the model, and the seconds of the last epoch."""
    model, loader = make(args, device), Loader(data, dist.get_rank(), args, device)
    replica = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    step = gnncompile.TrainStep(replica, loss_of_seeds, torch.optim.Adam(model.parameters(), lr=0.01))
    means = []
    for number in range(args.epochs):
        start = time.perf_counter()
        losses = [step(b.x, b.edge_index, target=(b.y, b.batch_size)) for b in loader.epoch(number)]
        mean = torch.stack(losses).mean() / dist.get_world_size()
        dist.all_reduce(mean)
        means.append(mean.item())
        seconds = time.perf_counter() - start
    return means, model, seconds


def train_alone(data: Data, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the mean loss of each epoch of one process that has the mini-batches of all."""
    model = make(args, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loaders = [Loader(data, rank, args, device) for rank in range(dist.get_world_size())]
    means = []
    for number in range(args.epochs):
        every = [[batch for batch in loader.epoch(number)] for loader in loaders]
        losses = []
        for of_step in zip(*every, strict=True):
            optimizer.zero_grad()
            found = [loss_of_seeds(model(b.x, b.edge_index), (b.y, int(b.batch_size))) for b in of_step]
            loss = torch.stack(found).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means.append(torch.stack(losses).mean().item())
    return means


def are_equal(model: nn.Module) -> bool:
    """Whether all processes have the parameters of the first, bit by bit."""
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    differ = (mine != first).any().int()
    dist.all_reduce(differ)
    return int(differ) == 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=512, help="seeds per process (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a small graph, three epochs")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.channels, args.epochs, args.batch_size = 2000, 16, 3, 64
    return args


def main() -> int:
    args = parse_args()
    device = common.join_processes(args.device, "examples/sampled_two_gpus.py")
    data, status = random_graph(args.nodes), 0
    found, model, seconds = train(data, args, device)
    same = are_equal(model)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes on {device.type}, the last epoch took {seconds:.2f} s")
        print("mean losses:", " ".join(f"{loss:.4f}" for loss in found))
        expected = train_alone(data, args, device)
        if not same:
            print("PROBLEM: parameters differ between processes")
            status = 1
        if any(abs(a - b) > TOLERANCE * b for a, b in zip(found, expected, strict=True)):
            print("PROBLEM: one process has", " ".join(f"{loss:.4f}" for loss in expected))
            status = 1
        if status == 0:
            print(f"One process has the same losses, within {TOLERANCE:.1%}.")
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
