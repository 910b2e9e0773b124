"""How large a tile of a Triton kernel is: rows, edges, heads and channels that a program takes at a time, its warps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gnncompile.codegen.triton_plan import WIDE, Schedule, edgewise, every_step, shares_maximum
from gnncompile.errors import Unsupported
from gnncompile.ir.region import BITS, FEATURE_REDUCTIONS, LAYERS, REDUCTIONS, Node, Region

T = TypeVar("T")

MAX_EDGE = 8192
"""Largest number of elements (padded to powers of two) that one edge may take in a tile."""

ELEMENTS = 2048
"""Elements of a tile per warp, where no accumulator is as large as the tile."""

JOINING_WARPS = 8
"""Warps of a program that puts the pieces of a hub together."""

FEW_WARPS = 2
"""The same where a row of one head has at least :data:`WIDE` channels, which programs share: most hubs have few pieces,
and those of many are left to other programs. A sum over 2.3M edges, the longest row 13,000, takes 208.5 us where it
takes 213.8 with 8 warps (128 channels, float32; 115.7 and 120.9 in bfloat16). A sum over one hub of 100,000 edges takes
1 us more: little of the 37 us that it takes with 64 channels, much of the 13 with 16."""

JOINED_CHANNELS = 32
"""Most channels of such a program: with 128 it reads 782 pieces in 13 steps, with 32 in 7, one behind the other."""

LARGE_CHANNELS = 4
"""Most channels of a program for a large hub, one with more pieces than a program for other hubs reads at once. In
microseconds on an H200, a hub of 100,000 edges beside as many rows without any, by channels and pieces read at once:

=============  =======  =======  =======  ===================
width          16x256   8x512    4x1024   edges spread evenly
=============  =======  =======  =======  ===================
64, float32    39.2     37.4     36.8     33.7
128, float32   69.8     67.9     67.2     63.7
64, bfloat16   23.3     21.4     20.8     17.5
128, bfloat16  39.5     37.6     36.8     33.8
=============  =======  =======  =======  ===================
"""

LARGE_PIECES = 1024
"""Most pieces that such a program reads at once: with so few channels no more elements than other programs read."""

BESIDE = 4096
"""Most elements of a step of a piece per warp, where other programs of the launch walk several rows each; half as many
where more is done with rows than to add them up (see :func:`_elements_beside`)."""

BESIDE_IN_LANES = 1024
"""The same for narrow rows, whose edges meet behind the loop: an accumulator has a register for each element."""

MOST_EDGES = 128
"""Most edges per step of a row."""

SPLIT_WIDTH = 1024
"""A row wider than this is split over programs by channels, where no sum over channels needs it whole."""

SUM_WIDTH = 128
"""The same for a sum of rows of one head, on graphs of at least :data:`SEVERAL_EDGES` edges per row. In microseconds on
an H200, 2.3M edges over 169,343 rows, and in the last line 100,000 over as many, by the channels of a program:

================  =====  =====  =====  =====
channels          512    256    128    64
================  =====  =====  =====  =====
512, float32      1086   906    803
512, bfloat16     478    442    436
256, float32             462    408    430
256, bfloat16            234    232    239
256, one edge            65     124
================  =====  =====  =====  =====
"""

SEVERAL_EDGES = 8
"""Edges for each row from which on more programs pay: a row takes 0.6 ns more to start, an edge of it 0.07 ns less."""

MANY_EDGES = 32
"""Edges for each row from which on sums have a tile for long rows (see :func:`tiles_by_degree`)."""

LONG_STEP = 16
"""Fewest edges of a step of that tile, and fewest channels."""

HEADS_WIDTH = 256
"""Elements of a program's heads, where programs share those of a row (see :func:`_shares_heads`)."""

HEAVY = 48
"""Instructions per element and edge from which on arithmetic takes longer than reading rows."""

SUMMED = 256
"""Elements of a tile per warp, where it is summed over all edges."""

WEIGHTS = 512
"""Most weights of linear layers that a warp keeps in registers. More are read again for every step, from the L1 cache:
a sum of relu(x + linear(e)), 128 channels and 16 features, takes 473 us with 70 registers a thread, 630 to 870 with 95
to 130."""

SUMS = 2048
"""Sums of gradients of weights that a warp keeps in registers, if there are further warps for the rest."""

