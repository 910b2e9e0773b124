"""Runs a region with launches that depend on sizes alone, so that a program of any graph can be traced. Imports Triton.

A process learns from the device how many hubs a graph has, and chooses tiles by its edges per row. A traced program
can't. It launches for the largest possible number of hubs, with the tiles for the edges per row of the traced graph.
Each launch returns its results as new tensors, so no tensor of the program changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm.sized import in_parts
from gnncompile.codegen.triton import layout_kernels
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.hub_lists import NO_LARGE, Launch, list_hubs, longest_of, most_hubs
from gnncompile.codegen.triton.kernel import TritonEdgeSums, TritonKernel, triton_kernel
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.codegen.triton.program_sums import ProgramSums
from gnncompile.codegen.triton.tiled_kernel import TiledKernel
from gnncompile.codegen.triton.tiled_layers import matrix, padded_matrix
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import Region
from gnncompile.layout.csr import find_rows
from gnncompile.layout.side_table import SideTable

_lists: SideTable[dict[int, tuple[Tensor, Tensor]]] = SideTable()
"""The lists of hubs of layouts, by rowptr and by the fewest pieces of a large hub.

All regions that walk a layout in one trace read the same lists.
"""

_ANY = 0
"""Stands for the fewest pieces of a large hub in lists that have falling numbers of pieces."""

RegionKernel = TritonKernel | TritonEdgeSums | TiledKernel


def give_hubs(rowptr: Tensor, hubs: Tensor, pieces: Tensor) -> None:
    """Gives a layout of a trace the lists of its hubs, which no region makes again.

    Args:
        rowptr: The layout's rowptr.
        hubs: The table of hubs: see :func:`list_exact_hubs`.
        pieces: The table of pieces.
    """
    _lists.set(rowptr, {_ANY: (hubs, pieces)})


def run_region(
    region: Region, degree: int, tensors: Sequence[Tensor], layout: Sequence[Tensor], launch: Launch
) -> list[Tensor]:
    """Returns the outputs of a region.

    Args:
        region: The region.
        degree: The edges per row to expect, which the tiles are chosen by.
        tensors: The region's tensors, contiguous.
        layout: rowptr, col and edge of the walk.
        launch: Launches a kernel.

    Raises:
        UnsupportedRegion: The region has no Triton kernel.
    """
    rowptr, edges = layout[0], layout[1].size(0)
    outputs = []
    for out in region.outputs:
        make = rowptr.new_zeros if region.cleared(out) else rowptr.new_empty
        rows = region.rows(out, rowptr.size(0) - 1, edges)
        outputs.append(make((rows, *out.trailing), dtype=tensor_type(out.dtype)))
    return _run(triton_kernel(region), degree, list(tensors), list(layout[:3]), outputs, launch)


def bounded(index: Tensor, size: Any, wraps: bool, launch: Launch) -> Tensor:
    """Returns an index whose wrong entries are replaced by 0. A wrong entry is an error of the call.

    Args:
        index: The index.
        size: The number of rows that it reads.
        wraps: Whether negative entries count from the end.
        launch: Launches a kernel.
    """
    count, types = index.numel(), (index.dtype, index.dtype, torch.bool)
    entry = _bound.entry(("index", "safe", "bad"), types, 2, (wraps, _BOUNDED), flag="index")
    entry = replace(entry, aligned=False)  # an index may be a row of edge_index
    given = [index.reshape(-1), index.new_empty((count,))]
    return launch(entry, given, [count, size], -(-count // _BOUNDED), [1])[0].view(index.shape)


_bound, _BOUNDED = Kernel(layout_kernels.bound, num_warps=tuning.TILES.short_warps), 1024
"""The kernel of :func:`bounded`, and the entries that a program reads."""


def _run(
    kernel: RegionKernel,
    degree: int,
    tensors: list[Tensor],
    layout: list[Tensor],
    outputs: list[Tensor],
    launch: Launch,
) -> list[Tensor]:
    names = [*(f"out{k}" for k in range(len(outputs))), *(f"t{p}" for p in range(len(tensors)))]
    given = dict(zip(("rowptr", "col", "edge", *names), (*layout, *outputs, *tensors), strict=True))
    run = _Run(given, layout[0].size(0) - 1, layout[1].size(0), launch)
    if isinstance(kernel, TiledKernel):
        _run_tiles(kernel, degree, run)
    elif isinstance(kernel, TritonEdgeSums):
        _sum_edges(kernel, run)
    else:
        _run_rows(kernel.for_degree(degree), run)
    return [run.given[f"out{k}"] for k in range(len(outputs))]


@dataclass
class _Run:
    """The run of a region.

    Attributes:
        given: The tensors by the names that kernels call them. A launch replaces those that it writes.
        rows: The number of rows.
        edges: The number of edges.
        start: Launches a kernel.
    """

    given: dict[str, Tensor]
    rows: Any
    edges: Any
    start: Launch

    def launch(self, entry: Entry, programs: Any, numbers: Sequence[Any] = ()) -> None:
        """Launches a kernel whose pointers are among the given tensors."""
        names = entry.names
        written = [at for at, name in enumerate(names) if name.startswith(("out", "temp", "partial", "sums"))]
        found = self.start(entry, [self.given[name] for name in names], list(numbers), programs, written)
        self.given.update(zip([names[at] for at in written], found, strict=True))

    def empty(self, rows: Any, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a new tensor ``[rows, columns]``."""
        return self.given["rowptr"].new_empty((rows, columns), dtype=dtype)


