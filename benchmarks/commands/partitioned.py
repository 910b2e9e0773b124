"""Training steps over the parts of one graph, on several processes: started by torchrun.

    torchrun --nproc-per-node 2 -m benchmarks partitioned

Each process first runs the whole graph on its own device. Outputs and gradients over parts are compared with it before
any time is reported. The first process then times the whole graph alone, and all processes time their parts together.
A step is forward, loss, backward and the step of an optimizer; a few steps follow each other without a wait between
them, as in training, and the median over such runs is reported. The second row of a model has steps of a ``TrainStep``,
on one process and over parts; on GPUs they are recorded as CUDA graphs. The limit is the time of one process by the
number of processes, and the time in which the halo rows pass a link (``--link``), without any overlap.

    python -m benchmarks partitioned --count

counts the halo rows of up to 1,024 parts, without running a model. It estimates the time of a layer from them.
"""

import argparse
import copy
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gnncompile.models import MeshGraphNet
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_geometric.data import Data
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

import gnncompile
from benchmarks.cases.names import named
from benchmarks.measuring import environment
from examples import common
from gnncompile import testing
from gnncompile.capture.compile import callable_of

NAME = "partitioned"
HELP = "steps over the parts of one graph on several processes (torchrun), and on one"

TOGETHER = 5
"""The number of steps between two waits for the device."""

LAYERS, EDGE_FEATURES = 3, 4
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "GCN": lambda width: GCN(width, width, LAYERS, width),
    "GraphSAGE": lambda width: GraphSAGE(width, width, LAYERS, width),
    "GAT": lambda width: GAT(width, width, LAYERS, width),
    "MeshGraphNet": lambda width: MeshGraphNet(width, EDGE_FEATURES, width, LAYERS, width),
}
RECORDED_AFTER = 4
"""The number of steps of a ``TrainStep`` after which it is replayed."""

TOLERANCE = 2e-3
"""The largest difference from the whole graph, over the largest value: both round in float32."""


@dataclass(frozen=True)
class Case:
    """One graph, and how it is cut."""

    name: str
    make: Callable[[str], Data]
    method: str = "contiguous"


def _power_law(nodes: int, edges: int, most: int) -> Callable[[str], Data]:
    return lambda device: testing.power_law(nodes, edges, most, channels=None, device=device)


def _mesh(side: int) -> Callable[[str], Data]:
    return lambda device: testing.grid(side, side, channels=None)


