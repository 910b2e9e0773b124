"""Plans the kernels of a tiled region: what is computed per edge, what is stored, and what is left to other kernels.

Kernels that walk the edges in tiles compute values per edge (:mod:`gnncompile.codegen.triton.tiled_writer`). Two kinds
of results are left to other kernels, which read values that a walk stores: values per row
(:mod:`gnncompile.codegen.triton.tiled_rows`), and sums over all edges that are matrices, which are products
``left.T @ right`` of two stored values.
"""

from __future__ import annotations

from functools import cached_property

from gnncompile import tuning
from gnncompile.codegen.triton.tiled_layers import is_layer, is_product, layers_of_summed
from gnncompile.codegen.triton.tiled_overwrites import overwritable
from gnncompile.codegen.triton.tiled_phases import Phase, phases
from gnncompile.codegen.triton.tiled_rows import ROW_RESULTS, RowPart, row_parts
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, BOOL, FEATURE_REDUCTIONS, HALVES, LAYERS, Region, Space, behind


class TiledPlan:
    """The parts of a tiled region.

    Attributes:
        region: The region.
        factor: The type of the factors of matrix products.
        parts: The regions that compute the outputs per row.
        products: The sums over all edges that are products of two stored values.
        phases: The walks, in order.
        stored: The dtype of each value per edge that is stored for other kernels or for a later walk. In float64, a
            bool is stored as a number: Triton 3.6 and 3.7 can't compile a float64 product of a value that a bool from
            memory has chosen.
        places: The name of the tensor of each stored value: an output ``out<position>``, or ``temp<node>``.
        brief: The stored values that only later walks, and products of two such values, read. They have a row for each
            edge of a share: see :mod:`gnncompile.codegen.triton.edge_shares`. Others have a row for each edge.
        overwritable: The inputs that each output may be written over: their nodes, by the output's position.

    Raises:
        UnsupportedRegion: The region can't be expressed as Triton kernels.
    """

    def __init__(self, region: Region) -> None:
        self.region, self.factor, nodes = region, region.factor, region.nodes
        check(region)
        outers = sorted({out.node for out in region.outputs if nodes[out.node].op == "outer"})
        self.products = [i for i in outers if is_product(region, nodes[i])]
        self.sums = [i for i in outers if i not in self.products]
        """The sums over all edges that a walk adds up: those that are vectors."""
        self.parts: list[RowPart] = row_parts(region)
        outputs = {k: out.node for k, out in enumerate(region.outputs) if region.per_edge(out)}
        kept = {a for i in self.products for a in nodes[i].args if not self.is_given(a)}
        kept = kept.union(*(part.leaves for part in self.parts))
        self._check_order({*outputs.values(), *kept}.union(*(nodes[i].args for i in self.sums)))
        self.phases: list[Phase] = phases(region, outputs, kept, self.sums)
        loaded = kept.union(*(phase.loads for phase in self.phases))
        self.stored = {i: self._dtype(i) for i in sorted(loaded)}
        self.places = {i: self._place(i, outputs) for i in self.stored}
        self.brief = self._brief()
        self.overwritable = overwritable(region, self.phases, self.products, self.parts)

    def _brief(self) -> frozenset[int]:
        if not self.region.unmasked:  # rows of edges that are masked out must be 0 in products
            return frozenset()
        leaves = set[int]().union(*(part.leaves for part in self.parts))
        found = {i for i, place in self.places.items() if place.startswith("temp") and i not in leaves}
        factors = [set(self.region.nodes[i].args) for i in self.products]
        while mixed := [pair for pair in factors if pair & found and not pair <= found]:
            found = found.difference(*mixed)
        return frozenset(found)

    def width(self, i: int) -> int:
        """Returns the numbers of a value per edge."""
        return self.region.nodes[i].shape[1]

    def is_given(self, i: int) -> bool:
        """Whether a product can take an input as it is. If edges are masked out, their rows must not count."""
        node = self.region.nodes[i]
        stored = node.op == "input" and node.space is Space.EDGE and not node.through_index
        return stored and node.dtype == self.factor and self.region.unmasked

    def _check_order(self, roots: set[int]) -> None:
        nodes = self.region.nodes
        if any(nodes[i].op in (*ROW_RESULTS, "softmax") for i in behind(nodes, roots)):
            raise UnsupportedRegion("tiles: a layer or an edge state reads a reduction over edges")

    def _dtype(self, i: int) -> str:
        """Returns the type of a stored value.

        A factor is rounded to the type of factors. So is what is reduced, if all tensors have that type.
        """
        if self.region.nodes[i].boolean:
            return self.region.compute if self.region.double else BOOL
        exact = any(i in part.leaves and self._is_exact(part, i) for part in self.parts)
        read = any(i in phase.loads and self._reads(phase, i) for phase in self.phases)
        return self.region.compute if exact or read or self.factor not in HALVES else self.factor

    def _is_exact(self, part: RowPart, i: int) -> bool:
        """Whether a part must read a value that is not rounded.

        Eager rounds it if all tensors have 16 bits. Under autocast others have more, but a value that is also a result
        with 16 bits is rounded.
        """
        outputs = self.region.outputs
        types = {outputs[k].dtype for k in part.outputs}
        if not any(out.node == i and out.dtype == self.factor for out in outputs):
            types |= {n.dtype for n in self.region.inputs if n.is_number}
        return part.compares or types != {self.factor}

    def _reads(self, phase: Phase, i: int) -> bool:
        """Whether a phase reads a value otherwise than as a factor."""
        region, nodes = self.region, self.region.nodes
        others = set(phase.sums) - self.sums_by_product(phase)
        readers = [nodes[r] for r in (*phase.need, *others) if i in nodes[r].args]
        leaves = any(region.outputs[k].node == i for k in phase.outputs)
        return leaves or any(not is_layer(region, n) for n in readers)

    def _place(self, i: int, outputs: dict[int, int]) -> str:
        same = [k for k, node in outputs.items() if node == i and self.region.outputs[k].dtype == self.stored[i]]
        return f"out{same[0]}" if same else f"temp{i}"

    @cached_property
    def layers(self) -> dict[int, str]:
        """The layers that are products of matrices, by node, with the name of the weights' argument.

        ``t<position>`` is the tensor; ``w<position>`` are its two float16 parts.
        """
        nodes, letter = self.region.nodes, "w" if self.factor == "float32" else "t"
        found = sorted(i for i in set[int]().union(*(p.need for p in self.phases)) if is_layer(self.region, nodes[i]))
        return {i: f"{letter}{nodes[nodes[i].args[1]].value}" for i in found}

    def sums_by_product(self, phase: Phase) -> set[int]:
        """Returns the sums over all edges that a phase takes by products with ones."""
        layers = self.layers_of(phase)
        return {i for i in phase.sums if layers_of_summed(self.region, i, layers)}

    def layers_of(self, phase: Phase) -> list[int]:
        """Returns the layers that a phase computes as products of matrices, in order."""
        return [i for i in phase.need if i in self.layers and i not in phase.loads]


def check(region: Region) -> None:
    """Checks that a tiled region can be expressed as Triton kernels.

    Raises:
        UnsupportedRegion: It can't; the message says why.
    """
    known = ("input", "const", "dropout", "softmax", *ROW_RESULTS, *FEATURE_REDUCTIONS, *LAYERS, *POINTWISE)
    for node in region.nodes:
        if node.op not in known:
            raise UnsupportedRegion(f"tiles: no Triton code for the operation {node.op!r}")
        if node.shape[0] != 1:
            raise UnsupportedRegion(f"tiles: found a value of {node.shape[0]} heads, expected one head")
        if node.shape[1] > tuning.TILES.tiled_widest:
            most = tuning.TILES.tiled_widest
            raise UnsupportedRegion(f"tiles: found a value of {node.shape[1]} channels, expected at most {most}")
        if node.op in (*REDUCTIONS, *FEATURE_REDUCTIONS, *LAYERS) and any(region.nodes[a].boolean for a in node.args):
            raise UnsupportedRegion(f"tiles: {node.op} of a bool value")
    if any(out.dtype == BITS for out in region.outputs):
        raise UnsupportedRegion("tiles: packed bools as an output")
