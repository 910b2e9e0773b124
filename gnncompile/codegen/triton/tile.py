"""Chooses the tile of a Triton kernel: the rows, edges, heads and channels of a program's step, and its warps.

The choice depends on estimates of the kernel's work per edge, which stand first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gnncompile import tuning
from gnncompile.codegen.triton.plan import Schedule
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.region import BITS, FEATURE_REDUCTIONS, HALVES, LAYERS, Node, Region, Space
from gnncompile.tile_sizes import Step

MAX_EDGE = 8192
"""Largest number of elements, padded to powers of two, that one edge may have in a tile."""

NARROWEST = 16
"""Fewest rows and columns of a block that is multiplied, other than a single one: the least that ``tl.dot`` takes."""


def power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def padded(length: int) -> int:
    """Returns the rows or columns of a block that is multiplied and holds this number of channels or features."""
    return 1 if length == 1 else max(power_of_two(length), NARROWEST)


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


# -- estimates of the work per edge --------------------------------------------------------------------------------


def reduces_channels(node: Node) -> bool:
    """Whether a node takes the sum or the maximum over all channels of an edge."""
    return node.op == "transposed" or (node.op in FEATURE_REDUCTIONS and node.op.endswith("channels"))


def needs_whole_rows(region: Region) -> bool:
    """Whether any node reduces channels, so that one program must have all channels of a row."""
    return any(map(reduces_channels, region.nodes))


_INSTRUCTIONS = {
    "exp": 4, "log": 14, "log1p": 30, "div": 8, "sqrt": 8, "sin": 20, "cos": 20, "erf": 30,
    "sigmoid": 5, "softplus": 14, "tanh": 16, "softmax": 6, "expm1": 16, "pow": 40,
}  # fmt: skip
"""Approximate number of instructions of each operation on float32 numbers that takes more than one."""


def arithmetic(region: Region, plan: Schedule) -> float:
    """Returns the approximate number of instructions per edge and element of the tile."""
    nodes = [n for n in (region.nodes[i] for i in plan.need) if n.space in plan.edge_spaces and n.op != "input"]
    size = region.grid[0] * region.grid[1]
    return sum(instructions(region, n) * n.shape[0] * n.shape[1] for n in nodes) / size


def is_heavy(region: Region, plan: Schedule) -> bool:
    """Whether arithmetic takes longer than reading rows. Layers count as multiply-adds, also if they are products."""
    return arithmetic(region, plan) > tuning.TILES.heavy


def instructions(region: Region, node: Node) -> float:
    """Returns the approximate number of instructions per element of a value."""
    if node.op == "linear":  # a multiply-add for each feature
        return region.nodes[node.args[0]].shape[1]
    return _INSTRUCTIONS.get(node.op, 1)


def weights(region: Region) -> int:
    """Returns the number of linear-layer weights that a region reads."""
    sizes = {n.args[1]: region.features(at) for at, n in enumerate(region.nodes) if n.op in ("linear", "transposed")}
    return sum(features * region.nodes[at].shape[0] * region.nodes[at].shape[1] for at, features in sizes.items())


def reads_many_weights(region: Region, warps: int = 1) -> bool:
    """Whether a region reads more linear-layer weights than its warps keep in registers."""
    return weights(region) > tuning.TILES.weights * warps


def sums(region: Region) -> int:
    """Returns the number of scalar sums over all edges that a region computes."""
    made = [(at, n) for at, n in enumerate(region.nodes) if n.op == "outer"]
    return sum(region.features(at) * n.shape[0] * n.shape[1] for at, n in made)


def sums_by_products(region: Region) -> frozenset[int]:
    """Returns the sums over all edges that are products of matrices, ``features.T @ values``.

    A product rounds values to the type of the features, as eager does: in float16, values above 65,504 become infinite.
    There are none if another sum has several features, since a step has too many edges for that sum; nor if the values
    come from layers of the region, or are so many that they do not fit in the registers of a program.
    """
    made = [at for at, n in enumerate(region.nodes) if n.op == "outer"]
    found = frozenset(at for at in made if _sums_by_product(region, at))
    others = any(region.features(at) > 1 for at in made if at not in found)
    layers = any(n.op in ("linear", "transposed") for n in region.nodes)
    tiles, channels = tuning.TILES, power_of_two(region.grid[1])
    made_sums = sum(padded(region.features(at)) for at in found) * channels
    fit = len(found) * channels <= tiles.edge_product_channels and made_sums <= tiles.edge_sums * tiles.edge_sum_warps
    return found if fit and not (others or layers) else frozenset()


_FEWEST_FEATURES = NARROWEST // 2
"""Fewest features of a product. Half of the block of features may be padding."""


def _sums_by_product(region: Region, at: int) -> bool:
    """Whether matrix units compute a sum faster. In float32 they do for many features beside few channels."""
    node = region.nodes[at]
    features, channels = region.nodes[node.args[0]], node.shape[1]
    plain = features.op == "input" and features.dtype == region.factor and not region.double and region.grid[0] == 1
    fewest = _FEWEST_FEATURES if features.dtype in HALVES else max(NARROWEST, channels // 4)
    return plain and features.shape[1] >= fewest and channels >= NARROWEST


PRODUCT_EDGES = 8
"""Edges of a step whose layers are products: the fewest columns that a GPU's matrix units multiply at once."""

