"""Trains a node classifier on one graph that is cut into parts, one for each process.

    torchrun --nproc-per-node 2 examples/partitioned.py            one process per GPU (NCCL), or on CPUs (gloo)
    torchrun --nproc-per-node 2 examples/partitioned.py --quick    a smoke test

The graph is a mesh whose nodes are to be told apart by the quarter that they lie in, from noisy features. The first
process also trains on the whole graph, alone and uncompiled. The exit status is 1 if its losses differ.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gnncompile
from examples import common
from gnncompile import testing

TOLERANCE = 1e-3  # of the loss: rounding differs, and grows while training


def quarters(side: int) -> Data:
    """A mesh of `side` by `side` nodes; the label of a node is its quarter, and half of the nodes have one to learn."""
    data = testing.grid(side, side, channels=None)
    generator = torch.Generator().manual_seed(0)
    row, column = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
    data.y = 2 * (row >= side // 2).long() + (column >= side // 2).long()
    data.x = F.one_hot(data.y, 4).float() + 2 * torch.randn(side * side, 4, generator=generator)
    data.train_mask = torch.rand(side * side, generator=generator) < 0.5
    return data


def make(args: argparse.Namespace, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)  # parameters start equal in all processes
    model = GraphSAGE(4, args.channels, num_layers=3, out_channels=4, norm="batch_norm").to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def train_alone(data: Data, args: argparse.Namespace, device: torch.device) -> list[float]:
    data, (model, optimizer), losses = data.to(device), make(args, device), []
    for _ in range(args.steps):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_over_parts(part: gnncompile.Part, args: argparse.Namespace, device: torch.device) -> list[float]:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    (model, optimizer), losses = make(args, device), []
    compiled = gnncompile.compile(model, mesh=mesh)
    for _ in range(args.steps):
        optimizer.zero_grad()
        out = compiled(part.data.x, part.data.edge_index)
        each = F.cross_entropy(out, part.data.y, reduction="none")
        loss = gnncompile.mean_over_parts(each, mesh, part.data.train_mask)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--side", type=int, default=200, help="nodes along one side of the mesh (default: %(default)s)")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--method", default="contiguous", choices=["contiguous", "rcm", "metis"])
    parser.add_argument("--folder", type=Path, help="where parts are saved, for all processes to read")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a small mesh, three steps")
    args = parser.parse_args()
    if args.quick:
        args.side, args.channels, args.steps = 20, 8, 3
    return args


def main() -> int:
    args = parse_args()
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # rows travel while kernels run
    device = common.join_processes(args.device, "examples/partitioned.py")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = quarters(args.side)
    parts = gnncompile.partition(data, size, args.method)
    if args.folder is None:
        part = parts[rank]  # every process cuts the graph itself; a large one is cut once, and saved
    else:
        if rank == 0:
            parts.save(args.folder)
        dist.barrier()
        part = gnncompile.load_part(args.folder, rank, size)
    found = train_over_parts(part.to(device), args, device)
    status = 0
    if rank == 0:
        print(parts.report())
        expected = train_alone(data, args, device)
        print("loss:", " ".join(f"{loss:.4f}" for loss in found))
        if any(abs(a - b) > TOLERANCE * b for a, b in zip(found, expected, strict=True)):
            print("PROBLEM: one process has", " ".join(f"{loss:.4f}" for loss in expected))
            status = 1
        else:
            print(f"One process has the same losses, within {TOLERANCE:.1%}.")
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
