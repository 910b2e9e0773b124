"""Divides a walk in tiles into phases: walks one after another, each with few layers.

A program holds whole rows of the edges of a tile. With many layers it would need more registers than there are. A value
behind a layer is computed in one phase only. If a later phase reads it, it is stored. Values in front of all layers are
cheap: each phase that reads them computes them again. So are values that follow from one layer's result, if more bytes
would be stored for them than for that result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gnncompile import tuning
from gnncompile.codegen.triton.tile import padded
from gnncompile.codegen.triton.tiled_layers import is_layer, layers_of_summed, matrix
from gnncompile.ir.region import HALVES, LAYERS, Region, behind

_LAYER = 100
"""The length of a layer in a chain of operations. Others have length 1."""


@dataclass(frozen=True)
class Phase:
    """One walk over the edges.

    Attributes:
        need: The nodes that it computes for each edge or loads, in order.
        loads: Those that an earlier phase stored.
        outputs: The positions of the outputs per edge that it writes.
        stores: The values that it stores for others.
        sums: The sums over all edges that it adds up.
    """

    need: tuple[int, ...]
    loads: frozenset[int]
    outputs: tuple[int, ...]
    stores: tuple[int, ...]
    sums: tuple[int, ...]

    def offsets(self, region: Region) -> tuple[dict[int, int], int]:
        """Returns the offset of each sum among the sums of a program, and their length."""
        offsets, length = dict[int, int](), 0
        for i in self.sums:
            offsets[i] = length
            length += max(matrix(region, region.nodes[i]))
        return offsets, length


def phases(region: Region, outputs: Mapping[int, int], kept: Iterable[int], sums: Iterable[int]) -> list[Phase]:
    """Returns the phases, in order.

    Args:
        region: The tiled region.
        outputs: The node of each output per edge, by the output's position.
        kept: The values that other kernels read.
        sums: The sums over all edges that are added up in the walk.
    """
    return _Division(region, outputs, kept, sums).phases()


class _Division:
    """Decides in which phase each value is computed."""

    def __init__(self, region: Region, outputs: Mapping[int, int], kept: Iterable[int], sums: Iterable[int]) -> None:
        self.region, self.nodes = region, region.nodes
        self.outputs, self.kept, self.sums = outputs, set(kept), tuple(sums)
        self.length: dict[int, int] = {}  # operations in the longest chain up to a value
        self.phase: dict[int, int] = {}  # the phase of a value behind a layer
        chain: dict[int, int] = {}  # layers in the longest chain up to a value
        roots = {*outputs.values(), *self.kept}.union(*(self.nodes[s].args for s in self.sums))
        found = sorted(behind(self.nodes, roots))
        for i in found:
            node = self.nodes[i]
            chain[i] = is_layer(region, node) + max((chain[a] for a in node.args), default=0)
            own = _LAYER if node.op in LAYERS else 1
            self.length[i] = own + max((self.length[a] for a in node.args), default=0)
        table = tuning.TILES.tiled_layers_of_halves if region.factor in HALVES else tuning.TILES.tiled_layers
        most = tuning.choice(table, max((padded(self.nodes[i].shape[1]) for i in found), default=1))
        count = Counter[int]()
        for i in sorted(found, key=lambda i: (chain[i], i)):
            phase = max((self.phase[a] for a in self.nodes[i].args if a in self.phase), default=0)
            if is_layer(region, self.nodes[i]):
                while count[phase] == most:
                    phase += 1
                count[phase] += 1
            if chain[i]:
                self.phase[i] = phase
        self.behind: dict[int, frozenset[int]] = {}
        """The layers from whose results a value follows without another layer, for each value behind a layer."""
        for i in filter(self.phase.__contains__, found):
            before = [self.behind[a] for a in self.nodes[i].args if a in self.behind]
            self.behind[i] = frozenset([i]) if is_layer(region, self.nodes[i]) else frozenset().union(*before)
        self.again: set[int] = set()  # values behind a layer that later phases compute again
        if not region.exact:  # Triton adds a bias within a product, and so rounds otherwise than behind it
            self.again = self._cheaper(set[int]().union(*(phase.loads for phase in self.phases())))

    def _cheaper(self, loaded: set[int]) -> set[int]:
        """Returns the values that later phases, which load these values, should compute again from a layer's result."""
        groups: dict[int, list[int]] = {}
        for i in loaded - self.kept:
            if len(self.behind[i]) == 1:
                groups.setdefault(next(iter(self.behind[i])), []).append(i)
        pays = {layer for layer, values in groups.items() if sum(map(self._bytes, values)) > self._bytes(layer)}
        values = self.phase.keys() - self.kept - pays
        return {i for i in values if len(self.behind[i]) == 1 and self.behind[i] <= pays}

    def _bytes(self, i: int) -> int:
        return self.nodes[i].shape[1] * (1 if self.nodes[i].boolean else 4)

    def phases(self) -> list[Phase]:
        """Returns the phases, in order."""
        stored, found, of_sums = set(self.kept), list[Phase](), self._of_sums()
        for number in reversed(range(max(self.phase.values(), default=0) + 1)):
            outputs = tuple(k for k, i in self.outputs.items() if self.phase.get(i, 0) == number)
            sums = tuple(s for s in self.sums if of_sums[s] == number)
            stores = tuple(sorted(i for i in stored if self.phase.get(i, 0) == number))
            roots = {*(self.outputs[k] for k in outputs), *stores}.union(*(self.nodes[s].args for s in sums))
            if roots:
                need, loads = self._order(roots, number)
                stored |= loads
                found.append(Phase(need, loads, outputs, stores, sums))
        return found[::-1]

    def _of_sums(self) -> dict[int, int]:
        """Returns the phase that takes each sum over all edges.

        That is the phase which makes the value, unless it takes two sums more than a phase whose product reads the
        value. The values of a sum wait in registers.
        """
        found = {s: max(self.phase.get(a, 0) for a in self.nodes[s].args) for s in self.sums}
        count = Counter(found.values())
        for s, made in found.items():
            reads = min((self.phase[n] for n in layers_of_summed(self.region, s, self.phase)), default=made)
            if count[made] - count[reads] >= 2:
                count[made] -= 1
                count[reads] += 1
                found[s] = reads
        return found

    def _order(self, roots: set[int], number: int) -> tuple[tuple[int, ...], frozenset[int]]:
        """Returns the nodes of a phase, depth first, and those among them that it loads.

        The longest chain of layers comes first, and a value shortly before it is read. So few values wait in registers.
        """
        order, loads = dict[int, None](), set[int]()
        todo = sorted(roots, key=lambda i: (self.length[i], -i))
        while todo:
            i = todo[-1]
            earlier = self.phase.get(i, number) < number and i not in self.again
            waiting = [] if earlier else [a for a in self.nodes[i].args if a not in order]
            if i in order or not waiting:
                order[todo.pop()] = None
                loads |= {i} if earlier else set()
            else:
                todo.append(max(waiting, key=lambda a: (self.length[a], -a)))
        return tuple(order), frozenset(loads)
