"""Prints a region as readable text, one value per line."""

from __future__ import annotations

from collections import Counter

from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import Node, Region, Space

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INDEXED = "rows of an index"
_SUFFIX = {space: space.value for space in Space} | {Space.PARAMETER: "-"}


def to_text(region: Region) -> str:
    """Returns the region as text::

    region by destination:
      x0: float32[source, 1x64] = tensor 0
      v1: [destination, 1x64] = sum over edges of x0
      return v1 as float32
    """
    names = {i: _name(i, n) for i, n in enumerate(region.nodes)}
    lines = [f"region by {region.by.value}{', in tiles' * region.tiled}:"]
    for i, node in enumerate(region.nodes):
        if node.op != "const":
            dtype = "" if node.dtype == "compute" else node.dtype
            kind = f"{dtype}[{_SUFFIX[node.space]}, {node.shape[0]}x{node.shape[1]}]"
            lines.append(f"  {names[i]}: {kind} = {_expression(node, names)}")
    returned = ", ".join(f"{names[o.node]} as {o.dtype}" for o in region.outputs)
    return "\n".join([*lines, f"  return {returned}"])


def summary(region: Region) -> str:
    """Returns a one-line summary of a region, such as ``softmax, 2 sums, max of 1x64 from source, edge``."""
    counts = Counter(region.nodes[i].op.removeprefix("reduce_") for i in region.reductions)
    kinds = ["softmax"] * bool(region.softmaxes) + ["dropout"] * region.drops
    kinds += [f"{n} {k}s" if n > 1 else k for k, n in counts.items()]
    reads = dict.fromkeys(_INDEXED if n.through_index else n.space.value for n in region.inputs if n.is_number)
    kinds += ["sum over all edges"] * region.sums_all
    layers = sum(n.op == "linear" for n in region.nodes)
    if region.tiled:  # values have several widths
        kinds = [*([f"{layers} linear layer{'s' * (layers > 1)}"] if layers else []), *kinds]
        return f"{', '.join(kinds)} in tiles from {', '.join(reads)}"
    kinds = kinds or ["gather" if region.walks_edges else "row-wise"]
    return f"{', '.join(kinds)} of {region.grid[0]}x{region.grid[1]} from {', '.join(reads)}"


def _name(at: int, node: Node) -> str:
    if node.op == "const":
        return f"{node.value:g}"
    return f"x{node.value}" if node.op == "input" else f"v{at}"


def _expression(node: Node, names: dict[int, str]) -> str:
    args = [names[a] for a in node.args]
    if node.op == "input":
        return f"tensor {node.value}" + (f", row {args[0]}" if args else "")
    if node.op in _INFIX:
        return f"{args[0]} {_INFIX[node.op]} {args[1]}"
    if node.op == "dropout":
        return f"dropout({args[0]}, {node.value:g})"
    if node.op in POINTWISE:
        return f"{node.op}({', '.join(args)})"
    if node.op.startswith("reduce_"):
        return f"{node.op.removeprefix('reduce_')} over edges of {args[0]}"
    return f"{node.op}({args[0]})"