def _run_rows(kernel: TritonKernel, run: _Run) -> None:
    counts = {"num_rows": run.rows, "num_pieces": 0, "num_large": 0, "most_edges": tuning.TILES.hub_edges}
    number = large = pieces = 0
    if kernel.hub_tile is not None:
        longest, lists = longest_of(run.edges), _lists.get(run.given["rowptr"]) or {}
        fewest = kernel.large[1] if kernel.large[0] else NO_LARGE
        fewest = _ANY if _ANY in lists else fewest
        if fewest not in lists:
            most = most_hubs(run.rows, run.edges, longest)
            lists[fewest] = list_hubs(run.given["rowptr"], *most, longest, fewest, run.start)
            _lists.set(run.given["rowptr"], lists)
        run.given["hubs"], run.given["pieces"] = lists[fewest]
        number, pieces = (one.size(0) for one in lists[fewest])
        large = kernel.large[0] * torch.sym_min(number, pieces // kernel.large[1])
        run.given["partial"] = run.empty(pieces, *kernel.partial)
        counts = {"num_rows": run.rows, "num_pieces": pieces, "num_large": large, "most_edges": longest}

    def launch(variant: Any, programs: Any) -> None:
        run.launch(variant.entry, programs, [counts[name] for name in variant.counts])

    launch(kernel.ordinary, -(-run.rows // kernel.tile.rows) + (pieces if kernel.together else 0))
    for variant in kernel.pieces:
        launch(variant, pieces)
    for variant in kernel.hubs:
        launch(variant, number + large)


def _sum_edges(kernel: TritonEdgeSums, run: _Run) -> None:
    tiles = tuning.TILES
    programs = torch.sym_max(run.edges // (tiles.edge_sum_steps * kernel.tile.edges), 1)
    programs = torch.sym_min(programs, tiles.edge_sum_programs)
    if "rows" in kernel.variant.entry.names:
        run.given["rows"] = find_rows(run.given["rowptr"], run.edges)
    run.given["partial"] = run.empty(programs, *kernel.partial)
    run.launch(kernel.variant.entry, programs, [run.rows for _ in kernel.variant.counts])
    _add_up(kernel.add_up, "partial", [name for name in run.given if name.startswith("out")], run)


def _add_up(sums: ProgramSums, partial: str, outputs: Sequence[str], run: _Run) -> None:
    """Adds up sums of programs into outputs."""
    names = (partial, *outputs)
    entry = sums.entry(names, [run.given[name].dtype for name in names])
    run.launch(entry, sums.programs, [*run.given[partial].shape, *sums.places])


def _run_tiles(kernel: TiledKernel, degree: int, run: _Run) -> None:
    region, plan, types, tensors = kernel.region, kernel.plan, kernel.types(), dict(run.given)
    run.given["rows"] = find_rows(run.given["rowptr"], run.edges) if kernel.reads_rows else run.given["rowptr"]
    for name, i in kernel.temporaries().items():
        # Rows of edges that are masked out are not written. They must not count in products.
        make = run.given["rowptr"].new_empty if region.unmasked else run.given["rowptr"].new_zeros
        run.given[name] = make((run.edges, region.nodes[i].shape[1]), dtype=tensor_type(plan.stored[i]))
    for name, size in kernel.weights().items():
        run.given[name] = in_parts(tensors[f"t{name[1:]}"], size, padded_matrix(size), False, run.start)
    if region.double:  # walks take bools as numbers
        bools = {name: t.to(torch.float64) for name, t in tensors.items() if name[0] == "t" and t.dtype is torch.bool}
        run.given.update(bools)
    for walk in kernel.walks:
        most = walk.tile.programs * tuning.TILES.processors
        programs = torch.sym_min(-(-run.edges // walk.tile.edges), most)
        if walk.add_up is not None:
            run.given["sums"] = run.empty(programs, *walk.partial)
        run.launch(walk.entry(types), programs, [run.rows, 0, run.edges])
        if walk.add_up is not None:
            _add_up(walk.add_up, "sums", walk.sums, run)
    for k, out in enumerate(region.outputs):
        if out.node in plan.products:
            left, right = (_factor(kernel, i, run) for i in region.nodes[out.node].args)
            place = run.given[f"out{k}"]
            # A single column stands for equal columns.
            product = (left.t() @ right).expand(matrix(region, region.nodes[out.node]))
            run.given[f"out{k}"] = product.reshape(place.shape).to(place.dtype)
    _run_parts(kernel, degree, tensors, run)


def _run_parts(kernel: TiledKernel, degree: int, tensors: dict[str, Tensor], run: _Run) -> None:
    """Runs the regions that reduce stored values of edges to rows."""
    given = [tensors[f"t{p}"] for p in range(kernel.region.count)]
    layout = [run.given[name] for name in ("rowptr", "col", "edge")]
    for inner, part in kernel.parts:
        assert isinstance(inner, TritonKernel)
        leaves = [run.given[kernel.plan.places[i]] for i in sorted(part.leaves)]
        outputs = [run.given[f"out{k}"] for k in part.outputs]
        found = _run(inner, degree, [*given, *leaves], layout, outputs, run.start)
        run.given.update(zip([f"out{k}" for k in part.outputs], found, strict=True))


def _factor(kernel: TiledKernel, i: int, run: _Run) -> Tensor:
    node = kernel.region.nodes[i]
    name = kernel.plan.places.get(i, f"t{node.value}")
    return run.given[name].view(run.edges, node.shape[1]).to(tensor_type(kernel.plan.factor))
