"""Plans the kernels of a tiled region: what the walk computes per edge, what it adds up, and what follows per row.

See :mod:`gnncompile.codegen.triton.tiled_writer` for the walk. Values per row that are computed from reductions become
a region of their own, which walks no edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from gnncompile.codegen.triton.tile import power_of_two
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.builder import Builder
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, FEATURE_REDUCTIONS, LAYERS, SEED, Node, Output, Region, Space, behind

WIDEST = 256
"""Most channels of a value. A program holds whole rows of the edges of a tile."""

NARROWEST = 16
"""Fewest columns of a block, other than a single column: the least that ``tl.dot`` takes."""

_LAYER = 100
"""The length of a layer in a chain of operations. Others have length 1."""

ROW_RESULTS = (*REDUCTIONS, "ties")
"""Operations that give a value per row from values per edge."""


def padded(length: int) -> int:
    """Returns the columns of the block that holds this number of channels."""
    return 1 if length == 1 else max(power_of_two(length), NARROWEST)


@dataclass(frozen=True)
class Stored:
    """A row result that the walk writes to a tensor.

    Attributes:
        node: The index of the row result.
        name: The name of the tensor: ``out<position>``, or ``row<position>`` for a temporary.
        dtype: The dtype of the tensor.
    """

    node: int
    name: str
    dtype: str


class TiledPlan:
    """The parts of a tiled region.

    Attributes:
        region: The region.
        results: The row results that the walk computes; an extremum comes before the count of its ties.
        outers: The sums over all edges that leave the region.
        temporaries: The row results that :attr:`rows` reads.
        rows: The region that computes the outputs in :attr:`late`; None without such outputs.
        late: The positions of the outputs per row that are computed from row results.

    Raises:
        UnsupportedRegion: The region can't be expressed as Triton kernels.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        check(region)
        nodes = region.nodes
        per_row = [k for k, out in enumerate(region.outputs) if region.per_row(out)]
        self.late = [k for k in per_row if nodes[region.outputs[k].node].op not in ROW_RESULTS]
        cut = self._behind_rows([region.outputs[k].node for k in self.late])
        self.temporaries = sorted(i for i in cut if nodes[i].op in ROW_RESULTS)
        self.rows = self._row_region(cut) if self.late else None
        direct = {region.outputs[k].node for k in per_row if k not in self.late}
        extrema = {nodes[i].args[0] for i in {*direct, *self.temporaries} if nodes[i].op == "ties"}
        self.results = sorted({*direct, *self.temporaries, *extrema})
        self.outers = sorted({out.node for out in region.outputs if nodes[out.node].op == "outer"})

    @cached_property
    def edge_outputs(self) -> list[int]:
        """The positions of the outputs per edge."""
        return [k for k, out in enumerate(self.region.outputs) if self.region.per_edge(out)]

    @cached_property
    def need(self) -> list[int]:
        """The nodes that the walk computes for each edge, in order.

        The longest chain of layers comes first, and a value shortly before it is read. So few values wait in registers.
        """
        nodes = self.region.nodes
        roots = [self.region.outputs[k].node for k in self.edge_outputs]
        roots += [a for i in (*self.results, *self.outers) if nodes[i].op != "ties" for a in nodes[i].args]
        found = behind(nodes, roots)
        if any(nodes[i].op in ROW_RESULTS for i in found):
            raise UnsupportedRegion("tiles: a value per edge reads a reduction over edges")
        return self._depth_first(found, roots)

    def _depth_first(self, found: set[int], roots: list[int]) -> list[int]:
        nodes, depth, order = self.region.nodes, dict[int, int](), dict[int, None]()
        for i in sorted(found):
            own = _LAYER if nodes[i].op in LAYERS else 1
            depth[i] = own + max((depth[a] for a in nodes[i].args), default=0)
        todo = sorted(set(roots), key=lambda i: (depth[i], -i))
        while todo:
            i = todo[-1]
            waiting = [a for a in nodes[i].args if a not in order]
            if i in order or not waiting:
                order[todo.pop()] = None
            else:
                todo.append(max(waiting, key=lambda a: (depth[a], -a)))
        return list(order)

    @cached_property
    def stored(self) -> list[Stored]:
        """The tensors of row results, in the order of the kernel's arguments."""
        outputs = [
            Stored(out.node, f"out{k}", out.dtype)
            for k, out in enumerate(self.region.outputs)
            if out.node in self.results
        ]
        return outputs + [Stored(i, f"row{s}", self.region.compute) for s, i in enumerate(self.temporaries)]

    @cached_property
    def offsets(self) -> tuple[dict[int, int], int]:
        """The offset of each row result in the partial results of a row, and their length."""
        return _offsets((i, self.region.nodes[i].shape[1]) for i in self.results)

    @cached_property
    def sum_offsets(self) -> tuple[dict[int, int], int]:
        """The offset of each sum over all edges in the sums of a program, and their length."""
        return _offsets((i, self.region.features(i) * self.region.nodes[i].shape[1]) for i in self.outers)

    @cached_property
    def layers(self) -> dict[int, str]:
        """The layers that are products of matrices, by node, with the name of the weights' argument.

        ``t<position>`` is the tensor; ``w<position>`` are its three bfloat16 parts.
        """
        nodes, found = self.region.nodes, {}
        for i in self.need:
            node = nodes[i]
            if node.op in ("linear", "transposed") and self.is_product(node):
                letter = "w" if self.factor == "float32" else "t"
                found[i] = f"{letter}{nodes[node.args[1]].value}"
        return found

    def is_product(self, node: Node) -> bool:
        """Whether a layer has several features and several channels. Others are sums or products of vectors."""
        return min(self.matrix(node)) > 1

    def matrix(self, node: Node) -> tuple[int, int]:
        """Returns the rows and columns of the weights of a layer, or of the sum of an ``outer``."""
        nodes = self.region.nodes
        if node.op == "outer":
            return nodes[node.args[0]].shape[1], node.shape[1]
        if node.op == "linear":
            return nodes[node.args[0]].shape[1], node.shape[1]
        return node.shape[1], nodes[node.args[1]].shape[1]

    @cached_property
    def factor(self) -> str:
        """The type of the factors of matrix products.

        It is a type of 16 bits if all weights have this type or, in a region without weights, all tensors. It is
        float32, whose products are computed in bfloat16 parts, or float64 otherwise.
        """
        if self.region.double:
            return "float64"
        floats = [n for n in self.region.inputs if not n.boolean and n.dtype != SEED]
        types = {n.dtype for n in floats if n.space is Space.FEATURE} or {n.dtype for n in floats}
        return types.pop() if len(types) == 1 and types <= {"bfloat16", "float16"} else "float32"

    def _behind_rows(self, roots: list[int]) -> set[int]:
        """Returns what `roots` are computed from, up to row results."""
        found: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo.extend(() if self.region.nodes[i].op in ROW_RESULTS else self.region.nodes[i].args)
        return found

    def _row_region(self, cut: set[int]) -> Region:
        """Returns the region of the late outputs. Its tensors are those of the region, then the temporaries."""
        region, copies = self.region, dict[int, int]()
        b = Builder(region.by, region.whole)
        for i in sorted(cut):
            node = region.nodes[i]
            if i in self.temporaries:
                position = region.count + self.temporaries.index(i)
                copies[i] = b.input(position, region.by, node.shape, region.compute)
            elif node.op == "input":
                copies[i] = b.emit(node)
            else:
                copies[i] = b.again(node, [copies[a] for a in node.args])
        outputs = [region.outputs[k] for k in self.late]
        return b.finish([Output(copies[out.node], out.dtype, out.trailing) for out in outputs])


