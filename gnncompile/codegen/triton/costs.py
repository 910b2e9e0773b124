"""Estimates of a kernel's work per edge. The choice of the tile depends on them."""

from __future__ import annotations

from gnncompile import tuning
from gnncompile.codegen.triton.plan import Schedule, edgewise, every_step, shares_maximum
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, FEATURE_REDUCTIONS, LAYERS, Node, Region


def reduces_channels(node: Node) -> bool:
    """Whether a node takes the sum or the maximum over all channels of an edge."""
    return node.op == "transposed" or (node.op in FEATURE_REDUCTIONS and node.op.endswith("channels"))


def needs_whole_rows(region: Region) -> bool:
    """Whether any node reduces channels, so that one program must have all channels of a row."""
    return any(map(reduces_channels, region.nodes))


_INSTRUCTIONS = {
    "exp": 4, "log": 14, "log1p": 30, "div": 8, "sqrt": 8, "sin": 20, "cos": 20, "erf": 30,
    "sigmoid": 12, "tanh": 60, "softmax": 12, "expm1": 30, "pow": 40,
}  # fmt: skip
"""Approximate number of instructions of each operation that takes more than one."""


def arithmetic(region: Region, plan: Schedule) -> float:
    """Returns the approximate number of instructions per edge and element of the tile."""
    nodes = [n for n in (region.nodes[i] for i in plan.need) if edgewise(region, n) and n.op != "input"]
    size = region.grid[0] * region.grid[1]
    return sum(_instructions(region, n) * n.shape[0] * n.shape[1] for n in nodes) / size


def is_heavy(region: Region, plan: Schedule) -> bool:
    """Whether arithmetic takes longer than reading rows."""
    return arithmetic(region, plan) > tuning.TILES.heavy


def _instructions(region: Region, node: Node) -> float:
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


def is_bandwidth_bound(region: Region, plan: Schedule) -> bool:
    """Whether a region does little but reduce rows, so that reading the rows takes most of the time."""
    return len(region.reductions) <= 2 and not region.softmaxes and arithmetic(region, plan) <= 2


def dots_per_edge(region: Region, plan: Schedule) -> bool:
    """Whether channels are reduced for every edge, which takes shuffles between lanes."""
    return any(reduces_channels(n) and edgewise(region, n) for n in (region.nodes[i] for i in plan.need))


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
    nodes = [n for n in (region.nodes[i] for i in read) if edgewise(region, n) and n.dtype != BITS]
    nodes += [region.nodes[o.node] for o in region.outputs if region.per_edge(o) and o.dtype != BITS]
    return max(sum(2 * n.shape[0] * n.shape[1] >= region.grid[0] * region.grid[1] for n in nodes), 1)


def wide_lanes(region: Region, plan: Schedule, step: int) -> bool:
    """Whether pass `step` keeps an accumulator about as large as its tile in registers."""
    nodes = [region.nodes[i] for i in plan.finished_in(step) if not shares_maximum(region, plan, i)]
    lanes = [n for n in nodes if n.op in ("softmax", "ties", *REDUCTIONS)]
    return (
        any(in_wide_lanes(region, n) for n in lanes)
        and region.grid[0] * region.grid[1] >= tuning.TILES.combined_width // 2
    )


def in_wide_lanes(region: Region, node: Node) -> bool:
    """Whether a reduction combines its lanes only after the loop, and is at least a quarter as wide as the region."""
    return not every_step(node) and 4 * node.shape[0] * node.shape[1] >= region.grid[0] * region.grid[1]
