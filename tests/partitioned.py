"""Checks, in several processes, compiled models over the parts of one graph: each gives what one process gives.

    torchrun --nproc-per-node 2 -m tests.partitioned [out] [--device cuda] [--inductor] [--recorded] [--names gcn gat]

Every check has its own process group, so a check that fails in one process does not disturb later checks. The processes
write their failures to ``out/0.json`` and so on. With ``--recorded``, the checks are those of tests/recorded_parts.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gnncompile.models import MeshGraphNet
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GraphNorm,
    HeteroConv,
    PNAConv,
    RGCNConv,
    SAGEConv,
    SimpleConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.models import GraphSAGE

import gnncompile
from gnncompile import testing
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs.mesh_pool import EXCHANGES, REGISTERS
from gnncompile.exc import PartitionError
from gnncompile.layout.halo import joined_rows
from gnncompile.ops import own_and_halo_edges
from tests.unit.test_ordered_writes import poison_memory

WIDTH = 12
STEPS = 20


class Two(nn.Module):
    """Two layers, as PyG's users write them; `more` names the attributes that the layers take beside edges."""

    def __init__(self, one: nn.Module, two: nn.Module, *more: str) -> None:
        super().__init__()
        self.one, self.two, self.more = one, two, more

    def forward(self, x: Tensor, edge_index: Tensor, *more: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x, edge_index, *more)), edge_index, *more)


class Hetero(nn.Module):
    """Two layers of three relations between two node types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for k in range(2):
            widths = {"user": 4, "item": 5} if k == 0 else {"user": 6, "item": 6}
            convs = {kind: SAGEConv((widths[kind[0]], widths[kind[2]]), 6) for kind in RELATIONS}
            self.layers.append(HeteroConv(convs, aggr="sum"))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        for layer in self.layers:
            x_dict = {kind: rows.relu() for kind, rows in layer(x_dict, edge_index_dict).items()}
        return x_dict


class OverNodes(nn.Module):
    """Reductions over all nodes beside a layer: means, deviations, a softmax, a product, and a sum of selected rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = GCNConv(WIDTH, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        h = self.conv(x, edge_index)
        h = (h - h.mean(0)) / (h.std(dim=0) + 1)
        h = h * torch.softmax(h, dim=0) + torch.log_softmax(h, 0)
        whole = self.lin(h.t() @ h) + h[h[:, 0] > 0].sum(0)
        return h, self.lin(whole.mean(0)) + h.sum(0)


class Extremes(nn.Module):
    """Maxima, minima, norms and pools over all nodes beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = GCNConv(WIDTH, 8), GraphNorm(8)

    def forward(self, x: Tensor, edge_index: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.conv(x, edge_index))
        tops = h.amax(0) + h.amin(dim=0) * (h - 1).relu().amax(0) + h.max(dim=0)[0] * h.min(0).values + h.max()
        pools = global_max_pool(h, None) + global_mean_pool(h, group, 3).sum(0) * global_add_pool(h, group, 3)[1]
        return h, tops + pools[0]


RELATIONS = (("user", "buys", "item"), ("item", "of", "user"), ("item", "like", "item"))


def hetero() -> HeteroData:
    made = torch.Generator().manual_seed(3)
    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(17, 4, generator=made), torch.randn(29, 5, generator=made)
    for kind, count in zip(RELATIONS, (60, 45, 30), strict=True):
        high = torch.tensor([[data[kind[0]].num_nodes], [data[kind[2]].num_nodes]])
        data[kind].edge_index = (torch.rand(2, count, generator=made) * high).long()
    return data.apply(lambda held: held.double() if held.is_floating_point() else held)


AWKWARD = ("crossing", "islands", "tiny", "no edge")


def graph(name: str = "power law") -> Data:
    made = torch.Generator().manual_seed(7)
    if name == "crossing":  # every edge leads from one half of the nodes to the other
        data = Data(edge_index=torch.stack([torch.arange(20), (torch.arange(20) + 10) % 20]), num_nodes=20)
    elif name == "islands":  # no edge leads from one part to another, of two parts
        one = testing.uniform(10, 40, channels=None).edge_index
        data = Data(edge_index=torch.cat([one, one + 10], dim=1), num_nodes=20)
    elif name == "tiny":  # with four parts, some have no node
        data = Data(edge_index=torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 1, 1]]), num_nodes=2)
    elif name == "no edge":
        data = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=9)
    else:
        data = testing.power_law(60, 300, 20, channels=None)
    nodes, edges = int(data.num_nodes), data.edge_index.size(1)
    data.x = torch.randn(nodes, WIDTH, generator=made, dtype=torch.float64)
    data.edge_attr = torch.randn(edges, 3, generator=made, dtype=torch.float64)
    data.edge_type = torch.randint(3, (edges,), generator=made)
    data.y = torch.randint(4, (nodes,), generator=made)
    return data


def _mlp(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, out), nn.BatchNorm1d(out), nn.ReLU(), nn.Linear(out, out))


def _pna(width: int, out: int) -> PNAConv:
    return PNAConv(width, out, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([1, 5, 8, 20]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: Two(GCNConv(WIDTH, 8), GCNConv(8, 4)),
    "sage": lambda: Two(SAGEConv(WIDTH, 8), SAGEConv(8, 4)),
    "gat": lambda: Two(GATConv(WIDTH, 4, heads=2), GATConv(8, 4)),
    "gin": lambda: Two(GINConv(_mlp(WIDTH, 8)), GINConv(_mlp(8, 4))),
    "pna": lambda: Two(_pna(WIDTH, 8), _pna(8, 4)),
    "rgcn": lambda: Two(RGCNConv(WIDTH, 8, 3), RGCNConv(8, 4, 3), "edge_type"),
    "mesh": lambda: MeshGraphNet(WIDTH, 3, 8, 2, 4),
}


def arguments(name: str, data: Any) -> tuple[Any, ...]:
    """Returns the arguments of a model."""
    if name == "hetero":
        return data.x_dict, data.edge_index_dict
    if name == "mesh":
        return data.x, data.edge_index, data.edge_attr
    return (data.x, data.edge_index, data.edge_type) if name == "rgcn" else (data.x, data.edge_index)


@dataclass(frozen=True)
class Here:
    """The process that this code runs in, during one check."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    inductor: bool

    def compile(self, model: nn.Module, mode: str | None = None, **options: Any) -> Any:
        return gnncompile.compile(model, mode=mode, mesh=self.mesh, options={"inductor": self.inductor, **options})

    def part(self, data: Any, method: str = "contiguous") -> gnncompile.Part:
        return gnncompile.partition(data, self.size, method)[self.rank].to(self.device)

    def model(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]().double().to(self.device)


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-9, atol=1e-10, msg=lambda m: f"{what}: {m}")


