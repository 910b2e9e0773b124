"""Whole epochs of training on sampled neighbourhoods: PyG's loop with a sampler in NumPy, and ours.

Mini-batches are checked to be subgraphs with at most the wanted neighbours, and the losses of the first steps are
compared with those of a plain loop in float64 on the same mini-batches, before any time is reported.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

from benchmarks.cases.names import UnknownNameError, chosen, named
from benchmarks.cases.sampled import CASES, SampledCase, graph, neighbour_loader, numpy_sampler, sampled_by_numpy
from benchmarks.commands import driver
from benchmarks.measuring.losses import TOLERANCE, Make, Outcome, check, plain_loop
from benchmarks.reporting import stored, tables
from benchmarks.rows.variants import VARIANTS

NAME = "sampled"
HELP = "whole epochs on sampled neighbourhoods: PyG's loop with a sampler in NumPy, and gnncompile's sampler"

CHECKED_STEPS = 2

Sample = Callable[[Tensor], int]
"""Samples around seeds and returns the number of edges."""


def _by_gnncompile(case: SampledCase, workers: int) -> Iterable[Data]:
    import gnncompile

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
        source = neighbour_loader(case, workers)
    return gnncompile.loader(source)


def _numpy_alone(case: SampledCase) -> Sample:
    sampler = numpy_sampler(case)
    return lambda seeds: int(sampler(seeds.tolist()).edge_index.size(1))


def _gnncompile_alone(case: SampledCase) -> Sample:
    from gnncompile.sampling.pyg import NeighborSampler

    sampler = NeighborSampler(graph(case), list(case.fan_outs))
    return lambda seeds: len(sampler._sample(seeds).row)


@dataclass(frozen=True)
class SampledRow:
    """One way to train: `make` makes a step of a model, `load` a loader, and `alone` its sampler."""

    name: str
    make: Make
    load: Callable[[SampledCase, int], Iterable[Data]]
    alone: Callable[[SampledCase], Sample]
    devices: tuple[str, ...] = ("cpu",)
    is_ours: bool = False


_BUILDS = {variant.name: variant.build for variant in VARIANTS}

ROWS = (
    SampledRow("eager + NumPy", plain_loop(_BUILDS["eager"]), sampled_by_numpy, _numpy_alone),
    SampledRow("eager + our sampler", plain_loop(_BUILDS["eager"]), _by_gnncompile, _gnncompile_alone, is_ours=True),
    SampledRow("gnncompile", plain_loop(_BUILDS["gnncompile"]), _by_gnncompile, _gnncompile_alone, is_ours=True),
)


@dataclass
class SampledResult(Outcome):
    """The outcome of one row.

    Attributes:
        epoch_s: the seconds of an epoch of training, loading included.
        loading_s: the seconds of an epoch of loading alone.
        edge_ns: the CPU time of the sampler alone in one thread, nanoseconds for each sampled edge.
        edges: the mean number of edges of a mini-batch.
    """

    row: SampledRow = field(kw_only=True)
    epoch_s: float | None = None
    loading_s: float | None = None
    edge_ns: float | None = None
    edges: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=None, rounds=3)
    parser.set_defaults(device="cpu")
    parser.add_argument("--cases", help="comma-separated (default: products-10th; with --quick: small)")
    parser.add_argument("--workers", type=int, default=0, help="processes that load (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a row is wrong or gnncompile failed."""
    device = torch.device(args.device)
    cases = named(CASES, (args.cases or ("small" if args.quick else "products-10th")).split(","))
    fitting = [row for row in ROWS if device.type in row.devices]
    if not fitting:
        raise UnknownNameError(f"--device: got {args.device}, expected cpu: no row samples for another device yet")
    rows = chosen(fitting, args.rows)
    rounds = 1 if args.quick else args.rounds

    def measure_case(case: SampledCase, progress: driver.Progress) -> tuple[str, driver.Records]:
        results = _Measurement(case, rows, rounds, args.workers, args.seed, progress).run()
        return format_case(results), [record(case, result, results) for result in results]

    more = {"epochs": f"median of {rounds}; {args.workers} processes load"}
    return driver.run(args, f"sampled-{device.type}", cases, measure_case, key=("case",), more=more)


