"""The Triton kernels of a region. This module imports Triton, so import it only where Triton is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, reduce
from operator import itemgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton import ahead
from gnncompile.codegen.triton.edge_linears import read_as_words
from gnncompile.codegen.triton.edge_sums import EdgeSumsWriter
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.hub_tile import hub_tile, joining_tile, large_programs
from gnncompile.codegen.triton.launcher import Launcher, complaint, first_launch, on_device
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.plan import Part, schedule
from gnncompile.codegen.triton.program_sums import ProgramSums
from gnncompile.codegen.triton.tile import Tile, choose_tile, tiles_by_degree
from gnncompile.codegen.triton.tiled_kernel import TiledKernel
from gnncompile.codegen.triton.writer import COUNTS, KERNEL, Writer, writer_of
from gnncompile.exc import ArgumentError
from gnncompile.ir.bits import tensor_type
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


GIVEN = (*Layout._fields, "hubs", "rows", "pieces", "partial")
"""The arguments of a launch before the outputs and tensors: the edges, the hubs' rows, the row of each edge, the pieces
of hubs, and the partial results of pieces or programs."""


class Variant:
    """One kernel of a region, with everything that does not change between calls.

    Args:
        writer: The writer of the kernel.

    Attributes:
        text: The generated module.
        counts: The numbers among the kernel's parameters, by their names in :data:`COUNTS`.
        entry: The kernel, for packages.
        compiled: The launcher for each device. Triton compiles for the alignment of pointers. So if some pointers are
            no multiples of 16, the key also has the positions of these pointers.
    """

    def __init__(self, writer: Writer) -> None:
        names, region = writer.parameters, writer.region
        self.text = writer.module()
        self._kernel: Any = getattr(load_module(self.text), KERNEL)
        self.counts = [name for name in names if name in COUNTS]
        self._counts = [COUNTS.index(name) for name in self.counts]
        self._arguments = _arguments(region, names)
        words = read_as_words(region, writer.products)
        # positions of the arguments that are read in words of 64 bits, and so must be aligned
        self._words = [at for at, name in enumerate(names) if name[0] == "t" and int(name[1:]) in words]
        self._pick = itemgetter(*(at for at, _ in self._arguments))
        self._columns = writer.tile.across(region.grid)
        options = {"num_warps": writer.tile.num_warps, "enable_fp_fusion": region.contracts}
        self._options = options if isinstance(self._kernel, triton.JITFunction) else {}  # the interpreter takes none
        pointers = tuple(name for name in names if name not in COUNTS), tuple(dtype for _, dtype in self._arguments)
        self.entry = Entry(self.text, self._kernel, *pointers, len(self.counts), self._columns, options=options)
        self.compiled: dict[int | tuple[int, ...], Launcher] = {}
        self._begun: Future[None] | None = None

    def compile_ahead(self) -> None:
        """Starts to compile the kernel in another thread. A launch waits for the result."""
        if self._begun is None:
            pointers = [dtype for _, dtype in self._arguments]
            self._begun = ahead.begin(self._kernel, pointers, [1] * len(self._counts), self._options)

    def __call__(self, given: Sequence[Tensor], counts: Sequence[int], device: int, programs: int) -> None:
        """Launches `programs` programs on the current device, whose index is -1 under Triton's interpreter.

        Args:
            given: The tensors named in :data:`GIVEN`, then the outputs, then the region's tensors. A tensor that the
                kernel does not read may be any tensor.
            counts: The numbers named in :data:`COUNTS`.
            device: The index of the device.
            programs: The number of programs, along the first axis of the grid.
        """
        arguments: list[Any] = [given[at] for at, _ in self._arguments]
        for k in self._words:
            if arguments[k].data_ptr() & 7:
                arguments[k] = arguments[k].clone()
        pointers: list[int] = []
        bits = 0
        for tensor, (_, dtype) in zip(arguments, self._arguments, strict=True):
            if tensor.dtype is not dtype or tensor.get_device() != device:
                raise ArgumentError(complaint(tensor, dtype, device))
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            bits |= pointer
        # A kernel that was compiled for aligned pointers serves every call whose pointers are all aligned.
        key = (device, *(k for k, p in enumerate(pointers) if p & 15)) if bits & 15 else device
        numbers = [counts[at] for at in self._counts]
        launcher = self.compiled.get(key)
        if launcher is not None:
            launcher(programs, self._columns, device, pointers + numbers)
            return
        if self._begun is not None:
            self._begun.result()
        launcher = first_launch(self._kernel, programs, self._columns, arguments, numbers, options=self._options)
        if launcher is not None:
            self.compiled[key] = launcher

    def trusted(self, given: Sequence[Tensor], counts: Sequence[int], device: int, programs: int) -> None:
        """The same without checks of dtypes and devices."""
        pointers = [tensor.data_ptr() for tensor in self._pick(given)]
        launcher = None if reduce(or_, pointers) & 15 else self.compiled.get(device)
        if launcher is None:
            self(given, counts, device, programs)
        else:
            pointers += [counts[at] for at in self._counts]
            launcher(programs, self._columns, device, pointers)


def _arguments(region: Region, names: Sequence[str]) -> list[tuple[int, torch.dtype]]:
    """Returns the position in `given` (see :meth:`Variant.__call__`) and the dtype of every pointer of a kernel."""
    types = {int(n.value or 0): n.dtype for n in region.inputs}
    found: list[tuple[int, torch.dtype]] = []
    for name in names:
        if name in GIVEN:
            found.append((GIVEN.index(name), tensor_type(region.compute) if name == "partial" else torch.int32))
        elif name.startswith("out"):
            at = int(name[3:])
            found.append((len(GIVEN) + at, tensor_type(region.outputs[at].dtype)))
        elif name not in COUNTS:
            at = int(name[1:])
            found.append((len(GIVEN) + len(region.outputs) + at, tensor_type(types[at])))
    return found


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
        ordinary: The kernel of the first launch.
        pieces: The kernels that walk pieces of hubs, one for each pass.
        hubs: The kernel that joins pieces, if outputs need it.
        together: Whether the first launch walks pieces, too.
        large: The programs of a large hub for each program of another hub, and the fewest pieces of a large hub.
        partial: The length and the dtype of the partial results of a piece.
        hub_texts: The further modules for hubs, in the order of their launches.
        hub_tile: The tile for pieces of hubs, or None if programs walk whole rows.
        gathered: For each pass over the edges of a row, the inputs that the pass reads per edge or at the edge's other
            end.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel.
    """

    def __init__(self, region: Region, tile: Tile | None = None) -> None:
        plan = schedule(region)
        self.gathered = tuple(loop.gathered for loop in plan.loops)
        (_, self.tile), *denser = tiles_by_degree(region, plan) if tile is None else [(0, tile)]
        self.hub_tile = hub_tile(region, plan, self.tile)
        self.together = plan.passes == 1
        part = Part("all" if self.hub_tile is None else "both" if self.together else "ordinary")
        self.ordinary = Variant(writer_of(region, plan, self.tile, part))
        self.text = self.ordinary.text
        self.pieces: list[Variant] = []
        self.hubs: list[Variant] = []
        self.large = 0, 1
        if self.hub_tile is not None:
            if not self.together:
                parts = [Part("pieces", k) for k in range(plan.passes)]
                self.pieces = [Variant(writer_of(region, plan, self.hub_tile, part)) for part in parts]
            if not all(map(region.per_edge, region.outputs)):
                joining = joining_tile(region, self.hub_tile)
                self.hubs = [Variant(writer_of(region, plan, joining, Part("hubs")))]
                self.large = large_programs(region, joining), joining.edges + 1
        self.hub_texts = [v.text for v in (*self.pieces, *self.hubs)]
        self.partial = plan.partial_length, getattr(torch, region.compute)
        self._denser = [(least, TritonKernel(region, other)) for least, other in denser]

    def for_degree(self, degree: float) -> TritonKernel:
        """Returns this kernel, or the kernel with the tile for graphs with `degree` edges per row."""
        return tuning.choice(((0, self), *self._denser), degree)

    def _for(self, layout: Sequence[Tensor]) -> TritonKernel:
        """Returns this kernel, or the kernel with the tile for the layout's number of edges per row."""
        if not self._denser:
            return self
        return self.for_degree(layout[1].size(0) / max(layout[0].size(0) - 1, 1))

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
            kernel._launch(kernel.ordinary, tensors, layout, outputs)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same without checks. The caller guarantees dtypes, devices, and that the device is the current device."""
        kernel = self._for(layout)
        kernel._launch(kernel.ordinary.trusted, tensors, layout, outputs)

    generator = "triton"
    overwritable: Mapping[int, tuple[int, ...]] = {}

    @property
    def listing(self) -> str:
        """The generated code of all kernels."""
        found = [self.text, *self.hub_texts]
        for least, kernel in self._denser:
            found += [f"# For graphs of {least} edges per row and more:", kernel.listing]
        return "\n\n".join(found)

    def compile_ahead(self, degree: int) -> None:
        """Starts to compile the kernels for graphs with `degree` edges per row, and those for hubs."""
        kernel = self.for_degree(degree)
        for variant in (kernel.ordinary, *kernel.pieces, *kernel.hubs):
            variant.compile_ahead()

    def _launch(
        self, start: Start, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        rowptr = layout[0]
        rows, device = rowptr.size(0) - 1, rowptr.get_device()
        if not rows:
            return
        hubs = csr.hubs(rowptr, layout[1].size(0)) if self.hub_tile is not None else None
        number, pieces = hubs.programs() if hubs is not None else (0, 0)
        length, dtype = self.partial
        if hubs is None or not pieces:
            given = (*layout, rowptr, rowptr, rowptr, _nothing(dtype, rowptr.device), *outputs, *tensors)
        else:
            partial = torch.empty((pieces, length), dtype=dtype, device=rowptr.device)
            given = (*layout, hubs.rows, rowptr, hubs.pieces, partial, *outputs, *tensors)
        programs, fewest = self.large
        large = programs * min(number, pieces // fewest)  # hubs with the most pieces come first
        counts = rows, pieces, large, hubs.most_edges if hubs is not None else tuning.TILES.hub_edges
        start(given, counts, device, -(-rows // self.tile.rows) + (pieces if self.together else 0))
        if pieces:
            for variant in self.pieces:
                variant(given, counts, device, pieces)
            for variant in self.hubs:
                variant(given, counts, device, number + large)


@lru_cache(maxsize=64)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of one element, for a kernel argument that no program reads or writes."""
    return torch.empty(1, dtype=dtype, device=device)


