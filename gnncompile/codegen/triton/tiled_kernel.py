"""The Triton kernels of a tiled region. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import kernels as gemm
from gnncompile.codegen.triton import tiled_finish, tiled_writer
from gnncompile.codegen.triton.launcher import Kernel, on_device
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.tiled_finish import FinishWriter
from gnncompile.codegen.triton.tiled_plan import TiledPlan, padded
from gnncompile.codegen.triton.tiled_tile import TiledTile, choose_tiled_tile
from gnncompile.codegen.triton.tiled_writer import TiledWriter
from gnncompile.codegen.triton.variant import complaint
from gnncompile.exc import ArgumentError
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region, Space
from gnncompile.layout.csr import rows_of_edges

_split = Kernel(gemm.split, num_warps=tuning.TILES.short_warps)

_GIVEN = (*Layout._fields, "rows", "partial", "sums")


class RowKernel(Protocol):
    """The kernel of a region that walks no edges."""

    @property
    def listing(self) -> str:
        """The generated code."""

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Writes the outputs."""


class TiledKernel:
    """The Triton kernels of a region that is walked in tiles of edges.

    The first kernel walks the edges: see :mod:`gnncompile.codegen.triton.tiled_writer`. The second kernel finishes
    rows that several programs share, and rows without edges. A kernel per row then computes what follows from row
    results. Sums over all edges are added up over the programs by ``torch.sum``.

    Args:
        region: The region to compute.
        of_rows: Returns the kernel of a region that walks no edges.
        tile: The tile. None chooses a tile by the region.

    Attributes:
        text: The generated module of the walk.
        tile: The tile.

    Raises:
        UnsupportedRegion: The region can't be expressed as Triton kernels.
    """

    def __init__(self, region: Region, of_rows: Callable[[Region], RowKernel], tile: TiledTile | None = None) -> None:
        plan, table = TiledPlan(region), tuning.TILES
        self._region, self._plan = region, plan
        self.tile = tile or choose_tiled_tile(plan)
        walk = TiledWriter(plan, self.tile)
        self.text = walk.module()
        options = {"enable_fp_fusion": region.contracts}
        function = getattr(load_module(self.text), tiled_writer.KERNEL)
        self._walk = Kernel(function, num_warps=self.tile.num_warps, num_stages=1, **options)
        self._places = {name: at for at, name in enumerate(self._names())}
        self._picked = _pick([self._places[name] for name in walk.parameters])
        self._reads_rows = "rows" in walk.parameters
        self._finish, self._finished, self._finish_text = None, self._picked, ""
        if plan.results:
            finish = FinishWriter(plan, table.finish_rows, table.finish_step)
            self._finish_text = finish.module()
            self._finish = Kernel(getattr(load_module(self._finish_text), tiled_finish.KERNEL), num_warps=4)
            self._finished = _pick([self._places[name] for name in finish.parameters])
        self._rows = of_rows(plan.rows) if plan.rows is not None else None
        self._compute = tensor_type(region.compute)
        self._types = {
            int(n.value or 0) + k: tensor_type(n.dtype) for n in region.inputs for k in range(len(n.positions))
        }

    def _names(self) -> list[str]:
        """The names of all tensors of a launch, in the order of :meth:`_launch`."""
        parts, region = self._parts(), self._region
        outputs = [f"out{k}" for k in range(len(region.outputs))]
        temporaries = [f"row{s}" for s in range(len(self._plan.temporaries))]
        return [*_GIVEN, *outputs, *temporaries, *parts, *(f"t{p}" for p in range(region.count))]

    def _parts(self) -> dict[str, tuple[int, int]]:
        """The arguments that hold bfloat16 parts of weights, with the weights' rows and columns."""
        nodes = self._region.nodes
        return {name: self._plan.matrix(nodes[i]) for i, name in self._plan.layers.items() if name[0] == "w"}

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernels on the current stream of the tensors' device.

        Args:
            tensors: The region's tensors, contiguous, in the dtypes of the region's input nodes.
            layout: The edges, ordered by the rows that the region walks; on the device of the tensors.
            outputs: The tensors to write, contiguous. Every row is written. Edges that are masked out are not written,
                so an output per edge must hold zeros there.

        Raises:
            ArgumentError: A tensor's dtype differs from its node's, or its device from that of the outputs.
        """
        device = outputs[0].get_device()
        expected = [(tensors[p], dtype) for p, dtype in self._types.items()]
        expected += [(t, tensor_type(o.dtype)) for t, o in zip(outputs, self._region.outputs, strict=True)]
        expected += [(t, torch.int32) for t in layout]
        for tensor, dtype in expected:
            if tensor.dtype is not dtype or tensor.get_device() != device:
                raise ArgumentError(complaint(tensor, dtype, device))
        with on_device(device):
            self.trusted(tensors, layout, outputs)

    generator = "triton"

    @property
    def listing(self) -> str:
        """The generated code of all kernels."""
        found = [self.text, *([self._finish_text] if self._finish_text else [])]
        return "\n\n".join([*found, *([self._rows.listing] if self._rows is not None else [])])

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """The inputs that the walk reads per edge or at the edge's other end."""
        nodes, gathered = self._region.nodes, (Space.EDGE, Space.ORDERED, self._region.by.opposite)
        return (tuple(i for i in self._plan.need if nodes[i].op == "input" and nodes[i].space in gathered),)

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same without checks. The caller guarantees dtypes, devices, and that the device is the current device."""
        rowptr, edges, plan = layout[0], layout[1].size(0), self._plan
        rows, device = rowptr.size(0) - 1, rowptr.device
        share, programs = self._shares(edges)
        owners = rows_of_edges(rowptr, edges) if self._reads_rows else rowptr
        partial = torch.empty(programs * 2 * plan.offsets[1], dtype=self._compute, device=device)
        make = torch.empty if self._region.whole else torch.zeros  # programs may have masked edges only
        sums = make((programs, plan.sum_offsets[1]), dtype=self._compute, device=device)
        widths = [self._region.nodes[i].shape[1] for i in plan.temporaries]
        temporaries = [torch.empty((rows, width), dtype=self._compute, device=device) for width in widths]
        parts = [self._split_weights(tensors[int(name[1:])], *size) for name, size in self._parts().items()]
        given = (*layout, owners, partial, sums, *outputs, *temporaries, *parts, *tensors)
        self._walk(programs, self._picked(given), (rows, share), ())
        if self._finish is not None:
            count = programs + -(-rows // tuning.TILES.finish_rows)
            self._finish(count if rows else 0, self._finished(given), (rows, max(share, 1), programs), ())
        self._join_sums(sums, outputs)
        if self._rows is not None and rows:
            self._rows.trusted([*tensors, *temporaries], layout, [outputs[k] for k in plan.late])

    def _shares(self, edges: int) -> tuple[int, int]:
        """Returns the edges that a program walks, and the number of programs."""
        tiles = -(-edges // self.tile.edges)
        share = -(-tiles // self.tile.programs) * self.tile.edges
        return share, -(-edges // share) if edges else 0

    @staticmethod
    def _split_weights(weights: Tensor, rows: int, columns: int) -> Tensor:
        """Returns weights in three bfloat16 parts, ``[3, rows, columns]``, with padded rows and columns of zeros."""
        size, block = (padded(rows), padded(columns)), tuning.TILES.split_block
        parts = torch.empty((3, *size), dtype=torch.bfloat16, device=weights.device)
        _split(-(-size[0] * size[1] // block), (weights, parts), (rows, columns, *size), (False, block))
        return parts

    def _join_sums(self, sums: Tensor, outputs: Sequence[Tensor]) -> None:
        if not self._plan.outers:
            return
        total, offsets = sums.sum(0), self._plan.sum_offsets[0]
        for out, output in zip(self._region.outputs, outputs, strict=True):
            if out.node in offsets:
                first = offsets[out.node]
                output.view(-1).copy_(total[first : first + output.numel()])


def _pick(places: Sequence[int]) -> Callable[[Any], tuple[Tensor, ...]]:
    """Returns a function that picks these items of a sequence."""
    pick = itemgetter(*places)
    return pick if len(places) > 1 else lambda given: (pick(given),)
