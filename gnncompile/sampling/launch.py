"""Launches the kernels that sample on a GPU, for :mod:`gnncompile.sampling.bounded` and
:mod:`gnncompile.sampling.device`. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gnncompile.codegen.triton.launcher import Kernel, on_device
from gnncompile.exc import ArgumentError
from gnncompile.sampling import draws, kernels
from gnncompile.sampling.device_csc import Graph

EMPTY = kernels.EMPTY.value
NOBODY = kernels.NOBODY.value
NUMBERED = kernels.NUMBERED.value
NODES = kernels.NODES.value

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
_number_sources = Kernel(kernels.number_sources, num_warps=4)
_restore = Kernel(kernels.restore, num_warps=4)
_finish_edges = Kernel(kernels.finish_edges, num_warps=4)
_finish_nodes = Kernel(kernels.finish_nodes, num_warps=4)


class Nodes(NamedTuple):
    """The nodes of one type that a sampling has found.

    Attributes:
        node: The nodes, int64 ``[max_nodes]``.
        batch: For disjoint subgraphs, the subgraph of each node, int64 ``[max_nodes]``; otherwise any tensor.
        first: The table from places to local ids.
        keys: The keys of the hash table; any tensor if `hash_bits` is 0.
        hash_bits: The bits of a place in the hash table; 0 if nodes are places.
    """

    node: Tensor
    batch: Tensor
    first: Tensor
    keys: Tensor
    hash_bits: int


def table(hash_bits: int, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns an empty table and its keys: a hash table, or with 0 bits a table with an entry per node."""
    entries = 1 << hash_bits if hash_bits else max(num_nodes, 1)
    first = torch.full((entries,), EMPTY, dtype=torch.int32, device=device)
    return first, torch.full((entries if hash_bits else 0,), NOBODY, dtype=torch.int64, device=device)


