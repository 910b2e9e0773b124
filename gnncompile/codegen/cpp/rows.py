"""Writes C++ that finds and prefetches rows of tensors. Kernels by rows and kernels by tiles share it."""

from __future__ import annotations

import math

from gnncompile import tuning
from gnncompile.codegen.cpp.nest import NestWriter, size_of
from gnncompile.codegen.cpp.plan import Kind, Step
from gnncompile.codegen.cpp.prelude import STORAGE
from gnncompile.ir import bits
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, Node, Region, Shape, Space

WIDTH = {"double": 8, "float": 4, "uint16_t": 2, "uint8_t": 1, "uint32_t": 4, "int32_t": 4, "int64_t": 8}
"""The number of bytes of each storage type."""


INDEX = [("const int32_t*", name) for name in ("rowptr", "col", "edge")]
"""The C++ types and names of the tensors of a layout."""


def positions(region: Region) -> tuple[int, ...]:
    """Returns the positions of the tensors that the kernel reads, in the order of its arguments."""
    return tuple(sorted({int(n.value or 0) for n in region.inputs}))


def tensors(region: Region) -> list[tuple[str, str]]:
    """Returns the (C++ pointer type, name) of every tensor argument, the layout aside."""
    dtypes = {int(n.value or 0): n.dtype for n in region.inputs}
    found = [(f"const {STORAGE[dtypes[at]]}*", f"t{at}") for at in positions(region)]
    return found + [(f"{STORAGE[out.dtype]}*", f"o{i}") for i, out in enumerate(region.outputs)]


def _stored(node: Node) -> Shape:
    """Returns the shape of an input's rows in memory."""
    return (1, bits.words(node.shape)) if node.dtype == BITS else node.shape


class RowWriter(NestWriter):
    """Writes loop nests, and the pointers to the rows that they read."""

    # Rows of tensors.

    def _row_pointers(self, space: Space) -> None:
        for i, node in enumerate(self.nodes):
            if node.op == "input" and node.space is space:
                self._pointer(i, node, "row" if space is self.region.by else "0")

    def _pointer(self, i: int, node: Node, index: str) -> None:
        if node.dtype == BITS:
            words = bits.words(node.shape)
            self._put(f"uint8_t p{i}[{words * bits.PER_WORD}];")
            self._put(f"unpack(t{node.value} + {index} * {words}, {words}, p{i});")
            return
        kind, size = STORAGE[node.dtype], size_of(node.shape)
        if node.through_index:
            self._put(f"const int64_t at{i} = {self._named_row(node, index)};")
            self._put(f"static const {kind} zeros{i}[{size}] = {{}};")
            self._put(f"const {kind}* const p{i} = at{i} < 0 ? zeros{i} : t{node.value} + at{i} * {size};")
            return
        offset = "" if index == "0" else f" + {index}" + (f" * {size}" if size > 1 else "")
        self._put(f"const {kind}* const p{i} = t{node.value}{offset};")

    def _named_row(self, node: Node, edge: str) -> str:
        """Returns the row that an index names for an input at an edge."""
        return f"t{self.nodes[node.args[0]].value}[{edge}]"

    def _edge_pointers(self, gathered: dict[int, Node], stored: list[int], numbered: bool) -> None:
        """Writes the prefetches for the edge ``p``, and the pointers to the rows of tensors that it reads.

        Args:
            gathered: The inputs, by node index.
            stored: The outputs whose rows are prefetched.
            numbered: Whether a step needs the edge's index in the edge list.
        """
        self._prefetch(list(gathered.values()), stored)
        read = {node.space for node in gathered.values()}
        if self.region.by.opposite in read:
            self._put("const int64_t j = col[p];")
        if Space.EDGE in read or numbered:
            self._put("const int64_t e = edge[p];")
        for i, node in gathered.items():
            self._pointer(i, node, {Space.EDGE: "e", Space.ORDERED: "p"}.get(node.space, "j"))

    def _adds(self, step: Step) -> bool:
        return step.kind is Kind.REDUCE and REDUCTIONS[self.nodes[step.node].op].adds

    def _numbers_edges(self, step: Step) -> bool:
        """Whether a step needs the edge's index in the edge list."""
        return self._on_edges(step) or (step.kind is Kind.VALUE and self.nodes[step.node].op == "dropout")

    def _prefetch(self, gathered: list[Node], stored: list[int]) -> None:
        """Writes the prefetches of rows that later edges read or write. Narrow rows are left out."""
        rows = {f"t{node.value}": (node.space, _stored(node), node.dtype) for node in gathered}
        indexed = {f"t{node.value}": node for node in gathered if node.through_index}
        for at in stored:
            out = self.region.outputs[at]
            rows[f"o{at}"] = (Space.EDGE, (1, math.prod(out.trailing)), out.dtype)
        ahead = f"p + {tuning.LOOPS.prefetch_edges} < stop ? p + {tuning.LOOPS.prefetch_edges} : stop - 1"
        numbered: set[str] = set()
        for name, (space, shape, dtype) in rows.items():
            size, width = size_of(shape), size_of(shape) * WIDTH[STORAGE[dtype]]
            if space is Space.ORDERED or (width < 64 and space is not Space.EDGE):
                continue  # the hardware prefetches sequential reads
            index, number = ("edge", "next_e") if space is Space.EDGE else ("col", "next_j")
            if number not in numbered:
                self._put(f"const int64_t {number} = {index}[{ahead}];")
                numbered.add(number)
            line, stop = max(1, 64 * size // width), min(size, tuning.LOOPS.prefetch_bytes * size // width)
            row = self._named_row(indexed[name], number) if name in indexed else number
            address = f"{name} + {row} * {size} + i{', 1' if name.startswith('o') else ''}"
            self._put(f"for (int i = 0; i < {stop}; i += {line}) __builtin_prefetch({address});")
