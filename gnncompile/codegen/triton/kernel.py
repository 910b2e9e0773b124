"""The Triton kernels of a region. Imports Triton, so import this module only where it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.codegen.triton.hub_tile import hub_tile, joining_tile, large_programs
from gnncompile.codegen.triton.plan import Part, gathered, partials, schedule
from gnncompile.codegen.triton.tile import PROGRAMS, SHARE, Tile, choose_tile, of_degree, tiles_by_degree
from gnncompile.codegen.triton.variant import Variant
from gnncompile.codegen.triton.writer import parameters
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region
from gnncompile.layout import csr
from gnncompile.layout.csr import rows_of_edges

Start = Callable[[Sequence[Tensor], Sequence[int], int, int], None]
"""Launches a kernel: what it is given, numbers among that, the device, and the number of programs."""


def triton_kernel(region: Region) -> TritonKernel | TritonEdgeSums:
    """The kernel of any region.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel.
    """
    return TritonEdgeSums(region) if region.sums_all else TritonKernel(region)


class TritonKernel:
    """One region as a Triton kernel, and as further ones for its hubs: rows with very many edges.

    Which of them computes a row depends on its degree and on how many rows and edges there are, so results do too, and
    not on what the host knows of the graph at the time of the launch.

    Args:
        region: What to compute.
        tile: The tile; chosen by the width of the region and, at each launch, by how many edges rows have, if left out.

    Attributes:
        text: The generated module, for graphs of few edges per row where others have kernels of their own.
        tile: What one program of it computes at a time.
        hub_texts: The modules for hubs beside it, in the order of their launches.
        hub_tile: Their tile, or None: programs walk whole rows.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel.
    """

    def __init__(self, region: Region, tile: Tile | None = None) -> None:
        plan, self._region = schedule(region), region
        (_, self.tile), *denser = tiles_by_degree(region, plan) if tile is None else [(0, tile)]
        self.hub_tile = hub_tile(region, plan, self.tile)
        self._together = plan.passes == 1
        part = Part("all" if self.hub_tile is None else "both" if self._together else "ordinary")
        self._ordinary = Variant(region, plan, self.tile, part)
        self.text = self._ordinary.text
        self._pieces: list[Variant] = []
        self._hubs: list[Variant] = []
        self._large = 0, 1
        if self.hub_tile is not None:
            if not self._together:
                self._pieces = [Variant(region, plan, self.hub_tile, Part("pieces", k)) for k in range(plan.passes)]
            if not all(map(region.per_edge, region.outputs)):
                joining = joining_tile(region, self.hub_tile)
                self._hubs = [Variant(region, plan, joining, Part("hubs"))]
                self._large = large_programs(region, joining), joining.edges + 1
        self.hub_texts = [v.text for v in (*self._pieces, *self._hubs)]
        self._partial = partials(region, plan)[1], getattr(torch, region.compute)
        self._denser = [(least, TritonKernel(region, other)) for least, other in denser]

    def _for(self, layout: Sequence[Tensor]) -> TritonKernel:
        """This kernel, or one with a tile for graphs of more edges per row."""
        if not self._denser:
            return self
        return of_degree(self._denser, layout[1].size(0) / max(layout[0].size(0) - 1, 1), self)

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernel on the current stream of the tensors' device.

        Args:
            tensors: The region's tensors, contiguous, ``heads * channels`` elements a row, in the types that its
                input nodes state.
            layout: The edges, ordered by the rows that the region walks; on the device of the tensors.
            outputs: Where results go: contiguous, ``[num_rows, heads * channels]`` elements, or
                ``[num_edges, heads * channels]`` for a value per edge. Every row is written; edges that are masked
                out are not, so an output per edge must hold zeros there.

        Raises:
            ValueError: A tensor has another type than its node, or is on another device than the outputs.
        """
        kernel = self._for(layout)
        with _on(outputs[0].get_device()):
            kernel._launch(kernel._ordinary, tensors, layout, outputs)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same for a caller who knows types and devices to be right, and the device to be the current one."""
        kernel = self._for(layout)
        kernel._launch(kernel._ordinary.trusted, tensors, layout, outputs)

    generator = "triton"

    @property
    def listing(self) -> str:
        """The generated code of all its kernels."""
        found = [self.text, *self.hub_texts]
        for least, kernel in self._denser:
            found += [f"# For graphs of {least} edges per row and more:", kernel.listing]
        return "\n\n".join(found)

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """For each pass over the edges of a row, the inputs on edges or at their other end that it reads."""
        return gathered(self._region)

    def _launch(
        self, start: Start, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        rowptr = layout[0]
        rows, device = rowptr.size(0) - 1, rowptr.get_device()
        if not rows:
            return
        hubs = csr.hubs(rowptr, layout[1].size(0)) if self.hub_tile is not None else None
        number, pieces = hubs.programs() if hubs is not None else (0, 0)
        length, dtype = self._partial
        if hubs is None or not pieces:
            given = (*layout, rowptr, rowptr, rowptr, _nothing(dtype, rowptr.device), *outputs, *tensors)
        else:
            partial = torch.empty((pieces, length), dtype=dtype, device=rowptr.device)
            given = (*layout, hubs.rows, rowptr, hubs.pieces, partial, *outputs, *tensors)
        programs, fewest = self._large
        large = programs * min(number, pieces // fewest)  # hubs with most pieces come first
        counts = rows, pieces, large, hubs.most_edges if hubs is not None else csr.HUB
        start(given, counts, device, -(-rows // self.tile.rows) + (pieces if self._together else 0))
        if pieces:
            for variant in self._pieces:
                variant(given, counts, device, pieces)
            for variant in self._hubs:
                variant(given, counts, device, number + large)


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands where a kernel reads and writes nothing."""
    return torch.empty(1, dtype=dtype, device=device)


