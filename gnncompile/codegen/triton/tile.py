"""Chooses the tile of a Triton kernel: the rows, edges, heads and channels of a program's step, and its warps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from gnncompile.codegen.triton.costs import (
    HEAVY,
    WEIGHTS,
    adds_rows,
    arithmetic,
    dots_per_edge,
    is_16bit,
    is_bandwidth_bound,
    needs_whole_rows,
    packs,
    sums,
    weights,
    wide_lanes,
    wide_streams,
)
from gnncompile.codegen.triton.plan import WIDE, Schedule
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.region import LAYERS, Region

T = TypeVar("T")

MAX_EDGE = 8192
"""Largest number of elements, padded to powers of two, that one edge may have in a tile."""

ELEMENTS = 2048
"""Elements of a tile per warp, if no accumulator is as large as the tile."""

MOST_EDGES = 16
"""Most edges per step of a row."""

SPLIT_WIDTH = 1024
"""Largest number of elements of a row in one program. A wider row is split over programs by channels, unless a
reduction of channels needs the whole row."""

SUM_WIDTH = 128
"""The same limit for a sum of rows of one head, on graphs with at least :data:`SEVERAL_EDGES` edges per row. In
microseconds on an H200, by the channels of a program. The graph has 169,343 rows and 2.3M edges; in the last line,
100,000 rows and 100,000 edges:

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
"""Edges per row from which on more programs per row pay: each row takes 0.6 ns more, each of its edges 0.07 ns less."""

MANY_EDGES = 32
"""Edges per row from which on a sum has a tile for long rows (see :func:`tiles_by_degree`)."""

LONG_STEP = 16
"""Fewest edges per step of the tile for long rows, and fewest channels of a region that has such a tile."""

HEADS_WIDTH = 256
"""Elements of the heads of one program, if programs share the heads of a row (see :func:`_shares_heads`)."""

SUMMED = 256
"""Elements of a tile per warp, in a region that sums over all edges."""

SUMS = 2048
"""Number of sums of a weight gradient that a warp keeps in registers. More sums are spread over more warps."""

SHARED = 128
"""Fewest elements of an edge per warp, in a region that sums over all edges. If warps took different edges, they would
wait for each other at each sum: 17 features of 128 channels took two warps 7.0 ms, 16 features take one warp 0.58 ms
(H200, 2.3M edges)."""

PROGRAMS = 2048
"""Most programs that share the edges of a sum over all edges: about as many as a large GPU runs at a time. The limit
does not depend on the GPU, so that every GPU adds in the same order."""

SHARE = 8
"""Fewest steps of such a program, if there are enough edges."""