def _offsets(sizes: Iterable[tuple[int, int]]) -> tuple[dict[int, int], int]:
    offsets, length = {}, 0
    for i, size in sizes:
        offsets[i] = length
        length += size
    return offsets, length


def check(region: Region) -> None:
    """Checks that a tiled region can be expressed as Triton kernels.

    Raises:
        UnsupportedRegion: It can't; the message says why.
    """
    known = ("input", "const", "dropout", *ROW_RESULTS, *FEATURE_REDUCTIONS, *LAYERS, *POINTWISE)
    for node in region.nodes:
        if node.op not in known:
            raise UnsupportedRegion(f"tiles: no Triton code for the operation {node.op!r}")
        if node.shape[0] != 1:
            raise UnsupportedRegion(f"tiles: found a value of {node.shape[0]} heads, expected one head")
        if node.shape[1] > WIDEST:
            raise UnsupportedRegion(f"tiles: found a value of {node.shape[1]} channels, expected at most {WIDEST}")
        if node.op in (*REDUCTIONS, *FEATURE_REDUCTIONS, *LAYERS) and region.nodes[node.args[0]].boolean:
            raise UnsupportedRegion(f"tiles: {node.op} of a bool value")
    if any(out.dtype == BITS for out in region.outputs):
        raise UnsupportedRegion("tiles: packed bools as an output")
