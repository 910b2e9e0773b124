"""Checks of tests/partitioned.py that record: steps over parts are replayed, and give what one process gives.

    torchrun --nproc-per-node 2 -m tests.partitioned --device cuda --inductor --recorded

With NCCL the steps are CUDA graphs, collectives included. On a CPU tapes stand in for CUDA graphs, and gloo for NCCL.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.cudagraphs import cuda_graph, mesh_pool
from gnncompile.cudagraphs.mesh_pool import MeshCudaGraphPool
from gnncompile.exc import PartitionError
from gnncompile.layout import agreement
from tests.partitioned import (
    AWKWARD,
    MODELS,
    STEPS,
    Here,
    arguments,
    graph,
    hetero_models,
    raises,
    same,
    same_gradients,
)
from tests.tape import tapes

WARM = 2

kept: list[Any] = []
"""Steps that live on when the process groups are destroyed: NCCL would wait for their CUDA graphs for ever."""


@contextmanager
def recording(here: Here) -> Iterator[None]:
    """Makes steps over gloo be recorded on tapes; changes nothing on a GPU."""
    torch._dynamo.reset()
    if here.device.type != "cpu":
        yield
        return
    with tapes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_pool, "why_not", lambda group: None)
        yield


class Both:
    """A model in a plain loop in one process, and its copy in a recorded ``TrainStep`` over parts."""

    def __init__(self, here: Here, name: str, most: int = 16) -> None:
        self.here, self.name = here, name
        self.theirs = here.model(name).cpu()
        self.ours = copy.deepcopy(self.theirs).to(here.device)
        # Adam on a GPU counts its steps in float32, and SGD in float64 has a new recording for each learning rate.
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.theirs, self.ours)]
        self.step = gnncompile.TrainStep(
            here.compile(self.ours),
            F.cross_entropy,
            self.optimizers[1],
            max_norm=0.5,
            options={"inductor": here.inductor, "recordings": most},
        )
        kept.append(self.step)

    def __call__(self, whole: Data, data: Any) -> Tensor:
        """Runs a step of both, and compares the losses."""
        self.optimizers[0].zero_grad()
        wanted = F.cross_entropy(self.theirs(*arguments(self.name, whole)), whole.y)
        wanted.backward()
        nn.utils.clip_grad_norm_(self.theirs.parameters(), 0.5)
        self.optimizers[0].step()
        found: Tensor = self.step(*arguments(self.name, data), target=data.y)
        same(found, wanted.detach(), "the loss")
        return found

    @property
    def pool(self) -> MeshCudaGraphPool:
        """What has recorded the steps."""
        (plan,) = self.step._plans
        assert isinstance(plan.recordings, MeshCudaGraphPool)
        return plan.recordings

    @property
    def number(self) -> int:
        """The number of recordings."""
        assert self.step.not_recorded is None, self.step.not_recorded
        return len(self.pool.recorded)

    def compare(self) -> None:
        """Compares parameters and buffers of both, and bits between processes."""
        state = self.ours.state_dict()
        for name, other in self.theirs.state_dict().items():
            same(state[name], other, name)
        every: list[Any] = [None] * self.here.size
        dist.all_gather_object(every, [t.cpu() for t in state.values()], group=self.here.mesh.get_group())
        assert all(torch.equal(a, b) for other in every for a, b in zip(every[0], other, strict=True))


def counted_replays(patch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that grows by one entry at each replay."""
    replays: list[Any] = []
    real = MeshCudaGraphPool._replay

    def replay(self: Any, recording: Any, *args: Any, **kwargs: Any) -> Any:
        replays.append(recording)
        return real(self, recording, *args, **kwargs)

    patch.setattr(MeshCudaGraphPool, "_replay", replay)
    return replays


def steps_of(name: str, here: Here) -> None:
    """Losses, parameters and buffers over 20 recorded steps are those of one process; no step asks the others."""
    both, whole, part = Both(here, name), graph(), here.part(graph())
    with pytest.MonkeyPatch.context() as patch:
        replays = counted_replays(patch)
        rounds = 0
        for step in range(STEPS):
            both(whole, part.data)
            if step == WARM + 2:
                rounds = agreement._rounds[both.pool.group]
        assert agreement._rounds[both.pool.group] == rounds
        assert len(replays) == STEPS - WARM - 1, len(replays)
    assert both.number == 1
    both.compare()


