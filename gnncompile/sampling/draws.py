"""Triton kernels that draw in-neighbours: uniformly, by weight, and until a time.

Random words are those of :func:`gnncompile.ir.philox.words` for (seed, local id of the destination, draw). A word times
n, divided by 2**32, is a number below n. Its probabilities differ by at most 2**-32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.ir import philox
from gnncompile.sampling.kernels import (
    BAD_GRAPH,
    BAD_WEIGHT,
    EMPTY,
    FLAGS,
    NOBODY,
    NOT_SORTED,
    NUM_EDGES,
    NUM_NODES,
    claim,
    report,
)

ROUNDS = tl.constexpr(philox.ROUNDS)

FAR = tl.constexpr(2**63 - 1)


@triton.jit
def word(seed, node, draw):
    """The random word of a draw of a destination, in [0, 2**32), as int64."""
    zero = tl.zeros_like(draw)
    bits, _, _, _ = tl.philox(seed, node + zero, draw, zero, zero, ROUNDS)
    return bits.to(tl.int64)


@triton.jit
def neighbours(
    colptr_ptr,
    row_ptr,
    time_ptr,
    limit_ptr,
    state_ptr,
    node,
    batch,
    exists,
    FANOUT: tl.constexpr,
    TIME: tl.constexpr,
    LAST: tl.constexpr,
):
    """The first edge of each node, and its number of edges, among which only those until the node's time limit count.

    TIME is "none", "node" or "edge". The times of a node's edges ascend, so a binary search finds the limit. LAST keeps
    the latest FANOUT edges.
    """
    begin = tl.load(colptr_ptr + node, mask=exists, other=0).to(tl.int64)
    end = tl.load(colptr_ptr + node + 1, mask=exists, other=0).to(tl.int64)
    bad = (begin < 0) | (end < begin) | (end > tl.load(state_ptr + NUM_EDGES)) | (end - begin > EMPTY)
    report(state_ptr, bad, BAD_GRAPH)
    end = tl.where(bad, begin, end)
    if TIME != "none":
        limit = tl.load(limit_ptr + batch, mask=exists, other=0)
        low, high = begin, end
        while tl.max(high - low, axis=0) > 0:
            middle = low + (high - low) // 2
            early = (low < high) & (time_of(row_ptr, time_ptr, state_ptr, middle, low < high, TIME) <= limit)
            high = tl.where((low < high) & ~early, middle, high)
            low = tl.where(early, middle + 1, low)
        several = low - begin > 1
        oldest = time_of(row_ptr, time_ptr, state_ptr, begin, several, TIME)
        latest = time_of(row_ptr, time_ptr, state_ptr, low - 1, several, TIME)
        report(state_ptr, several & (oldest > latest), NOT_SORTED)
        end = low
        if LAST and FANOUT >= 0:
            begin = tl.maximum(begin, end - FANOUT)
    return begin, end - begin


@triton.jit
def time_of(row_ptr, time_ptr, state_ptr, edge, mask, TIME: tl.constexpr):
    """The time of an edge, or of its source."""
    at = edge
    if TIME == "node":
        at = tl.load(row_ptr + edge, mask=mask, other=0).to(tl.int64)
        mask = mask & (at >= 0) & (at < tl.load(state_ptr + NUM_NODES))
    return tl.load(time_ptr + at, mask=mask, other=0)


@triton.jit(do_not_specialize=["begin_at", "end_at", "base"])
def draw_uniform(
    colptr_ptr,
    row_ptr,
    time_ptr,
    limit_ptr,
    seed_ptr,
    node_ptr,
    batch_ptr,
    state_ptr,
    edge_slot_ptr,
    place_slot_ptr,
    first_ptr,
    keys_ptr,
    begin_at,
    end_at,
    base,
    FANOUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    REPLACE: tl.constexpr,
    TIME: tl.constexpr,
    LAST: tl.constexpr,
    DISJOINT: tl.constexpr,
    HASH_BITS: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Draws FANOUT edges of each node uniformly, and claims their sources. WIDTH is the next power of two.

    Without replacement, the draws are those of R. Floyd (J. Bentley, "Programming Pearls: A Sample of Brilliance", CACM
    1987): draw t is uniform among the first ``n - FANOUT + t + 1`` edges; if it was drawn before, the last of these is
    taken instead.
    """
    begin, end = tl.load(state_ptr + begin_at), tl.load(state_ptr + end_at)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    local = begin + i
    exists = local < end
    if tl.program_id(0) * ROWS < end - begin:
        node = tl.load(node_ptr + local, mask=exists, other=0)
        batch = tl.load(batch_ptr + local, mask=exists, other=0) if DISJOINT else tl.zeros_like(node)
        first_edge, size = neighbours(
            colptr_ptr, row_ptr, time_ptr, limit_ptr, state_ptr, node, batch, exists, FANOUT, TIME, LAST
        )
        seed, key = tl.load(seed_ptr), local.to(tl.uint32)
        if REPLACE:
            draw = word(seed, key[:, None], tl.zeros((ROWS, WIDTH), tl.uint32) + j[None, :].to(tl.uint32))
            chosen = (draw * size[:, None]) >> 32
            taken = tl.where(size > 0, FANOUT, 0)
        else:
            chosen = tl.zeros((ROWS, WIDTH), tl.int64) - 1
            for t in range(FANOUT):
                top = tl.maximum(size - FANOUT + t, 0)
                drawn = (word(seed, key, tl.zeros((ROWS,), tl.uint32) + t) * (top + 1)) >> 32
                again = tl.max((chosen == drawn[:, None]).to(tl.int32), axis=1) > 0
                chosen = tl.where(j[None, :] == t, tl.where(again, top, drawn)[:, None], chosen)
            chosen = tl.where(size[:, None] <= FANOUT, j[None, :].to(tl.int64), chosen)
            taken = tl.minimum(size, FANOUT)
        inside = exists[:, None] & (j[None, :] < FANOUT)
        bad = claim(
            row_ptr,
            state_ptr,
            edge_slot_ptr,
            place_slot_ptr,
            first_ptr,
            keys_ptr,
            first_edge[:, None] + chosen,
            batch[:, None] + tl.zeros_like(chosen),
            i[:, None] * FANOUT + j[None, :],
            inside,
            inside & (j[None, :] < taken[:, None]),
            base,
            HASH_BITS,
        )
        report(state_ptr, tl.max(bad.to(tl.int32), axis=1), BAD_GRAPH)


