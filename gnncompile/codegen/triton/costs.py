"""What a kernel of a region does for each edge, as far as the size of its tile depends on it."""

from __future__ import annotations

from gnncompile.codegen.triton.plan import WIDE, Schedule, edgewise, every_step, shares_maximum
from gnncompile.ir.region import BITS, FEATURE_REDUCTIONS, LAYERS, REDUCTIONS, Node, Region

HEAVY = 48
"""Instructions per element and edge from which on arithmetic takes longer than reading rows."""

WEIGHTS = 512
"""Most weights of linear layers that a warp keeps in registers. More are read again for every step, from the L1 cache:
a sum of relu(x + linear(e)), 128 channels and 16 features, takes 473 us with 70 registers a thread, 630 to 870 with 95
to 130."""


def reduces_channels(node: Node) -> bool:
    """Whether a node adds up, or takes the largest of, all channels of an edge."""
    return node.op == "transposed" or (node.op in FEATURE_REDUCTIONS and node.op.endswith("channels"))


def needs_whole_rows(region: Region) -> bool:
    """Whether channels are reduced."""
    return any(map(reduces_channels, region.nodes))


_INSTRUCTIONS = {
    "exp": 4, "log": 14, "log1p": 30, "div": 8, "sqrt": 8, "sin": 20, "cos": 20, "erf": 30,
    "sigmoid": 12, "tanh": 60, "softmax": 12, "expm1": 30, "pow": 40,
}  # fmt: skip
"""Of operations that take more than one, about."""


def arithmetic(region: Region, plan: Schedule) -> float:
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


def sums(region: Region) -> int:
    """How many sums over all edges a region makes."""
    made = [(at, n) for at, n in enumerate(region.nodes) if n.op == "outer"]
    return sum(region.features(at) * n.shape[0] * n.shape[1] for at, n in made)


def is_bandwidth_bound(region: Region, plan: Schedule) -> bool:
    """Whether little is done with the rows but to add them up."""
    return len(region.reductions) <= 2 and not region.softmaxes and arithmetic(region, plan) <= 2


def dots_per_edge(region: Region, plan: Schedule) -> bool:
    """Whether channels are reduced for every edge, which takes shuffles."""
    return any(reduces_channels(n) and edgewise(region, n) for n in (region.nodes[i] for i in plan.need))


def adds_rows(region: Region, plan: Schedule) -> bool:
    """Whether a region only adds up rows of one head along its edges, with two instructions an element at most."""
    one = [region.nodes[i].op for i in region.reductions] == ["reduce_sum"] and region.grid[0] == 1
    little = is_bandwidth_bound(region, plan) and wide_streams(region, plan) == 1
    more = region.sums_all or region.drops or packs(region) or any(n.op in LAYERS for n in region.nodes)
    return one and little and not (more or needs_whole_rows(region) or any(map(region.per_edge, region.outputs)))


def is_16bit(region: Region) -> bool:
    """Whether rows of two bytes per element are read."""
    return any(n.dtype in ("float16", "bfloat16") for n in region.inputs)


def packs(region: Region) -> bool:
    """Whether bools per edge are read or written as bits."""
    return BITS in [n.dtype for n in region.inputs] + [o.dtype for o in region.outputs]


def wide_streams(region: Region, plan: Schedule) -> int:
    """How many values about as wide as the tile are read or written per edge; at least 1."""
    read = [i for i in plan.need if i not in region.only_columns and region.nodes[i].op == "input"]
    nodes = [n for n in (region.nodes[i] for i in read) if edgewise(region, n) and n.dtype != BITS]
    nodes += [region.nodes[o.node] for o in region.outputs if region.per_edge(o) and o.dtype != BITS]
    return max(sum(2 * n.shape[0] * n.shape[1] >= region.grid[0] * region.grid[1] for n in nodes), 1)


def wide_lanes(region: Region, plan: Schedule, step: int) -> bool:
    """Whether a pass keeps an accumulator about as large as its tile in registers."""
    nodes = [region.nodes[i] for i in plan.finished_in(step) if not shares_maximum(region, plan, i)]
    lanes = [n for n in nodes if n.op in ("softmax", "ties", *REDUCTIONS)]
    return any(in_wide_lanes(region, n) for n in lanes) and region.grid[0] * region.grid[1] >= WIDE // 2


def in_wide_lanes(region: Region, node: Node) -> bool:
    """Whether the lanes of a reduction meet behind the loop and take about as much as a value of the region's width."""
    return not every_step(node) and 4 * node.shape[0] * node.shape[1] >= region.grid[0] * region.grid[1]
