"""The Triton kernels of a tiled region. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm.weights import in_parts, splitting
from gnncompile.codegen.triton import edge_shares, tiled_writer
from gnncompile.codegen.triton.edge_shares import Share
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel, complaint, on_device
from gnncompile.codegen.triton.module import load_module
from gnncompile.codegen.triton.program_sums import ProgramSums
from gnncompile.codegen.triton.tiled_layers import matrix, padded_matrix
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.codegen.triton.tiled_products import EdgeProduct, write_products
from gnncompile.codegen.triton.tiled_tile import TiledTile, choose_tiled_tile
from gnncompile.codegen.triton.tiled_writer import TiledWriter
from gnncompile.exc import ArgumentError
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region
from gnncompile.layout.csr import rows_of_edges

_GIVEN = (*Layout._fields, "rows", "sums")
_SUMS = len(_GIVEN) - 1


class RowKernel(Protocol):
    """The kernel of a region that is not tiled."""

    @property
    def listing(self) -> str:
        """The generated code."""

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Writes the outputs."""

    def compile_ahead(self, degree: int) -> None:
        """Starts to compile the kernels for graphs with `degree` edges per row."""


class _Walk:
    """The kernel of one phase.

    Attributes:
        tile: The tile of its programs.
        partial: The length and the dtype of the sums of a program.
        sums: The names of the outputs that are sums over all edges.
        add_up: Adds up the sums of programs; None if there are no such outputs.
    """

    def __init__(self, plan: TiledPlan, phase: Phase, places: dict[str, int], tile: TiledTile | None) -> None:
        self.tile = tile or choose_tiled_tile(plan, phase)
        writer = TiledWriter(plan, phase, self.tile)
        self.text = writer.module()
        function = getattr(load_module(self.text), tiled_writer.KERNEL)
        options = {"num_warps": self.tile.num_warps, "num_stages": 1, "maxnreg": self.tile.registers}
        self._kernel = Kernel(function, enable_fp_fusion=plan.region.contracts, **options)
        self._names = writer.parameters
        self._places = places
        self._pick = _pick([places[name] for name in self._names])
        self.reads_rows = "rows" in writer.parameters
        offsets, size = phase.offsets(plan.region)
        self.partial = size, tensor_type(plan.region.compute)
        outputs = {f"out{k}": out for k, out in enumerate(plan.region.outputs) if out.node in offsets}
        self.sums = list(outputs)
        sums = [(offsets[out.node], plan.region.size_of_sum(out)) for out in outputs.values()]
        self.add_up = ProgramSums(sums) if sums else None

    def compile_ahead(self, types: Mapping[str, torch.dtype]) -> None:
        """Starts to compile the kernel. `types` are the dtypes of all tensors of a region's launch, by name."""
        self._kernel.compile_ahead([types[name] for name in self._names], len(tiled_writer.NUMBERS), ())
        if self.add_up is not None:
            self.add_up.compile_ahead(self.partial[1], [types[name] for name in self.sums])

    def entry(self, types: Mapping[str, torch.dtype]) -> Entry:
        """Returns the kernel, for packages. `types` are those of :meth:`compile_ahead`."""
        return self._kernel.entry(self._names, [types[name] for name in self._names], len(tiled_writer.NUMBERS), ())

    @property
    def wave(self) -> int:
        """The edges that programs on all multiprocessors take at a time."""
        return self.tile.edges * self.tile.programs * tuning.TILES.processors

    def programs(self, share: Share) -> int:
        """Returns the number of programs for a share of the edges."""
        return -(-min(share.size, self.wave) // self.tile.edges)

    def sums_of_programs(self, shares: Sequence[Share], like: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns memory for the sums of all programs, on the device of `like`, and the part of it for each share.

        A walk without sums gets `like` in their place, which it does not write.
        """
        if self.add_up is None:
            return like, [like] * len(shares)
        length, dtype = self.partial
        counts = [self.programs(share) for share in shares]
        sums = like.new_empty((sum(counts), length), dtype=dtype)
        return sums, sums.split(counts)

    def __call__(self, given: list[Tensor], rows: int, share: Share, sums: Tensor) -> None:
        """Launches the kernel for a share of the edges.

        Args:
            given: All tensors of a region's launch.
            rows: The number of rows.
            share: The share.
            sums: The sums of the programs, to write.
        """
        given[_SUMS] = sums
        self._kernel(self.programs(share), self._pick(given), (rows, *share), ())

    def write_sums(self, sums: Tensor, given: Sequence[Tensor]) -> None:
        """Adds up the sums of all programs, and writes those outputs."""
        if self.add_up is not None:
            self.add_up(sums, [given[self._places[name]] for name in self.sums])


class TiledKernel:
    """The Triton kernels of a region that is walked in tiles of edges.

    The first kernels walk the edges, phase by phase: see :mod:`gnncompile.codegen.triton.tiled_plan`. They store values
    per edge, which kernels per row then reduce, and which products over all edges read.

    Args:
        region: The region to compute.
        of_rows: Returns the kernel of a region that is not tiled.
        tile: The tile of every phase. None chooses a tile for each phase.

    Attributes:
        region: The region.
        plan: Its plan.
        walks: The kernels that walk the edges.
        reads_rows: Whether a walk reads the row of each edge.
        parts: The kernels that reduce stored values of edges to rows, and what they compute.
        overwritable: The tensors that each output may be written over: their positions, by the output's position.

    Raises:
        UnsupportedRegion: The region can't be expressed as Triton kernels.
    """

    def __init__(self, region: Region, of_rows: Callable[[Region], RowKernel], tile: TiledTile | None = None) -> None:
        plan = TiledPlan(region)
        self.region, self.plan = region, plan
        self._places = {name: at for at, name in enumerate(self._names())}
        self.walks = [_Walk(plan, phase, self._places, tile) for phase in plan.phases]
        self.reads_rows = any(walk.reads_rows for walk in self.walks)
        self._turns = edge_shares.turns(plan)
        self._of_shares, self._of_all_edges = (edge_shares.products(plan, brief) for brief in (True, False))
        self._share_bytes = sum(plan.width(i) * tensor_type(plan.stored[i]).itemsize for i in plan.brief)
        self._wave = max((walk.wave for walk in self.walks), default=1)
        self.parts = [(of_rows(part.region(region, plan.stored)), part) for part in plan.parts]
        self.overwritable = {
            k: tuple(region.nodes[i].positions[0] for i in inputs) for k, inputs in plan.overwritable.items()
        }
        self._types = {
            int(n.value or 0) + k: tensor_type(n.dtype) for n in region.inputs for k in range(len(n.positions))
        }

    def _names(self) -> list[str]:
        """The names of all tensors of a launch, in the order of :meth:`trusted`."""
        region = self.region
        outputs = [f"out{k}" for k in range(len(region.outputs))]
        return [*_GIVEN, *outputs, *self.temporaries(), *self.weights(), *(f"t{p}" for p in range(region.count))]

    def compile_ahead(self, degree: int) -> None:
        """Starts to compile the kernels for graphs with `degree` edges per row."""
        types = self.types()
        for walk in self.walks:
            walk.compile_ahead(types)
        for name, size in self.weights().items():
            for splits, _, constants in splitting(size, padded_matrix(size)):
                splits.compile_ahead([self._types[int(name[1:])], torch.float16], 5, constants)
        for kernel, _ in self.parts:
            kernel.compile_ahead(degree)

    def types(self) -> dict[str, torch.dtype]:
        """Returns the dtypes of all tensors of a launch, by name."""
        region, bools = self.region, torch.float64 if self.region.double else torch.bool
        types = dict.fromkeys(_GIVEN, torch.int32) | {"sums": tensor_type(region.compute)}
        types |= {f"out{k}": tensor_type(out.dtype) for k, out in enumerate(region.outputs)}
        types |= {name: tensor_type(self.plan.stored[i]) for name, i in self.temporaries().items()}
        types |= dict.fromkeys(self.weights(), torch.float16)
        return types | {f"t{p}": bools if dtype is torch.bool else dtype for p, dtype in self._types.items()}

    def temporaries(self) -> dict[str, int]:
        """The names of the stored values that are no outputs, with their nodes."""
        return {place: i for i, place in self.plan.places.items() if place.startswith("temp")}

    def weights(self) -> dict[str, tuple[int, int]]:
        """The arguments that hold float16 parts of weights, with the weights' rows and columns."""
        region, layers = self.region, self.plan.layers
        return {name: matrix(region, region.nodes[i]) for i, name in layers.items() if name[0] == "w"}

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, outputs: Sequence[Tensor]) -> None:
        """Launches the kernels on the current stream of the tensors' device.

        Args:
            tensors: The region's tensors, contiguous, in the dtypes of the region's input nodes.
            layout: The edges, ordered by the rows that the region walks; on the device of the tensors.
            outputs: The tensors to write, contiguous. Every row is written. Edges that are masked out are not written,
                so an output per edge must hold zeros there. An output may be a tensor of :attr:`overwritable`.

        Raises:
            ArgumentError: A tensor's dtype differs from its node's, or its device from that of the outputs.
        """
        device = outputs[0].get_device()
        expected = [(tensors[p], dtype) for p, dtype in self._types.items()]
        expected += [(t, tensor_type(o.dtype)) for t, o in zip(outputs, self.region.outputs, strict=True)]
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
        return "\n\n".join([*(walk.text for walk in self.walks), *(kernel.listing for kernel, _ in self.parts)])

    @property
    def gathered(self) -> tuple[tuple[int, ...], ...]:
        """The inputs that each walk reads per edge or at the edge's other end."""
        nodes, gathered = self.region.nodes, self.region.edge_spaces
        return tuple(
            tuple(i for i in phase.need if nodes[i].op == "input" and nodes[i].space in gathered)
            for phase in self.plan.phases
        )

    def trusted(self, tensors: Sequence[Tensor], layout: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The same without checks. The caller guarantees dtypes, devices, and that the device is the current device."""
        rowptr, edges, plan = layout[0], layout[1].size(0), self.plan
        rows, device = rowptr.size(0) - 1, rowptr.device
        owners = rows_of_edges(rowptr, edges) if self.reads_rows else rowptr
        shares = edge_shares.divide(edges, self._share_bytes, self._wave)
        # Rows of edges that are masked out are not written. They must not count in products.
        make = torch.empty if self.region.unmasked else torch.zeros
        temporaries = [  # rowptr stands for values that have no memory yet
            rowptr if i in plan.brief else self._memory(make, i, edges, device) for i in self.temporaries().values()
        ]
        weights = [
            in_parts(tensors[int(name[1:])], size, padded_matrix(size), size[1])
            for name, size in self.weights().items()
        ]
        given = [*layout, owners, rowptr, *outputs, *temporaries, *weights, *self._without_bools(tensors)]
        self._walk(given, rows, shares, outputs)
        write_products([self._product(k, given, outputs[k]) for k in self._of_all_edges])
        for kernel, part in self.parts if rows else ():
            leaves = [given[self._places[plan.places[i]]] for i in sorted(part.leaves)]
            kernel.trusted([*tensors[: self.region.count], *leaves], layout, [outputs[k] for k in part.outputs])

    def _without_bools(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors that walks read. In float64, bools become numbers: see :attr:`TiledPlan.stored`."""
        if not self.region.double:
            return tensors
        return [t.to(torch.float64) if t.dtype is torch.bool else t for t in tensors]

    def _walk(self, given: list[Tensor], rows: int, shares: Sequence[Share], outputs: Sequence[Tensor]) -> None:
        """Walks the edges, share by share, and writes the sums of the walks and the products of brief values."""
        sums = [walk.sums_of_programs(shares, given[0]) for walk in self.walks]
        one = len(shares) == 1
        found = {k: outputs[k][None] if one else self._for_shares(outputs[k], len(shares)) for k in self._of_shares}
        for number, share in enumerate(shares):
            for walk, turn, (_, of_shares) in zip(self.walks, self._turns, sums, strict=True):
                self._keep(given, turn.stores, share)
                walk(given, rows, share, of_shares[number])
                write_products([self._product(k, given, found[k][number]) for k in turn.products])
                self._forget(given, turn.done)
        for walk, (of_programs, _) in zip(self.walks, sums, strict=True):
            walk.write_sums(of_programs, given)
        for k, out in () if one else found.items():
            outputs[k].copy_(out.sum(0))

    def _keep(self, given: list[Tensor], values: Sequence[int], share: Share) -> None:
        """Gives brief values memory for a share."""
        for i in values:
            given[self._places[self.plan.places[i]]] = self._memory(torch.empty, i, share.size, given[0].device)

    def _forget(self, given: list[Tensor], values: Sequence[int]) -> None:
        """Takes the memory of brief values back."""
        for i in values:
            given[self._places[self.plan.places[i]]] = given[0]

    def _memory(self, make: Callable[..., Tensor], i: int, edges: int, device: torch.device) -> Tensor:
        """Returns memory for a value that a walk stores."""
        return make((edges, self.plan.width(i)), dtype=tensor_type(self.plan.stored[i]), device=device)

    def _for_shares(self, output: Tensor, shares: int) -> Tensor:
        """Returns memory for what each share adds to an output."""
        return output.new_empty((shares, *output.shape), dtype=tensor_type(self.region.compute))

    def _product(self, k: int, given: Sequence[Tensor], out: Tensor) -> EdgeProduct:
        """Returns the product that an output is, of the rows that its factors have."""
        node = self.region.nodes[self.region.outputs[k].node]
        left, right = (self._factor(i, given).view(-1, self.plan.width(i)) for i in node.args)
        return EdgeProduct(left, right, out.view(matrix(self.region, node)))

    def _factor(self, i: int, given: Sequence[Tensor]) -> Tensor:
        name = self.plan.places.get(i, f"t{self.region.nodes[i].value}")
        return given[self._places[name]].to(tensor_type(self.plan.factor))


def _pick(places: Sequence[int]) -> Callable[[Any], tuple[Tensor, ...]]:
    """Returns a function that picks these items of a sequence."""
    pick = itemgetter(*places)
    return pick if len(places) > 1 else lambda given: (pick(given),)
