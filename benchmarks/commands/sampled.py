"""Whole epochs of training on sampled neighbourhoods, Adam included: PyG's loop, and ours.

Mini-batches are checked to be subgraphs with at most the wanted neighbours. The losses of the first steps are compared
with those of a plain loop in float64 on the same mini-batches. The model is trained, and must classify other nodes. All
this happens before any time is reported.

    torchrun --nproc-per-node 2 -m benchmarks sampled --device cuda

compares epochs on several GPUs with epochs on one. Without a GPU, the processes are on CPUs.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

from benchmarks.cases.names import UnknownNameError, chosen, named
from benchmarks.cases.sampled import CASES, SampledCase, graph, known_edges, neighbour_loader
from benchmarks.commands import driver, sampled_together
from benchmarks.measuring import measure
from benchmarks.measuring.errors import first_line
from benchmarks.measuring.losses import TOLERANCE, Outcome, check, plain_loop
from benchmarks.reporting import stored, tables
from benchmarks.rows.sampled import ROWS, Sample, SampledRow

NAME = "sampled"
HELP = "whole epochs on sampled neighbourhoods: PyG's loop, and gnncompile's samplers on CPUs and GPUs"

CHECKED_STEPS = 2

LEARNED_STEPS = 100
"""The fewest steps of training before the accuracy is measured. Training stops at the end of an epoch."""

DEFAULT_CASES = {"cpu": "products-10th", "cuda": "products,papers-quarter"}
DEFAULT_WORKERS = {"cpu": 0, "cuda": 8}


@dataclass
class SampledResult(Outcome):
    """The outcome of one row.

    Attributes:
        epoch_s: the seconds of an epoch of training, loading included.
        loading_s: the seconds of an epoch of loading alone.
        edge_ns: the CPU time of the sampler alone in one thread, nanoseconds for each sampled edge.
        edges: the mean number of edges of a mini-batch.
        accuracy: the share of other nodes that the model classified right after training.
        hits: the share of features that came from the cache of the loader.
    """

    row: SampledRow = field(kw_only=True)
    epoch_s: float | None = None
    loading_s: float | None = None
    edge_ns: float | None = None
    edges: float | None = None
    accuracy: float | None = None
    hits: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=None, rounds=3)
    parser.set_defaults(device="cpu")
    parser.add_argument(
        "--cases", help="comma-separated (default: products-10th; products and papers-quarter on a GPU)"
    )
    parser.add_argument("--workers", type=int, help="processes that load (default: 0 on a CPU, 8 on a GPU)")
    parser.add_argument("--alone", action="store_true", help="time only the samplers for CPUs, in one thread")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    fitting = [row for row in ROWS if device.type in row.devices]
    if not fitting:
        raise UnknownNameError(f"--device: got {args.device}, expected cpu or cuda: no row trains on another device")
    usual = "small" if args.quick else DEFAULT_CASES[device.type]
    cases = named(CASES, (args.cases or usual).split(","))
    rows = chosen(fitting, args.rows)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        together = [row for row in rows if row.is_together or args.rows]
        return sampled_together.run(args, cases, together, _loss)
    rounds = 1 if args.quick else args.rounds
    workers = (0 if args.quick else DEFAULT_WORKERS[device.type]) if args.workers is None else args.workers

    def measure_case(case: SampledCase, progress: driver.Progress) -> tuple[str, driver.Records]:
        measurement = Measurement(case, rows, rounds, workers, args.seed, progress, device)
        results = measurement.run_alone() if args.alone else measurement.run()
        return format_case(results), [record(case, result, results) for result in results]

    more = {"epochs": f"median of {rounds}; {workers} processes load where the CPU samples"}
    return driver.run(args, f"sampled-{device.type}", cases, measure_case, key=("case",), more=more)


class Measurement:
    """Measures one case: checks each row, then times epochs in turns, and the samplers alone."""

    def __init__(
        self,
        case: SampledCase,
        rows: Sequence[SampledRow],
        rounds: int,
        workers: int,
        seed: int,
        progress: driver.Progress,
        device: torch.device | str = "cpu",
    ) -> None:
        self.case, self.rounds, self.workers, self.seed, self.progress = case, rounds, workers, seed, progress
        self.device = torch.device(device)
        self.results = [SampledResult(row=row) for row in rows]
        self.loaders: dict[str, Iterable[Data]] = {}

    def run(self) -> list[SampledResult]:
        """Measures all rows."""
        torch.manual_seed(self.seed)
        self.progress("make the graph")
        model, tested = self.case.model().to(self.device), self._tested()
        steps = {}
        for result in self.results:
            self.progress(f"{result.row.name}: build and check")
            step = self._prepare(result, model, tested)
            if step is not None:
                steps[result.row.name] = step
            measure.free(self.device)
        ready = [result for result in self.results if result.row.name in steps]
        epochs: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(self.rounds):
            for result in ready:
                seconds = self._epoch(result, steps[result.row.name])
                epochs[result.row.name].append(seconds)
                self.progress(f"{result.row.name}: epoch {turn + 1} of {self.rounds} took {seconds:.2f} s")
        for result in ready:
            result.epoch_s = statistics.median(epochs[result.row.name])
            self.progress(f"{result.row.name}: loading alone")
            result.hits = _hit_rate(self.loaders[result.row.name])
            result.loading_s = statistics.median(self._epoch(result, None) for _ in range(self.rounds))
            if result.row.alone is not None:
                result.edge_ns = self._sampler_alone(result.row.alone(self.case))
        self.progress("")
        return self.results

    def run_alone(self) -> list[SampledResult]:
        """Measures only the samplers of rows that have one, in turns; each takes its fastest turn."""
        torch.manual_seed(self.seed)
        self.progress("make the graph")
        alone = {result.row.name: result.row.alone(self.case) for result in self.results if result.row.alone}
        found = [result for result in self.results if result.row.name in alone]
        for turn in range(self.rounds):
            for result in found:
                edge_ns = self._sampler_alone(alone[result.row.name])
                result.edge_ns = min(edge_ns, result.edge_ns or edge_ns)
                self.progress(f"{result.row.name}: turn {turn + 1} of {self.rounds} took {edge_ns:.1f} ns per edge")
        self.progress("")
        return found

    def _prepare(self, result: SampledResult, model: nn.Module, tested: Sequence[Data]) -> Any:
        """Builds and checks one row; returns None if it failed or is wrong."""
        try:
            loader = self.loaders[result.row.name] = result.row.load(self.case, self.device, self.workers)
            torch.manual_seed(self.seed)
            batches = list(islice(loader, CHECKED_STEPS))
        except Exception as error:
            result.status, result.message = "FAILED", first_line(error)
            return None
        wrong = next((text for text in (problem(self.case, batch) for batch in batches) if text), "")
        if wrong:
            result.status, result.message = "WRONG", wrong
            return None
        plain = plain_loop(lambda m: m)(copy.deepcopy(model).double(), _loss)
        expected = torch.stack([plain(*_arguments(batch)).double() for batch in batches])
        measure.free(self.device)
        trained = copy.deepcopy(model)

        def losses(step: Any) -> Tensor:
            return torch.stack([step(*_arguments(batch)).double() for batch in batches])

        step = check(result, lambda: result.row.make(trained, _loss), losses, expected, TOLERANCE)
        if step is not None:
            del batches
            result.accuracy = self._learn(result, step, trained, tested)
            if result.accuracy < self.case.accuracy:
                result.status = "WRONG"
                result.message = f"accuracy {result.accuracy:.2f} after training, expected {self.case.accuracy} or more"
                return None
        return step

    def _learn(self, result: SampledResult, step: Any, trained: nn.Module, tested: Sequence[Data]) -> float:
        """Trains for whole epochs; returns the accuracy on nodes without labels, of the plain model."""
        for _ in range(-(-LEARNED_STEPS * self.case.batch_size // self.case.train)):
            self._epoch(result, step)
        model = self.case.model().to(self.device)
        model.load_state_dict(trained.state_dict())
        right = total = 0
        with torch.no_grad():
            for batch in tested:
                on = batch.to(self.device)
                seeds = int(on.batch_size)
                right += int((model(on.x, on.edge_index)[:seeds].argmax(1) == on.y[:seeds]).sum())
                total += seeds
        return right / total

    def _tested(self) -> list[Data]:
        """Returns mini-batches of nodes without labels, on the CPU."""
        from gnncompile.sampling.pyg import NeighborSampler

        data, fan_outs = graph(self.case), list(self.case.fan_outs)
        sampler = NeighborSampler(
            Data(edge_index=data.edge_index, num_nodes=self.case.num_nodes), fan_outs, is_sorted=True
        )
        return list(neighbour_loader(self.case, 0, input_nodes=data.test_index, neighbor_sampler=sampler))

    def _epoch(self, result: SampledResult, step: Any) -> float:
        """Returns the seconds of an epoch, of loading alone if `step` is None."""
        torch.manual_seed(self.seed)
        edges = []
        measure.synchronize(self.device)
        start = time.perf_counter()
        for batch in self.loaders[result.row.name]:
            if step is not None:
                step(*_arguments(batch))
            edges.append(batch.edge_index.size(1))
        measure.synchronize(self.device)
        result.edges = statistics.mean(edges)
        return time.perf_counter() - start

    def _sampler_alone(self, sample: Sample) -> float:
        """Returns the nanoseconds of CPU time per edge, median of an epoch's mini-batches."""
        times = []
        with _threads(1):
            for seeds in graph(self.case).train_index.split(self.case.batch_size):
                start = time.process_time_ns()
                edges = sample(seeds)
                times.append((time.process_time_ns() - start) / edges)
        return statistics.median(times)