class TritonEdgeSums:
    """A region that sums over all edges: each program walks a share of them, and what they stored is added up.

    Args:
        region: What to compute.
        tile: The tile; chosen by the width of the region if left out.

    Attributes:
        text: The generated module.
        tile: What one program computes at a time.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel.
    """

    def __init__(self, region: Region, tile: Tile | None = None) -> None:
        plan, self._region = schedule(region), region
        self.tile = tile or choose_tile(region, plan)
        part = Part("edges")
        self._variant = Variant(region, plan, self.tile, part)
        self.text = self._variant.text
        offsets, self._length = partials(region, plan)
        self._offsets = [offsets[out.node] for out in region.outputs]
        self._dtype = getattr(torch, region.compute)
        self._reads_rows = "rows" in parameters(region, plan, self.tile, part)

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernel; arguments as those of :class:`TritonKernel`, an output has a row per edge feature."""
        with _on(outputs[0].get_device()):
            self._launch(self._variant, tensors, layout, outputs)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same for a caller who knows types and devices to be right, and the device to be the current one."""
        self._launch(self._variant.trusted, tensors, layout, outputs)

    generator = "triton"

    @property
    def listing(self) -> str:
        """The generated code."""
        return self.text

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """For each pass over the edges, the inputs on edges or at their ends that it reads."""
        return gathered(self._region)

    def _launch(
        self,
        start: Start,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        rowptr, edges = layout[0], layout[1].size(0)
        programs = min(max(edges // (SHARE * self.tile.edges), 1), PROGRAMS)
        partial = torch.empty((programs, self._length), dtype=self._dtype, device=rowptr.device)
        rows = rows_of_edges(rowptr, edges) if self._reads_rows else rowptr
        given = (*layout, rowptr, rows, rowptr, partial, *outputs, *tensors)
        start(given, (rowptr.size(0) - 1, 0, 0, 0), rowptr.get_device(), programs)
        total = partial.sum(0)
        for offset, output in zip(self._offsets, outputs, strict=True):
            output.view(-1).copy_(total[offset : offset + output.numel()])


def _on(device: int) -> AbstractContextManager[object]:
    """Makes a device the current one, if it is not: an index below 0 is the CPU."""
    other = device >= 0 and device != _compat.current_device()
    return torch.cuda.device(device) if other else nullcontext()