def same_gradients(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            same(one.grad, other.grad, f"the gradient of {name}")


def trains(name: str, here: Here) -> None:
    """Outputs, input gradients and parameters over 20 steps of training equal those of one process."""
    whole, part = graph(), here.part(graph(), "rcm")
    theirs = here.model(name).cpu()
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (theirs, ours)]
    mask = torch.rand(int(whole.num_nodes), generator=torch.Generator().manual_seed(1)) < 0.5
    whole.x.requires_grad_()
    part.data.x.requires_grad_()
    for step in range(STEPS):
        whole.x.grad = part.data.x.grad = None
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = theirs(*arguments(name, whole))
        F.cross_entropy(wanted[mask], whole.y[mask]).backward()
        found = compiled(*arguments(name, part.data))
        losses = F.cross_entropy(found, part.data.y, reduction="none")
        nodes = part.nodes[""].cpu()
        loss = gnncompile.mean_over_parts(losses, here.mesh, mask[nodes].to(here.device))
        loss.backward()
        same(found, wanted[nodes], f"the output of step {step}")
        same(loss, F.cross_entropy(wanted[mask], whole.y[mask]), f"the loss of step {step}")
        same_gradients(ours, theirs)
        same(part.data.x.grad, whole.x.grad[nodes], "the gradient of x")
        for optimizer in optimizers:
            optimizer.step()
    for (key, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        same(one, other, key)
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


def hetero_models(here: Here) -> tuple[HeteroData, Any, Hetero, Hetero]:
    """Returns a graph with node types, its part, a model on the CPU and its copy on the device of the part."""
    whole, part = hetero(), here.part(hetero())
    torch.manual_seed(0)
    theirs = Hetero().double()
    theirs(whole.x_dict, whole.edge_index_dict)
    return whole, part, theirs, copy.deepcopy(theirs).to(here.device)


def hetero_model(here: Here) -> None:
    whole, part, theirs, ours = hetero_models(here)
    compiled = here.compile(ours)
    for _ in range(2):
        theirs.zero_grad()
        ours.zero_grad()
        wanted = theirs(whole.x_dict, whole.edge_index_dict)
        sum(rows.square().mean() for rows in wanted.values()).backward()  # type: ignore[union-attr]
        found = compiled(part.data.x_dict, part.data.edge_index_dict)
        losses = [gnncompile.mean_over_parts(rows.square(), here.mesh) for rows in found.values()]
        sum(losses).backward()  # type: ignore[union-attr]
        for kind, rows in found.items():
            same(rows, wanted[kind][part.nodes[kind].cpu()], kind)
        same_gradients(ours, theirs)
    records = callable_of(compiled).backend.captured[0].log.exchanges  # type: ignore[union-attr]
    assert len(records) == 4, records  # both types in both layers, though three relations read them


def awkward_graphs(here: Here) -> None:
    """Parts without nodes, without halo, without edges, and with all edges crossing, with one captured graph."""
    theirs = here.model("gcn").cpu()
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours)
    for name in ("power law", *AWKWARD, "power law"):
        whole, part = graph(name), here.part(graph(name))
        theirs.zero_grad()
        ours.zero_grad()
        wanted = theirs(whole.x, whole.edge_index)
        wanted.square().mean().backward()
        found = compiled(part.data.x, part.data.edge_index)
        gnncompile.mean_over_parts(found.square(), here.mesh).backward()
        same(found, wanted[part.nodes[""].cpu()], name)
        same_gradients(ours, theirs)
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


