"""The Triton kernels of a region. This module imports Triton, so import it only where Triton is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton.hub_tile import hub_tile, joining_tile, large_programs
from gnncompile.codegen.triton.launcher import on_device
from gnncompile.codegen.triton.plan import Part, gathered, partials, schedule
from gnncompile.codegen.triton.tile import Tile, choose_tile, of_degree, tiles_by_degree
from gnncompile.codegen.triton.tiled_kernel import TiledKernel
from gnncompile.codegen.triton.variant import Variant
from gnncompile.codegen.triton.writer import parameters
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region
from gnncompile.layout import csr
from gnncompile.layout.csr import rows_of_edges

Start = Callable[[Sequence[Tensor], Sequence[int], int, int], None]
"""A function that launches a kernel, given its tensors, its numbers, the device index and the number of programs."""


def triton_kernel(region: Region) -> TritonKernel | TritonEdgeSums | TiledKernel:
    """Returns the kernel of any region.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel.
    """
    if region.tiled:
        return TiledKernel(region, TritonKernel)
    return TritonEdgeSums(region) if region.sums_all else TritonKernel(region)


class TritonKernel:
    """The Triton kernel of a region, and further kernels for its hubs: rows with very many edges.

    The kernel that computes a row depends on the row's degree and on the numbers of rows and edges. So the bits of the
    results depend on these as well. They do not depend on what the host knows about the graph when it launches.

    Args:
        region: The region to compute.
        tile: The tile. None chooses tiles by the region, and at each launch one of them by the edges per row.

    Attributes:
        text: The generated module, for graphs with few edges per row if other graphs have kernels of their own.
        tile: The tile of that module.
        hub_texts: The further modules for hubs, in the order of their launches.
        hub_tile: The tile for pieces of hubs, or None if programs walk whole rows.

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
        """Returns this kernel, or the kernel with the tile for this graph's number of edges per row."""
        if not self._denser:
            return self
        return of_degree(self._denser, layout[1].size(0) / max(layout[0].size(0) - 1, 1), self)

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernel on the current stream of the tensors' device.

        Args:
            tensors: The region's tensors, contiguous, with ``heads * channels`` elements per row, in the dtypes of the
                region's input nodes.
            layout: The edges, ordered by the rows that the region walks; on the device of the tensors.
            outputs: The tensors to write: contiguous, with ``[num_rows, heads * channels]`` elements, or
                ``[num_edges, heads * channels]`` for a value per edge. Every row is written. Edges that are masked
                out are not written, so an output per edge must hold zeros there.

        Raises:
            ValueError: A tensor's dtype differs from its node's, or its device from that of the outputs.
        """
        kernel = self._for(layout)
        with on_device(outputs[0].get_device()):
            kernel._launch(kernel._ordinary, tensors, layout, outputs)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same without checks. The caller guarantees dtypes, devices, and that the device is the current device."""
        kernel = self._for(layout)
        kernel._launch(kernel._ordinary.trusted, tensors, layout, outputs)

    generator = "triton"

    @property
    def listing(self) -> str:
        """The generated code of all kernels."""
        found = [self.text, *self.hub_texts]
        for least, kernel in self._denser:
            found += [f"# For graphs of {least} edges per row and more:", kernel.listing]
        return "\n\n".join(found)

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """For each pass over the edges of a row, the inputs that the pass reads per edge or at the edge's other end."""
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
        large = programs * min(number, pieces // fewest)  # hubs with the most pieces come first
        counts = rows, pieces, large, hubs.most_edges if hubs is not None else tuning.TILES.hub_edges
        start(given, counts, device, -(-rows // self.tile.rows) + (pieces if self._together else 0))
        if pieces:
            for variant in self._pieces:
                variant(given, counts, device, pieces)
            for variant in self._hubs:
                variant(given, counts, device, number + large)


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of one element, for a kernel argument that no program reads or writes."""
    return torch.empty(1, dtype=dtype, device=device)


class TritonEdgeSums:
    """The Triton kernel of a region that sums over all edges.

    Each program walks a share of the edges and stores partial sums, which ``torch.sum`` then adds up.

    Args:
        region: The region to compute.
        tile: The tile. None chooses a tile by the region.

    Attributes:
        text: The generated module.
        tile: The tile of its programs.

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
        """Launches the kernel. Arguments are those of :class:`TritonKernel`; an output has a row per edge feature."""
        with on_device(outputs[0].get_device()):
            self._launch(self._variant, tensors, layout, outputs)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same without checks. The caller guarantees dtypes, devices, and that the device is the current device."""
        self._launch(self._variant.trusted, tensors, layout, outputs)

    generator = "triton"

    @property
    def listing(self) -> str:
        """The generated code."""
        return self.text

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """For each pass over the edges, the inputs that the pass reads per edge or at the edge's other end."""
        return gathered(self._region)

    def _launch(
        self,
        start: Start,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        rowptr, edges, tiles = layout[0], layout[1].size(0), tuning.TILES
        programs = min(max(edges // (tiles.edge_sum_steps * self.tile.edges), 1), tiles.edge_sum_programs)
        partial = torch.empty((programs, self._length), dtype=self._dtype, device=rowptr.device)
        rows = rows_of_edges(rowptr, edges) if self._reads_rows else rowptr
        given = (*layout, rowptr, rows, rowptr, partial, *outputs, *tensors)
        start(given, (rowptr.size(0) - 1, 0, 0, 0), rowptr.get_device(), programs)
        total = partial.sum(0)
        for offset, output in zip(self._offsets, outputs, strict=True):
            output.view(-1).copy_(total[offset : offset + output.numel()])
