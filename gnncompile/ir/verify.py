"""Checks that a region is well formed. The check runs after every construction and in tests, never on a hot path."""

from __future__ import annotations

import math

from gnncompile.exc import InvalidRegionError
from gnncompile.ir import bits
from gnncompile.ir.builder import broadcast, join
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS, gradient_of
from gnncompile.ir.region import (
    BITS,
    BOOL,
    COMPUTE,
    FEATURE_REDUCTIONS,
    INDEX,
    LAYERS,
    SEED,
    SOFTMAX_ROWS,
    STATISTICS,
    Node,
    Output,
    Region,
    Space,
)

STORAGE = ("float32", "float64", "bfloat16", "float16", BOOL)


def verify(region: Region) -> None:
    """Checks a region.

    Raises:
        InvalidRegionError: The region breaks a rule; the message names the node and the rule.
    """
    if region.by not in (Space.SOURCE, Space.DESTINATION):
        raise InvalidRegionError(f"a region is walked by source or destination, found {region.by.value}")
    late: set[int] = set()  # row values that are known only after the walk over the edges
    for at, node in enumerate(region.nodes):
        if any(not 0 <= a < at for a in node.args):
            raise InvalidRegionError(f"%{at} {node.op}: arguments must be earlier nodes, found {node.args}")
        if node.op in (*REDUCTIONS, *STATISTICS) or (node.space is region.by and late.intersection(node.args)):
            late.add(at)
        elif late.intersection(node.args) and node.dtype != BOOL:  # comparisons have no gradient
            raise InvalidRegionError(f"%{at} {node.op}: reads a reduction on edges again; form two regions")
        problem = _problem(region, node)
        if problem:
            raise InvalidRegionError(f"%{at} {node.op}: {problem}")
    for out in region.outputs:
        if not 0 <= out.node < len(region.nodes):
            raise InvalidRegionError(f"output %{out.node}: the region has {len(region.nodes)} nodes")
        node = region.nodes[out.node]
        if region.sums_all and node.op != "outer" and not region.tiled:
            raise InvalidRegionError(f"output %{out.node}: a region that sums over all edges gives nothing else")
        if node.space not in (region.by, Space.EDGE) and node.op != "outer":
            raise InvalidRegionError(
                f"output %{out.node} lives on {node.space.value}, expected {region.by.value} or edge"
            )
        if not _holds(out, node):
            raise InvalidRegionError(f"output %{out.node}: {out.trailing} {out.dtype} does not hold {node.shape}")


def _holds(out: Output, node: Node) -> bool:
    if out.dtype == BITS:
        return node.boolean and node.space is Space.EDGE and out.trailing == (bits.words(node.shape),)
    return math.prod(out.trailing) == math.prod(node.shape) and out.dtype in STORAGE


def _problem(region: Region, node: Node) -> str | None:
    args = [region.nodes[a] for a in node.args]
    if node.op in ("input", "const"):
        return _input_problem(node, args) if node.op == "input" else None
    if any(a.dtype == INDEX for a in args):
        return "reads an index, which only an input does"
    if node.op == "dropout":
        return _dropout_problem(node, args)
    if node.op in LAYERS:
        return _layer_problem(node, args, region.tiled)
    if any(a.space is Space.FEATURE for a in args):
        return "reads weights, which only a linear layer does"
    if any(a.dtype == SEED for a in args):
        return "reads a seed, which only dropout does"
    if node.op in POINTWISE:
        return _pointwise_problem(region, node, args)
    if len(args) != 1:
        return f"takes one argument, found {len(args)}"
    if node.op in FEATURE_REDUCTIONS:
        axis = FEATURE_REDUCTIONS.index(node.op) % 2
        kept = args[0].shape[1 - axis]
        if node.space is not args[0].space.computed:
            return f"lives on {node.space.value}, its argument on {args[0].space.value}"
        fits = node.shape[axis] == 1 and node.shape[1 - axis] == kept
        return None if fits else "keeps every axis but the reduced one"
    if node.op == "softmax":
        return None if node.space is Space.EDGE else "lives on edges"
    if node.op in SOFTMAX_ROWS:
        return None if args[0].op == "softmax" and node.space is region.by else "is a row value of a softmax"
    if node.op == "ties":
        fits = gradient_of(args[0].op) == "ties" and (node.space, node.shape) == (region.by, args[0].shape)
        return None if fits else "is a row value of an extremum"
    if node.op in REDUCTIONS:
        return None if node.space is region.by and node.shape == args[0].shape else "has a row per row of the region"
    return "unknown operation"