def forward_of(name: str, here: Here) -> None:
    """Outputs, input gradients and gradients of parameters of ``mode="reduce-overhead"``, and of evaluation."""
    whole, part, theirs = graph(), here.part(graph(), "rcm"), here.model(name).cpu()
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours, mode="reduce-overhead")
    kept.append(compiled)
    nodes = part.nodes[""].cpu()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (theirs, ours)]
    part.data.x.requires_grad_()
    whole.x.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        replays, rounds = counted_replays(patch), 0
        for step in range(STEPS):
            whole.x.grad = part.data.x.grad = None
            theirs.zero_grad()
            ours.zero_grad()
            wanted, found = theirs(*arguments(name, whole)), compiled(*arguments(name, part.data))
            same(found, wanted[nodes], f"the output of step {step}")
            F.cross_entropy(wanted, whole.y).backward()
            losses = F.cross_entropy(found, part.data.y, reduction="none")
            gnncompile.mean_over_parts(losses, here.mesh).backward()
            same_gradients(ours, theirs)
            same(part.data.x.grad, whole.x.grad[nodes], "the gradient of x")
            for optimizer in optimizers:
                optimizer.step()
            if step == WARM + 1:
                rounds = agreement._rounds[pools(compiled)[0].group]
        assert len(replays) == STEPS - WARM, len(replays)
        assert agreement._rounds[pools(compiled)[0].group] == rounds  # no step asks the others
    theirs.eval()
    ours.eval()
    with torch.no_grad():
        for _ in range(WARM + 2):
            same(compiled(*arguments(name, part.data)), theirs(*arguments(name, whole))[nodes], "in evaluation")
    assert [len(r.recorded) for r in pools(compiled)] == [1, 1]


def pools(compiled: Any) -> list[MeshCudaGraphPool]:
    """Returns what records the captured graphs of a compiled model."""
    program = callable_of(compiled)
    assert program is not None
    found = [captured.recordings for captured in program.backend.captured]
    assert all(isinstance(r, MeshCudaGraphPool) for r in found), found
    return found  # type: ignore[return-value]


def graphs_alternate(here: Here) -> None:
    """Recordings are used again when their graph comes again, and replaced when it does not."""
    both, names = Both(here, "sage", most=2), ("power law", "crossing", "islands")
    parts = {name: (graph(name), here.part(graph(name))) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_pool, "LONG", 4)
        for _ in range(WARM + 3):
            for name in names[:2]:
                both(parts[name][0], parts[name][1].data)
        assert both.number == 2
        replays = counted_replays(patch)
        for _ in range(4):
            for name in names[:2]:
                both(parts[name][0], parts[name][1].data)
        assert replays == replays[:2] * 4 and len({*replays}) == 2, replays
        for _ in range(4):
            for name in names[1:]:
                both(parts[name][0], parts[name][1].data)
        known = [recording for _, recording in both.pool.recorded]
        assert replays[1] in known and replays[0] not in known and both.number == 2
    both.compare()


def parts_change_in_one_rank(here: Here) -> None:
    """Two graphs whose parts are alike in one process only: all processes tell them apart."""
    one, two = graph(), graph()
    last = int(one.num_nodes) - 1
    two.edge_index = torch.cat([two.edge_index, torch.tensor([[last], [last]])], dim=1)
    for name in ("edge_attr", "edge_type"):
        two[name] = torch.cat([two[name], two[name][:1]])
    parts = [here.part(each) for each in (one, two)]
    alike = parts[0].edges[""].numel() == parts[1].edges[""].numel()
    every: list[Any] = [None] * here.size
    dist.all_gather_object(every, alike, group=here.mesh.get_group())
    assert any(every) and not all(every), every
    both = Both(here, "gat")
    for _ in range(WARM + 3):
        for whole, part in zip((one, two), parts, strict=True):
            both(whole, part.data)
    assert both.number == 2
    both.compare()


