"""Times tiles of a layer's Triton kernels: for each region the chosen tile, and tiles near it.

A layer's forward and backward are run once. Then every region that they launch is run again with other tiles, on the
same tensors. A tile is timed only after its result was compared with that of the chosen tile. The times are for the
table of tuned numbers in gnncompile/tuning.py. Under Triton's interpreter (`TRITON_INTERPRET=1`) this also runs on a
CPU, but the times mean nothing there.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import gnncompile
from benchmarks.cases.nested import tensors as tensors_of
from benchmarks.cases.registry import Case, science_cases, select
from benchmarks.commands import driver
from benchmarks.commands.layers import KEY, SUITES
from benchmarks.measuring import measure
from benchmarks.measuring.comparison import Options
from benchmarks.measuring.errors import first_line
from benchmarks.reporting import tables
from gnncompile import tuning
from gnncompile.codegen.triton.plan import schedule
from gnncompile.codegen.triton.tile import Tile, tiles_by_degree, warps_of
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region
from gnncompile.runtime import launch

NAME = "tiles"
HELP = "other tiles for the Triton kernels of a layer"

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Tolerances of the largest difference over the largest value: other tiles add in another order."""

COLUMNS = ["", "ms", "over chosen", "difference"]


@dataclass
class Launch:
    """A launch of a region, with copies of all its arguments."""

    region: Region
    tensors: list[Tensor]
    layout: Layout
    outputs: list[Tensor]

    @property
    def degree(self) -> float:
        """The average number of edges per row."""
        return self.layout.col.numel() / max(self.layout.rowptr.numel() - 1, 1)


