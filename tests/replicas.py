"""Checks, in two processes, compiled models in ``DistributedDataParallel``.

Results must equal those of eager replicas, and those of one process that has the batches of both.

    torchrun --nproc-per-node 2 -m tests.replicas out [--device cuda]

On GPUs the processes use NCCL if each has its own GPU, and gloo if both share one. Every check has its own process
group. So a check that fails in only one process does not disturb later checks. The processes write their failures to
``out/0.json`` and ``out/1.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool
from torch_geometric.nn.models import GAT, GCN, GIN

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from tests.sampled_replicas import check_sampled_steps, check_sampled_steps_of_chunks  # noqa: F401
from tests.tape import tapes

GRAPHS = 4
"""The number of graphs in each batch of each process."""


@dataclass(frozen=True)
class Here:
    """The process that this code runs in, during one check."""

    rank: int
    device: torch.device
    group: Any

    def wrap(self, model: nn.Module, **settings: Any) -> DistributedDataParallel:
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, devices, process_group=self.group, **settings)

    def compile(self, model: nn.Module, **settings: Any) -> Any:
        return gnncompile.compile(model, options=self.options, **settings)

    @property
    def options(self) -> dict[str, Any]:
        return {"inductor": self.device.type != "cpu"}

    @property
    def recording(self) -> Any:
        return nullcontext() if self.device.type == "cuda" else tapes()

    def batch(self, k: int) -> Any:
        """Returns batch `k` of this process. The other process's batch has another size."""
        return Batch.from_data_list(graphs(k, self.rank)).to(self.device)

    def joined(self, k: int) -> Any:
        return Batch.from_data_list([*graphs(k, 0), *graphs(k, 1)]).to(self.device)


def graphs(k: int, rank: int) -> list[Data]:
    """Returns graphs with one node, without edges, with a hub, and with doubled edges. Batch 2 has no edges."""
    made = torch.Generator().manual_seed(100 * k + rank)
    found = []
    for i in range(GRAPHS):
        nodes = 1 if i == 0 else int(torch.randint(2, 9 + 5 * rank, (1,), generator=made))
        edges = 0 if i == 1 or k == 2 else int(torch.randint(1, 25, (1,), generator=made))
        edge_index = torch.randint(nodes, (2, edges), generator=made)
        edge_index[1, ::2] = 0
        x = torch.randn(nodes, 5, generator=made, dtype=torch.float64)
        y = torch.randint(3, (1,), generator=made)
        found.append(Data(x=x, edge_index=edge_index.repeat(1, 1 + i % 2), y=y))
    return found


class Net(nn.Module):
    def __init__(self, kind: Any, norm: str | None = None) -> None:
        super().__init__()
        self.gnn, self.lin = kind(5, 8, 2, norm=norm), nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.lin(global_mean_pool(self.gnn(x, edge_index), batch, size))