_PRODUCT_CHANNELS = 64
"""Channels of a row for each warp of a program whose layers are products."""


def layers_of_halves(region: Region) -> frozenset[int]:
    """Returns the linear layers that are products of matrices, ``features @ weights``, of 16-bit factors.

    There are none if the weights of all do not fit in the registers of a program, nor in a region that computes in
    float64, since matrix units sum these factors in float32.
    """
    if region.double:
        return frozenset()
    found = frozenset(at for at, n in enumerate(region.nodes) if n.op == "linear" and _is_layer_of_halves(region, at))
    sizes = sum(padded(region.features(at)) * power_of_two(region.nodes[at].shape[1]) for at in found)
    fit = sizes <= 2 * tuning.TILES.edge_sums  # two values of 16 bits in a register
    return found if fit and not region.sums_all else frozenset()


def _is_layer_of_halves(region: Region, at: int) -> bool:
    features, weights = (region.nodes[arg] for arg in region.nodes[at].args)
    halves = features.op == weights.op == "input" and features.dtype == weights.dtype and features.dtype in HALVES
    wide = features.shape[1] >= _FEWEST_FEATURES and region.grid[1] >= NARROWEST
    return halves and wide and region.grid[0] == 1 and region.nodes[at].shape == region.grid


def layers_by_products(region: Region, tile: Tile) -> frozenset[int]:
    """Returns the linear layers that kernels with this tile compute as products of matrices."""
    fits = tile.rows == tile.across(region.grid) == 1 and tile.edges >= PRODUCT_EDGES
    return layers_of_halves(region) if fits else frozenset()


def is_bandwidth_bound(region: Region, plan: Schedule) -> bool:
    """Whether a region does little but reduce rows, so that reading the rows takes most of the time."""
    return len(region.reductions) <= 2 and not region.softmaxes and arithmetic(region, plan) <= 2


def dots_per_edge(region: Region, plan: Schedule) -> bool:
    """Whether channels are reduced for every edge, which takes shuffles between lanes."""
    return any(reduces_channels(n) and n.space in plan.edge_spaces for n in (region.nodes[i] for i in plan.need))


def adds_rows(region: Region, plan: Schedule) -> bool:
    """Whether a region only sums rows of one head over edges, with at most two instructions per element."""
    one = [region.nodes[i].op for i in region.reductions] == ["reduce_sum"] and region.grid[0] == 1
    little = is_bandwidth_bound(region, plan) and wide_streams(region, plan) == 1
    more = region.sums_all or region.drops or packs(region) or any(n.op in LAYERS for n in region.nodes)
    return one and little and not (more or needs_whole_rows(region) or any(map(region.per_edge, region.outputs)))


