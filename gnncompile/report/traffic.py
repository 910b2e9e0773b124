"""Counts the bytes that a region's kernel moves, and the least that it must move; knows the rates of some GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gnncompile.ir.region import LAYERS, Node, Region, Space

INDEX_BYTES = 4


@dataclass(frozen=True)
class Rates:
    """The rates that a device reaches: bytes per second gathered and streamed, flops per second of float32 products."""

    gather: float
    stream: float
    flops: float


# Measured on one H200: a plain sum over neighbours, a copy, a large float32 product in three bfloat16 parts.
RATES = {"H200": Rates(gather=5.0e12, stream=4.3e12, flops=85e12)}


def rates_of(device_name: str) -> Rates | None:
    """Returns the rates of a device by its name; None for a device that was not measured."""
    return next((rates for name, rates in RATES.items() if name in device_name), None)


@dataclass(frozen=True)
class Phase:
    """Bytes gathered and streamed, and flops. Memory traffic and flops overlap within a phase, but phases do not."""

    gathered: float = 0.0
    streamed: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Work:
    """The bytes and flops of a kernel, or of a layer in one step."""

    phases: tuple[Phase, ...]

    def __add__(self, other: Work) -> Work:
        return Work(self.phases + other.phases)

    @property
    def gathered(self) -> float:
        """Bytes that are gathered."""
        return sum(phase.gathered for phase in self.phases)

    @property
    def streamed(self) -> float:
        """Bytes that are streamed."""
        return sum(phase.streamed for phase in self.phases)

    @property
    def bytes(self) -> float:
        """All bytes, gathered and streamed."""
        return self.gathered + self.streamed

    @property
    def flops(self) -> float:
        """Flops of matrix products."""
        return sum(phase.flops for phase in self.phases)

    def milliseconds(self, rates: Rates) -> float:
        """The time at the given rates: for each phase the longer of memory traffic and products, summed over phases."""
        return 1e3 * sum(
            max(phase.gathered / rates.gather + phase.streamed / rates.stream, phase.flops / rates.flops)
            for phase in self.phases
        )

    def __str__(self) -> str:
        gathered, streamed, flops = self.gathered / 1e9, self.streamed / 1e9, self.flops / 1e9
        return f"{gathered:.3g} GB gathered, {streamed:.3g} GB streamed, {flops:.3g} GFLOP"


def counted(
    region: Region,
    loops: Sequence[Sequence[int]],
    tensors: Sequence[Tensor],
    layout: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Work:
    """Counts the bytes that a kernel moves on given tensors, and its flops.

    Gathered bytes: for each loop and edge, the rows that the loop reads at the other end of the edge or through an
    index. Nothing is subtracted for caches. Streamed bytes: for each loop, the indices and features of all edges; and
    once the row pointers, the parameters, the results, and each tensor with one row per row of the region. Flops: those
    of linear layers in the kernel, counted once.

    Args:
        region: The program that the kernel computes.
        loops: For each loop over the edges, the indices of the nodes in `region.nodes` for the inputs that it reads on
            edges or at the other end of edges.
        tensors: The region's tensors, by position.
        layout: rowptr, col and edge, int32.
        outputs: The results.
    """
    edges = int(layout[1].size(0))
    gathered = streamed = 0.0
    for at, loop in enumerate(loops):
        read = [region.nodes[i] for i in loop]
        per_row = [(n, _row_bytes(tensors[n.positions.start])) for n in read]
        distant = [n.space is region.by.opposite or n.through_index for n in read]
        gathered += edges * sum(b for (_, b), far in zip(per_row, distant, strict=True) if far)
        streamed += edges * sum(b for (_, b), far in zip(per_row, distant, strict=True) if not far)
        last = at == len(loops) - 1
        stores = last and any(map(region.per_edge, region.outputs))
        numbered = stores or any(n.space is Space.EDGE for n in read)
        streamed += edges * INDEX_BYTES * (any(n.space is region.by.opposite for n in read) + numbered)
    once = [tensors[n.positions.start] for n in region.inputs if n.space not in region.edge_spaces]
    streamed += layout[0].nbytes + sum(t.nbytes for t in (*once, *outputs))
    flops = sum(
        2.0 * edges * region.features(i) * _width(region, n) for i, n in enumerate(region.nodes) if n.op in LAYERS
    )
    return Work((Phase(gathered, streamed, flops),))


def least(region: Region) -> list[list[int]]:
    """Returns the loops of the kernel that moves least: a single loop that reads the data of each edge once."""
    return [[i for i, n in enumerate(region.nodes) if n.op == "input" and n.space in region.edge_spaces]]


def _row_bytes(tensor: Tensor) -> float:
    return tensor.nbytes / tensor.size(0) if tensor.dim() and tensor.size(0) else 0.0


def _width(region: Region, node: Node) -> int:
    """Returns the width of the rows that a linear layer computes, or that its gradients read."""
    at = {"transposed": 0, "outer": 1}.get(node.op)
    heads, channels = node.shape if at is None else region.nodes[node.args[at]].shape
    return heads * channels