class _Measurement:
    """Measures one case: checks each row, then times epochs in turns, and the samplers alone."""

    def __init__(
        self,
        case: SampledCase,
        rows: Sequence[SampledRow],
        rounds: int,
        workers: int,
        seed: int,
        progress: driver.Progress,
    ) -> None:
        self.case, self.rounds, self.workers, self.seed, self.progress = case, rounds, workers, seed, progress
        self.results = [SampledResult(row=row) for row in rows]

    def run(self) -> list[SampledResult]:
        """Measures all rows."""
        torch.manual_seed(self.seed)
        model = self.case.model()
        steps = {}
        for result in self.results:
            self.progress(f"{result.row.name}: build and check")
            step = self._prepare(result, model)
            if step is not None:
                steps[result.row.name] = step
        ready = [result for result in self.results if result.row.name in steps]
        epochs: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(self.rounds):
            for result in ready:
                self.progress(f"{result.row.name}: epoch {turn + 1} of {self.rounds}")
                epochs[result.row.name].append(self._epoch(result.row, steps[result.row.name]))
        for result in ready:
            result.epoch_s = statistics.median(epochs[result.row.name])
            self.progress(f"{result.row.name}: loading alone")
            result.loading_s = statistics.median(self._epoch(result.row, None) for _ in range(self.rounds))
            result.edge_ns, result.edges = self._sampler_alone(result.row.alone(self.case))
        self.progress("")
        return self.results

    def _prepare(self, result: SampledResult, model: nn.Module) -> Any:
        """Builds and checks one row; returns None if it failed or is wrong."""
        batches = list(islice(self._load(result.row), CHECKED_STEPS))
        wrong = next((text for text in (problem(self.case, batch) for batch in batches) if text), "")
        if wrong:
            result.status, result.message = "WRONG", wrong
            return None
        plain = plain_loop(lambda m: m)(copy.deepcopy(model).double(), _loss)
        expected = torch.stack([plain(*_arguments(batch, torch.float64)).double() for batch in batches])

        def losses(step: Any) -> Tensor:
            return torch.stack([step(*_arguments(batch)).double() for batch in batches])

        return check(result, lambda: result.row.make(copy.deepcopy(model), _loss), losses, expected, TOLERANCE)

    def _load(self, row: SampledRow) -> Iterable[Data]:
        torch.manual_seed(self.seed)
        return row.load(self.case, self.workers)

    def _epoch(self, row: SampledRow, step: Any) -> float:
        loader = self._load(row)
        start = time.perf_counter()
        for batch in loader:
            if step is not None:
                step(*_arguments(batch))
        return time.perf_counter() - start

    def _sampler_alone(self, sample: Sample) -> tuple[float, float]:
        """Returns the nanoseconds of CPU time per edge, median of an epoch's mini-batches, and the mean of edges."""
        times, edges = [], []
        with _threads(1):
            for seeds in graph(self.case).train_index.split(self.case.batch_size):
                start = time.process_time_ns()
                edges.append(sample(seeds))
                times.append((time.process_time_ns() - start) / edges[-1])
        return statistics.median(times), statistics.mean(edges)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _arguments(batch: Data, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], Any]:
    return (batch.x.to(dtype), batch.edge_index), (batch.y, batch.batch_size)


def _loss(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def problem(case: SampledCase, batch: Data) -> str:
    """Returns why a mini-batch is not a sample of the graph, or an empty string if it is one."""
    data = graph(case)
    if len(batch.n_id.unique()) != len(batch.n_id):
        return "a node occurs twice"
    if not torch.equal(batch.x, data.x[batch.n_id]) or not torch.equal(batch.y, data.y[batch.n_id]):
        return "features or labels are those of other nodes"
    source, target = batch.n_id[batch.edge_index]
    known = data.edge_index[0] * case.num_nodes + data.edge_index[1]
    if not torch.isin(source * case.num_nodes + target, known).all():
        return "an edge is not in the graph"
    wanted = torch.bincount(data.edge_index[1], minlength=case.num_nodes)[batch.n_id]
    found = torch.bincount(batch.edge_index[1], minlength=len(batch.n_id))
    seeds = int(batch.batch_size)
    if not torch.equal(found[:seeds], wanted[:seeds].clamp(max=case.fan_outs[0])):
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
    header = ["", "epoch s", f"x {first}", "loading s", "ns per edge", f"x {first}", "edges", "error"]
    cells, notes = [], []
    for result in results:
        if result.status != "ok":
            notes.append(f"{result.row.name}: {result.status}: {result.message}")
        values = (
            result.epoch_s,
            _over(result, results, "epoch_s"),
            result.loading_s,
            result.edge_ns,
            _over(result, results, "edge_ns"),
        )
        shown = [f"{value:.2f}" if value is not None else "" for value in values]
        edges = f"{result.edges:,.0f}" if result.edges is not None else ""
        error = f"{result.error:.0e}" if result.error is not None else ""
        cells.append([result.row.name, *shown, edges, error])
    return "\n".join([tables.text_table(header, cells), *notes])


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
        "error": result.error,
    }