def is_16bit(region: Region) -> bool:
    """Whether a region reads rows with two bytes per element."""
    return any(n.dtype in ("float16", "bfloat16") for n in region.inputs)


def packs(region: Region) -> bool:
    """Whether a region reads or writes packed bools."""
    return BITS in [n.dtype for n in region.inputs] + [o.dtype for o in region.outputs]


def wide_streams(region: Region, plan: Schedule) -> int:
    """Returns the number of values read or written per edge that are at least half as wide as the tile; at least 1."""
    read = [i for i in plan.need if i not in region.only_columns and region.nodes[i].op == "input"]
    nodes = [n for n in (region.nodes[i] for i in read) if n.space in plan.edge_spaces and n.dtype != BITS]
    nodes += [region.nodes[o.node] for o in region.outputs if region.per_edge(o) and o.dtype != BITS]
    return max(sum(2 * n.shape[0] * n.shape[1] >= region.grid[0] * region.grid[1] for n in nodes), 1)


def streams_edges(region: Region) -> bool:
    """Whether a region gathers rows, and also reads rows of edges that are so wide that programs share them."""
    wide = any(n.space is Space.EDGE and n.shape[0] * n.shape[1] > tuning.TILES.heads_width for n in region.inputs)
    return wide and any(n.space is region.by.opposite for n in region.inputs)


def wide_lanes(region: Region, plan: Schedule) -> bool:
    """Whether a pass keeps an accumulator about as large as its tile in registers."""
    ends = {i for loop in plan.loops for i in loop.reductions} - plan.shared_maxima
    wide = any(in_wide_lanes(region, plan, i) for i in ends if region.nodes[i].op != "outer")
    return wide and region.grid[0] * region.grid[1] >= tuning.TILES.combined_width // 2


def in_wide_lanes(region: Region, plan: Schedule, i: int) -> bool:
    """Whether a reduction combines its lanes only after the loop, and is at least a quarter as wide as the region."""
    shape = region.nodes[i].shape
    return i not in plan.every_step and 4 * shape[0] * shape[1] >= region.grid[0] * region.grid[1]


# -- the tile of rows ----------------------------------------------------------------------------------------------


def _shares_heads(region: Region, plan: Schedule) -> bool:
    """Whether several programs, each with some heads of a row, are faster than one program with all heads.

    Each dot product per edge and head then stays in a warp.
    """
    joined = any(n.op in LAYERS or n.op.endswith("heads") for n in region.nodes)
    wide = power_of_two(region.grid[0]) * power_of_two(region.grid[1]) > tuning.TILES.heads_width
    return wide and region.grid[0] > 1 and dots_per_edge(region, plan) and not joined and not packs(region)


def _sums_heads(region: Region) -> bool:
    """Whether a region sums rows with several heads, without a softmax. One warp is then fastest for wide rows, too.

    More warps take different edges or heads of a step, and Triton joins their parts through shared memory in each step.
    With 20,000 rows of 9 x 64 channels and 400,000 edges, four warps took 1.2 to 4.2 ms on an H100, one 0.15 to 0.76.
    """
    plain = not any(n.op in LAYERS for n in region.nodes) and not packs(region)
    return region.grid[0] > 1 and not region.softmaxes and plain


def has_vectors(region: Region) -> bool:
    """Whether the heads of a region are the components of vectors: numbers per channel, such as filters, scale them.

    The heads of attention differ, since all their values have an axis of heads.
    """
    heads, channels = region.grid
    scale = any(n.shape == (1, channels) and n.space is Space.EDGE for n in region.nodes)
    return heads > 1 and channels > 1 and scale and not region.softmaxes