class TritonEdgeSums:
    """The Triton kernel of a region that sums over all edges.

    Each program walks a share of the edges and stores partial sums, which a second kernel adds up.

    Args:
        region: The region to compute.
        tile: The tile. None chooses a tile by the region.

    Attributes:
        text: The generated module.
        tile: The tile of its programs.
        variant: The kernel.
        partial: The length and the dtype of the sums of a program.
        add_up: Adds up the sums of programs.
        gathered: For each pass over the edges, the inputs that the pass reads per edge or at the edge's other end.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel.
    """

    def __init__(self, region: Region, tile: Tile | None = None) -> None:
        plan = schedule(region)
        self.gathered = tuple(loop.gathered for loop in plan.loops)
        self.tile = tile or choose_tile(region, plan)
        writer = EdgeSumsWriter(region, plan, self.tile, Part("edges"))
        self.variant = Variant(writer)
        self.text = self.variant.text
        self.partial = plan.partial_length, getattr(torch, region.compute)
        self.add_up = ProgramSums([(plan.offsets[out.node], region.size_of_sum(out)) for out in region.outputs])
        self._types = [tensor_type(out.dtype) for out in region.outputs]
        self._reads_rows = "rows" in writer.parameters

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernel. Arguments are those of :class:`TritonKernel`; an output has a row per edge feature."""
        with on_device(outputs[0].get_device()):
            self._launch(self.variant, tensors, layout, outputs)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same without checks. The caller guarantees dtypes, devices, and that the device is the current device."""
        self._launch(self.variant.trusted, tensors, layout, outputs)

    generator = "triton"
    overwritable: Mapping[int, tuple[int, ...]] = {}

    @property
    def listing(self) -> str:
        """The generated code."""
        return self.text

    def compile_ahead(self, degree: int) -> None:
        """Starts to compile the kernels. They serve graphs of every number of edges per row."""
        self.variant.compile_ahead()
        self.add_up.compile_ahead(self.partial[1], self._types)

    def _launch(
        self,
        start: Start,
        tensors: Sequence[Tensor],
        layout: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        rowptr, edges, tiles = layout[0], layout[1].size(0), tuning.TILES
        programs = min(max(edges // (tiles.edge_sum_steps * self.tile.edges), 1), tiles.edge_sum_programs)
        length, dtype = self.partial
        partial = torch.empty((programs, length), dtype=dtype, device=rowptr.device)
        rows = rows_of_edges(rowptr, edges) if self._reads_rows else rowptr
        given = (*layout, rowptr, rows, rowptr, partial, *outputs, *tensors)
        start(given, (rowptr.size(0) - 1, 0, 0, 0), rowptr.get_device(), programs)
        self.add_up(partial, outputs)