def norms_over_awkward_graphs(here: Here) -> None:
    """Batch norm and aggregations over parts without nodes."""
    for name, graphs in (("gin", ("crossing", "no edge")), ("gat", AWKWARD), ("pna", AWKWARD)):
        theirs = here.model(name).cpu()
        compiled = here.compile(copy.deepcopy(theirs).to(here.device))
        for which in graphs:
            whole, part = graph(which), here.part(graph(which))
            same(
                compiled(part.data.x, part.data.edge_index),
                theirs(whole.x, whole.edge_index)[part.nodes[""].cpu()],
                which,
            )


def reductions_over_nodes(here: Here) -> None:
    """Reductions go over all parts, and results that all processes have alike count once."""
    whole, part = graph(), here.part(graph())
    torch.manual_seed(0)
    theirs = OverNodes().double()
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours)
    wanted, readout = theirs(whole.x, whole.edge_index)
    (wanted.square().mean() + readout.square().sum()).backward()
    found, one = compiled(part.data.x, part.data.edge_index)
    (gnncompile.mean_over_parts(found.square(), here.mesh) + one.square().sum()).backward()
    same(found, wanted[part.nodes[""].cpu()], "rows")
    same(one, readout, "the readout")
    same_gradients(ours, theirs)


def extremes_over_nodes(here: Here) -> None:
    """Maxima, graph norms and pools go over all parts, some of them without nodes; NaN stays NaN."""
    torch.manual_seed(0)
    theirs = Extremes().double()
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours)
    for name in ("power law", "islands"):
        whole, part = graph(name), here.part(graph(name))
        theirs.zero_grad()
        ours.zero_grad()
        wanted, readout = theirs(whole.x, whole.edge_index, whole.y % 3)
        (wanted.square().mean() + readout.square().sum()).backward()
        found, one = compiled(part.data.x, part.data.edge_index, part.data.y % 3)
        (gnncompile.mean_over_parts(found.square(), here.mesh) + one.square().sum()).backward()
        same(found, wanted[part.nodes[""].cpu()], "rows")
        same(one, readout, "the readout")
        same_gradients(ours, theirs)

    def tops(x: Tensor, edge_index: Tensor, group: Tensor) -> tuple[Tensor, ...]:
        return x.amax(0) + 0 * x[edge_index[0]].nan_to_num().sum(), x.max(0)[0], x.amin(), global_mean_pool(x, group, 4)

    compiled = here.compile(tops)  # type: ignore[arg-type]
    for bad in (False, True):
        whole = graph("tiny")
        whole.x[-1, 0] = torch.nan if bad else 3.0
        part = here.part(whole)
        results = compiled(part.data.x, part.data.edge_index, part.data.y)
        for one, other in zip(results, tops(whole.x, torch.zeros(2, 0, dtype=torch.long), whole.y), strict=True):
            torch.testing.assert_close(one.cpu(), other, equal_nan=True)