def spreads_channels(region: Region) -> bool:
    """Whether the lanes of a warp should share the channels of vectors, and each lane have all components of its own.

    By itself Triton gives each lane 16 bytes of a row, and the components to different lanes, which then all compute
    what scales them. Dot products over the channels are faster that way.
    """
    dots = [n for n in region.nodes if reduces_channels(n) and region.nodes[n.args[0]].shape[1] == region.grid[1]]
    return has_vectors(region) and not dots


def fills_warps(region: Region, plan: Schedule) -> bool:
    """Whether the lanes of a warp should share the channels of one edge, where a row of 128 channels has 16 bits each.

    By itself Triton gives each lane 16 bytes of a row, so that the lanes of a warp hold two edges, whose parts are then
    joined by shuffles. That costs nothing where reading the rows takes most of the time. Dot products take as many
    shuffles in either way.
    """
    alone = is_16bit(region) and region.grid[0] == 1 and not region.sums_all
    return alone and not (is_bandwidth_bound(region, plan) or dots_per_edge(region, plan))


def warps_of(width: int) -> int:
    """Returns the number of warps of a program that has `width` elements of an edge."""
    return tuning.choice(tuning.TILES.warps, width)


def choose_tile(region: Region, plan: Schedule, dense: bool = False) -> Tile:
    """Returns a tile whose values and accumulators fit into the registers of its warps.

    The sizes stand in :class:`gnncompile.tuning.TileTable`.

    Args:
        region: The region to compute.
        plan: Its passes.
        dense: Whether the graph has several edges per row. A program then takes no more than
            :attr:`gnncompile.tuning.TileTable.sum_width` elements of a row; otherwise no more than ``split_width``. A
            wider row is split by channels, unless a reduction of channels needs the whole row.

    Raises:
        UnsupportedRegion: A single edge is too wide for a tile.
    """
    tiles = tuning.TILES
    heads, channels = power_of_two(region.grid[0]), power_of_two(region.grid[1])
    shared = _shares_heads(region, plan)
    if shared:
        heads = max(tiles.heads_width // channels, 1)
    elif not needs_whole_rows(region):
        channels = min(channels, max((tiles.sum_width if dense else tiles.split_width) // heads, 1))
    width = heads * channels
    if width > MAX_EDGE:
        raise UnsupportedRegion(f"a tile of one edge has {width} elements, at most {MAX_EDGE} are generated")
    if plan.passes == 0:
        rows = max(tiles.rowwise_elements // width, 1)
        return Tile(rows, 1, channels, tuning.choice(tiles.rowwise_warps, width))
    num_warps = warps_of(width)
    if region.sums_all:
        return _tile_of_edge_sums(region, plan, channels, width)
    if num_warps > 1 and not shared and _sums_heads(region):
        # with more arithmetic, the values of two edges do not fit in the registers of a warp
        pair = dots_per_edge(region, plan) and arithmetic(region, plan) <= tiles.pair_arithmetic
        return Tile(1, 2 if pair else 1, channels, 1)
    rows = _rows(region, plan, width, dense)
    if rows == 1 and layers_by_products(region, tile := _tile_of_products(region, channels)):
        return tile
    elements, stages = _step(region, plan, width) if rows == 1 else (_elements_of_several(region, plan, width), 1)
    edges = max(min(num_warps * elements // (rows * width), tiles.edges_per_step), 1)
    return Tile(rows, edges, channels, num_warps, stages, _steps(region, plan, rows, edges), heads if shared else 0)


def _tile_of_products(region: Region, channels: int) -> Tile:
    """Returns the tile of a region of one head whose layers are products. One warp packs bools fastest."""
    num_warps = 1 if packs(region) else max(channels // _PRODUCT_CHANNELS, 1)
    return Tile(1, PRODUCT_EDGES, channels, num_warps)


def _tile_of_edge_sums(region: Region, plan: Schedule, channels: int, width: int) -> Tile:
    """Returns the tile of a region that sums over all edges."""
    tiles, products = tuning.TILES, sums_by_products(region)
    if products:
        edges = tiles.edge_product_edges // (1 if region.factor in HALVES else 2)  # parts take registers as well
        rows = edges * wide_streams(region, plan)
        rows += sum(padded(region.features(at)) for at in products)
        num_warps = min(power_of_two(-(-rows * channels // tiles.edge_product_values)), tiles.edge_sum_warps)
        return Tile(1, edges, channels, num_warps)
    needed = power_of_two(-(-sums(region) // tiles.edge_sums))
    num_warps = min(max(warps_of(width), needed), max(width // tiles.edge_sum_width, 1), tiles.edge_sum_warps)
    return Tile(1, max(num_warps * tiles.edge_sum_elements // width, 1), channels, num_warps)


def _steps(region: Region, plan: Schedule, rows: int, edges: int) -> int:
    """Returns the number of steps that the generator unrolls.

    ptxas itself unrolls four steps of a short loop, such as a loop that sums rows or finds a maximum. A loop that also
    counts ties is too long for ptxas, and would load one row at a time.
    """
    long = region.softmaxes or wide_streams(region, plan) > 1 or is_heavy(region, plan)
    if rows == 1 or long or not plan.counted:
        return 1
    return min(max(tuning.TILES.counted_edges // edges, 1), tuning.TILES.most_steps)


def _rows(region: Region, plan: Schedule, width: int, dense: bool) -> int:
    """Returns the number of rows per program, for any graph or for graphs with several edges per row.

    A program with one narrow row leaves most of its warp idle, and a GPU starts at most about 1.6 programs per
    nanosecond. On the other hand, all rows of a program wait for the row with the most edges.
    """
    if is_bandwidth_bound(region, plan):
        words = width // 2 if is_16bit(region) and not _prefers_one_row(region, plan, width, dense) else width
        return tuning.choice(tuning.TILES.rows_of_sums, words)
    if width == tuning.TILES.combined_width and region.softmaxes and dots_per_edge(region, plan):
        return tuning.TILES.rows_of_attention
    return tuning.choice(tuning.TILES.rows_of_others, width)


def _prefers_one_row(region: Region, plan: Schedule, width: int, dense: bool) -> bool:
    """Whether one wide row of 16 bits per program is faster than two.

    Two rows hide more latency if there are few edges to load. The loads of two rows are not unrolled if a value is
    computed from the only row that each edge has.
    """
    computes = arithmetic(region, plan) > 0 and wide_streams(region, plan) == 1
    return width >= tuning.TILES.sum_width and (dense or computes or packs(region))


def _elements_of_several(region: Region, plan: Schedule, width: int) -> int:
    """Returns the elements of a tile per warp, if a program walks several rows."""
    tiles = tuning.TILES
    if is_heavy(region, plan):
        return tiles.elements_of_several_heavy
    gathers_little = wide_streams(region, plan) == 1 and not dots_per_edge(region, plan)
    several_streams = region.grid[0] > 1 and wide_streams(region, plan) > 1
    if is_16bit(region) and is_bandwidth_bound(region, plan) and several_streams:
        return 4 * tiles.elements_of_several  # two edges of each row
    if width <= tiles.narrow or is_bandwidth_bound(region, plan) or not (region.softmaxes or gathers_little):
        return tiles.elements_of_several
    return tiles.elements_of_several_softmaxes


def _step(region: Region, plan: Schedule, width: int) -> Step:
    """Returns the step of a program that walks one row.

    More edges per step hide more latency. But they take registers, so fewer rows run at the same time, and those would
    hide more.
    """
    tiles = tuning.TILES
    if packs(region):
        return tiles.step_of_packed
    if is_heavy(region, plan):
        return tiles.step_of_heavy
    if reads_many_weights(region):
        return tiles.step_of_weights
    if _shares_heads(region, plan):
        return tiles.step_of_shared_heads
    if width > tiles.heads_width and any(map(region.per_edge, region.outputs)) and not dots_per_edge(region, plan):
        return tiles.step_of_edge_values
    if wide_streams(region, plan) > 1 or dots_per_edge(region, plan):
        return _step_of_heads(region, plan)
    if region.softmaxes and wide_lanes(region, plan):
        return tiles.step_of_lanes
    one_head = region.grid[0] == 1 and (region.softmaxes or needs_whole_rows(region))
    return tiles.step_of_one_head if one_head else tiles.step


def _step_of_heads(region: Region, plan: Schedule) -> Step:
    """The same if several wide rows are gathered, or channels are reduced, as in attention with several heads."""
    if region.grid[0] > 1:
        if region.softmaxes:
            return tuning.TILES.step_of_softmax
        if has_vectors(region):
            many = is_16bit(region) or spreads_channels(region)
            return tuning.TILES.step_of_vectors if many else tuning.TILES.step_of_vector_dots
        if not dots_per_edge(region, plan) and not is_16bit(region):
            return tuning.TILES.step_of_streams
    return tuning.TILES.step_of_dots


def tiles_by_degree(region: Region, plan: Schedule) -> list[tuple[int, Tile]]:
    """Returns the tiles of a region, each with the least number of edges per row, on average over a graph, to use it.

    A long row fills steps of many edges. If programs with few channels each share a row, each gathers from a part of
    the table, and the caches hold more of that part. Other reductions of 128 channels in 16 bits take one row per
    program instead of two. Many regions have a tile of several rows for graphs with few edges per row. A maximum or
    attention over long rows has the same tile as over others, since more edges per step make it slower.
    """
    usual = choose_tile(region, plan)
    tiles, adds = tuning.TILES, adds_rows(region, plan)
    found = [(0, _tile_of_short_rows(region, plan, usual)), (tiles.several_edges, usual)]
    if adds or _pairs_wide_rows(region, plan, usual):
        found[1] = tiles.several_edges, choose_tile(region, plan, dense=True)
    if adds:
        channels = min(power_of_two(region.grid[1]), tiles.long_channels * (2 if is_16bit(region) else 1))
        if channels >= tiles.long_step:
            edges = max(tiles.long_step, tiles.long_elements // channels)
            found.append((tiles.many_edges, Tile(1, edges, channels, 1)))
    return [one for at, one in enumerate(found) if at == 0 or one[1] != found[at - 1][1]]


def _tile_of_short_rows(region: Region, plan: Schedule, usual: Tile) -> Tile:
    """Returns the tile for graphs with few edges per row: several rows, if their values fit in registers.

    A GPU starts at most about 1.6 programs per nanosecond. If each has one row of two edges, they use a part of the
    memory's bandwidth: a gather of 200,000 rows of 128 channels took 124 microseconds on an H200 with one row per
    program, 34 with four. The rule leaves out what was not measured, or takes more registers.
    """
    tiles, width, heads = tuning.TILES.short_rows, usual.width(region.grid), region.grid[0]
    others = region.sums_all or needs_whole_rows(region) or packs(region) or any(n.op in LAYERS for n in region.nodes)
    many = region.double or len(region.reductions) > 2 or is_heavy(region, plan)
    fits = tiles.rows[0][0] <= width <= tiles.widest and usual.across(region.grid) == 1
    wide = width >= tiles.channels and (region.softmaxes or heads > 1)
    if not plan.passes or others or many or wide or not fits:
        return usual
    rows, edges = tuning.choice(tiles.rows, width), tiles.edges if heads == 1 else 1
    num_warps = max(width // tiles.channels, 1)
    return Tile(rows, edges, usual.channels, num_warps, steps=_steps(region, plan, rows, edges))


def _pairs_wide_rows(region: Region, plan: Schedule, tile: Tile) -> bool:
    """Whether a program reduces several rows of :attr:`gnncompile.tuning.TileTable.sum_width` channels of one head."""
    one_head = region.grid[0] == 1 and tile.width(region.grid) == tuning.TILES.sum_width
    return tile.rows > 1 and one_head and is_bandwidth_bound(region, plan)