class Slots:
    """The memory of the slots of one hop: the edge in each slot, the place of its source, and sums of blocks."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.edge = torch.empty(0, dtype=dtype, device=device)
        self.place = torch.empty(0, dtype=torch.int32, device=device)
        self.sums = torch.empty(0, dtype=torch.int64, device=device)

    def reserve(self, number: int) -> None:
        """Makes room for so many slots."""
        if self.edge.numel() < number:
            self.edge, self.place = self.edge.new_empty(number), self.place.new_empty(number)
            self.sums = self.sums.new_empty(_blocks(number))


@dataclass(frozen=True, eq=False)
class Hop:
    """A hop of one edge type: what its kernels read and write.

    Attributes:
        graph: The edges.
        seed: The random seed, int64 ``[1]``.
        state: The buffer whose entries are described in :mod:`gnncompile.sampling.kernels`.
        targets: The nodes of the destinations' type.
        sources: The nodes of the sources' type.
        edges: The local sources, the local destinations and the positions of edges, int64 ``[max_edges]`` each.
        slots: The memory of the slots.
        begin_at: The entry of `state` with the first destination of the hop.
        end_at: The entry of `state` with one more than the last.
        node_at: The entry of `state` with the number of sources before the hop.
        edge_at: The entry of `state` with the number of edges before the hop.
    """

    graph: Graph
    seed: Tensor
    state: Tensor
    targets: Nodes
    sources: Nodes
    edges: tuple[Tensor, Tensor, Tensor]
    slots: Slots
    begin_at: int
    end_at: int
    node_at: int
    edge_at: int

    def draw(self, fan_out: int, rows: int, limit: Tensor) -> None:
        """Samples at most `fan_out` edges of each destination. There are at most `rows` destinations."""
        graph, slots = self.graph, self.slots
        slots.reserve(rows * fan_out)
        if rows * fan_out and graph.weight is not None:
            width = max(_power(fan_out), 2)
            step = max(_PAIRS // width, _LEAST_STEP) if graph.replace else max(_STEP, width)
            tensors: tuple[Tensor, ...] = (
                graph.colptr, graph.weight, self.seed, self.targets.node, self.state, slots.edge
            )  # fmt: skip
            constants: tuple[Any, ...] = (fan_out, width, step, graph.replace, self._types)
            self._launch(_draw_weighted[1 if width <= _ONE_WARP else 4], rows, tensors, self._span, constants)
            self._claim_slots(fan_out, rows * fan_out, slots.place)
        elif rows * fan_out:
            width = _power(fan_out)
            tall = max(_TILE // width, 1)
            bits = self.sources.hash_bits
            constants = (fan_out, width, tall, graph.replace, graph.time_of, graph.last, graph.disjoint, bits)
            tensors = (
                graph.colptr, graph.row, graph.time, limit, self.seed, self.targets.node, self.targets.batch,
                self.state, slots.edge, slots.place, self.sources.first, self.sources.keys,
            )  # fmt: skip
            numbers = (*self._span, self._base(rows * fan_out))
            self._launch(_draw_uniform, -(-rows // tall), tensors, numbers, (*constants, self._types))
        self._number(fan_out, rows * fan_out, slots.place)

    def ranges(self, rows: int, limit: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first edge and the number of edges of at most `rows` destinations, int64 ``[rows]``."""
        graph = self.graph
        begin, size = torch.zeros(2, rows, dtype=torch.int64, device=self.state.device)
        tensors = (
            graph.colptr, graph.row, graph.time, limit, self.targets.node, self.targets.batch, self.state, begin, size
        )  # fmt: skip
        constants = (graph.time_of, graph.disjoint, BLOCK, self._types)
        self._launch(_find_ranges, _blocks(rows), tensors, self._span, constants)
        return begin, size

    def take(self, edge: Tensor, dest: Tensor) -> None:
        """Takes the edges at the positions `edge`. Their destinations are the hop's `dest`-th."""
        self.slots.reserve(edge.numel())
        self.slots.edge[: edge.numel()] = edge
        if edge.numel():
            self._claim_slots(0, edge.numel(), dest)
        self._number(0, edge.numel(), dest)

    def number_sources(self, slots: int, highest_at: int) -> None:
        """Gives the edges of the hop, at most `slots`, the local ids of their sources; see the kernel."""
        tensors = (*self.edges[:2], self.state, self.sources.first)
        self._launch(_number_sources, _blocks(slots), tensors, (self.edge_at, highest_at), (BLOCK,))

    @property
    def _span(self) -> tuple[int, int]:
        return self.begin_at, self.end_at

    @property
    def _types(self) -> str:
        return f"{self.graph.types} {self.slots.edge.dtype}"

    def _base(self, slots: int) -> int:
        base = self.sources.node.numel()
        if base + slots >= EMPTY:
            raise ArgumentError(
                f"num_neighbors: found a hop of up to {slots} edges, expected fewer than {EMPTY - base}; lower "
                "num_neighbors, or give fewer seeds."
            )
        return base

    def _claim_slots(self, fan_out: int, slots: int, dest: Tensor) -> None:
        tensors = (
            self.graph.row, dest, self.targets.batch, self.state, self.slots.edge, self.slots.place,
            self.sources.first, self.sources.keys,
        )  # fmt: skip
        constants = (fan_out, self.graph.disjoint, self.sources.hash_bits, BLOCK, f"{self._types} {dest.dtype}")
        self._launch(_claim_slots, _blocks(slots), tensors, (slots, self._base(slots), *self._span), constants)

    def _number(self, fan_out: int, slots: int, dest: Tensor) -> None:
        """Counts and places the slots of the hop. Without a slot, one program writes that nothing was found."""
        self.slots.reserve(1)
        base, blocks, types = self._base(slots), max(_blocks(slots), 1), f"{self._types} {dest.dtype}"
        fan_out = fan_out if slots else 0
        counted = (self.state, self.slots.place, self.sources.first, self.slots.sums)
        self._launch(_count, blocks, counted, (slots, base, *self._span), (fan_out, BLOCK, types))
        tensors = (
            self.graph.row, dest, self.targets.batch, self.sources.node, self.sources.batch, *self.edges, self.state,
            self.slots.edge, self.slots.place, self.sources.first, self.slots.sums,
        )  # fmt: skip
        constants = (fan_out, self.graph.disjoint, BLOCK, types)
        numbers = (slots, base, *self._span, self.node_at, self.edge_at)
        self._launch(_place, blocks, tensors, numbers, constants)

    def _launch(
        self, kernel: Kernel, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int], constants: Any
    ) -> None:
        with on_device(self.state.get_device()):
            kernel(programs, tensors, numbers, constants)


def start(
    found: Nodes, seeds: Tensor, size: int, count: tuple[Tensor, int], first_batch: Tensor, disjoint: bool
) -> None:
    """Gives seeds their local ids.

    Args:
        found: The nodes of the seeds' type.
        seeds: The seeds, int32 or int64 ``[size]``, of which the last may be -1.
        size: The largest number of seeds.
        count: The buffer that :mod:`gnncompile.sampling.kernels` describes, and its entry for the number of seeds.
        first_batch: The subgraph of the first seed, int64, on the device.
        disjoint: Whether each seed gets a subgraph of its own.
    """
    state, node_at = count
    constants = (found.hash_bits, disjoint, BLOCK, str(seeds.dtype))
    tensors = (seeds, found.node, found.batch, state, found.first, found.keys, first_batch)
    with on_device(state.get_device()):
        _start(_blocks(size), tensors, (size, node_at), constants)