def parts_without_nodes(here: Here) -> None:
    """A part without nodes, and parts without halo or without edges, are recorded like the others."""
    for name in ("sage", "gcn"):
        both = Both(here, name)
        alone = Data(edge_index=torch.zeros(2, 3, dtype=torch.long), num_nodes=1)
        alone.x, alone.y = graph().x[:1], graph().y[:1]
        wholes = [alone, *map(graph, AWKWARD)]
        parts = [here.part(whole) for whole in wholes]
        for _ in range(WARM + 3):
            for whole, part in zip(wholes, parts, strict=True):
                both(whole, part.data)
        assert both.number == len(wholes)
        both.compare()


def inputs_move_in_one_rank(here: Here) -> None:
    """Features at another address in each step of one process: recordings copy them."""
    both, whole, part = Both(here, "sage"), graph(), here.part(graph())
    moved = []
    with pytest.MonkeyPatch.context() as patch:
        replays = counted_replays(patch)
        for step in range(STEPS):
            data = copy.copy(part.data)
            if here.rank == 1:
                data.x = part.data.x.clone()
                moved.append(data.x)
            whole.x[step] += 1  # new values arrive in all processes
            at = part.nodes[""].cpu() == step
            data.x[at.to(here.device)] += 1
            part.data.x.copy_(data.x)
            both(whole, data)
        assert len(replays) == STEPS - WARM - 1
    both.compare()


def forwards_without_backward(here: Here) -> None:
    """A forward whose result dies later in one process, in a cycle of garbage, does not part the processes."""
    whole, part, theirs = graph(), here.part(graph()), here.model("sage").cpu()
    ours = copy.deepcopy(theirs).to(here.device)
    compiled = here.compile(ours, mode="reduce-overhead")
    kept.append(compiled)
    nodes, x, edges = part.nodes[""].cpu(), part.data.x, part.data.edge_index
    wanted = theirs(whole.x, whole.edge_index)

    def loss(found: Tensor) -> Tensor:
        return gnncompile.mean_over_parts(found.square(), here.mesh)

    for _ in range(WARM + 1):
        loss(compiled(x, edges)).backward()
    assert len(pools(compiled)[0].recorded) == 1
    gc.disable()
    try:
        for _ in range(4):
            held: list[Any] = [compiled(x, edges)]
            if here.rank == 1:
                held.append(held)  # only the garbage collector ends it
            same(held[0], wanted[nodes], "the output")
    finally:
        gc.enable()
    held.clear()
    gc.collect()
    ours.zero_grad()
    wanted.square().mean().backward()
    for _ in range(3):
        first, second = compiled(x, edges), compiled(x, edges)
        for found in (first, second):
            ours.zero_grad()
            loss(found).backward()
            same_gradients(ours, theirs)


