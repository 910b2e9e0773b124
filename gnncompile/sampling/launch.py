"""Launches the kernels that sample on a GPU, for :mod:`gnncompile.sampling.bounded` and
:mod:`gnncompile.sampling.device`. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from gnncompile.codegen.triton.launcher import Kernel, on_device, runs_on
from gnncompile.exc import ArgumentError, IndexOutOfRangeError, UnsupportedSampling
from gnncompile.sampling import draws, kernels
from gnncompile.sampling.arguments import check_exclusive, check_strategy, vector

EMPTY = kernels.EMPTY.value
NOBODY = kernels.NOBODY.value
NUMBERED = kernels.NUMBERED.value
NODES = kernels.NODES.value

MOST_DRAWS = 1024
"""The largest fan-out besides "all". A program keeps the draws of a node in registers."""

LARGEST_TABLE = 2**28
"""The most nodes of a graph for which a table has an entry per node; 1 GiB. Larger graphs use a hash table."""

BLOCK = 1024
"""Slots, edges or nodes of a program that numbers or pads them."""

_TILE = 512
"""Draws of a program that draws uniformly."""

_STEP = 128
"""Edges that a program reads at once when it draws by weight without replacement: few nodes have more."""

_ONE_WARP = 64
"""The largest fan-out for which one warp draws by weight. It sorts without shared memory."""

_PAIRS, _LEAST_STEP = 4096, 16
"""With replacement, a program compares each edge that it reads with each draw: pairs at once, and the least edges."""

_start = Kernel(kernels.start, num_warps=4)
_draw_uniform = Kernel(draws.draw_uniform, num_warps=4)
_draw_weighted = {warps: Kernel(draws.draw_weighted, num_warps=warps) for warps in (1, 4)}
_find_ranges = Kernel(draws.find_ranges, num_warps=4)
_claim_slots = Kernel(kernels.claim_slots, num_warps=4)
_count = Kernel(kernels.count, num_warps=4)
_place = Kernel(kernels.place, num_warps=4)
_restore = Kernel(kernels.restore, num_warps=4)
_finish_edges = Kernel(kernels.finish_edges, num_warps=4)
_finish_nodes = Kernel(kernels.finish_nodes, num_warps=4)


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph in CSC order on a GPU, and how its neighbours are drawn. :func:`checked` makes it.

    Attributes:
        colptr: The first edge of each destination, ``[num_nodes + 1]``.
        row: The source of each edge, ``[num_edges]``.
        node_time: The time of each node, ``[num_nodes]``, or None.
        edge_time: The time of each edge, ``[num_edges]``, or None.
        weight: The weight of each edge, ``[num_edges]``, or None.
        replace: Whether a neighbour may be drawn several times.
        disjoint: Whether each seed gets a subgraph of its own.
        last: Whether the latest neighbours are taken, not any earlier ones.
    """

    colptr: Tensor
    row: Tensor
    node_time: Tensor | None
    edge_time: Tensor | None
    weight: Tensor | None
    replace: bool
    disjoint: bool
    last: bool

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.colptr.numel() - 1

    @property
    def is_temporal(self) -> bool:
        """Whether neighbours have times."""
        return self.node_time is not None or self.edge_time is not None

    @cached_property
    def time(self) -> Tensor:
        """The times; any tensor if there are none."""
        found = self.edge_time if self.node_time is None else self.node_time
        return self.colptr if found is None else found

    @property
    def time_of(self) -> str:
        """What the times belong to: "none", "node" or "edge"."""
        return "node" if self.node_time is not None else "none" if self.edge_time is None else "edge"

    @cached_property
    def types(self) -> str:
        """The dtypes of the tensors, for which kernels are compiled."""
        weight = "" if self.weight is None else self.weight.dtype
        return f"{self.colptr.dtype} {self.row.dtype} {self.time.dtype} {weight}"

    @cached_property
    def slot_dtype(self) -> torch.dtype:
        """The dtype of the positions of edges while they are in slots."""
        return torch.int32 if self.row.numel() < 2**31 else torch.int64