def restore(found: Nodes, number: int, count: tuple[Tensor, int], disjoint: bool) -> None:
    """Enters the nodes found so far, at most `number`, into a new hash table; see :func:`start`."""
    state, node_at = count
    tensors = (found.node, found.batch, state, found.first, found.keys)
    with on_device(state.get_device()):
        _restore(_blocks(number), tensors, (node_at,), (disjoint, found.hash_bits, BLOCK))


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
        check_sizes(nodes, edges)
        self.graph, self.batch_size, self.hops, self.seed = graph, batch_size, hops, seed
        self.node = torch.empty(nodes, dtype=torch.int64, device=device)
        self.edge_index = torch.empty(2, rounded(edges), dtype=torch.int64, device=device)
        self.row, self.col = self.edge_index
        self.edge = torch.empty_like(self.row)
        self.batch = torch.empty_like(self.node) if graph.disjoint else self.node
        sizes = [0, graph.num_nodes, graph.row.numel()]
        self.state = torch.zeros(NODES + 2 * hops + 3, dtype=torch.int64, device=device)
        for at, size in enumerate(sizes):
            self.state[at] = size
        self.hash_bits = bits_of(nodes) if hashes else 0
        self._make_table()
        self.slots = Slots(graph.slot_dtype, device)

    @property
    def node_ends(self) -> Tensor:
        """The number of nodes up to the seeds and up to each hop, int64 ``[hops + 1]``."""
        return self.state[NODES + 1 : NODES + 2 + self.hops]

    @property
    def edge_ends(self) -> Tensor:
        """The number of edges up to each hop, int64 ``[hops]``."""
        return self.state[NODES + 3 + self.hops :]

    def _make_table(self) -> None:
        self.first, self.keys = table(self.hash_bits, self.graph.num_nodes, self.node.device)

    def grow(self, nodes: int, edges: int, hop: int) -> None:
        """Makes room for more nodes and edges before a hop, and keeps those that are there.

        Waits for the device if a hash table grows, because the edges so far refer to places in the old one.
        """
        check_sizes(nodes, edges)
        known = self.node.numel()
        self.node = grown(self.node, nodes)
        self.batch = grown(self.batch, nodes) if self.graph.disjoint else self.node
        self.edge_index, self.edge = grown(self.edge_index, rounded(edges)), grown(self.edge, rounded(edges))
        self.row, self.col = self.edge_index
        if self.hash_bits and bits_of(nodes) > self.hash_bits:
            begin, end = int(self.state[NUMBERED]), int(self.state[NODES + 2 + self.hops + hop])
            self.row[begin:end] = self.first[self.row[begin:end]].long()
            self.state[NUMBERED] = end
            self.hash_bits = bits_of(nodes)
            self._make_table()
            restore(self._found, known, (self.state, NODES + hop + 1), self.graph.disjoint)

    def start(self, seeds: Tensor) -> None:
        """Gives the seeds their local ids: int32 or int64 ``[batch_size]``, of which the last may be -1."""
        if self.hash_bits:
            self.keys.fill_(NOBODY)
            self.first.fill_(EMPTY)
        start(self._found, seeds, self.batch_size, (self.state, NODES + 1), self.state[NODES:], self.graph.disjoint)

    def draw(self, hop: int, fan_out: int, rows: int, limit: Tensor) -> None:
        """Samples a hop of at most `rows` destinations, each with at most `fan_out` edges."""
        self._hop(hop).draw(fan_out, rows, limit)

    def ranges(self, hop: int, rows: int, limit: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first edge and the number of edges of at most `rows` destinations of a hop, int64 ``[rows]``."""
        return self._hop(hop).ranges(rows, limit)

    def take(self, hop: int, edge: Tensor, dest: Tensor) -> None:
        """Samples a hop that takes the edges at the positions `edge`. Their destinations are the hop's `dest`-th."""
        self._hop(hop).take(edge, dest)

    @property
    def _found(self) -> Nodes:
        return Nodes(self.node, self.batch, self.first, self.keys, self.hash_bits)

    def _hop(self, hop: int) -> Hop:
        found, edges, at = self._found, (self.row, self.col, self.edge), NODES + hop
        addresses = at, at + 1, at + 1, NODES + 2 + self.hops + hop
        return Hop(self.graph, self.seed, self.state, found, found, edges, self.slots, *addresses)

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

    def _launch(
        self, kernel: Kernel, programs: int, tensors: Sequence[Tensor], numbers: Sequence[int], constants: Any
    ) -> None:
        with on_device(self.node.get_device()):
            kernel(programs, tensors, numbers, constants)


def grown(value: Tensor, size: int) -> Tensor:
    """Returns a tensor with room for `size` entries along the last dimension. It keeps the entries that it has."""
    if value.size(-1) >= size:
        return value
    made = value.new_empty(*value.shape[:-1], size)
    made[..., : value.size(-1)] = value
    return made


def rounded(edges: int) -> int:
    """Returns a multiple of 8, so that sources and destinations are aligned in one memory."""
    return -(-edges // 8) * 8


def check_sizes(nodes: int, edges: int) -> None:
    """Raises a ValueError for more nodes or edges than local ids."""
    if max(nodes, edges) >= EMPTY:
        raise ArgumentError(
            f"num_neighbors: found up to {nodes} nodes and {edges} edges, expected fewer than {EMPTY}; lower "
            "num_neighbors, or give fewer seeds."
        )


def bits_of(nodes: int) -> int:
    """Returns the bits of an index of a hash table that is at most half full."""
    return max((2 * nodes - 1).bit_length(), 4)


def _blocks(number: int) -> int:
    return -(-number // BLOCK)


def _power(number: int) -> int:
    return int(triton.next_power_of_2(number))