class Heads(nn.Module):
    """A model with three heads. The caller chooses one by index; the last head is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn, self.heads = GCN(5, 8, 2), nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int, head: int) -> Tensor:
        return self.heads[head](global_mean_pool(self.gnn(x, edge_index), batch, size))


def made(here: Here, kind: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args).double().to(here.device)


def loss(model: Any, batch: Any, *more: Any) -> Tensor:
    return F.cross_entropy(model(batch.x, batch.edge_index, batch.batch, batch.num_graphs, *more), batch.y)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def compared(here: Here, models: list[Any], k: int, *more: Any) -> None:
    """Runs forward and backward of two models, asserts equal gradients and buffers, and keeps the gradients."""
    for model in models:
        loss(model, here.batch(k), *more).backward()
    same(gradients(models[1]), gradients(models[0]))
    same(list(models[1].buffers()), list(models[0].buffers()))


def captured_once(model: Any) -> None:
    program = callable_of(getattr(model, "module", model))
    assert program is not None
    assert len(program.backend.captured) == 1, len(program.backend.captured)


def number_recorded(model: Any) -> int:
    program = callable_of(model.module)
    assert program is not None
    return sum(len(c.recordings.recorded) for c in program.backend.captured)  # type: ignore[union-attr]


# -- compiled models ----------------------------------------------------------------------------------------------


def check_one_process_with_both_batches(here: Here, kind: Any) -> None:
    single = made(here, Net, kind)
    eager = here.wrap(copy.deepcopy(single))
    model = here.compile(here.wrap(copy.deepcopy(single)))
    breaks = _compat.graph_breaks()
    for k in range(5):
        for m in (eager, model, single):
            m.zero_grad()
        compared(here, [eager, model], k)
        loss(single, here.joined(k)).backward()
        same(gradients(model), gradients(single))
    captured_once(model)
    assert _compat.graph_breaks() == breaks


def check_small_buckets(here: Here) -> None:
    """With many small buckets, Dynamo would by default split the graph at each bucket."""
    first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 64
    try:
        eager, plain = (here.wrap(made(here, Net, GAT), bucket_cap_mb=1e-4) for _ in range(2))
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
    model = here.compile(plain)
    for k in range(4):
        compared(here, [eager, model], k)
    captured_once(model)


def check_accumulation(here: Here) -> None:
    """Accumulates gradients over two steps without synchronisation, and synchronises in the third."""
    eager = here.wrap(made(here, Net, GCN))
    plain = copy.deepcopy(eager.module)
    model = here.wrap(here.compile(plain))
    for k in range(6):
        quiet = k % 3 != 2
        with eager.no_sync() if quiet else nullcontext(), model.no_sync() if quiet else nullcontext():
            compared(here, [eager, model], k)
    captured_once(model)


def check_one_state(here: Here) -> None:
    """A compiled replica shares modules, parameters and state with the replica that it was made from."""
    plain = DistributedDataParallel(made(here, Net, GCN), [here.device] if here.device.type == "cuda" else None)
    model = here.compile(plain)
    assert isinstance(model, DistributedDataParallel) and type(model).__name__ == "DistributedDataParallel"
    assert isinstance(model.module, Net) and list(model.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert callable_of(model) is callable_of(model.module) and callable_of(plain.module) is None
    model.eval()
    assert not plain.training and not plain.module.training
    model.train()
    with plain.no_sync():
        assert not model.require_backward_grad_sync
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert callable_of(other) not in (None, callable_of(model)) and other.module is not model.module
    plain.zero_grad()
    compared(here, [copy.deepcopy(plain), other], 0)
    captured_once(other)


def check_explain(here: Here) -> None:
    """``explain`` runs in one process, without the other."""
    model = here.compile(here.wrap(made(here, Net, GCN)))
    if here.rank == 0:
        batch = here.batch(0)
        report = gnncompile.explain(model, batch.x, batch.edge_index, batch.batch, GRAPHS)
        assert (report.captured_graphs, report.graph_breaks) == (1, 0)


# -- recorded models ----------------------------------------------------------------------------------------------


def check_recorded(here: Here) -> None:
    """The first process repeats one batch, and replays. The second has a new batch each time, and never replays."""
    eager = here.wrap(made(here, Net, GIN, "batch_norm"))
    model = here.compile(here.wrap(copy.deepcopy(eager.module), gradient_as_bucket_view=True), mode="reduce-overhead")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (eager, model)]
    batches = [here.batch(k) for k in range(8)]
    for k in range(8):
        for m, optimizer in zip((eager, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss(m, batches[0 if here.rank == 0 else k]).backward()
            optimizer.step()
        same(model.state_dict(), eager.state_dict())
    assert number_recorded(model) == (here.rank == 0)
    captured_once(model)


def check_recorded_accumulation(here: Here) -> None:
    eager = here.wrap(made(here, Net, GAT))
    model = here.wrap(here.compile(copy.deepcopy(eager.module), mode="reduce-overhead"), static_graph=True)
    batch = here.batch(0)
    for k in range(9):
        if k % 3 == 0:
            eager.zero_grad(), model.zero_grad()
        quiet = k > 2 and k % 3 != 2
        for m in (eager, model):
            with m.no_sync() if quiet else nullcontext():
                loss(m, batch).backward()
        same(gradients(model), gradients(eager))
    assert number_recorded(model) == 1


def check_recorded_with_unused_parameters(here: Here) -> None:
    eager = here.wrap(made(here, Heads), find_unused_parameters=True)
    plain = here.wrap(copy.deepcopy(eager.module), find_unused_parameters=True)
    model = here.compile(plain, mode="reduce-overhead")
    batch = here.batch(0)
    for k in range(10):
        eager.zero_grad(), model.zero_grad()
        for m in (eager, model):
            loss(m, batch, here.rank if k > 4 else 0).backward()
        same(gradients(model), gradients(eager))
        assert [h.weight.grad is None for h in model.module.heads] == [False, k < 5, True]
    assert number_recorded(model) == 1 + here.rank


# -- whole steps --------------------------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


class Pair:
    """A model in a plain training loop, and a copy of the model in a ``TrainStep``."""

    def __init__(self, here: Here, model: nn.Module, criterion: Any = F.cross_entropy, **settings: Any) -> None:
        self.here, self.criterion = here, criterion
        self.plain = here.wrap(copy.deepcopy(model), **settings.pop("replica", {}))
        self.replica = here.wrap(model, find_unused_parameters=self.plain.find_unused_parameters)
        self.plain_criterion = copy.deepcopy(criterion)
        extra = [list(c.parameters()) if isinstance(c, nn.Module) else [] for c in (self.plain_criterion, criterion)]
        ours = sgd([*model.parameters(), *extra[1]])
        self.optimizer = sgd([*self.plain.parameters(), *extra[0]])
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (self.optimizer, ours)]
        self.max_norm = settings.get("max_norm")
        self.step = gnncompile.TrainStep(
            here.compile(self.replica) if self.max_norm else self.replica,
            criterion,
            ours,
            scheduler=self.schedules[1],
            options=here.options,
            **settings,
        )

    def compare(self, batch: Any, *more: Any) -> None:
        inputs = (batch.x, batch.edge_index, batch.batch, GRAPHS, *more)
        self.optimizer.zero_grad()
        expected = self.plain_criterion(self.plain(*inputs), batch.y)
        expected.backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], self.max_norm)
        self.optimizer.step()
        self.schedules[0].step()
        found = self.step(*inputs, target=batch.y)
        same(found, expected.detach())
        same(self.replica.state_dict(), self.plain.state_dict())
        same(gradients(self.replica), gradients(self.plain))

    @property
    def recorded(self) -> tuple[int, int]:
        updates = self.step._updates
        return sum(len(plan.recordings.recorded) for plan in self.step._plans), len(updates.recorded if updates else ())


def check_step(here: Here) -> None:
    both = Pair(here, made(here, Net, GIN, "batch_norm"), max_norm=0.05)
    batches = [here.batch(k) for k in range(9)]
    for k in range(9):
        both.compare(batches[0 if here.rank == 0 else k])
    assert both.step.not_recorded is None
    assert both.recorded[0] == (here.rank == 0) and both.recorded[1] >= 1, both.recorded


def check_step_with_unused_parameters(here: Here) -> None:
    both = Pair(here, made(here, Heads), replica={"find_unused_parameters": True})
    batch = here.batch(0)
    for k in range(12):
        both.compare(batch, here.rank if k > 4 else 0)
    assert both.recorded[0] == 1 + here.rank and both.recorded[1] >= 2, both.recorded


class Scaled(nn.Module):
    """A loss with a parameter of its own, which is in no replica."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out * self.scale, target)


