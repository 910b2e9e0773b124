"""Triton kernels that number the nodes of a sampled neighbourhood, and pad it. The kernels of
:mod:`gnncompile.sampling.draws` draw its edges.

A hop runs three kernels. The first draws edges: node i of the hop's frontier owns the slots ``i * fan-out + j``, and a
slot without an edge has the place -1. The second counts the slots that hold an edge, and the slots that hold the first
occurrence of a new node. The third gives new nodes their local ids, and moves edges to the front.

The table `first` maps a node to its local id. A node that this hop discovers has ``base + slot`` there meanwhile,
where `base` is at least the largest number of nodes. ``atomic_min`` keeps the smallest slot, whatever the order of the
atomics, so the same seed gives the same bits. For disjoint subgraphs, a hash table maps (subgraph, node) to a place in
`first`.

The int64 buffer `state` has what the host does not know: problems found, the sizes of the graph, where each hop's nodes
begin, and where each hop's edges begin. Kernels of a hop are told which entries of `state` they read: `begin_at` has
the hop's first destination, and `end_at` has one more than the last. A kernel that finds nodes or edges reads their
number so far at `node_at` or `edge_at`, and writes the new number to the next entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLAGS, NUM_NODES, NUM_EDGES, NUMBERED, NODES = (tl.constexpr(at) for at in range(5))
"""Entries of `state`. The first NUMBERED edges have local ids as sources, the others places in `first`. From NODES on
follow the first local id of each hop, and of a hop after the last.
"""

BAD_SEED, BAD_GRAPH, NOT_SORTED, BAD_WEIGHT = (tl.constexpr(1 << bit) for bit in range(4))
"""Bits of ``state[FLAGS]``."""

EMPTY = tl.constexpr(2**31 - 1)
"""An entry of `first` that no node has claimed."""

NOBODY = tl.constexpr(-1)
"""A key of the hash table that is free, a slot without an edge, and a seed that is padding."""

REPEATED = tl.constexpr(1024)
"""The most nodes that padded nodes repeat. Features of so few are read again from the cache of the device."""

NODE_BITS = tl.constexpr(40)
"""Bits of a key of the hash table that hold the node; the bits above them hold the subgraph."""


@triton.jit
def report(state_ptr, bad, FLAG: tl.constexpr):
    """Sets a bit of the flags if any lane of `bad` is set."""
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        tl.atomic_or(state_ptr + FLAGS, tl.full((), FLAG, tl.int64), sem="relaxed")


@triton.jit
def place_of(keys_ptr, node, batch, slot, exists, HASH_BITS: tl.constexpr):
    """The entry of `first` that belongs to a node: the node itself, or its place in the hash table."""
    if HASH_BITS == 0:
        at = node
    else:
        key = (batch << NODE_BITS) | node
        # Lanes without a node probe apart from each other, and match nothing.
        spread = tl.where(exists, key, slot.to(tl.int64)).to(tl.uint64) * 0x9E3779B97F4A7C15
        at = (spread >> (64 - HASH_BITS)).to(tl.int64)
        pending = exists
        while tl.max(pending.to(tl.int32), axis=None) > 0:
            old = tl.atomic_cas(keys_ptr + at, tl.where(pending, NOBODY, NOBODY - 1).to(tl.int64), key, sem="relaxed")
            pending = pending & (old != NOBODY) & (old != key)
            at = tl.where(pending, (at + 1) & ((1 << HASH_BITS) - 1), at)
    return at


@triton.jit
def claim(
    row_ptr,
    state_ptr,
    edge_slot_ptr,
    place_slot_ptr,
    first_ptr,
    keys_ptr,
    edge,
    batch,
    slot,
    inside,
    exists,
    base,
    HASH_BITS: tl.constexpr,
):
    """Writes the slots `inside`, and claims the sources of the edges that exist. Returns whether a source is bad."""
    node = tl.load(row_ptr + edge, mask=exists, other=0).to(tl.int64)
    bad = exists & ((node < 0) | (node >= tl.load(state_ptr + NUM_NODES)))
    exists = exists & ~bad
    place = place_of(keys_ptr, node, batch, slot, exists, HASH_BITS)
    tl.atomic_min(first_ptr + place, base + slot, mask=exists, sem="relaxed")
    tl.store(place_slot_ptr + slot, tl.where(exists, place, NOBODY), mask=inside)
    tl.store(edge_slot_ptr + slot, edge, mask=inside & exists)
    return bad


@triton.jit(do_not_specialize=["seeds", "node_at"])
def start(
    seed_nodes_ptr,
    node_ptr,
    batch_ptr,
    state_ptr,
    first_ptr,
    keys_ptr,
    first_batch_ptr,
    seeds,
    node_at,
    HASH_BITS: tl.constexpr,
    DISJOINT: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Gives the seeds their local ids, and writes their number. Seeds equal to NOBODY come last, and are padding."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < seeds
    node = tl.load(seed_nodes_ptr + at, mask=inside, other=NOBODY).to(tl.int64)
    before = tl.load(seed_nodes_ptr + at - 1, mask=inside & (at > 0), other=0).to(tl.int64)
    after = tl.load(seed_nodes_ptr + at + 1, mask=at + 1 < seeds, other=NOBODY).to(tl.int64)
    exists = node != NOBODY
    bad = inside & ((node < NOBODY) | (node >= tl.load(state_ptr + NUM_NODES)) | (exists & (before == NOBODY)))
    report(state_ptr, bad, BAD_SEED)
    node, exists = tl.where(bad, 0, node), exists & ~bad
    batch = at.to(tl.int64) + tl.load(first_batch_ptr)
    place = place_of(keys_ptr, node, batch if DISJOINT else 0 * batch, at, exists, HASH_BITS)
    tl.atomic_min(first_ptr + place, at, mask=exists, sem="relaxed")
    tl.store(node_ptr + at, node, mask=inside)
    if DISJOINT:
        tl.store(batch_ptr + at, batch, mask=inside)
    # The last seed tells how many there are; without a seed, the first lane does.
    last = inside & (exists | bad) & (after == NOBODY)
    number = at.to(tl.int64)
    tl.store(state_ptr + node_at + 0 * at, number + 1, mask=last)
    alone = (at == 0) & ~(exists | bad)
    tl.store(state_ptr + node_at + 0 * at, number, mask=alone)


@triton.jit(do_not_specialize=["slots", "base", "begin_at", "end_at"])
def claim_slots(
    row_ptr,
    dest_ptr,
    batch_ptr,
    state_ptr,
    edge_slot_ptr,
    place_slot_ptr,
    first_ptr,
    keys_ptr,
    slots,
    base,
    begin_at,
    end_at,
    FANOUT: tl.constexpr,
    DISJOINT: tl.constexpr,
    HASH_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Claims the sources of edges that are in their slots already. With FANOUT 0, `dest` has the slots' rows."""
    begin, end = tl.load(state_ptr + begin_at), tl.load(state_ptr + end_at)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if FANOUT == 0:
        inside = slot < slots
        i = tl.load(dest_ptr + slot, mask=inside, other=0).to(tl.int64)
    else:
        inside = slot < (end - begin) * FANOUT
        i = (slot // FANOUT).to(tl.int64)
    edge = tl.load(edge_slot_ptr + slot, mask=inside, other=NOBODY).to(tl.int64)
    exists = inside & (edge >= 0) & (edge < tl.load(state_ptr + NUM_EDGES))
    batch = tl.load(batch_ptr + begin + i, mask=inside, other=0) if DISJOINT else tl.zeros_like(i)
    bad = claim(
        row_ptr,
        state_ptr,
        edge_slot_ptr,
        place_slot_ptr,
        first_ptr,
        keys_ptr,
        edge,
        batch,
        slot,
        inside,
        exists,
        base,
        HASH_BITS,
    )
    report(state_ptr, bad, BAD_GRAPH)


@triton.jit
def counts(
    state_ptr, place_slot_ptr, first_ptr, slots, base, begin_at, end_at, FANOUT: tl.constexpr, BLOCK: tl.constexpr
):
    """The slots of a program, their places, and two bits of each: 1 for an edge, 2**32 for the first of a new node."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    if FANOUT > 0:
        rows = tl.load(state_ptr + end_at) - tl.load(state_ptr + begin_at)
        inside = slot < rows * FANOUT
    place = tl.load(place_slot_ptr + slot, mask=inside, other=NOBODY).to(tl.int64)
    exists = place != NOBODY
    is_first = exists & (tl.load(first_ptr + place, mask=exists, other=0) == base + slot)
    return slot, place, exists.to(tl.int64) + (is_first.to(tl.int64) << 32)


@triton.jit(do_not_specialize=["slots", "base", "begin_at", "end_at"])
def count(
    state_ptr,
    place_slot_ptr,
    first_ptr,
    sums_ptr,
    slots,
    base,
    begin_at,
    end_at,
    FANOUT: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Counts the edges and the new nodes in each block of slots."""
    _, _, ones = counts(state_ptr, place_slot_ptr, first_ptr, slots, base, begin_at, end_at, FANOUT, BLOCK)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(ones, axis=0))


