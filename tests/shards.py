"""Checks, in two processes, models with sharded parameters (``fully_shard``, FSDP2), compiled before or after sharding.

    torchrun --nproc-per-node 2 -m tests.shards out

The processes write their failures to ``out/0.json`` and ``out/1.json``.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GCNConv

import gnncompile
from gnncompile.capture.backend import SHARDED
from gnncompile.capture.compile import callable_of
from tests.tape import tapes

LIGHT: dict[str, Any] = {"options": {"inductor": False}}
RECORDED: dict[str, Any] = {"mode": "reduce-overhead", **LIGHT}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.lin = GCNConv(4, 6), GATConv(6, 4, heads=2), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.second(self.first(x, edge_index).relu(), edge_index))


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


def sharded(model: Any, layers: bool = True) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model.first, model.second) if layers else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_layers(**settings: Any) -> Any:
    """Returns a model whose layers are compiled one by one, and whose parameters are sharded as one group."""
    model = made()
    model.first, model.second = (gnncompile.compile(layer, **settings) for layer in (model.first, model.second))
    return sharded(model, layers=False)


WAYS: dict[str, Callable[..., Any]] = {
    "compiled when sharded": lambda **settings: gnncompile.compile(sharded(made()), **settings),
    "compiled when sharded as one": lambda **settings: gnncompile.compile(sharded(made(), layers=False), **settings),
    "sharded when compiled": lambda **settings: sharded(gnncompile.compile(made(), **settings)),
    "layers": in_layers,
}


def batch(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns batch `k` of this process. Processes have different graphs; batch 2 has no edge."""
    here = torch.Generator().manual_seed(10 * k + dist.get_rank())
    nodes = 6 + 2 * k + dist.get_rank()
    edge_index = torch.randint(nodes, (2, 0 if k == 2 else 15), generator=here)
    x = torch.randn(nodes, 4, generator=here, dtype=torch.float64)
    return x, edge_index, torch.randint(3, (nodes,), generator=here)


def check(way: str, settings: dict[str, Any]) -> None:
    """Trains a few steps and asserts the losses, parameters and buffers of the uncompiled model."""
    eager, model = sharded(made()), WAYS[way](**settings)
    assert isinstance(model, FSDPModule) and isinstance(model, Net)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (eager, model)]
    for k in (0, 1, 2, 0, 0, 0, 0):
        x, edge_index, y = batch(k)
        losses = []
        for m, optimizer in zip((eager, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x, edge_index), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    whole = [{name: value.full_tensor() for name, value in m.state_dict().items()} for m in (model, eager)]
    torch.testing.assert_close(*whole, rtol=1e-9, atol=1e-9)
    programs = [p for m in (model, *model.children()) if (p := callable_of(m)) is not None]
    captured = [c for p in programs for c in p.backend.captured]
    regions = [len(c.log.regions) for c in captured]
    # The graph breaks where parameters are gathered. After a break, graphs without an edge are captured again.
    assert sum(regions) == (3 if way == "layers" else 6), regions
    assert len(captured) <= 8, regions
    if settings is RECORDED:
        # A graph that only passes edges across a break has nothing to record.
        assert {c.recordings for c in captured} - {None} == {SHARDED}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for way in WAYS:
        for settings in (LIGHT, RECORDED) if way in ("sharded when compiled", "layers") else (LIGHT,):
            torch._dynamo.reset()
            try:
                with tapes():
                    check(way, settings)
            except Exception:
                found[f"{way}, {settings}"] = traceback.format_exc()
            dist.barrier()
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