@triton.jit
def weight_of(weight_ptr, state_ptr, edge, mask):
    """The weight of an edge in float64; 0 for one that is negative, infinite or NaN, which is reported."""
    weight = tl.load(weight_ptr + edge, mask=mask, other=0.0).to(tl.float64)
    good = (weight >= 0) & (weight < float("inf"))
    report(state_ptr, ~good, BAD_WEIGHT)
    return tl.where(good, weight, 0.0)


@triton.jit
def largest(best, scores, WIDTH: tl.constexpr):
    """The WIDTH largest of two lists of scores; `best` has WIDTH of them."""
    new = tl.topk(scores, WIDTH)
    return tl.topk(tl.reshape(tl.join(best, new), (2 * WIDTH,)), WIDTH)


@triton.jit
def lightest(
    weight_ptr, state_ptr, seed, local, first_edge, size, draw, FANOUT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws FANOUT of `size` edges without replacement, with probabilities proportional to their weights.

    Edge e gets the key ``-log(u) / weight`` with u uniform, and the smallest keys win (P. Efraimidis, P. Spirakis,
    "Weighted random sampling with a reservoir", IPL 2006). Weights of 0 come last. A score is FAR minus the bits of the
    key, then the index of the edge.
    """
    best = tl.full((WIDTH,), -1, tl.int64)
    for offset in range(0, tl.where(size <= FANOUT, 0, size), BLOCK):
        at = offset + tl.arange(0, BLOCK)
        mask = at < size
        weight = weight_of(weight_ptr, state_ptr, first_edge + at, mask)
        v = (word(seed, local, at.to(tl.uint32)).to(tl.float64) + 0.5) * 2.3283064365386963e-10
        key = (-tl.log(1.0 - v) / tl.where(weight > 0, weight, 1.0)).to(tl.float32)
        key = tl.where(weight > 0, key, float("inf"))
        packed = (key.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at
        scores = tl.where(mask, FAR - packed, -1)
        if tl.max(scores, axis=0) > tl.min(best, axis=0):
            best = largest(best, scores, WIDTH)
    chosen = (FAR - best) & 0xFFFFFFFF
    return tl.where(size <= FANOUT, draw, chosen)


@triton.jit
def by_thresholds(
    weight_ptr, state_ptr, seed, local, first_edge, size, draw, BLOCK: tl.constexpr
):  # fmt: skip
    """Draws edges with replacement: draw j takes the edge where the running sum of weights passes ``u * total``."""
    total = tl.zeros((), tl.float64)
    for offset in range(0, size, BLOCK):
        at = offset + tl.arange(0, BLOCK)
        total += tl.sum(weight_of(weight_ptr, state_ptr, first_edge + at, at < size), axis=0)
    if (size > 0) & (total <= 0):
        tl.atomic_or(state_ptr + FLAGS, tl.full((), BAD_WEIGHT, tl.int64), sem="relaxed")
    u = (word(seed, local, draw.to(tl.uint32)).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    threshold = u * total
    running = tl.zeros((), tl.float64)
    chosen = tl.zeros_like(draw)
    for offset in range(0, size, BLOCK):
        at = offset + tl.arange(0, BLOCK)
        weight = weight_of(weight_ptr, state_ptr, first_edge + at, at < size)
        sums = running + tl.cumsum(weight, axis=0)
        passed = (sums[:, None] <= threshold[None, :]) & (at < size)[:, None]
        chosen += tl.sum(passed.to(tl.int64), axis=0)
        running += tl.sum(weight, axis=0)
    return tl.minimum(chosen, size - 1)


@triton.jit(do_not_specialize=["begin_at", "end_at"])
def draw_weighted(
    colptr_ptr,
    weight_ptr,
    seed_ptr,
    node_ptr,
    state_ptr,
    edge_slot_ptr,
    begin_at,
    end_at,
    FANOUT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REPLACE: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Draws FANOUT edges of one node by weight, and writes them to the node's slots. WIDTH is the next power of two."""
    begin, end = tl.load(state_ptr + begin_at), tl.load(state_ptr + end_at)
    i = tl.program_id(0)
    j = tl.arange(0, WIDTH)
    if i < end - begin:
        local = begin + i
        node = tl.load(node_ptr + local)
        first_edge, last_edge = tl.load(colptr_ptr + node).to(tl.int64), tl.load(colptr_ptr + node + 1).to(tl.int64)
        bad = (first_edge < 0) | (last_edge < first_edge) | (last_edge > tl.load(state_ptr + NUM_EDGES))
        bad = bad | (last_edge - first_edge > EMPTY)
        if bad:
            tl.atomic_or(state_ptr + FLAGS, tl.full((), BAD_GRAPH, tl.int64), sem="relaxed")
        size = tl.where(bad, 0, last_edge - first_edge)
        seed, draw, key = tl.load(seed_ptr), j.to(tl.int64), local.to(tl.uint32)
        if REPLACE:
            chosen = by_thresholds(weight_ptr, state_ptr, seed, key, first_edge, size, draw, BLOCK)
            taken = tl.where(size > 0, FANOUT, 0)
        else:
            chosen = lightest(weight_ptr, state_ptr, seed, key, first_edge, size, draw, FANOUT, WIDTH, BLOCK)
            taken = tl.minimum(size, FANOUT)
        edge = tl.where(j < taken, first_edge + chosen, NOBODY)
        tl.store(edge_slot_ptr + i.to(tl.int64) * FANOUT + j, edge, mask=j < FANOUT)


@triton.jit(do_not_specialize=["begin_at", "end_at"])
def find_ranges(
    colptr_ptr,
    row_ptr,
    time_ptr,
    limit_ptr,
    node_ptr,
    batch_ptr,
    state_ptr,
    begin_ptr,
    size_ptr,
    begin_at,
    end_at,
    TIME: tl.constexpr,
    DISJOINT: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Writes the first edge and the number of edges of each node of a frontier, for a hop that takes all edges."""
    begin, end = tl.load(state_ptr + begin_at), tl.load(state_ptr + end_at)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = begin + i < end
    node = tl.load(node_ptr + begin + i, mask=exists, other=0)
    batch = tl.load(batch_ptr + begin + i, mask=exists, other=0) if DISJOINT else tl.zeros_like(node)
    first_edge, size = neighbours(
        colptr_ptr, row_ptr, time_ptr, limit_ptr, state_ptr, node, batch, exists, -1, TIME, False
    )
    tl.store(begin_ptr + i, first_edge, mask=exists)
    tl.store(size_ptr + i, size, mask=exists)