def recordings_have_the_same_bits(here: Here) -> None:
    """Two runs of recorded steps and of recorded forwards give the same bits, in all processes."""
    part, runs = here.part(graph()), []
    for _ in range(2):
        model = here.model("gat").float()
        optimizer, scheduler = settings(here, model)
        options = {"inductor": here.inductor}
        compiled = here.compile(model)
        step = gnncompile.TrainStep(compiled, F.cross_entropy, optimizer, scheduler=scheduler, options=options)
        compiled = here.compile(model, mode="reduce-overhead")
        kept.extend((step, compiled))
        x = part.data.x.float()
        losses = [step(x, part.data.edge_index, target=part.data.y).cpu() for _ in range(STEPS)]
        assert step.not_recorded is None and len(step._plans[0].recordings.recorded) == 1
        with torch.no_grad():
            outputs = [compiled(x, part.data.edge_index).cpu() for _ in range(WARM + 2)]
        runs.append([*losses, *outputs, *(p.detach().cpu() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def settings(here: Here, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Returns an optimizer and a scheduler. On a CPU they can't change: the host would read the step of Adam."""
    if here.device.type == "cpu":
        return torch.optim.SGD(model.parameters(), lr=0.01), None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)


def models_are_warmed_up(here: Here) -> None:
    """After ``warmup``, the first step is replayed; with two node types, and two exchanges in each layer."""
    whole, part, theirs, ours = hetero_models(here)
    compiled = here.compile(ours, mode="reduce-overhead")
    kept.append(compiled)
    compiled.warmup(part.data.x_dict, part.data.edge_index_dict)
    with pytest.MonkeyPatch.context() as patch:
        replays = counted_replays(patch)
        for _ in range(3):
            theirs.zero_grad()
            ours.zero_grad()
            wanted = theirs(whole.x_dict, whole.edge_index_dict)
            sum(rows.square().mean() for rows in wanted.values()).backward()  # type: ignore[union-attr]
            found = compiled(part.data.x_dict, part.data.edge_index_dict)
            sum(gnncompile.mean_over_parts(rows.square(), here.mesh) for rows in found.values()).backward()
            for kind, rows in found.items():
                same(rows, wanted[kind][part.nodes[kind].cpu()], kind)
            same_gradients(ours, theirs)
        assert len(replays) == 3, len(replays)


def captures_fail_in_one_rank(here: Here) -> None:
    """If one process can't record, none does, and all know why."""
    both, whole, part = Both(here, "sage"), graph(), here.part(graph())

    real = cuda_graph.recorder

    def broken(device: Any) -> Any:
        def record(work: Callable[[], Any]) -> Any:
            real(device)(work)  # the others do not wait for collectives of this capture
            raise torch.OutOfMemoryError("no memory left")

        return record

    with pytest.MonkeyPatch.context() as patch:
        if here.rank == 1:
            patch.setattr(cuda_graph, "recorder", broken)
        for _ in range(WARM + 4):
            both(whole, part.data)
    assert both.step.not_recorded == "rank 1 could not record it: no memory left"
    assert not both.pool.recorded
    both.compare()


def optimizers_change(here: Here) -> None:
    """A step that depends on another setting of the optimizer is recorded anew, in all processes."""
    both, whole, part = Both(here, "gcn"), graph(), here.part(graph())
    for momentum in (0.0, 0.5, 0.0):
        for optimizer in both.optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        for _ in range(WARM + 3):
            both(whole, part.data)
    assert both.number >= 2
    both.compare()


def other_partitions_are_errors(here: Here) -> None:
    """Processes that are about to record steps on parts of different partitions raise an error."""
    one, two = graph(), graph()
    two.edge_index = two.edge_index.flip(1)  # the same edges in another order: the exchanges have the same sizes
    both = Both(here, "sage")
    parts = [here.part(each) for each in (one, two)]
    for part in (parts[0], *parts):  # the first step of all is not counted: it captures
        both.step(*arguments("sage", part.data), target=part.data.y)
    mine = parts[here.rank % 2].data

    def several() -> None:
        for _ in range(WARM + 1):
            both.step(*arguments("sage", mine), target=mine.y)

    raises(PartitionError, "parts of different partitions", several)


def groups_end(here: Here) -> None:
    """The end of a process group ends the recordings that hold its collectives, and only these."""
    first = Both(here, "sage")
    group = dist.new_group()
    mesh = dist.device_mesh.DeviceMesh.from_group(group, here.device.type)
    other = Both(Here(here.rank, here.size, here.device, mesh, here.inductor), "sage")
    whole, part = graph(), here.part(graph())
    for both in (first, other):
        for _ in range(WARM + 3):
            both(whole, part.data)
    dist.barrier()
    dist.destroy_process_group(group)
    assert not other.pool.recorded and other.pool.reason == "its process group was destroyed"
    first(whole, part.data)
    assert first.number == 1


def _recorded(check: Callable[[Here], None]) -> Callable[[Here], None]:
    def run(here: Here) -> None:
        with recording(here):
            check(here)

    return run


_STEPS: dict[str, Callable[[Here], None]] = {
    **{f"steps_of_{name}": lambda here, name=name: steps_of(name, here) for name in MODELS},  # type: ignore[misc]
    **{f"forward_of_{name}": lambda here, name=name: forward_of(name, here) for name in MODELS},  # type: ignore[misc]
}
_DECISIONS = (
    graphs_alternate,
    parts_change_in_one_rank,
    parts_without_nodes,
    inputs_move_in_one_rank,
    forwards_without_backward,
    recordings_have_the_same_bits,
    captures_fail_in_one_rank,
    optimizers_change,
    models_are_warmed_up,
    other_partitions_are_errors,
    groups_end,
)
_FIRST = ("steps_of_sage", "forward_of_sage")
_CHECKS = {
    **{name: _STEPS[name] for name in _FIRST},
    **{check.__name__: check for check in _DECISIONS},
    **_STEPS,  # the slowest checks are the last ones
}

RECORDED = {name: _recorded(check) for name, check in _CHECKS.items()}