def check_step_with_parameters_of_its_own(here: Here) -> None:
    criterion = Scaled().to(here.device)
    both = Pair(here, made(here, Net, GCN), criterion)
    batch = here.batch(0)
    for _ in range(7):
        both.compare(batch)
        same(criterion.scale, both.plain_criterion.scale)
    assert both.recorded[0] == 1


def check_step_with_a_scaler(here: Here) -> None:
    """Gradients are infinite at first; on a CPU, in one process only. Both processes must skip the same steps."""

    def criterion(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) * (1 if here.rank else 100)

    on_gpu = here.device.type == "cuda"
    kind, scale = (torch.float16, 2.0**40) if on_gpu else (None, 2.0**127)
    model = made(here, Net, GCN).float()
    plain, replica = here.wrap(copy.deepcopy(model)), here.wrap(model)
    # On a GPU, the scale falls at once from one that makes all gradients infinite to one that makes none infinite. For
    # a scale in between, the order of sums in float16 decides whether a gradient is infinite.
    scaling = {"backoff_factor": 2.0**-32, "growth_interval": 100} if on_gpu else {"growth_interval": 4}
    scalers = [torch.amp.GradScaler(here.device.type, init_scale=scale, **scaling) for _ in range(2)]
    # Not Adam: its steps are as long where a gradient is only rounding error. In float16 the two models would diverge.
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, fused=True) for m in (plain, replica)]
    settings = {"scaler": scalers[1], "max_norm": 1.0, "autocast": kind, "options": here.options}
    step = gnncompile.TrainStep(replica, criterion, optimizers[1], **settings)
    batch = here.batch(0)
    inputs = (batch.x.float(), batch.edge_index, batch.batch, GRAPHS)
    for _ in range(40):
        optimizers[0].zero_grad()
        with torch.autocast(here.device.type, kind) if on_gpu else nullcontext():
            expected = criterion(plain(*inputs), batch.y)
        scalers[0].scale(expected).backward()
        scalers[0].unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scalers[0].step(optimizers[0])
        scalers[0].update()
        found = step(*inputs, target=batch.y)
    close = 2e-2 if on_gpu else 1e-4
    torch.testing.assert_close(found, expected.detach(), rtol=close, atol=close)
    assert scalers[0].get_scale() == scalers[1].get_scale() < scale
    assert step._plans[0].recordings.recorded