def losses_inside(here: Here) -> None:
    """A loss inside the compiled model is the mean over all nodes."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = here.model("sage")

        def forward(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
            out = self.net(x, edge_index)
            chosen = out[y > 1]
            twice = F.cross_entropy(torch.stack([out, -out], 2), torch.stack([y, y], 1), ignore_index=3)
            return F.cross_entropy(out, y) + F.mse_loss(chosen, 0 * chosen) + twice

    whole, part = graph(), here.part(graph())
    ours = Inside()
    theirs = copy.deepcopy(ours).cpu()
    wanted = theirs(whole.x, whole.edge_index, whole.y)
    found = here.compile(ours)(part.data.x, part.data.edge_index, part.data.y)
    wanted.backward()
    found.backward()
    same(found, wanted, "the loss")
    same_gradients(ours, theirs)


def train_steps(here: Here) -> None:
    """``TrainStep`` over parts: the loss is the mean over all nodes, and the norm of gradients that of all parts."""
    whole, part = graph(), here.part(graph())
    theirs = here.model("sage").cpu()
    ours = copy.deepcopy(theirs).to(here.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, ours)]
    step = gnncompile.TrainStep(
        here.compile(ours), F.cross_entropy, optimizers[1], max_norm=0.1, options={"inductor": here.inductor}
    )
    for _ in range(5):
        optimizers[0].zero_grad()
        wanted = F.cross_entropy(theirs(whole.x, whole.edge_index), whole.y)
        wanted.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizers[0].step()
        same(step(part.data.x, part.data.edge_index, target=part.data.y), wanted.detach(), "the loss")
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same(one, other, name)
    registers = REGISTERS if os.environ.get("NCCL_GRAPH_REGISTER") != "0" else None
    assert step.not_recorded == (EXCHANGES if here.device.type == "cpu" else registers), step.not_recorded


def the_same_bits(here: Here) -> None:
    ours = here.model("gat").float()
    part = here.part(graph())
    compiled = here.compile(ours)
    results = []
    for _ in range(3):
        ours.zero_grad()
        found = compiled(part.data.x.float(), part.data.edge_index)
        gnncompile.mean_over_parts(found.square(), here.mesh).backward()
        results.append([found.detach(), *(p.grad.clone() for p in ours.parameters() if p.grad is not None)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
    every: list[Any] = [None] * here.size
    dist.all_gather_object(every, [t.cpu() for t in results[0][1:]], group=here.mesh.get_group())
    assert all(torch.equal(a, b) for other in every for a, b in zip(every[0], other, strict=True))


def poisoned(here: Here) -> None:
    """With Inductor, nothing is read before it is written: memory that its code allocates holds NaN."""
    torch._dynamo.reset()
    whole, part = graph(), here.part(graph())
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):
        poison_memory(patch, here.device.type)
        for name in ("gcn", "gat", "sage"):
            theirs = here.model(name).cpu()
            ours = copy.deepcopy(theirs).to(here.device)
            compiled = here.compile(ours)
            for _ in range(2):
                for model in (theirs, ours):
                    model.zero_grad()
                wanted, found = theirs(whole.x, whole.edge_index), compiled(part.data.x, part.data.edge_index)
                wanted.square().mean().backward()
                gnncompile.mean_over_parts(found.square(), here.mesh).backward()
                same(found, wanted[part.nodes[""].cpu()], name)
                same_gradients(ours, theirs)


def structure_is_exchanged_once(here: Here) -> None:
    """Degrees are exchanged once per graph; a step exchanges rows of layers only."""
    part, compiled = here.part(graph()), here.compile(here.model("gcn"))
    compiled(part.data.x, part.data.edge_index)
    records = callable_of(compiled).backend.captured[0].log.exchanges  # type: ignore[union-attr]
    assert [(len(r.shape), r.structural) for r in records] == [(0, True), (1, False), (1, False)], records
    calls = 0
    real = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        with torch.no_grad():
            compiled(part.data.x, part.data.edge_index)
            calls = 0
            compiled(part.data.x, part.data.edge_index)
    finally:
        dist.all_to_all_single = real
    assert calls == 2, calls


def explained(here: Here) -> None:
    """The report names each exchange, with its bytes and its line."""
    part = here.part(graph())
    report = gnncompile.explain(here.compile(here.model("sage")), part.data.x, part.data.edge_index)
    found = [note for note in report.notes if note.startswith("exchanged over parts")]
    assert len(found) == 2 and "32 bytes for each halo row, in each step" in found[1], report.notes
    sent, halo, own = part.exchanges[""].send.numel(), part.halo[""].numel(), part.nodes[""].numel()
    expected = f"each exchange sends {sent} of this part's {own} rows, and receives {halo} halo rows"
    assert expected in report.notes, report.notes
    assert report.host_syncs == 0 and report.captured_graphs == 1, report
    assert "tests/partitioned.py" in found[0]


def own_edges_are_walked_first(here: Here) -> None:
    """Regions walk edges from own rows while halo rows arrive, where many arrive; else they walk all edges at once."""
    if not here.inductor:
        return  # operations run one by one
    for name in ("power law", "islands", "crossing"):
        whole, part = graph(name), here.part(graph(name))
        expected = 4 * part.halo[""].numel() >= part.nodes[""].numel()
        assert expected == (name != "islands" or here.size > 2)
        for kind in ("sage", "gat", "gcn"):
            theirs, found = here.model(kind).cpu(), []
            compiled = here.compile(copy.deepcopy(theirs).to(here.device))
            with pytest.MonkeyPatch.context() as patch:

                def walk(*args: Any, real: Any = own_and_halo_edges.walk_own_edges, found: list[bool] = found) -> Any:
                    partial = real(*args)
                    found.append(partial is not None)
                    return partial

                patch.setattr(own_and_halo_edges, "walk_own_edges", walk)
                out = compiled(*arguments(kind, part.data))
            assert found == [expected, expected], (name, kind, found)
            same(out, theirs(*arguments(kind, whole))[part.nodes[""].cpu()], f"{kind} on {name}")


def raises(error: Any, text: str, call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except error as found:
        assert text in str(found), str(found)
    else:
        raise AssertionError(f"no error with {text!r}")


def features_have_room(here: Here) -> None:
    """Compiled layers that read features receive halo rows behind them, in the same memory; other layers do not."""
    whole, part = graph(), here.part(graph())
    compiled, x = here.compile(here.model("sage")), part.data.x
    before, version, again = x.clone(), x._version, x.clone()
    for _ in range(2):
        found = compiled(x, part.data.edge_index)
    joined = joined_rows(x, part.halo[""].new_empty(part.halo[""].numel(), 0))
    assert joined.data_ptr() == x.data_ptr() and torch.equal(x, before) and x._version == version
    if here.inductor:
        same(joined[len(x) :], whole.x[part.halo[""].cpu()], "the halo rows")
    assert torch.equal(compiled(again, part.data.edge_index), found)
    with tempfile.TemporaryDirectory() as folder:
        saved = gnncompile.load_part(part.save(folder).parent, here.rank, here.size).data.x
    assert torch.equal(saved, before.cpu())


def rows_are_kept_once(here: Here) -> None:
    """The backward keeps the rows of an exchange, and not their first rows beside them."""
    if not here.inductor:
        return  # what eager keeps, it keeps
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    part = here.part(graph())
    own = part.nodes[""].numel()
    compiled = here.compile(here.model("gat"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(part.data.x, part.data.edge_index)
    joined = [t for t in kept if t.dim() > 1 and t.size(0) == own + part.halo[""].numel() and t[0].numel() >= 4]
    assert len(joined) == 2, [t.shape for t in kept]  # one of each layer
    alone = [t for t in kept if t.dim() > 1 and t.size(0) == own]
    for rows in (rows[:own].flatten(1) for rows in joined):
        assert not any(t.numel() == rows.numel() and torch.equal(t.flatten(1), rows) for t in alone)


def products_add_to_returned_gradients(here: Here) -> None:
    """Where a layer also reads own rows, its product adds to the gradients of those rows in their memory."""
    if not here.inductor:
        return  # products are what eager runs
    whole = testing.power_law(3000, 12000, 50, channels=None)
    whole.x = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    theirs, part = GraphSAGE(64, 64, num_layers=3), here.part(whole)
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours)

    def step() -> None:
        gnncompile.mean_over_parts(compiled(part.data.x, part.data.edge_index).square(), here.mesh).backward()

    *_, backward = run_and_get_code(step)[1]
    theirs(whole.x, whole.edge_index).square().mean().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[union-attr]
    returned = re.findall(r"add_arrived\((\w+),", backward)
    in_place = [rf"(_gnncompile_gemm|extern_kernels\.addmm).*\b{rows}\b.*\b{rows}\b" for rows in returned]
    assert len(returned) == 2 and all(re.search(text, backward) for text in in_place), backward


class Checkpointed(nn.Module):
    """A convolution whose inner rows the backward computes again, the exchange included."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(WIDTH, WIDTH), SimpleConv("mean")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return checkpoint(lambda: self.conv(self.lin(x).relu(), edge_index), use_reentrant=False)