def _hit_rate(loader: Any) -> float | None:
    """Returns the hit rate of features in the cache of a loader; None if it has none."""
    if getattr(loader, "not_on_device", "no loader of gnncompile") is not None:
        return None
    rate: float | None = next(one.hit_rate for one in loader.report() if one.name == "x")
    return rate


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _arguments(batch: Data) -> tuple[tuple[Any, ...], Any]:
    return (batch.x, batch.edge_index), (batch.y, batch.batch_size)


def _loss(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def problem(case: SampledCase, batch: Data) -> str:
    """Returns why a mini-batch is not a sample of the graph, or an empty string if it is one."""
    data, (known, degree) = graph(case), known_edges(case)
    n_id, edge_index = batch.n_id.cpu(), batch.edge_index.cpu()
    if len(n_id.unique()) != len(n_id):
        return "a node occurs twice"
    if not torch.equal(batch.x.cpu(), data.x[n_id]) or not torch.equal(batch.y.cpu(), data.y[n_id]):
        return "features or labels are those of other nodes"
    source, target = n_id[edge_index]
    key = target * case.num_nodes + source
    if not torch.equal(known[torch.searchsorted(known, key).clamp_(max=len(known) - 1)], key):
        return "an edge is not in the graph"
    found = torch.bincount(edge_index[1], minlength=len(n_id))
    seeds = int(batch.batch_size)
    if not torch.equal(found[:seeds], degree[n_id[:seeds]].clamp(max=case.fan_outs[0])):
        return "a seed has too few or too many neighbours"
    if int(found[seeds:].max()) > max(case.fan_outs[1:]):
        return "a node has too many neighbours"
    return ""


def _over(result: SampledResult, results: Sequence[SampledResult], column: str) -> float | None:
    base, mine = getattr(results[0], column), getattr(result, column)
    return base / mine if base and mine else None


def format_case(results: Sequence[SampledResult]) -> str:
    """Returns the table of one case; a row without a time gives the reason."""
    first = results[0].row.name
    header = ["", "epoch s", f"x {first}", "loading s", "edges", "accuracy", "error"]
    header += ["hit rate"] if any(result.hits is not None for result in results) else []
    is_alone = any(result.row.alone is not None for result in results)
    header += ["ns per edge", f"x {first}"] if is_alone else []
    cells, notes = [], []
    for result in results:
        if result.status != "ok":
            notes.append(f"{result.row.name}: {result.status}: {result.message}")
        times = (result.epoch_s, _over(result, results, "epoch_s"), result.loading_s)
        alone = (result.edge_ns, _over(result, results, "edge_ns")) if is_alone else ()
        edges = f"{result.edges:,.0f}" if result.edges is not None else ""
        accuracy = f"{result.accuracy:.3f}" if result.accuracy is not None else ""
        error = f"{result.error:.0e}" if result.error is not None else ""
        hits = [f"{result.hits:.1%}" if result.hits is not None else ""] if "hit rate" in header else []
        cells.append([result.row.name, *map(_shown, times), edges, accuracy, error, *hits, *map(_shown, alone)])
    return "\n".join([tables.text_table(header, cells), *notes])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def record(case: SampledCase, result: SampledResult, results: Sequence[SampledResult]) -> dict[str, Any]:
    """Returns one row as it is stored; quantities that were not measured are None."""
    return {
        **stored.labelled(result.row, result, case=case.name),
        "epoch_s": result.epoch_s,
        "loading_s": result.loading_s,
        "edge_ns": result.edge_ns,
        "edges": result.edges,
        "epoch_over_first": _over(result, results, "epoch_s"),
        "edge_over_first": _over(result, results, "edge_ns"),
        "accuracy": result.accuracy,
        "hit_rate": result.hits,
        "error": result.error,
    }