COUNTED_EDGES = 8
"""Number of edges of each row that are loaded together, in a program that walks several rows and counts ties."""


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tile:
    """The sizes of a program and of its steps. Rows, edges, channels and heads are powers of two.

    Attributes:
        rows: Rows per program.
        edges: Edges of a row per step.
        channels: Channels per program. Programs along a second grid axis take the other channels of a wider row.
        num_warps: Warps per program.
        stages: Triton's ``num_stages``: the loads of a step are issued ``stages - 1`` steps ahead.
        steps: Number of steps that are unrolled, so that their rows are loaded together; 1 unless a program walks
            several rows. If it is 1, ptxas itself unrolls a loop that is short enough.
        heads: Heads per program, or 0 for all heads. Programs along the second grid axis take the other heads; each
            then has all channels.
    """

    rows: int
    edges: int
    channels: int
    num_warps: int
    stages: int = 1
    steps: int = 1
    heads: int = 0

    def extent(self, grid: tuple[int, int], axis: int) -> int:
        """Returns a program's length of a feature axis (0: heads, 1: channels) of a region's grid."""
        padded = power_of_two(grid[axis])
        return min(padded, self.channels if axis else self.heads or padded)

    def width(self, grid: tuple[int, int]) -> int:
        """Returns the number of elements of one edge in a program."""
        return self.extent(grid, 0) * self.extent(grid, 1)

    def across(self, grid: tuple[int, int]) -> int:
        """Returns the number of programs that share a row."""
        return math.prod(-(-grid[axis] // self.extent(grid, axis)) for axis in (0, 1))


def _shares_heads(region: Region, plan: Schedule) -> bool:
    """Whether several programs, each with some heads of a row, are faster than one program with all heads.

    Each dot product per edge and head then stays in a warp. In microseconds on an H200, by the heads of a program, for
    16 heads of 64 channels in float16 with edge features. The graphs have 327,660 edges over 40,962 rows, and 1,626,240
    edges over 542,080 rows:

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
    return wide and region.grid[0] > 1 and dots_per_edge(region, plan) and not joined and not packs(region)


def warps_of(width: int) -> int:
    """Returns the number of warps of a program that has `width` elements of an edge."""
    return 1 if width <= 256 else 2 if width <= 512 else 4 if width <= 2048 else 8


def choose_tile(region: Region, plan: Schedule, most: int | None = None) -> Tile:
    """Returns a tile whose values and accumulators fit into the registers of its warps.

    The choices were measured on an H200 with 2.3M edges (see :func:`_elements`).

    Args:
        region: The region to compute.
        plan: Its passes.
        most: Largest number of elements of a row per program; a wider row is split by channels, unless a reduction of
            channels needs the whole row. None means :data:`SPLIT_WIDTH`.

    Raises:
        UnsupportedRegion: A single edge is too wide for a tile.
    """
    heads, channels = power_of_two(region.grid[0]), power_of_two(region.grid[1])
    shared = _shares_heads(region, plan)
    if shared:
        heads = max(HEADS_WIDTH // channels, 1)
    elif not needs_whole_rows(region):
        channels = min(channels, max((most or SPLIT_WIDTH) // heads, 1))
    width = heads * channels
    if width > MAX_EDGE:
        raise UnsupportedRegion(f"a tile of one edge has {width} elements, at most {MAX_EDGE} are generated")
    if plan.passes == 0:
        rows = max(1024 // width, 1)
        return Tile(rows, 1, channels, 8 if width > 4096 else 4)
    num_warps = warps_of(width)
    if region.sums_all:
        num_warps = min(max(num_warps, power_of_two(-(-sums(region) // SUMS))), max(width // SHARED, 1), 8)
        return Tile(1, max(num_warps * SUMMED // width, 1), channels, num_warps)
    rows = _rows(region, plan, width)
    elements, stages = _elements(region, plan, width) if rows == 1 else (_elements_of_several(region, plan, width), 1)
    edges = max(min(num_warps * elements // (rows * width), MOST_EDGES), 1)
    return Tile(rows, edges, channels, num_warps, stages, _steps(region, plan, rows, edges), heads if shared else 0)


def _steps(region: Region, plan: Schedule, rows: int, edges: int) -> int:
    """Returns the number of steps that the generator unrolls.

    ptxas itself unrolls four steps of a short loop, such as a loop that sums rows or finds a maximum. A loop that also
    counts ties is too long for ptxas, and would load one row at a time.
    """
    long = region.softmaxes or wide_streams(region, plan) > 1 or arithmetic(region, plan) > HEAVY
    if rows == 1 or long or not plan.counted:
        return 1
    return min(max(COUNTED_EDGES // edges, 1), 4)


def _rows(region: Region, plan: Schedule, width: int) -> int:
    """Returns the number of rows per program.

    A program with one narrow row leaves most of its warp idle, and a GPU starts at most about 1.6 programs per
    nanosecond. On the other hand, all rows of a program wait for the row with the most edges.
    """
    if is_bandwidth_bound(region, plan):
        words = width // 2 if is_16bit(region) else width
        return 8 if words <= 8 else 4 if words < WIDE else 2 if words == WIDE else 1
    if width < WIDE:
        return 8 if width <= 8 else 2
    return 2 if width == WIDE and region.softmaxes and dots_per_edge(region, plan) else 1


def _elements_of_several(region: Region, plan: Schedule, width: int) -> int:
    """Returns the elements of a tile per warp, if a program walks several rows.

    In microseconds on an H200 with 2.3M edges, by rows x edges of a step (in brackets: one row, 32 edges):

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
    if arithmetic(region, plan) > HEAVY:
        return ELEMENTS // 32
    gathers_little = wide_streams(region, plan) == 1 and not dots_per_edge(region, plan)
    if width <= 16 or is_bandwidth_bound(region, plan) or not (region.softmaxes or gathers_little):
        return ELEMENTS // 16
    return ELEMENTS // 8


def _elements(region: Region, plan: Schedule, width: int) -> tuple[int, int]:
    """Returns the elements of a tile per warp, and the stages of the loop over edges, if a program walks one row.

    More edges per step hide more latency. But they take registers, so fewer rows run at the same time, and those would
    hide more. In microseconds on an H200, by the edges of a step (in brackets with two stages):

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
    if packs(region):  # packed words that Triton loads one step ahead take three times as long
        return ELEMENTS // 4, 1
    if arithmetic(region, plan) > HEAVY:
        return ELEMENTS // 16, 1
    if weights(region) > WEIGHTS:
        return ELEMENTS // 4, 1
    if _shares_heads(region, plan) and not region.softmaxes:
        return ELEMENTS // 8, 2  # 3272 us if rows have three edges; 3609 us with two edges per step
    if width > HEADS_WIDTH and any(map(region.per_edge, region.outputs)) and not dots_per_edge(region, plan):
        return ELEMENTS // 8, 1  # 522 us; 577 us with two edges per step; 531 and 555 us with two stages
    if wide_streams(region, plan) > 1 or dots_per_edge(region, plan):
        return _elements_of_heads(region, plan)
    if region.softmaxes and any(wide_lanes(region, plan, step) for step in range(plan.passes)):
        return ELEMENTS // 8, 1
    # Attention of one head: a training step of 3 GAT layers took 4.6 ms with 4 edges, 5.2 ms with 8.
    one_head = region.grid[0] == 1 and (region.softmaxes or needs_whole_rows(region))
    return (ELEMENTS // 4 if one_head else ELEMENTS // 2), 1


def _elements_of_heads(region: Region, plan: Schedule) -> tuple[int, int]:
    """The same if several wide rows are gathered, or channels are reduced, as in attention with several heads.

    In microseconds on the same machine, for 2.3M edges and 4 heads of 32 channels, by edges per step x stages:

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
        if not dots_per_edge(region, plan) and not is_16bit(region):
            return ELEMENTS // 8, 1
    return ELEMENTS // 4, 2


def tiles_by_degree(region: Region, plan: Schedule) -> list[tuple[int, Tile]]:
    """Returns the tiles of a region, each with the least number of edges per row, on average over a graph, to use it.

    A long row fills steps of many edges. If programs with few channels each share a row, each gathers from a part of
    the table, and the caches hold more of that part. In microseconds on an H200 (in brackets with the tile for graphs
    with fewer edges per row):

    =============  ===========================  ===========================
    channels       124M edges, 2.4M rows        115M edges, 233,000 rows
    =============  ===========================  ===========================
    32, float32    3646 (4021)                  1640 (1753)
    64, float32    6685 (6943)                  3335 (3601)
    128, float32   13437 (13864)                6737 (9051)
    64, bfloat16   3657 (4139)                  1666 (1866)
    128, bfloat16  6646 (7049)                  3422 (3825)
    =============  ===========================  ===========================

    In float32, the sum of 128 channels read 58 GB for the first graph. That takes 13.5 ms at 4.3 TB/s, the speed of a
    copy. Other regions have one tile, since a maximum or attention over long rows is slower with more edges per step.
    """
    found = [(0, choose_tile(region, plan))]
    if adds_rows(region, plan):
        found.append((SEVERAL_EDGES, choose_tile(region, plan, SUM_WIDTH)))
        channels = min(power_of_two(region.grid[1]), 2 * WIDE if is_16bit(region) else WIDE)
        if channels >= LONG_STEP:
            found.append((MANY_EDGES, Tile(1, max(LONG_STEP, ELEMENTS // 4 // channels), channels, 1)))
    return [one for at, one in enumerate(found) if at == 0 or one[1] != found[at - 1][1]]


def of_degree(choices: Sequence[tuple[int, T]], degree: float, otherwise: T) -> T:
    """Returns the choice for graphs with `degree` edges per row on average.

    Args:
        choices: Pairs of the least degree and the choice, in ascending order, like those of :func:`tiles_by_degree`.
        degree: Edges per row.
        otherwise: The choice for a degree below the first.
    """
    return next((one for least, one in reversed(choices) if degree >= least), otherwise)