def checkpoints(here: Here) -> None:
    """Processes run the same exchanges also where rows are computed again, and few rows arrive in one of them alone."""
    torch.manual_seed(0)
    nodes = 40
    inner = torch.stack([torch.arange(20), torch.arange(20).roll(1)])
    outer = torch.stack([torch.arange(20), torch.arange(20) + 20])
    edge_index = torch.cat([inner, inner + 20, outer, torch.tensor([[30], [0]])], 1)
    whole = Data(x=torch.randn(nodes, WIDTH, dtype=torch.float64), edge_index=edge_index, num_nodes=nodes)
    part, theirs = here.part(whole), Checkpointed().double()
    ours = copy.deepcopy(theirs).to(here.device)
    out = here.compile(ours)(part.data.x, part.data.edge_index)
    rows = part.nodes[""]
    gnncompile.mean_over_parts(out.square(), here.mesh).backward()
    wanted = theirs(whole.x, whole.edge_index)
    wanted.square().mean().backward()
    same(out, wanted[rows], "rows")
    same_gradients(ours, theirs)


def different_graphs(here: Here) -> None:
    """Processes that capture different exchanges, or of which one fails, raise errors that name the line."""
    part = here.part(graph())
    x, edges = part.data.x, part.data.edge_index
    torch.manual_seed(0)
    convs = [GCNConv(WIDTH, width).double().to(here.device) for width in (4, 5)]

    def wider(x: Tensor, edge_index: Tensor) -> Tensor:
        return convs[min(here.rank, 1)](x, edge_index)

    raises(PartitionError, "Exchange 2 is rank 0: an exchange of rows of 4", here.compile(wider), x, edges)  # type: ignore[arg-type]

    def fails(x: Tensor, edge_index: Tensor) -> Tensor:
        out = convs[0](x, edge_index)
        return out.cumsum(0) if here.rank == 1 else out

    expected = "cumsum goes along rows" if here.rank == 1 else "but rank 1 failed: "
    raises(PartitionError, expected, here.compile(fails), x, edges)  # type: ignore[arg-type]
    assert len(here.compile(convs[0])(x, edges)) == len(x)  # the processes still agree


