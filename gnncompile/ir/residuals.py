"""Chooses residuals: values that the forward of a region stores for its gradient, as outputs after the user's outputs.

The row values that a gradient needs are stored:
- the maximum and the sum of each softmax;
- each extremum, in the dtype of the values that it is chosen from, and the number of values that share its gradient;
- reductions that only an epilogue reads;
- sums over edges that save the gradient a walk.

Values per edge are not stored, except
- comparisons, as one bit each, if the gradient would otherwise gather wide rows, or compute a layer per edge, to
  compare again;
- results of layers on edges, if the caller asks for them, and the gradient would otherwise compute them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from gnncompile.ir import bits
from gnncompile.ir.builder import Builder
from gnncompile.ir.costs import bytes_read, multiplications
from gnncompile.ir.cutting import trailing
from gnncompile.ir.forward_values import selected_dtype
from gnncompile.ir.reductions import REDUCTIONS, gradient_of
from gnncompile.ir.region import BITS, STATISTICS, Node, Output, Region, Space, behind
from gnncompile.ir.stages import Backward, Operand, Stage
from gnncompile.ir.vjp import Differentiation, cheapest, vjp

MOST_BITS = 1024
"""Widest region whose comparisons are stored, in elements per edge, padded to powers of two. No kernel splits such a
region by channels."""

WRITTEN = 280
"""Cost of writing the bits of an edge, in bytes of a gathered row that take as long. A row of 512 bytes takes about 240
us; bits in the order of the edge list take 130 us to write (H200, 2.3M edges)."""


@lru_cache(maxsize=1024)
def with_residuals(region: Region, wanted: tuple[bool, ...] | None = None, least_features: int = 0) -> Region:
    """Returns the region with the values that its gradient needs as additional outputs.

    Args:
        region: A region without residuals.
        wanted: For each tensor, whether a gradient may be asked for. None means all tensors.
        least_features: The fewest features of layers whose results are stored. 0 stores none.
    """
    if wanted is not None and not any(wanted):
        return region
    b = Builder.of(region)
    kept = _Residuals(region)
    for at, node in enumerate(region.nodes):
        if node.op == "softmax":
            kept.add(b, b.softmax_row("softmax_max", at))
            kept.add(b, b.softmax_row("softmax_sum", at))
        elif gradient_of(node.op) == "ties":
            kept.add(b, at)
            kept.add(b, b.sharers(at))
    seen = {o.node for o in region.outputs}  # the caller reads these nodes, so they may have a cotangent
    region = kept.finish(b)
    given = tuple(o.node in seen and region.nodes[o.node].op not in STATISTICS for o in region.outputs)
    for at in Differentiation(region, given).backward(wanted or (True,) * region.count).missing:
        kept.add(b, at)
    region = kept.finish(b)
    given += (False,) * (len(region.outputs) - len(given))
    b = Builder.of(region)
    for argument in Differentiation(region, given).sums_of_the_forward(b, wanted):
        kept.add(b, b.reduce("sum", argument))
    region, wanted = kept.finish(b), wanted or (True,) * region.count
    if not region.tiled:
        return _with_comparisons(region, given, wanted)
    # The backward of a tiled region computes every value per edge again that the region does not return.
    return _with_layers(region, given, wanted, least_features) if least_features else region


@lru_cache(maxsize=4096)
def tensors_read(region: Region, wanted: tuple[bool, ...], kind: str) -> frozenset[int]:
    """Returns the positions of the forward's tensors that a region's gradient may read.

    The tensors that it does read depend on the outputs with a cotangent, which are known only in the backward.

    Args:
        region: The forward, with residuals.
        wanted: For each forward tensor, whether its gradient is needed.
        kind: ``"input"`` or ``"output"``, as of an :class:`~gnncompile.ir.stages.Operand`.
    """
    stages = [stage for given in region.cotangents for stage in vjp(region, wanted, given).stages]
    return frozenset(o.index for stage in stages for o in stage.operands if o.kind == kind)


class _Residuals:
    """The outputs of a region; :meth:`add` appends a value, without rounding it, unless it is an output already."""

    def __init__(self, region: Region) -> None:
        self.by, self.compute = region.by, region.compute
        self.outputs = list(region.outputs)

    def add(self, b: Builder, node: int) -> None:
        dtype = selected_dtype(b.nodes, node) or self.compute
        if not any(o.node == node and o.dtype in (dtype, self.compute) for o in self.outputs):
            self.outputs.append(Output(node, dtype, trailing(b.nodes[node].shape)))

    def finish(self, b: Builder) -> Region:
        return Region(self.by, tuple(b.nodes), tuple(self.outputs), b.unmasked, b.tiled)


def _with_comparisons(region: Region, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> Region:
    """Returns the region with comparisons as outputs: tries one after another, keeps each that saves the backward more
    than its write costs.
    """
    plan = _backward(region, given, wanted)
    cost = bytes_read(plan)
    tried: set[Node] = set()
    for stage in plan.stages:
        for at in _comparisons(stage):
            b = Builder.of(region)
            found = _in_the_forward(b, region, stage, at)
            if found is None or b.nodes[found] in tried:
                continue
            tried.add(b.nodes[found])
            output = Output(found, BITS, (bits.words(b.nodes[found].shape),))
            candidate = Region(region.by, tuple(b.nodes), (*region.outputs, output), b.unmasked, b.tiled)
            less = bytes_read(_backward(candidate, given, wanted))
            if less + WRITTEN < cost:
                region, cost = candidate, less
    return region


def _with_layers(region: Region, given: tuple[bool, ...], wanted: tuple[bool, ...], least_features: int) -> Region:
    """Returns the region with results of layers as outputs, each of which saves the backward multiplications.

    What is added to a layer's result is stored with it. Layers of weights with fewer bits than values have are not
    stored: their results would be longer than the weights' numbers, and short numbers are multiplied faster.
    """
    if region.factor != region.compute:
        return region
    count = multiplications(_backward(region, given, wanted))
    for at, node in enumerate(region.nodes):
        if node.op != "linear" or region.features(at) < least_features:
            continue
        found = _behind_additions(region, at)
        output = Output(found, region.compute, trailing(region.nodes[found].shape))
        candidate = replace(region, outputs=(*region.outputs, output))
        less = multiplications(_backward(candidate, given, wanted))
        if less < count:
            region, count = candidate, less
    return region


def _behind_additions(region: Region, at: int) -> int:
    """Returns the last of the sums in which a value ends that is read for nothing else."""
    while True:
        readers = [k for k, node in enumerate(region.nodes) if at in node.args]
        if len(readers) != 1 or region.nodes[readers[0]].op != "add":
            return at
        if region.nodes[readers[0]].shape != region.nodes[at].shape:
            return at
        at = readers[0]


def _backward(region: Region, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> Backward:
    return cheapest(region, wanted, given + (False,) * (len(region.outputs) - len(given)))


def _comparisons(stage: Stage) -> Iterator[int]:
    """Yields the bools per edge of a stage that a value other than a bool reads, if they can be packed."""
    nodes = stage.region.nodes
    for at, node in enumerate(nodes):
        read = any(at in n.args and not n.boolean for n in nodes)
        if node.op != "input" and node.boolean and node.space is Space.EDGE and read and _fits(stage.region, node):
            yield at


def _fits(region: Region, node: Node) -> bool:
    heads, channels = (1 << (length - 1).bit_length() for length in region.grid)
    return bits.packable(node.shape) and heads * channels <= MOST_BITS


def _in_the_forward(b: Builder, region: Region, stage: Stage, at: int) -> int | None:
    """Rebuilds a value of a backward stage in `b`, a builder that holds the forward's nodes.

    Returns None if the value depends on a cotangent, a temporary, a reduction, or an input in walk order or packed.
    """
    copied: dict[int, int] = {}
    for k in sorted(behind(stage.region.nodes, [at])):
        node = stage.region.nodes[k]
        if node.op == "input":
            found = _origin(region, stage.operands[int(node.value or 0)], node)
            if found is None:
                return None
            copied[k] = found
        elif node.op in (*REDUCTIONS, *STATISTICS, "softmax"):
            return None
        else:
            copied[k] = b.again(node, [copied[a] for a in node.args])
    return copied[at] if b.nodes[copied[at]].space is Space.EDGE else None


def _origin(region: Region, operand: Operand, node: Node) -> int | None:
    """Returns the forward's node that an input of the backward holds, or None if the forward has no such node."""
    if node.space is Space.ORDERED or node.dtype == BITS:
        return None
    if operand.kind == "output":
        return region.outputs[operand.index].node
    inputs = {int(n.value or 0): at for at, n in enumerate(region.nodes) if n.op == "input"}
    return inputs[operand.index] if operand.kind == "input" else None