@triton.jit(do_not_specialize=["slots", "base", "begin_at", "end_at", "node_at", "edge_at"])
def place(
    row_ptr,
    dest_ptr,
    dest_batch_ptr,
    node_ptr,
    batch_ptr,
    edge_row_ptr,
    edge_col_ptr,
    edge_ptr,
    state_ptr,
    edge_slot_ptr,
    place_slot_ptr,
    first_ptr,
    sums_ptr,
    slots,
    base,
    begin_at,
    end_at,
    node_at,
    edge_at,
    FANOUT: tl.constexpr,
    DISJOINT: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Moves the edges of a hop to the front, and gives new nodes their local ids in the order of their first slots.

    Until all hops are done, the source of an edge is its place in `first`.
    """
    slot, at, ones = counts(state_ptr, place_slot_ptr, first_ptr, slots, base, begin_at, end_at, FANOUT, BLOCK)
    before = tl.zeros((), tl.int64)
    for offset in range(0, tl.program_id(0), BLOCK):
        block = offset + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(sums_ptr + block, mask=block < tl.program_id(0), other=0), axis=0)
    begin, node_end, edge_end = (
        tl.load(state_ptr + begin_at),
        tl.load(state_ptr + node_at),
        tl.load(state_ptr + edge_at),
    )
    rank = before + tl.cumsum(ones, axis=0) - ones
    exists, is_first = (ones & 1) == 1, ones > 1
    i = tl.load(dest_ptr + slot, mask=exists, other=0).to(tl.int64) if FANOUT == 0 else (slot // FANOUT).to(tl.int64)

    edge = tl.load(edge_slot_ptr + slot, mask=exists, other=0).to(tl.int64)
    out = edge_end + (rank & 0xFFFFFFFF)
    tl.store(edge_row_ptr + out, at, mask=exists)
    tl.store(edge_col_ptr + out, begin + i, mask=exists)
    tl.store(edge_ptr + out, edge, mask=exists)

    local = node_end + (rank >> 32)
    tl.store(node_ptr + local, tl.load(row_ptr + edge, mask=is_first, other=0).to(tl.int64), mask=is_first)
    if DISJOINT:
        tl.store(batch_ptr + local, tl.load(dest_batch_ptr + begin + i, mask=is_first, other=0), mask=is_first)
    tl.store(first_ptr + at, local.to(tl.int32), mask=is_first)

    if tl.program_id(0) == tl.num_programs(0) - 1:
        total = before + tl.sum(ones, axis=0)
        tl.store(state_ptr + node_at + 1, node_end + (total >> 32))
        tl.store(state_ptr + edge_at + 1, edge_end + (total & 0xFFFFFFFF))


@triton.jit(do_not_specialize=["edge_at", "highest_at"])
def number_sources(edge_row_ptr, edge_col_ptr, state_ptr, first_ptr, edge_at, highest_at, BLOCK: tl.constexpr):
    """Gives the edges of one hop the local ids of their sources.

    Raises the entries of `state` from `highest_at` on: one more than the last source, and than the last destination.
    """
    begin, end = tl.load(state_ptr + edge_at), tl.load(state_ptr + edge_at + 1)
    if tl.program_id(0) * BLOCK < end - begin:
        at = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(edge_row_ptr + at, mask=at < end, other=0)
        local = tl.load(first_ptr + place, mask=at < end, other=-1).to(tl.int64)
        tl.store(edge_row_ptr + at, local, mask=at < end)
        dest = tl.load(edge_col_ptr + at, mask=at < end, other=-1)
        tl.atomic_max(state_ptr + highest_at, tl.max(local, axis=0) + 1, sem="relaxed")
        tl.atomic_max(state_ptr + highest_at + 1, tl.max(dest, axis=0) + 1, sem="relaxed")


@triton.jit(do_not_specialize=["node_at"])
def restore(
    node_ptr,
    batch_ptr,
    state_ptr,
    first_ptr,
    keys_ptr,
    node_at,
    DISJOINT: tl.constexpr,
    HASH_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Enters the nodes found so far into a new hash table."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < tl.load(state_ptr + node_at)
    node = tl.load(node_ptr + at, mask=exists, other=0)
    batch = tl.load(batch_ptr + at, mask=exists, other=0) if DISJOINT else tl.zeros_like(node)
    place = place_of(keys_ptr, node, batch, at, exists, HASH_BITS)
    tl.atomic_min(first_ptr + place, at, mask=exists, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "size", "hops"])
def finish_edges(
    edge_row_ptr,
    edge_col_ptr,
    edge_ptr,
    state_ptr,
    first_ptr,
    rows,
    size,
    hops,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Gives edges the local ids of their sources, and pads `size` edges: a ring through the padded nodes below `rows`.
    A `size` of 0 pads nothing.

    See :class:`gnncompile.batches.padding_edges.Ring`. The position of a padded edge repeats those of the first edges.
    """
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    nodes = tl.load(state_ptr + NODES + 1 + hops)
    edges = tl.load(state_ptr + NODES + 2 + 2 * hops)
    valid = at < edges
    unnumbered = valid & (at >= tl.load(state_ptr + NUMBERED))
    source = tl.load(edge_row_ptr + at, mask=unnumbered, other=0)
    source = tl.load(first_ptr + source, mask=unnumbered, other=0).to(tl.int64)
    tl.store(edge_row_ptr + at, source, mask=unnumbered)

    padded, more = (at >= edges) & (at < size), rows - nodes
    k = (at - edges) * more // tl.maximum(size - edges, 1)
    tl.store(edge_row_ptr + at, nodes + (k + 1) % tl.maximum(more, 1), mask=padded)
    tl.store(edge_col_ptr + at, nodes + k, mask=padded)
    again = tl.load(edge_ptr + (at - edges) % tl.maximum(edges, 1), mask=padded & (edges > 0), other=0)
    tl.store(edge_ptr + at, again, mask=padded)


@triton.jit(do_not_specialize=["rows", "graphs", "hops"])
def finish_nodes(
    node_ptr,
    batch_ptr,
    state_ptr,
    first_ptr,
    seed_ptr,
    rows,
    graphs,
    hops,
    DISJOINT: tl.constexpr,
    CLEARS: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Pads `rows` nodes, which repeat the first REPEATED nodes or fewer, and advances the seed.

    The subgraphs from the number of seeds to ``graphs - 1`` share the padded nodes evenly. With CLEARS, the
    entries of `first` become EMPTY again.
    """
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    nodes = tl.load(state_ptr + NODES + 1 + hops)
    valid, padded = at < nodes, (at >= nodes) & (at < rows)
    repeated = (at - nodes) % tl.minimum(tl.maximum(nodes, 1), REPEATED)
    node = tl.load(node_ptr + tl.where(valid, at, repeated), mask=valid | padded, other=0)
    tl.store(node_ptr + at, tl.where(nodes > 0, node, 0), mask=padded)
    if DISJOINT:
        graph = tl.load(state_ptr + NODES + 1)
        graph += (at - nodes) * (graphs - graph) // tl.maximum(rows - nodes, 1)
        tl.store(batch_ptr + at, graph, mask=padded)
    if CLEARS:
        tl.store(first_ptr + node, 0 * at.to(tl.int32) + EMPTY, mask=valid)
    if tl.program_id(0) == 0:
        tl.store(seed_ptr, tl.load(seed_ptr) + 1)