def can_sample(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU, or a CPU with Triton's interpreter."""
    return runs_on(kernels.start, device)


def checked(
    colptr: Tensor,
    row: Tensor,
    *,
    node_time: Tensor | None,
    edge_time: Tensor | None,
    weight: Tensor | None,
    replace: bool,
    disjoint: bool,
    temporal_strategy: str,
    directed: bool,
) -> Graph:
    """Returns the graph. Raises an error for arguments that do not fit together, without a look at their values."""
    if not can_sample(colptr.device):
        raise ArgumentError(
            f"colptr: found a tensor on {colptr.device}, expected one on a GPU; move the graph there with .cuda(), or "
            "sample on the CPU with gnncompile.sampling.neighbors."
        )
    if not directed:
        raise UnsupportedSampling("directed=False: induced subgraphs are sampled on the CPU only")
    check_strategy(temporal_strategy)
    check_exclusive(node_time, edge_time, weight, disjoint)
    integers, device = (torch.int32, torch.int64), colptr.device
    colptr = vector("colptr", colptr, integers, None, device)
    row = vector("row", row, integers, None, device)
    if colptr.numel() < 1:
        raise ArgumentError("colptr: found no entry, expected the number of nodes plus 1.")
    nodes, edges, times = colptr.numel() - 1, row.numel(), (torch.int64,)
    return Graph(
        colptr,
        row,
        None if node_time is None else vector("node_time", node_time, times, nodes, device),
        None if edge_time is None else vector("edge_time", edge_time, times, edges, device),
        None if weight is None else vector("weight", weight, (torch.float32, torch.float64), edges, device),
        replace,
        disjoint,
        temporal_strategy == "last",
    )


def fan_outs_of(num_neighbors: Sequence[int]) -> tuple[int, ...]:
    """Returns the fan-outs. -1 takes all neighbours."""
    found = tuple(max(int(number), -1) for number in num_neighbors)
    if max(found, default=0) > MOST_DRAWS:
        raise UnsupportedSampling(
            f"num_neighbors: found {max(found)}, expected at most {MOST_DRAWS} on a GPU, or -1 for all neighbours"
        )
    return found


class Buffers:
    """The memory of one sampling, and the launches that fill it.

    Args:
        graph: The graph.
        batch_size: The largest number of seeds.
        hops: The number of hops.
        nodes: The most nodes, padding included.
        edges: The most edges. There is memory for a multiple of 8.
        seed: The random seed, int64 ``[1]``. :meth:`pad` adds 1.
        hashes: Whether a hash table maps nodes to local ids.
    """

    def __init__(
        self, graph: Graph, batch_size: int, hops: int, nodes: int, edges: int, seed: Tensor, hashes: bool
    ) -> None:
        device = graph.colptr.device
        _check_sizes(nodes, edges)
        self.graph, self.batch_size, self.hops, self.seed = graph, batch_size, hops, seed
        self.node = torch.empty(nodes, dtype=torch.int64, device=device)
        self.edge_index = torch.empty(2, _rounded(edges), dtype=torch.int64, device=device)
        self.row, self.col = self.edge_index
        self.edge = torch.empty_like(self.row)
        self.batch = torch.empty_like(self.node) if graph.disjoint else self.node
        sizes = [0, graph.num_nodes, graph.row.numel()]
        self.state = torch.zeros(NODES + 2 * hops + 3, dtype=torch.int64, device=device)
        for at, size in enumerate(sizes):
            self.state[at] = size
        self.hash_bits = _bits(nodes) if hashes else 0
        self._make_table()
        self.edge_slot = torch.empty(0, dtype=graph.slot_dtype, device=device)
        self.place_slot = torch.empty(0, dtype=torch.int32, device=device)
        self.sums = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def node_ends(self) -> Tensor:
        """The number of nodes up to the seeds and up to each hop, int64 ``[hops + 1]``."""
        return self.state[NODES + 1 : NODES + 2 + self.hops]

    @property
    def edge_ends(self) -> Tensor:
        """The number of edges up to each hop, int64 ``[hops]``."""
        return self.state[NODES + 3 + self.hops :]

    def _make_table(self) -> None:
        entries, device = 1 << self.hash_bits if self.hash_bits else max(self.graph.num_nodes, 1), self.node.device
        self.first = torch.full((entries,), EMPTY, dtype=torch.int32, device=device)
        self.keys = torch.full((entries,), NOBODY, dtype=torch.int64, device=device) if self.hash_bits else self.state

    def grow(self, nodes: int, edges: int, hop: int) -> None:
        """Makes room for more nodes and edges before a hop, and keeps those that are there.

        Waits for the device if a hash table grows, because the edges so far refer to places in the old one.
        """
        _check_sizes(nodes, edges)
        known = self.node.numel()
        self.node = _grown(self.node, nodes)
        self.batch = _grown(self.batch, nodes) if self.graph.disjoint else self.node
        self.edge_index, self.edge = _grown(self.edge_index, _rounded(edges)), _grown(self.edge, _rounded(edges))
        self.row, self.col = self.edge_index
        if self.hash_bits and _bits(nodes) > self.hash_bits:
            begin, end = int(self.state[NUMBERED]), int(self.state[NODES + 2 + self.hops + hop])
            self.row[begin:end] = self.first[self.row[begin:end]].long()
            self.state[NUMBERED] = end
            self.hash_bits = _bits(nodes)
            self._make_table()
            tensors = (self.node, self.batch, self.state, self.first, self.keys)
            self._launch(_restore, _blocks(known), tensors, (hop,), (self.graph.disjoint, self.hash_bits, BLOCK))

    def reserve(self, slots: int) -> None:
        """Makes room for the slots of a hop."""
        if self.edge_slot.numel() < slots:
            device = self.node.device
            self.edge_slot = torch.empty(slots, dtype=self.graph.slot_dtype, device=device)
            self.place_slot = torch.empty(slots, dtype=torch.int32, device=device)
            self.sums = torch.empty(_blocks(slots), dtype=torch.int64, device=device)

    def start(self, seeds: Tensor) -> None:
        """Gives the seeds their local ids: int32 or int64 ``[batch_size]``, of which the last may be -1."""
        if self.hash_bits:
            self.keys.fill_(NOBODY)
            self.first.fill_(EMPTY)
        constants = (self.hash_bits, self.graph.disjoint, BLOCK, str(seeds.dtype))
        tensors = (seeds, self.node, self.batch, self.state, self.first, self.keys)
        self._launch(_start, _blocks(self.batch_size), tensors, (self.batch_size, self.hops), constants)

    def draw(self, hop: int, fan_out: int, rows: int, limit: Tensor) -> None:
        """Samples a hop of at most `rows` destinations, each with at most `fan_out` edges."""
        graph = self.graph
        self.reserve(rows * fan_out)
        if rows * fan_out and graph.weight is not None:
            width = max(_power(fan_out), 2)
            step = max(_PAIRS // width, _LEAST_STEP) if graph.replace else max(_STEP, width)
            tensors: tuple[Tensor, ...] = (
                graph.colptr, graph.weight, self.seed, self.node, self.state, self.edge_slot
            )  # fmt: skip
            constants: tuple[Any, ...] = (fan_out, width, step, graph.replace, self._types)
            self._launch(_draw_weighted[1 if width <= _ONE_WARP else 4], rows, tensors, (hop,), constants)
            self._claim_slots(hop, fan_out, rows * fan_out, self.place_slot)
        elif rows * fan_out:
            width = _power(fan_out)
            tall = max(_TILE // width, 1)
            constants = (fan_out, width, tall, graph.replace, graph.time_of, graph.last, graph.disjoint, self.hash_bits)
            tensors = (
                graph.colptr, graph.row, graph.time, limit, self.seed, self.node, self.batch, self.state,
                self.edge_slot, self.place_slot, self.first, self.keys,
            )  # fmt: skip
            numbers = (hop, self._base(rows * fan_out))
            self._launch(_draw_uniform, -(-rows // tall), tensors, numbers, (*constants, self._types))
        self._number(hop, fan_out, rows * fan_out, self.place_slot)

    def ranges(self, hop: int, rows: int, limit: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first edge and the number of edges of at most `rows` destinations of a hop, int64 ``[rows]``."""
        graph = self.graph
        begin, size = torch.zeros(2, rows, dtype=torch.int64, device=self.node.device)
        tensors = (
            graph.colptr, graph.row, graph.time, limit, self.node, self.batch, self.state, begin, size
        )  # fmt: skip
        constants = (graph.time_of, graph.disjoint, BLOCK, self._types)
        self._launch(_find_ranges, _blocks(rows), tensors, (hop,), constants)
        return begin, size

    def take(self, hop: int, edge: Tensor, dest: Tensor) -> None:
        """Samples a hop that takes the edges at the positions `edge`. Their destinations are the hop's `dest`-th."""
        self.reserve(edge.numel())
        self.edge_slot[: edge.numel()] = edge
        if edge.numel():
            self._claim_slots(hop, 0, edge.numel(), dest)
        self._number(hop, 0, edge.numel(), dest)

    def finish(self) -> None:
        """Gives edges the local ids of their sources."""
        self._finish_edges(0, 0)

    def pad(self) -> None:
        """Does as :meth:`finish`, pads nodes and edges, advances the seed, and empties the table for the next call."""
        self._finish_edges(self.node.numel(), self.edge.numel())
        constants = (self.graph.disjoint, not self.hash_bits, BLOCK, "")
        tensors = (self.node, self.batch, self.state, self.first, self.seed)
        numbers = (self.node.numel(), self.batch_size + 1, self.hops)
        self._launch(_finish_nodes, _blocks(self.node.numel()), tensors, numbers, constants)

    def _finish_edges(self, rows: int, size: int) -> None:
        """Numbers the sources. Pads `size` edges, by a ring through the padded ones of `rows` nodes."""
        tensors = (self.row, self.col, self.edge, self.state, self.first)
        self._launch(_finish_edges, _blocks(self.edge.numel()), tensors, (rows, size, self.hops), (BLOCK, ""))

    @cached_property
    def _types(self) -> str:
        return f"{self.graph.types} {self.edge_slot.dtype}"

    def _base(self, slots: int) -> int:
        base = self.node.numel()
        if base + slots >= EMPTY:
            raise ArgumentError(
                f"num_neighbors: found a hop of up to {slots} edges, expected fewer than {EMPTY - base}; lower "
                "num_neighbors, or give fewer seeds."
            )
        return base

    def _claim_slots(self, hop: int, fan_out: int, slots: int, dest: Tensor) -> None:
        tensors = (
            self.graph.row, dest, self.batch, self.state, self.edge_slot, self.place_slot, self.first, self.keys
        )  # fmt: skip
        constants = (fan_out, self.graph.disjoint, self.hash_bits, BLOCK, f"{self._types} {dest.dtype}")
        self._launch(_claim_slots, _blocks(slots), tensors, (slots, self._base(slots), hop), constants)

    def _number(self, hop: int, fan_out: int, slots: int, dest: Tensor) -> None:
        """Counts and places the slots of a hop. Without a slot, one program writes that nothing was found."""
        self.reserve(1)
        base, blocks, types = self._base(slots), max(_blocks(slots), 1), f"{self._types} {dest.dtype}"
        fan_out = fan_out if slots else 0
        counted = (self.state, self.place_slot, self.first, self.sums)
        self._launch(_count, blocks, counted, (slots, base, hop), (fan_out, BLOCK, types))
        tensors = (
            self.graph.row, dest, self.node, self.batch, self.row, self.col, self.edge, self.state,
            self.edge_slot, self.place_slot, self.first, self.sums,
        )  # fmt: skip
        constants = (fan_out, self.graph.disjoint, BLOCK, types)
        self._launch(_place, blocks, tensors, (slots, base, hop, self.hops), constants)

    def _launch(
        self, kernel: Kernel, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int], constants: Any
    ) -> None:
        with on_device(self.node.get_device()):
            kernel(programs, tensors, numbers, constants)


def complain(flags: int, graph: Graph) -> None:
    """Raises the error for the problems that the kernels have found."""
    if flags & kernels.BAD_SEED.value:
        raise IndexOutOfRangeError(
            f"seeds: found a node outside the graph, expected 0 to {graph.num_nodes - 1}; -1 only after the last seed."
        )
    if flags & kernels.BAD_GRAPH.value:
        raise IndexOutOfRangeError(
            f"row or colptr: found a source outside of 0 to {graph.num_nodes - 1}, or edges outside of 0 to "
            f"{graph.row.numel()}, expected a graph in CSC order; check edge_index and num_nodes."
        )
    if flags & kernels.NOT_SORTED.value:
        raise ArgumentError(
            f"{graph.time_of}_time: found neighbours that are not sorted by time, expected ascending times within each "
            "neighbourhood; sort the edges by destination, then by time."
        )
    if flags & kernels.BAD_WEIGHT.value:
        raise ArgumentError(
            "weight: found a negative, infinite or NaN weight, or with replace=True only zeros for a node; expected "
            "finite numbers of 0 or more; change the weights."
        )


def needs_hash(graph: Graph) -> bool:
    """Whether a hash table maps nodes to local ids, rather than a table with an entry per node."""
    return graph.disjoint or graph.num_nodes > LARGEST_TABLE


def _grown(value: Tensor, size: int) -> Tensor:
    if value.size(-1) >= size:
        return value
    made = value.new_empty(*value.shape[:-1], size)
    made[..., : value.size(-1)] = value
    return made


def _rounded(edges: int) -> int:
    """Returns a multiple of 8, so that sources and destinations are aligned in one memory."""
    return -(-edges // 8) * 8


def _check_sizes(nodes: int, edges: int) -> None:
    if max(nodes, edges) >= EMPTY:
        raise ArgumentError(
            f"num_neighbors: found up to {nodes} nodes and {edges} edges, expected fewer than {EMPTY}; lower "
            "num_neighbors, or give fewer seeds."
        )


def _bits(nodes: int) -> int:
    """Returns the bits of an index of a hash table that is at most half full."""
    return max((2 * nodes - 1).bit_length(), 4)


def _blocks(number: int) -> int:
    return -(-number // BLOCK)


def _power(number: int) -> int:
    return int(triton.next_power_of_2(number))