SHARED = 128
"""Elements of an edge that a warp takes. Where further warps take other edges, all wait for each other to add up each
of the sums: 17 features of 128 channels took two warps 7.0 ms, 16 take one warp 0.58 (H200, 2.3M edges)."""

PROGRAMS = 2048
"""Programs that share the edges of a sum over all of them: about as many as a large GPU runs at a time. Always as many,
so that the same numbers are added in the same order everywhere."""

SHARE = 8
"""Fewest steps of such a program, as long as there are not too many of them."""

COUNTED_EDGES = 8
"""Edges of a row that a program of several rows asks for at a time, where it counts ties."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time; all but `num_warps` are powers of two.

    Attributes:
        rows: Rows per program.
        edges: Edges per step and row.
        channels: Channels per program; a second grid axis walks the rest of a wider row.
        num_warps: Warps per program.
        stages: In how many steps before it is needed Triton asks for the rows of a step, plus one.
        steps: Steps that are written one behind the other, so that their rows are asked for together; 1 unless a
            program walks several rows. Where it is 1, ptxas does so itself with a loop that is short enough.
        heads: Heads per program, or 0 for all; otherwise the second grid axis walks the rest, and channels are whole.
    """

    rows: int
    edges: int
    channels: int
    num_warps: int
    stages: int = 1
    steps: int = 1
    heads: int = 0

    def extent(self, grid: tuple[int, int], axis: int) -> int:
        """How much of a feature axis (0: heads, 1: channels) of a region's grid a program has."""
        padded = power_of_two(grid[axis])
        return min(padded, self.channels if axis else self.heads or padded)

    def width(self, grid: tuple[int, int]) -> int:
        """Elements of one edge, of those that a program has."""
        return self.extent(grid, 0) * self.extent(grid, 1)

    def across(self, grid: tuple[int, int]) -> int:
        """How many programs share a row."""
        return math.prod(-(-grid[axis] // self.extent(grid, axis)) for axis in (0, 1))


def _reduces_channels(node: Node) -> bool:
    return node.op == "transposed" or (node.op in FEATURE_REDUCTIONS and node.op.endswith("channels"))


def _needs_whole_rows(region: Region) -> bool:
    """Whether channels are reduced."""
    return any(map(_reduces_channels, region.nodes))


def _shares_heads(region: Region, plan: Schedule) -> bool:
    """Whether programs that each have some heads of a row do better than one that has them all.

    A dot product per edge and head then stays in a warp. In microseconds on an H200, 16 heads of 64 channels in float16
    with features of edges, by the heads of a program (327,660 edges over 40,962 rows; 1,626,240 over 542,080):

    ===========================  ==========  ==========  ==========  ==========
    heads                        16          8           4           2
    ===========================  ==========  ==========  ==========  ==========
    attention                    471; 2702   438; 2563   394; 2542   431; 3103
    its gradient by destination  557; 3409   551; 3294   539; 3272   653; 4406
    by source, no dot products   522; 2561   514; 2637   536; 2787   605; 3076
    ===========================  ==========  ==========  ==========  ==========
    """
    joined = any(n.op in LAYERS or n.op.endswith("heads") for n in region.nodes)
    wide = power_of_two(region.grid[0]) * power_of_two(region.grid[1]) > HEADS_WIDTH
    return wide and region.grid[0] > 1 and _dots_per_edge(region, plan) and not joined and not _packs(region)


def warps_of(width: int) -> int:
    """Warps of a program that has so many elements of an edge."""
    return 1 if width <= 256 else 2 if width <= 512 else 4 if width <= 2048 else 8


def choose_tile(region: Region, plan: Schedule, most: int | None = None) -> Tile:
    """A tile whose values and accumulators fit the registers of its warps.

    Measured on an H200, 2.3M edges: one warp always (see :func:`_elements` for the rest).

    Args:
        region: What to compute.
        plan: Its passes.
        most: A wider row is split by channels, where no sum over channels needs it whole; :data:`SPLIT_WIDTH` if left
            out.

    Raises:
        Unsupported: One edge of one row is too wide for a tile.
    """
    heads, channels = power_of_two(region.grid[0]), power_of_two(region.grid[1])
    shared = _shares_heads(region, plan)
    if shared:
        heads = max(HEADS_WIDTH // channels, 1)
    elif not _needs_whole_rows(region):
        channels = min(channels, max((most or SPLIT_WIDTH) // heads, 1))
    width = heads * channels
    if width > MAX_EDGE:
        raise Unsupported(f"a tile of one edge has {width} elements, at most {MAX_EDGE} are generated")
    if plan.passes == 0:
        rows = max(1024 // width, 1)
        return Tile(rows, 1, channels, 8 if width > 4096 else 4)
    num_warps = warps_of(width)
    if region.sums_all:
        num_warps = min(max(num_warps, power_of_two(-(-_sums(region) // SUMS))), max(width // SHARED, 1), 8)
        return Tile(1, max(num_warps * SUMMED // width, 1), channels, num_warps)
    rows = _rows(region, plan, width)
    elements, stages = _elements(region, plan, width) if rows == 1 else (_elements_of_several(region, plan, width), 1)
    edges = max(min(num_warps * elements // (rows * width), MOST_EDGES // 8), 1)
    return Tile(rows, edges, channels, num_warps, stages, _steps(region, plan, rows, edges), heads if shared else 0)


def _steps(region: Region, plan: Schedule, rows: int, edges: int) -> int:
    """Steps that are written one behind the other.

    ptxas does so with four steps of a short loop, as those are that add rows up, or that find a maximum. To count its
    ties as well makes a loop too long for it, so that one row would be asked for at a time.
    """
    long = region.softmaxes or _wide_streams(region, plan) > 1 or _arithmetic(region, plan) > HEAVY
    if rows == 1 or long or not plan.counted:
        return 1
    return min(max(COUNTED_EDGES // edges, 1), 4)


def _rows(region: Region, plan: Schedule, width: int) -> int:
    """Rows per program.

    A program of one narrow row keeps most of its warp idle, and a GPU starts no more than about 1.6 programs in a
    nanosecond. But all rows of a program wait for the one that has most edges.
    """
    if _light(region, plan):
        words = width // 2 if _halves(region) else width
        return 8 if words <= 8 else 4 if words < WIDE else 2 if words == WIDE else 1
    if width < WIDE:
        return 8 if width <= 8 else 2
    return 2 if width == WIDE and region.softmaxes and _dots_per_edge(region, plan) else 1


def _elements_of_several(region: Region, plan: Schedule, width: int) -> int:
    """Elements of a tile per warp, where a program walks several rows.

    In microseconds on an H200 with 2.3M edges, by rows and edges of a step (in brackets: one row, 32 edges):

    =================================  =========  =========  =========  =========  =========
    width                              2x1        2x2        2x4        4x1        4x2
    =================================  =========  =========  =========  =========  =========
    16: GCN (106)                                 59         57         45         35
    16: GAT, 4 heads (245)                        133        93         159        96
    16: CGConv (531)                              189        189        225        221
    32: GCN (119)                      74         63         71         59         70
    32: GAT, 4 heads (439)             235        163        127        193        131
    32: GATv2, 4 heads, last (614)     354        264        345        288        395
    32: CGConv (1601)                  352        341        445        410        427
    64: GCN (123)                      102        123        101        142        111
    64: Transformer, 4 heads (435)     413        350        377        394        403
    =================================  =========  =========  =========  =========  =========
    """
    if _arithmetic(region, plan) > HEAVY:
        return ELEMENTS // 32
    gathers_little = _wide_streams(region, plan) == 1 and not _dots_per_edge(region, plan)
    if width <= 16 or _light(region, plan) or not (region.softmaxes or gathers_little):
        return ELEMENTS // 16
    return ELEMENTS // 8


def _elements(region: Region, plan: Schedule, width: int) -> tuple[int, int]:
    """Elements of a tile per warp, and stages of the loop over edges.

    More edges a step hide more latency, but the registers they take keep other rows off the chip, which hides more. In
    microseconds on an H200, by the edges of a step (in brackets with two stages):

    ====================================  ===========  ===========  ===========  ===========
    128 channels, 2.3M edges              1            2            4            8
    ====================================  ===========  ===========  ===========  ===========
    mean of rows                          205 (308)    190 (239)    203 (210)    188 (225)
    GAT, gradient by source               472 (680)    440 (612)    718 (627)    428 (519)
    GEN (softmax per channel)             493 (527)    428 (456)    410 (483)    448 (549)
    ResGated, two rows gathered           544 (571)    482 (481)    461 (463)    759 (591)
    CGConv, about 80 instructions         877 (997)    1074 (1036)  1478 (1150)  2389 (2108)
    ====================================  ===========  ===========  ===========  ===========
    """
    wide_lanes = any(_wide_lanes(region, plan, step) for step in range(plan.passes))
    if _packs(region):  # words that Triton asks for one step ahead take three times as long
        return ELEMENTS // 4, 1
    if _arithmetic(region, plan) > HEAVY:
        return ELEMENTS // 16, 1
    if weights(region) > WEIGHTS:
        return ELEMENTS // 4, 1
    if _shares_heads(region, plan) and not region.softmaxes:
        return ELEMENTS // 8, 2  # 3272 us where rows have three edges, with two at a time 3609
    if width > HEADS_WIDTH and any(map(region.per_edge, region.outputs)) and not _dots_per_edge(region, plan):
        return ELEMENTS // 8, 1  # 522 us; with two edges 577, in two stages 531 and 555
    if _wide_streams(region, plan) > 1 or _dots_per_edge(region, plan):
        return _elements_of_heads(region, plan)
    if region.softmaxes and wide_lanes:
        return ELEMENTS // 8, 1
    # Attention of one head: 3 layers of GAT took 4.6 ms a step with 4 edges, 5.2 ms with the 8 that several heads want.
    one_head = region.grid[0] == 1 and (region.softmaxes or _needs_whole_rows(region))
    return (ELEMENTS // 4 if one_head else ELEMENTS // 2), 1


def _elements_of_heads(region: Region, plan: Schedule) -> tuple[int, int]:
    """The same where several wide rows are gathered, or channels are reduced, as in attention of several heads.

    In microseconds on the same machine, 2.3M edges, 4 heads of 32 channels, by edges and stages of a step:

    =====================================  =====  =====  =====  =====  =====
    float32                                2x1    2x2    4x1    4x2    8x1
    =====================================  =====  =====  =====  =====  =====
    dot products                           484    503    462    464    470
    GATv2                                  343    391    301    315    377
    dot products, gradient by destination  530    544    507    504    596
    GATv2, gradient by destination         437    453    456    409    554
    dot products, gradient by source       595    659    777    642    1530
    GATv2, gradient by source              553    610    636    606    1541
    dot products, float16                  365    372    294    316    274
    GATv2, float16                         350    344    291    309    306
    dot products, float16, by source       478    440    456    433    1283
    =====================================  =====  =====  =====  =====  =====
    """
    if region.grid[0] > 1 and not _shares_heads(region, plan):
        if region.softmaxes:
            return ELEMENTS // 4, 1
        if not _dots_per_edge(region, plan) and not _halves(region):
            return ELEMENTS // 8, 1
    return ELEMENTS // 4, 2


_INSTRUCTIONS = {
    "exp": 4, "log": 14, "log1p": 30, "div": 8, "sqrt": 8, "sin": 20, "cos": 20, "erf": 30,
    "sigmoid": 12, "tanh": 60, "softmax": 12, "expm1": 30, "pow": 40,
}  # fmt: skip
"""Of operations that take more than one, about."""


def _arithmetic(region: Region, plan: Schedule) -> float:
    """About how many instructions an element of the tile takes per edge."""
    nodes = [n for n in (region.nodes[i] for i in plan.need) if edgewise(region, n) and n.op != "input"]
    size = region.grid[0] * region.grid[1]
    return sum(_instructions(region, n) * n.shape[0] * n.shape[1] for n in nodes) / size


def _instructions(region: Region, node: Node) -> float:
    if node.op == "linear":  # a multiply-add for each feature
        return region.nodes[node.args[0]].shape[1]
    return _INSTRUCTIONS.get(node.op, 1)


def weights(region: Region) -> int:
    """How many weights of linear layers a region reads."""
    sizes = {n.args[1]: region.features(at) for at, n in enumerate(region.nodes) if n.op in ("linear", "transposed")}
    return sum(features * region.nodes[at].shape[0] * region.nodes[at].shape[1] for at, features in sizes.items())


def _sums(region: Region) -> int:
    """How many sums over all edges a region makes."""
    sums = [(at, n) for at, n in enumerate(region.nodes) if n.op == "outer"]
    return sum(region.features(at) * n.shape[0] * n.shape[1] for at, n in sums)


def _light(region: Region, plan: Schedule) -> bool:
    """Whether little is done with the rows but to add them up."""
    return len(region.reductions) <= 2 and not region.softmaxes and _arithmetic(region, plan) <= 2


def _dots_per_edge(region: Region, plan: Schedule) -> bool:
    """Whether channels are reduced for every edge, which takes shuffles."""
    return any(_reduces_channels(n) and edgewise(region, n) for n in (region.nodes[i] for i in plan.need))


def _adds_rows(region: Region, plan: Schedule) -> bool:
    """Whether a region only adds up rows of one head along its edges, with two instructions an element at most."""
    one = [region.nodes[i].op for i in region.reductions] == ["reduce_sum"] and region.grid[0] == 1
    little = _light(region, plan) and _wide_streams(region, plan) == 1
    more = region.sums_all or region.drops or _packs(region) or any(n.op in LAYERS for n in region.nodes)
    return one and little and not (more or _needs_whole_rows(region) or any(map(region.per_edge, region.outputs)))


def tiles_by_degree(region: Region, plan: Schedule) -> list[tuple[int, Tile]]:
    """From how many edges per row, on average over a graph, it has which tile: the first is for all with fewer.

    A long row fills its steps, and programs of few channels each, which share a row, gather from a part of the table,
    of which the caches hold more. In microseconds on an H200 (in brackets the tile for graphs of fewer edges per row):

    =============  ===========================  ===========================
    channels       124M edges, 2.4M rows        115M edges, 233,000 rows
    =============  ===========================  ===========================
    32, float32    3646 (4021)                  1640 (1753)
    64, float32    6685 (6943)                  3335 (3601)
    128, float32   13437 (13864)                6737 (9051)
    64, bfloat16   3657 (4139)                  1666 (1866)
    128, bfloat16  6646 (7049)                  3422 (3825)
    =============  ===========================  ===========================

    In float32 the sum of 128 channels read 58 GB for the first graph: 13.5 ms at 4.3 TB/s, the memory's speed in a
    copy. Other kernels have one tile: a maximum or attention over such rows takes longer with more edges a step.
    """
    found = [(0, choose_tile(region, plan))]
    if _adds_rows(region, plan):
        found.append((SEVERAL_EDGES, choose_tile(region, plan, SUM_WIDTH)))
        channels = min(power_of_two(region.grid[1]), 2 * WIDE if _halves(region) else WIDE)
        if channels >= LONG_STEP:
            found.append((MANY_EDGES, Tile(1, max(LONG_STEP, ELEMENTS // 4 // channels), channels, 1)))
    return [one for at, one in enumerate(found) if at == 0 or one[1] != found[at - 1][1]]


def of_degree(choices: Sequence[tuple[int, T]], degree: float, otherwise: T) -> T:
    """The choice for graphs of so many edges per row on average.

    Args:
        choices: From how many edges per row each is, the fewest first, as :func:`tiles_by_degree` has tiles.
        degree: Edges per row.
        otherwise: For fewer than the first.
    """
    return next((one for least, one in reversed(choices) if degree >= least), otherwise)


def hub_tile(region: Region, plan: Schedule, tile: Tile) -> Tile | None:
    """The tile for pieces of hubs beside `tile` for the other rows.

    None where no edges are walked.

    A piece fills its steps, which most rows are too short for, so it takes more edges at once: the pieces of a sum of
    128 channels take 23 us with 32 edges, 30 with 16. Where several wide values per edge are read or written, fewer, so
    that ptxas spills nothing; where arithmetic takes longest, no more. A step whose ties are counted stays in registers
    as a whole until its maximum is known: 32 edges of 128 channels take 190, 16 take 100.
    """
    if plan.passes == 0:
        return None
    beside = tile.rows > 1 and plan.passes == 1
    tile = replace(tile, rows=1, steps=1)
    if _arithmetic(region, plan) > HEAVY or weights(region) > WEIGHTS:
        return tile
    width = tile.width(region.grid)
    elements = tile.num_warps * ELEMENTS // min(power_of_two(_wide_streams(region, plan)), 4)
    if width > WIDE and _light(region, plan) and not plan.counted:
        elements *= 2
    lanes = [i for i in plan.counted if _in_wide_lanes(region, region.nodes[i])]
    if lanes:  # the largest accumulators, two of each
        elements //= 2 * power_of_two(len(lanes))
    elif any(_wide_lanes(region, plan, step) for step in range(plan.passes)):
        elements //= 2
    if beside:
        elements = _elements_beside(region, plan, elements, tile.num_warps)
    return replace(tile, edges=min(max(elements // width, tile.edges), MOST_EDGES))


def _elements_beside(region: Region, plan: Schedule, elements: int, num_warps: int) -> int:
    """Elements of a step of a piece, in one launch with rows that several share a program.

    All programs have as many registers as a piece. More than 64 a thread would keep some of the 32 programs of one warp
    off each processor. Compiled for an H200, 64 channels in float32, a sum comes to 64, a maximum with its ties to 60,
    with twice as many edges to 112.
    """
    most = BESIDE if region.grid[0] * region.grid[1] >= WIDE else BESIDE_IN_LANES
    elements = min(elements, num_warps * most)
    if any(n.op == "softmax" and _in_wide_lanes(region, n) for n in region.nodes):
        return elements // 4  # each edge has a maximum and a sum for every channel
    alone = _arithmetic(region, plan) == 0 and not plan.counted and not region.softmaxes
    return elements if alone else elements // 2


def joining_tile(region: Region, tile: Tile) -> Tile:
    """The tile for putting the pieces of a hub together, of which there may be hundreds, by programs of few channels
    each, where no sum over channels needs them all. `tile` is that of the pieces.
    """
    if not tile.heads and not _needs_whole_rows(region):
        tile = replace(tile, channels=min(tile.channels, JOINED_CHANNELS))
    width = tile.width(region.grid)
    few = width <= JOINED_CHANNELS and region.grid[0] * region.grid[1] >= WIDE
    warps = FEW_WARPS if few else JOINING_WARPS
    return replace(tile, edges=min(max(warps * ELEMENTS // 2 // width, 1), MOST_EDGES), num_warps=warps)


def large_tile(region: Region, tile: Tile) -> Tile | None:
    """The tile for a hub of more pieces than `tile`, that of other hubs, reads at once: its channels are spread over
    more programs, which read more pieces, but no more elements, so that other hubs lose no registers to it. None where
    it would have no more pieces.
    """
    if tile.heads or _needs_whole_rows(region):
        return None
    large = replace(tile, channels=min(tile.channels, LARGE_CHANNELS))
    elements = max(tile.edges * tile.width(region.grid), tile.num_warps * ELEMENTS // 8)
    pieces = min(elements // large.width(region.grid), LARGE_PIECES)
    return replace(large, edges=pieces) if pieces > tile.edges else None


def large_programs(region: Region, tile: Tile) -> int:
    """How many programs a large hub has for each one that other hubs have, whose tile is `tile`; 0 if it is as they."""
    large = large_tile(region, tile)
    return 0 if large is None else -(-large.across(region.grid) // tile.across(region.grid))


def _halves(region: Region) -> bool:
    """Whether rows of two bytes per element are read."""
    return any(n.dtype in ("float16", "bfloat16") for n in region.inputs)


def _packs(region: Region) -> bool:
    """Whether bools per edge are read or written as bits."""
    return BITS in [n.dtype for n in region.inputs] + [o.dtype for o in region.outputs]


def _wide_streams(region: Region, plan: Schedule) -> int:
    """How many values about as wide as the tile are read or written per edge; at least 1."""
    read = [i for i in plan.need if i not in region.only_columns and region.nodes[i].op == "input"]
    nodes = [n for n in (region.nodes[i] for i in read) if edgewise(region, n) and n.dtype != BITS]
    nodes += [region.nodes[o.node] for o in region.outputs if region.per_edge(o) and o.dtype != BITS]
    return max(sum(2 * n.shape[0] * n.shape[1] >= region.grid[0] * region.grid[1] for n in nodes), 1)


def _wide_lanes(region: Region, plan: Schedule, step: int) -> bool:
    """Whether a pass keeps an accumulator about as large as its tile in registers."""
    nodes = [region.nodes[i] for i in plan.finished_in(step) if not shares_maximum(region, plan, i)]
    lanes = [n for n in nodes if n.op in ("softmax", "ties", *REDUCTIONS)]
    return any(_in_wide_lanes(region, n) for n in lanes) and region.grid[0] * region.grid[1] >= WIDE // 2


def _in_wide_lanes(region: Region, node: Node) -> bool:
    """Whether the lanes of a reduction meet behind the loop and take about as much as a value of the region's width."""
    return not every_step(node) and 4 * node.shape[0] * node.shape[1] >= region.grid[0] * region.grid[1]