def _input_problem(node: Node, args: list[Node]) -> str | None:
    if not isinstance(node.value, int) or node.value < 0 or node.dtype not in (*STORAGE, SEED, BITS, INDEX):
        return f"needs a storage type and a position, found {node.dtype}, {node.value!r}"
    if node.dtype == BITS and node.space is not Space.EDGE:
        return f"packed bools live on edges, found {node.space.value}"
    if node.dtype == SEED and (node.space is not Space.PARAMETER or node.shape != (1, 1)):
        return f"a seed is one parameter, found {node.shape} on {node.space.value}"
    if node.dtype == INDEX and (node.space is not Space.EDGE or node.shape != (1, 1) or args):
        return f"an index is one number per edge, found {node.shape} on {node.space.value}"
    if args and ([a.dtype for a in args] != [INDEX] or node.space is not Space.EDGE or node.dtype == BITS):
        return f"is gathered through one index, and lives on edges; found {node.dtype} on {node.space.value}"
    return None


def _dropout_problem(node: Node, args: list[Node]) -> str | None:
    if [a.dtype for a in args] != [SEED]:
        return f"takes one seed, found {[a.dtype for a in args]}"
    if node.value is None or not 0 < node.value < 1:
        return f"needs a probability between 0 and 1, found {node.value!r}"
    return None if (node.space, node.dtype) == (Space.EDGE, COMPUTE) else f"lives on edges in {COMPUTE} type"


def _layer_problem(node: Node, args: list[Node], tiled: bool) -> str | None:
    if len(args) != 2:
        return f"takes two arguments, found {len(args)}"
    first, other = args
    if node.space is not (Space.FEATURE if node.op == "outer" else Space.EDGE):
        return f"lives on {node.space.value}"
    if first.through_index and not tiled:
        return "takes features stored per edge; rows of an index are read by walks in tiles only"
    if node.op != "transposed" and (first.space.computed is not Space.EDGE or first.shape[0] != 1):
        return f"takes the features of edges, found {first.shape} on {first.space.value}"
    if node.op != "outer" and (other.op, other.space) != ("input", Space.FEATURE):
        return f"takes weights, found {other.op} on {other.space.value}"
    if node.op == "linear":
        return None if other.shape == node.shape else f"takes weights of its own shape, found {other.shape}"
    if node.op == "transposed":
        fits = first.space is not Space.FEATURE and broadcast(first.shape, other.shape) == other.shape
        return None if fits and node.shape[0] == 1 else "takes a value that broadcasts to the weights"
    fits = other.space is not Space.FEATURE and broadcast(other.shape, node.shape) == node.shape
    return None if fits else f"takes a value that broadcasts to its shape, found {other.shape}"


def _pointwise_problem(region: Region, node: Node, args: list[Node]) -> str | None:
    rule = POINTWISE[node.op]
    if len(args) != rule.arity:
        return f"takes {rule.arity} arguments, found {len(args)}"
    if node.shape != broadcast(*(a.shape for a in args)):
        return f"has shape {node.shape}, its arguments broadcast to {broadcast(*(a.shape for a in args))}"
    space = Space.EDGE if node.op == "on_edges" else join(region.by, [a.space for a in args])
    if node.space is not space:
        return f"lives on {node.space.value}, its arguments on {space.value}"
    if rule.result == BOOL and node.dtype != BOOL:
        return "is a bool"
    if node.dtype not in (BOOL, COMPUTE):
        return f"has type {node.dtype}, expected {BOOL} or {COMPUTE}"
    return None