@dataclass
class TileResult:
    """The outcome of one tile. `status` is `ok`, FAILED or WRONG; only tiles that are `ok` have a time."""

    tile: Tile
    status: str = "ok"
    message: str = ""
    error: float | None = None
    timing: measure.Timing | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of this subcommand."""
    driver.add_arguments(parser, seconds=0.1, rounds=3, rows="all that are tried")
    driver.add_budget(parser)
    parser.add_argument("--suite", default="layers", choices=[*SUITES, "science"], help="(default: %(default)s)")
    parser.add_argument("--graph", help="as of `layers`, not for science (default: guide; all of attention)")
    parser.add_argument(
        "--layers", help="comma-separated; in the suite science as of `training --models` (default: all)"
    )
    parser.add_argument("--edges", default="1,2,4,8,16", help="edges per step (default: %(default)s)")
    parser.add_argument("--stages", default="1,2", help="stages of a program of one row (default: %(default)s)")
    parser.add_argument("--several", default="1,2,4,8", help="rows of a program of several rows (default: %(default)s)")
    parser.add_argument("--warps", help="warps of a program (default: those of the chosen tile)")
    parser.add_argument(
        "--any-rows", action="store_true", help="try several rows where the chosen tile has one as well"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the exit status is 1 if a chosen tile failed."""
    device = driver.device_of_triton(args)
    cases, tried = cases_of(args), Tried.of(args)
    how = driver.options(args)

    def measure_case(case: Case, progress: driver.Progress) -> tuple[str, driver.Records]:
        progress("one step")
        texts, records = [], []
        for number, one in enumerate(launches(case, device, how.seed)):
            progress(f"region {number}")
            results = measure_tiles(one, tiles_around(one.region, one.degree, tried), device, how)
            texts.append(format_region(number, one.region, results))
            records += [record(case, number, result, results) for result in results]
        return "\n\n".join(texts), records

    stem = f"tiles-{args.suite}-{device.type}"
    return driver.run(args, stem, cases, measure_case, key=KEY, budget=driver.Budget(args.budget))


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Returns the cases that the command line names."""
    names = args.layers.split(",") if args.layers else None
    if args.suite == "science":
        return science_cases(names)
    suite = SUITES[args.suite]
    return select(args.suite, args.graph or suite.graph, names, suite.orders[-1:])


@dataclass(frozen=True)
class Tried:
    """The numbers that tiles are made of.

    Attributes:
        edges: Edges per step.
        stages: Stages of a program of one row.
        rows: Rows of a program of several rows.
        warps: Warps of a program; without any, those that the rule takes.
        any_rows: Whether programs of several rows are tried as well where the chosen tile has one row.
    """

    edges: Sequence[int] = (1, 2, 4, 8, 16)
    stages: Sequence[int] = (1, 2)
    rows: Sequence[int] = (1, 2, 4, 8)
    warps: Sequence[int] = ()
    any_rows: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Tried":
        """Returns the numbers that the command line names."""
        lists = (args.edges, args.stages, args.several, args.warps or "")
        edges, stages, rows, warps = ([int(number) for number in text.split(",") if number] for text in lists)
        return cls(edges, stages, rows, warps, args.any_rows)


def launches(case: Case, device: torch.device, seed: int = 0) -> list[Launch]:
    """Runs one step of a case; returns a launch of each distinct region that walks edges row by row."""
    found: dict[str, Launch] = {}

    def watch(
        region: Region,
        kernel: launch.Kernel,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[], None],
    ) -> None:
        by_rows = region.walks_edges and not region.sums_all and not region.tiled
        if by_rows and region.spec not in found:
            given, walk, made = ([t.detach().clone() for t in many] for many in (tensors, layout, outputs))
            found[region.spec] = Launch(region, given, Layout(*walk[:3]), made)
        start()

    model = gnncompile.compile(case.model(device, seed))
    inputs = case.with_gradients(case.inputs(device, seed))
    with launch.watched(watch):
        out = model(*inputs)
        made = [tensor for _, tensor in tensors_of(out, "output") if tensor.requires_grad]
        torch.autograd.backward(made, [torch.randn_like(tensor) for tensor in made])
    return list(found.values())


def tiles_around(region: Region, degree: float, tried: Tried) -> list[Tile]:
    """Returns the tile chosen for `degree` edges per row, then tiles with other edges and stages, rows or heads."""
    chosen = tuning.choice(tuple(tiles_by_degree(region, schedule(region))), degree)
    several = chosen.rows > 1 or (tried.any_rows and not chosen.heads)
    others = [*(_of_rows(chosen, tried) if several else ())]
    others += _of_one_row(region, chosen, tried) if chosen.rows == 1 else ()
    return list(dict.fromkeys([chosen, *others]))


def _of_rows(chosen: Tile, tried: Tried) -> Iterator[Tile]:
    for rows, number, warps in product(tried.rows, tried.edges, tried.warps or (chosen.num_warps,)):
        yield replace(chosen, rows=rows, edges=number, num_warps=warps, stages=1, steps=1)


def _of_one_row(region: Region, chosen: Tile, tried: Tried) -> Iterator[Tile]:
    shared = (chosen.heads // 2 or 1, chosen.heads, 2 * chosen.heads, 0) if chosen.heads else (0,)
    for heads, number, depth in product(shared, tried.edges, tried.stages):
        tile = replace(chosen, heads=heads, edges=number, stages=depth)
        for warps in tried.warps or (warps_of(tile.width(region.grid)),):
            yield replace(tile, num_warps=warps)


def measure_tiles(one: Launch, tiles: Sequence[Tile], device: torch.device, how: Options) -> list[TileResult]:
    """Checks and times tiles, the chosen one first."""
    # Imported here, because Triton's interpreter must be chosen before Triton is imported.
    from gnncompile.codegen.triton.kernel import TritonKernel

    results, steps = [TileResult(tile) for tile in tiles], {}
    expected: list[Tensor] | None = None
    for number, result in enumerate(results):
        try:
            kernel, outputs = TritonKernel(one.region, result.tile), [torch.zeros_like(t) for t in one.outputs]
            kernel(one.tensors, one.layout, outputs)
        except Exception as error:
            result.status, result.message = "FAILED", first_line(error)
            continue
        expected = outputs if expected is None else expected
        result.error, within = _difference(outputs, expected)
        if not within:
            result.status, result.message = "WRONG", "it gives other numbers than the chosen tile"
            continue
        steps[str(number)] = lambda kernel=kernel, outputs=outputs: kernel(one.tensors, one.layout, outputs)
    time = measure.queued if device.type == "cuda" else measure.interleaved
    for name, timing in time(steps, device, how.seconds, how.rounds).items():
        results[int(name)].timing = timing
    return results


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, bool]:
    """Returns the largest difference relative to the largest value, and whether all tensors are within tolerance."""
    worst, within = 0.0, True
    for one, other in zip(found, expected, strict=True):
        if one.numel() == 0 or not one.is_floating_point():
            within &= torch.equal(one, other)
            continue
        error = float((one - other).abs().max() / other.abs().max().clamp(min=1e-30))
        worst, within = max(worst, error), within and error <= TOLERANCES[one.dtype]
    return worst, within


def name_of(tile: Tile) -> str:
    """Returns the description of a tile in words."""
    heads = f", {tile.heads} heads" if tile.heads else ""
    return f"{tile.rows} row(s), {tile.edges} edge(s), {tile.stages} stage(s), {tile.num_warps} warp(s){heads}"


def format_region(number: int, region: Region, results: Sequence[TileResult]) -> str:
    """Returns the table of one region, the fastest tile first."""
    title = (
        f"region {number} by {region.by.value}, {region.grid[0]} x {region.grid[1]}; chosen: {name_of(results[0].tile)}"
    )
    cells, notes = [], []
    for result in sorted(results, key=lambda one: one.timing.median if one.timing else float("inf")):
        ratio = _over_chosen(result, results)
        cells.append(
            [
                name_of(result.tile),
                f"{result.timing.median:.4f}" if result.timing else result.status,
                f"{ratio:.2f}" if ratio else "",
                "" if result.error is None else f"{result.error:.0e}",
            ]
        )
        if result.status != "ok":
            notes.append(f"{name_of(result.tile)}: {result.status}: {result.message}")
    return "\n".join([title, tables.text_table(COLUMNS, cells), *notes])


def _over_chosen(result: TileResult, results: Sequence[TileResult]) -> float | None:
    """Returns the time of a tile over the time of the chosen tile."""
    chosen = results[0].timing
    return result.timing.median / chosen.median if result.timing and chosen else None


def record(case: Case, number: int, result: TileResult, results: Sequence[TileResult]) -> dict[str, Any]:
    """Returns one tile as it is stored; quantities that were not measured are None."""
    return {
        "graph": case.graph.name,
        "model": case.name,
        "order": case.order,
        "region": number,
        "row": name_of(result.tile),
        "ours": result is results[0],
        "status": result.status,
        "message": result.message,
        "ms": result.timing and result.timing.median,
        "over_chosen": _over_chosen(result, results),
        "difference": result.error,
    }