def check_step_with_hooks(here: Here) -> None:
    both = Pair(here, made(here, Net, GCN))
    for model in (both.plain, both.replica):
        model.module.lin.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    batch = here.batch(0)
    for _ in range(5):
        both.compare(batch)
    assert both.step.not_recorded == "a parameter has a hook"


def check_step_that_breaks(here: Here) -> None:
    def broken(out: Tensor, target: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.cross_entropy(out, target)

    both = Pair(here, made(here, Net, GCN), broken)
    for _ in range(5):
        both.compare(here.batch(0))
    assert both.step.not_recorded == "the graph breaks"


def check_what_steps_refuse(here: Here) -> None:
    batch = here.batch(0)
    inputs = (batch.x, batch.edge_index, batch.batch, GRAPHS)

    def step(replica: Any) -> Any:
        return gnncompile.TrainStep(replica, F.cross_entropy, sgd(replica.parameters()), options=here.options)

    hooked = here.wrap(made(here, Net, GCN))
    hooked.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    raises(ValueError, "register_comm_hook", lambda: step(hooked))
    plain = here.wrap(made(here, Net, GCN))
    with plain.no_sync():
        raises(ValueError, "no_sync", lambda: step(plain))
    unused = step(here.wrap(made(here, Heads)))
    raises(RuntimeError, "heads.1.weight: found no gradient", lambda: unused(*inputs, 0, target=batch.y))
    sparse = [parameter.detach().to_sparse() for parameter in unused._averaging.parameters]
    raises(RuntimeError, "found a gradient of layout torch.sparse_coo", lambda: unused._averaging.keep(sparse))


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


CHECKS: dict[str, Callable[[Here], None]] = {
    "GCN": lambda here: check_one_process_with_both_batches(here, GCN),
    "GAT": lambda here: check_one_process_with_both_batches(here, GAT),
    **{name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")},
}
del CHECKS["one_process_with_both_batches"]


def failures(rank: int, device: torch.device, only: list[str]) -> Iterator[tuple[str, str]]:
    """Runs the checks; yields the name of each with its traceback, which is empty if the check passed."""
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        torch._dynamo.reset()
        group = dist.new_group(timeout=timedelta(seconds=120))
        here, start, error = Here(rank, device, group), time.perf_counter(), ""
        try:
            with here.recording if "recorded" in name or "step" in name else nullcontext():
                check(here)
        except Exception:
            error = traceback.format_exc()
        if rank == 0:
            print(f"{time.perf_counter() - start:6.1f} s  {name}{'  FAILED' if error else ''}", flush=True)
        dist.barrier() if device.type == "cpu" else dist.all_reduce(torch.zeros(1))
        yield name, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="*", default=[], choices=list(CHECKS), help="names of checks (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    own = args.device == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if own else "gloo", timeout=timedelta(seconds=300))
    found = {name: error for name, error in failures(rank, device, args.only) if error}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{rank}.json").write_text(json.dumps(found))
    for name, error in found.items():
        print(f"rank {rank}, {name}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
