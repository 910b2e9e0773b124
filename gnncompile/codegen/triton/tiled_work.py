"""Estimates what a walk in tiles needs: registers for values, shared memory for rows and weights, and instructions."""

from __future__ import annotations

from functools import cached_property

from gnncompile.codegen.triton.tile import instructions, padded
from gnncompile.codegen.triton.tiled_layers import is_wide_row, matrix
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.ir.bits import tensor_type
from gnncompile.ir.region import LAYERS, Node, Space

_BYTES = {"float64": 8, "float32": 4}
"""Bytes of a weight in shared memory: two float16 parts for float32."""


class TiledWork:
    """What one phase needs for each edge. A row is a wide value that is read from memory.

    Attributes:
        width: The padded channels of the widest value.
        layers: The number of products with weights.
        weights: Bytes of the weights in shared memory.
    """

    def __init__(self, plan: TiledPlan, phase: Phase) -> None:
        self._plan, self._phase, self._nodes = plan, phase, plan.region.nodes
        region = plan.region
        self.width = max((padded(self._nodes[i].shape[1]) for i in phase.need), default=1)
        layers = [(plan.layers[i], self._nodes[i]) for i in plan.layers_of(phase)]
        self.layers = len(layers)
        sizes = {(name, node.op, matrix(region, node)) for name, node in layers}
        self.weights = sum(padded(rows) * padded(columns) for _, _, (rows, columns) in sizes) * self._factor_bytes

    @property
    def _factor_bytes(self) -> int:
        return _BYTES.get(self._plan.factor, 2)

    def _is_loaded(self, i: int) -> bool:
        return self._nodes[i].op == "input" or i in self._phase.loads

    def _is_row(self, i: int) -> bool:
        return self._is_loaded(i) and is_wide_row(self._nodes[i])

    @cached_property
    def instructions(self) -> float:
        """Approximate instructions per edge and element, without products."""
        computed = [self._nodes[i] for i in self._phase.need if not self._is_loaded(i)]
        others = [n for n in computed if n.op not in LAYERS]
        return sum(instructions(self._plan.region, n) * n.shape[1] for n in others) / self.width

    @cached_property
    def bytes_of_rows(self) -> int:
        """Bytes of the rows of one edge in memory."""
        rows = [i for i in self._phase.need if self._is_row(i)]
        types = [self._plan.stored[i] if i in self._phase.loads else self._nodes[i].dtype for i in rows]
        sizes = [padded(self._nodes[i].shape[1]) for i in rows]
        return sum(n * tensor_type(dtype).itemsize for n, dtype in zip(sizes, types, strict=True))

    @property
    def bytes_of_exchange(self) -> int:
        """Bytes per edge by which the threads of a program exchange the widest value, or the parts of it."""
        return self.width * max(self._factor_bytes + 2, 4)

    @cached_property
    def reads_vectors(self) -> bool:
        """Whether vectors of a few numbers, such as positions, are read for each edge."""
        vectors = [i for i in self._phase.need if self._is_loaded(i) and not self._is_row(i)]
        return any(_is_per_edge(self._nodes[i]) and self._nodes[i].shape[1] > 1 for i in vectors)

    @cached_property
    def begins_with_rows(self) -> bool:
        """Whether the first layer reads rows. Other walks compute something while rows are on their way."""
        first = self._plan.layers_of(self._phase)[:1]
        seen, todo = set[int](), [self._nodes[i].args[0] for i in first]
        while todo:
            i = todo.pop()
            if self._is_row(i):
                return True
            if i not in seen and not self._is_loaded(i):
                todo.extend(self._nodes[i].args)
            seen.add(i)
        return False

    @cached_property
    def waiting(self) -> int:
        """The most numbers of 32 bits of one edge that are in registers at the same time.

        Rows do not wait over a product: they are loaded again.
        """
        last, live, most = self._last_reads(), set[int](), 0
        for step, i in enumerate(self._phase.need):
            if not _is_per_edge(self._nodes[i]):
                continue
            live.add(i)
            if i in self._plan.layers and not self._is_loaded(i):
                live = {j for j in live if not self._is_loaded(j)}
            most = max(most, sum(padded(self._nodes[j].shape[1]) for j in live))
            live = {j for j in live if last.get(j, step) > step}
        return most * (2 if self._plan.region.double else 1)

    def _last_reads(self) -> dict[int, int]:
        """The step in which each value is read for the last time."""
        last = dict[int, int]()
        steps = {i: step for step, i in enumerate(self._phase.need)}
        for i, step in steps.items():
            if not self._is_loaded(i):
                last.update(dict.fromkeys(self._nodes[i].args, step))
        for i in self._phase.sums:
            args = self._nodes[i].args
            step = max(steps.get(a, 0) for a in args)
            last.update({a: max(step, last.get(a, 0)) for a in args})
        return last


def _is_per_edge(node: Node) -> bool:
    return node.op != "const" and node.space not in (Space.PARAMETER, Space.FEATURE)
