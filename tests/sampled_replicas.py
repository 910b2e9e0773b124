"""Checks, in two processes, that each samples its own seeds and that both train one model: see tests/replicas.py."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE

import gnncompile
from gnncompile import testing

if TYPE_CHECKING:
    from tests.replicas import Here

STEPS, LABELLED, CLASSES = 20, 137, 4


def graph() -> Data:
    """Returns a graph with a hub, with nodes that have no edges, and with an odd number of labelled nodes."""
    data = testing.power_law(300, 1500, max_degree=90, channels=5, seed=1)
    data.x, data.y = data.x.double(), torch.arange(300) % CLASSES
    return data


def labelled() -> Tensor:
    return torch.randperm(300, generator=torch.Generator().manual_seed(3))[:LABELLED]


def by_sampler(rank: int, epoch: int) -> dict[str, Any]:
    """Returns the arguments that give a process its share, as DistributedSampler draws it."""
    order = DistributedSampler(labelled(), 2, rank, shuffle=True, seed=5)  # type: ignore[arg-type]
    order.set_epoch(epoch)
    return {"input_nodes": labelled(), "sampler": order}


def by_chunk(rank: int, epoch: int) -> dict[str, Any]:
    """Returns the arguments that give a process its share as PyG's examples do."""
    return {"input_nodes": labelled()[:-1].chunk(2)[rank], "shuffle": True}


def sampled(here: Here, rank: int, share: Any) -> list[Data]:
    """Returns the mini-batches of a process, of as many epochs as give 20. A seed repeats them in every process."""
    torch.manual_seed(11 + rank)
    found: list[Data] = []
    sizes = None
    for epoch in range(STEPS):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
            source = NeighborLoader(graph(), [4, 3], batch_size=16, **share(rank, epoch))
        loader = gnncompile.loader(source, device=here.device, buckets=2)
        if sizes is not None:
            loader.buckets = sizes  # later epochs use the sizes of the first
        sizes = loader.buckets
        found += list(loader)
        if len(found) >= STEPS:
            break
    return found[:STEPS]


def loss_of_seeds(out: Tensor, target: Any) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_together(here: Here, share: Any) -> None:
    """Trains on this process's mini-batches, and compares with one process that has those of both."""
    torch.manual_seed(0)
    model = GraphSAGE(5, 8, num_layers=2, out_channels=CLASSES).double().to(here.device)
    single = copy.deepcopy(model)
    step = gnncompile.TrainStep(here.wrap(model), loss_of_seeds, sgd(model), options=here.options)
    every = [sampled(here, rank, share) for rank in range(2)]
    optimizer = sgd(single)
    for of_step in zip(*every, strict=True):
        optimizer.zero_grad()
        expected = [loss_of_seeds(single(b.x, b.edge_index), (b.y, int(b.batch_size))) for b in of_step]
        (sum(expected) / 2).backward()
        optimizer.step()
        mine = of_step[here.rank]
        found = step(mine.x, mine.edge_index, target=(mine.y, mine.batch_size))
        torch.testing.assert_close(found, expected[here.rank].detach(), rtol=1e-9, atol=1e-9)
    assert step.not_recorded is None
    torch.testing.assert_close(model.state_dict(), single.state_dict(), rtol=1e-8, atol=1e-8)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    both = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(both, values, group=here.group)
    assert torch.equal(both[0], both[1]), "parameters differ between processes"


def check_sampled_steps(here: Here) -> None:
    """``DistributedSampler`` gives both processes as many mini-batches, and its order changes by the epoch."""
    shares = [torch.cat([batch.input_id for batch in sampled(here, rank, by_sampler)[:5]]) for rank in range(2)]
    assert [len(share) for share in shares] == [69, 69]
    assert set(shares[0].tolist()) | set(shares[1].tolist()) == set(range(LABELLED))
    later = sampled(here, here.rank, by_sampler)[5].input_id
    assert not torch.equal(later, shares[here.rank][:16].to(later.device))
    train_together(here, by_sampler)


def check_sampled_steps_of_chunks(here: Here) -> None:
    """Each process is given the seeds of its own: ``input_nodes=train_index.chunk(2)[rank]``."""
    train_together(here, by_chunk)