CASES = (
    Case("powerlaw-products-5th", _power_law(489_805, 24_743_656, 8_000)),
    Case("grid-1000", _mesh(1000)),
    Case("grid-400", _mesh(400)),
    Case("small-powerlaw", _power_law(2_000, 20_000, 300)),
    Case("small-grid", _mesh(40)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", help="comma-separated (default: powerlaw-products-5th,grid-1000)")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS)[:3])
    parser.add_argument("--channels", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--seconds", type=float, default=1.0, help="timed in each row (default: %(default)s)")
    parser.add_argument("--link", type=float, default=450e9, help="bytes per second in one direction (default: NVLink)")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a step over parts")
    parser.add_argument("--count", action="store_true", help="count the halo rows of up to 1,024 parts instead")
    parser.add_argument("--quick", action="store_true", help="a smoke test on small graphs")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a result over parts is wrong."""
    if args.count:
        return _count("small-powerlaw,small-grid" if args.quick else args.cases or "powerlaw-products-5th,grid-1000")
    if "LOCAL_RANK" not in os.environ:
        print("Start this with torchrun: torchrun --nproc-per-node 2 -m benchmarks partitioned", file=sys.stderr)
        return 2
    names = args.cases or ("small-powerlaw,small-grid" if args.quick else "powerlaw-products-5th,grid-1000")
    channels = [16] if args.quick else args.channels
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # nothing is recorded without it
    os.environ.setdefault(
        "TORCH_NCCL_HIGH_PRIORITY", "1"
    )  # else an exchange waits for the kernel that it should run beside
    device = common.join_processes(args.device, "-m benchmarks partitioned")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    _say("; ".join(f"{k}: {v}" for k, v in environment.describe(device, args.argv).items()))
    status = 0
    for case in named(CASES, names.split(",")):
        data = case.make(device.type).to("cpu")
        parts = gnncompile.partition(data, dist.get_world_size(), case.method)
        part = parts[dist.get_rank()]
        _say(f"\n{case.name}: {data.num_nodes:,} nodes, {data.edge_index.size(1):,} edges\n{parts.report()}")
        _say(
            f"{'':26}{'one (ms)':>10}{'parts (ms)':>11}{'limit (ms)':>11}{'faster':>8}{'one (MiB)':>11}"
            f"{'parts (MiB)':>12}{'share':>7}"
        )
        for width in channels:
            for make in (MODELS[name] for name in args.models):
                status |= _Row(make(width), width, data, part, mesh, device, args).run()
    dist.destroy_process_group()
    return status


MEMORY, LINK = 3.35e12, 50e9
"""Bytes per second: the memory of an H100, and a link of 400 Gbit/s for each GPU, in one direction."""


def _count(names: str) -> int:
    """Prints, for growing numbers of parts, the largest halo, and the estimated time of a layer of 128 channels."""
    row = 128 * 4
    for case in named(CASES, names.split(",")):
        data = case.make("cuda" if torch.cuda.is_available() else "cpu").to("cpu")
        print(f"\n{case.name}: {data.num_nodes:,} nodes, {data.edge_index.size(1):,} edges, {case.method}")
        print(f"{'parts':>6}{'edges cut':>11}{'halo rows':>11}{'halo/own':>10}{'walk (us)':>11}{'exchange (us)':>15}")
        for n in (2**k for k in range(1, 11)):
            report = gnncompile.partition(data, n, case.method).report()
            walk = 1e6 * max(report.edges) * row / MEMORY
            exchange = 1e6 * report.seconds(128, LINK)
            share = max(report.halo) * n / max(sum(report.nodes), 1)
            print(f"{n:>6}{report.cut:>11.1%}{report.largest:>11,}{share:>10.2f}{walk:>11,.0f}{exchange:>15,.0f}")
    return 0


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class _Row:
    """One model of one width on one graph: checks it over parts, then times it."""

    def __init__(
        self,
        model: nn.Module,
        width: int,
        data: Data,
        part: gnncompile.Part,
        mesh: DeviceMesh,
        device: torch.device,
        args: argparse.Namespace,
    ) -> None:
        self.width, self.data, self.mesh, self.device = width, data, mesh, device
        self.seconds, self.link, self.profile = args.seconds, args.link, args.profile
        self.model = model.to(device)
        torch.manual_seed(0)
        for parameter in self.model.parameters():  # the same in all processes
            parameter.data.copy_(torch.randn(parameter.shape) / max(parameter.size(-1), 1) ** 0.5)
        self.nodes, self.edges = part.nodes[""], part.edges[""]
        part.data.x = self._inputs(self.nodes, self.edges)[0].cpu()
        self.part = part

    def run(self) -> int:
        """Measures plain steps and recorded ones. Returns 1 if a result is wrong."""
        return self._line(recorded=False) | self._line(recorded=True)

    def _line(self, recorded: bool) -> int:
        _forget()
        wanted, alone, alone_mib = self._whole(recorded)
        _forget()  # what the whole graph needs must not count for the part
        found, over, over_mib, told = self._parts(recorded)
        name = f"{type(self.model).__name__} {self.width}{' TrainStep' if recorded else ''}"
        wrong = _largest_difference(found, wanted)
        worst = _maximum(max(wrong.values()), self.device)
        if not worst < TOLERANCE:
            _say(f"{name:26} WRONG: {wrong}")
            return 1
        limit = alone / dist.get_world_size() + 1000 * _maximum(self.sent, self.device) / self.link
        _say(
            f"{name:26}{alone:10.2f}{over:11.2f}{limit:11.2f}{alone / over:7.2f}x{alone_mib:11,.0f}{over_mib:12,.0f}"
            f"{over_mib / alone_mib:7.2f}{told}"
        )
        return 0

    def _inputs(self, nodes: Tensor | slice, edges: Tensor | slice) -> tuple[Tensor, ...]:
        """Node features for some nodes and, for a model that takes them, edge features for some edges."""
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(int(self.data.num_nodes or 0), self.width, generator=generator)[nodes]]
        if isinstance(self.model, MeshGraphNet):
            inputs.append(torch.randn(self.data.edge_index.size(1), EDGE_FEATURES, generator=generator)[edges])
        return tuple(one.to(self.device) for one in inputs)

    def _whole(self, recorded: bool) -> tuple[dict[str, Tensor], float, float]:
        """The results on the whole graph for this part's rows, milliseconds, and the peak of memory."""
        model = copy.deepcopy(self.model)
        compiled, edges = gnncompile.compile(model), self.data.edge_index.to(self.device)
        x, *more = self._inputs(slice(None), slice(None))
        if recorded:
            together = _Recorded(model, compiled, (x, edges, *more))
            return together.results(), *self._timed(together, alone=True, recorded=True)
        step = _Step(model, lambda: compiled(x, edges, *more), lambda values: values.mean())
        found = step.results()
        found["out"] = found["out"][self.nodes]
        return found, *self._timed(step, alone=True)

    def _parts(self, recorded: bool) -> tuple[dict[str, Tensor], float, float, str]:
        """The results over this part, milliseconds, the peak of memory, and what waited for the device."""
        model = copy.deepcopy(self.model)
        part = self.part.to(self.device)  # not earlier: the peak of memory of the whole graph is that of one process
        compiled, edges = gnncompile.compile(model, mesh=self.mesh), part.data.edge_index
        x, (_, *more) = part.data.x, self._inputs(self.nodes, self.edges)
        if recorded:
            together = _Recorded(model, compiled, (x, edges, *more))
            found, (milliseconds, mib) = together.results(), self._timed(together, alone=False, recorded=True)
            return found, milliseconds, mib, together.told + self._waits(together)
        step = _Step(
            model, lambda: compiled(x, edges, *more), lambda values: gnncompile.mean_over_parts(values, self.mesh)
        )
        found, (milliseconds, mib) = step.results(), self._timed(step, alone=False)
        exchange, program = self.part.exchanges[""], callable_of(compiled)
        assert program is not None
        row = sum(r.bytes_per_row for r in program.backend.captured[0].log.exchanges if not r.structural)
        self.sent = 2 * row * max(sum(exchange.sent), sum(exchange.received))  # the forward, and the backward
        told = self._waits(step)
        if self.profile:
            told += "\n" + self._profile(step)
        return found, milliseconds, mib, told

    def _timed(self, step: Callable[[], None], alone: bool, recorded: bool = False) -> tuple[float, float]:
        """Runs steps; returns the median of milliseconds, and the peak of memory of all processes.

        With `alone`, the first process is timed while the others wait. With `recorded`, the memory is what the
        allocator has reserved: `max_memory_allocated` does not count what lives in the memory of a CUDA graph.
        """
        for _ in range(3):
            step()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        times: list[float] = []
        if not alone or dist.get_rank() == 0:
            steps = self._steps(step)
            times = [self._once(step, alone) for _ in range(steps if alone else int(_maximum(steps, self.device)))]
        dist.barrier()
        peak = float("nan")
        if self.device.type == "cuda":
            peak = (torch.cuda.max_memory_reserved() if recorded else torch.cuda.max_memory_allocated()) / 2**20
        median = statistics.median(times) if times else 0.0
        return _maximum(median, self.device), _maximum(peak, self.device)

    def _steps(self, step: Callable[[], None]) -> int:
        first = self._once(step, True)
        return max(3, min(100, int(1000 * self.seconds / (first * TOGETHER))))

    def _once(self, step: Callable[[], None], alone: bool) -> float:
        """Milliseconds of one of several steps, which all processes begin together unless one is alone."""
        if not alone:
            dist.barrier()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(TOGETHER):
            step()
        self._synchronize()
        return 1000 * (time.perf_counter() - start) / TOGETHER

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _waits(self, step: Callable[[], None]) -> str:
        """What torch says of a step in which the host waits for the device; empty if it does not wait."""
        if self.device.type != "cuda":
            return ""
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            return f"  the host waits: {str(error).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    def _profile(self, step: Callable[[], None]) -> str:
        """The kernels of one step in the first process, by their time."""
        kind = (
            torch.profiler.ProfilerActivity.CUDA if self.device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
        )
        with torch.profiler.profile(activities=[kind]) as seen:
            step()
            self._synchronize()
        spent = [(e.self_device_time_total or e.self_cpu_time_total, e.count, e.key) for e in seen.key_averages()]
        return "\n".join(f"{t / 1000:10.3f} ms {n:4} {key[:90]}" for t, n, key in sorted(spent, reverse=True)[:24])


class _Step:
    """A step of training.

    Args:
        model: The model, whose parameters are trained.
        forward: Runs it.
        mean: The mean over all nodes.
    """

    def __init__(self, model: nn.Module, forward: Callable[[], Tensor], mean: Callable[[Tensor], Tensor]) -> None:
        self.model, self.forward, self.mean = model, forward, mean
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def results(self) -> dict[str, Tensor]:
        """The output and the gradients before the first step, on the CPU."""
        out = self._backward()
        gradients = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        return {"out": out.cpu(), **gradients}

    def __call__(self) -> None:
        """Runs one step."""
        self._backward()
        self.optimizer.step()

    def _backward(self) -> Tensor:
        self.model.zero_grad()
        out = self.forward()
        self.mean(out.square()).backward()
        return out.detach()


class _Recorded:
    """A step of training as one ``TrainStep``.

    Args:
        model: The model, whose parameters are trained.
        compiled: The compiled model.
        inputs: Its arguments.
    """

    def __init__(self, model: nn.Module, compiled: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.model, self.inputs = model, inputs
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        self.step = gnncompile.TrainStep(compiled, _mean_square, optimizer)

    def results(self) -> dict[str, Tensor]:
        """The loss and the gradients of a step that is replayed, on the CPU."""
        for _ in range(RECORDED_AFTER):
            loss = self.step(*self.inputs)
        gradients = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        return {"loss": loss.cpu(), **gradients}

    def __call__(self) -> None:
        """Runs one step."""
        self.step(*self.inputs)

    @property
    def told(self) -> str:
        """Why steps are not recorded; empty if they are."""
        reason = self.step.not_recorded
        return "" if reason is None else f"  not recorded: {reason}"


def _forget() -> None:
    """Frees what was compiled, and the memory of recordings."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _mean_square(out: Tensor, target: None) -> Tensor:
    return out.square().mean()


def _largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """For each result, the largest difference over the largest value; infinity for NaN, which `max` may pass over."""
    differences = {}
    for name, expected in wanted.items():
        scale = expected.abs().max().clamp(min=1e-20) if expected.numel() else torch.ones(())
        difference = (found[name] - expected).abs().max() if expected.numel() else torch.zeros(())
        differences[name] = float((difference / scale).nan_to_num(math.inf))
    return differences


def _maximum(number: float, device: torch.device) -> float:
    """The largest number of all processes."""
    held = torch.tensor(float(number), dtype=torch.float64, device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return held.item()