def errors(here: Here) -> None:
    """Operations without a form over parts, arguments of another graph, and parts of another partition."""
    part, whole = here.part(graph()), graph()
    conv = GCNConv(WIDTH, 4).double().to(here.device)

    def over(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = here.compile(function)  # type: ignore[arg-type]
        return lambda: compiled(part.data.x, part.data.edge_index)

    def places(x: Tensor) -> Tensor:
        return torch.arange(x.size(0), device=x.device)

    raises(PartitionError, "sort", over(lambda x, e: conv(x, e).sort(0).values))
    raises(PartitionError, "cumsum", over(lambda x, e: conv(x, e).cumsum(0)))
    raises(PartitionError, "tests/partitioned.py", over(lambda x, e: conv(x, e).cumsum(0)))
    raises(PartitionError, "gives the index of a row", over(lambda x, e: conv(x, e).max(0)))
    raises(PartitionError, "by their place", over(lambda x, e: conv(x, e)[:3]))
    raises(PartitionError, "indices of nodes", over(lambda x, e: conv(x, e) * e[1].sum()))
    raises(PartitionError, "indices of nodes", over(lambda x, e: conv(x, e) * (e[1] == 3).sum()))
    raises(PartitionError, "indices of nodes", over(lambda x, e: conv(x, e)[x.size(0) - 1 - e[1]]))
    raises(
        PartitionError,
        "some of the rows",
        over(lambda x, e: conv(x, e)[torch.arange(0, x.size(0), 2, device=x.device)]),
    )
    raises(PartitionError, "indices of nodes", over(lambda x, e: conv(x, e) * places(x).view(-1, 1)))
    raises(
        PartitionError, "no destination", over(lambda x, e: x.new_zeros(x.size(0)).index_add(0, e[0], x[e[1]][:, 0]))
    )
    raises(PartitionError, "number of rows", over(lambda x, e: conv(x, e) if x.size(0) > 2 else x))
    raises(PartitionError, "random", over(lambda x, e: F.dropout(conv(x, e).sum(0), 0.5)))
    compiled = here.compile(copy.deepcopy(conv))
    raises(ValueError, "no edge list of a part", compiled, part.data.x, whole.edge_index.to(here.device))
    raises(ValueError, "found 1000 rows", compiled, torch.ones(1000, WIDTH, device=here.device), part.data.edge_index)
    raises(ValueError, "mesh=mesh", gnncompile.compile(conv), part.data.x, part.data.edge_index)
    other = gnncompile.partition(graph("crossing") if here.rank else graph(), here.size)[here.rank].to(here.device)
    raises(PartitionError, "of partition", compiled, other.data.x, other.data.edge_index)
    swapped = gnncompile.partition(graph(), here.size)[(here.rank + 1) % here.size].to(here.device)
    raises(PartitionError, "expected part k", compiled, swapped.data.x, swapped.data.edge_index)
    compiled(part.data.x, part.data.edge_index)
    raises(PartitionError, "found part", compiled, swapped.data.x, swapped.data.edge_index)


CHECKS: dict[str, Callable[[Here], None]] = {
    **{name: lambda here, name=name: trains(name, here) for name in MODELS},  # type: ignore[misc]
    **{
        f.__name__: f
        for f in (
            hetero_model,
            awkward_graphs,
            norms_over_awkward_graphs,
            reductions_over_nodes,
            extremes_over_nodes,
            losses_inside,
            train_steps,
            the_same_bits,
            poisoned,
            structure_is_exchanged_once,
            own_edges_are_walked_first,
            features_have_room,
            rows_are_kept_once,
            products_add_to_returned_gradients,
            checkpoints,
            different_graphs,
            explained,
            errors,
        )
    },
}


def checks(recorded: bool) -> dict[str, Callable[[Any], None]]:
    """Returns the checks by name."""
    if not recorded:
        return CHECKS
    from tests.recorded_parts import RECORDED  # it imports this file

    return RECORDED


def run(rank: int, size: int, device: str, out: Path, names: list[str], inductor: bool, recorded: bool = False) -> None:
    """Runs the checks in this process, and writes what failed."""
    chosen = checks(recorded)
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    failed = {}
    for name in names or chosen:
        group = dist.new_group(timeout=timedelta(seconds=60))
        mesh = DeviceMesh.from_group(group, device)
        start = time.perf_counter()
        try:
            chosen[name](Here(rank, size, here, mesh, inductor))
        except BaseException:
            failed[name] = traceback.format_exc()
            print(f"rank {rank}: {name} failed\n{failed[name]}", flush=True)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        dist.barrier()
    (out / f"{rank}.json").write_text(json.dumps(failed))


def spawned(rank: int, size: int, out: str, names: list[str], inductor: bool, recorded: bool = False) -> None:
    """The entry of a spawned process: gloo, met over a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    run(rank, size, "cpu", Path(out), names, inductor, recorded)
    dist.destroy_process_group()


def main() -> None:
    """Runs all checks under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?", help="a folder for failures (default: a new one per process)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--recorded", action="store_true")
    given = parser.parse_args()
    if given.recorded:
        os.environ["NCCL_GRAPH_REGISTER"] = "0"  # nothing is recorded without it
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    out = given.out or Path(tempfile.mkdtemp())
    run(rank, size, given.device, out, given.names, given.inductor, given.recorded)
    failed = json.loads((out / f"{rank}.json").read_text())
    print(
        f"rank {rank}: {len(given.names or checks(given.recorded)) - len(failed)} checks passed, {len(failed)} failed",
        flush=True,
    )
    dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
