"""Writes a region as the text of a Python module with one Triton kernel. Triton need not be installed.

See :mod:`gnncompile.codegen.triton.kernel_text` for the form of a kernel's values.
"""

from __future__ import annotations

from gnncompile.codegen.triton.hub_tile import large_tile
from gnncompile.codegen.triton.kernel_text import FEATURE_AXES, combining
from gnncompile.codegen.triton.plan import ENDS, WHOLE, Part, Schedule, every_step, reads, shares_maximum
from gnncompile.codegen.triton.softmax import OnlineSoftmax
from gnncompile.codegen.triton.ties import TieCounter
from gnncompile.codegen.triton.tile import Tile, power_of_two
from gnncompile.codegen.triton.values import ValueWriter
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import Node, Region, Space

KERNEL = "region_kernel"
"""Name of the kernel in the generated module."""


def parameters(region: Region, plan: Schedule, tile: Tile, part: Part = WHOLE) -> list[str]:
    """Returns the names of the kernel's arguments, in order.

    The names are ``t<position>``, ``rowptr``, ``col``, ``edge``, ``hubs``, ``pieces``, ``rows``, ``partial``,
    ``out<position>`` and :data:`COUNTS`. Arguments that the kernel does not need are left out.
    """
    nodes = [region.nodes[i] for i in plan.need]
    inputs = [n for n in nodes if n.op == "input"]
    names = [f"t{position}" for position in sorted({int(n.value or 0) for n in inputs})]
    if plan.passes:
        names.append("rowptr")
    if any(n.space is region.by.opposite for n in inputs):
        names.append("col")
    if any(n.numbers_edges for n in nodes) or any(map(region.per_edge, region.outputs)):
        names.append("edge")
    if part.walks == "edges":
        return [*names, *(["rows"] if any(n.space is region.by for n in inputs) else []), "partial", "num_rows"]
    if part.walks in ("pieces", "both", "hubs"):
        names += ["hubs", "pieces", "partial"]
    names += [f"out{k}" for k in range(len(region.outputs))]
    large = part.walks == "hubs" and large_tile(region, tile) is not None
    needed = tile.rows > 1, part.walks == "both", large, part.walks in ("ordinary", "pieces", "both")
    return names + [count for count, used in zip(COUNTS, needed, strict=True) if used]


COUNTS = ("num_rows", "num_pieces", "num_large", "most_edges")
"""The integer arguments, which come last.

They are the number of rows, of programs that walk a piece, and of programs for large hubs, and the most edges of a row
that is no hub.
"""


def start_of(node: Node) -> str:
    """Returns the start value of an accumulator. Lanes without an edge hold it too: it never changes a result."""
    return "0.0" if node.op == "ties" else REDUCTIONS[node.op].triton_start


class Writer(ValueWriter):
    """Writes the text of one kernel, statement by statement. A program of this kernel walks all edges of its rows."""

    def __init__(self, region: Region, plan: Schedule, tile: Tile, part: Part) -> None:
        super().__init__(region, plan, tile)
        self.softmax, self.ties = OnlineSoftmax(self), TieCounter(self)
        self.part = part
        self.parameters = parameters(region, plan, tile, part)

    # -- text -----------------------------------------------------------------------------------------------------

    def module(self) -> str:
        """Returns the text of the module."""
        functions = self.functions()
        head = [*self._header(), "", "import triton", "import triton.language as tl", ""]
        text = "\n".join(functions)
        for reduction in REDUCTIONS.values():
            if not reduction.adds and f"_{reduction.triton_function}" in text:
                name = f"_{reduction.triton_function}"
                head += ["", "@triton.jit", f"def {name}(a, b):", f"    return {reduction.triton.format('a', 'b')}", ""]
        return "\n".join([*head, "", *functions]) + "\n"

    def functions(self) -> list[str]:
        """Returns the lines of the functions that the kernel calls, then those of the kernel."""
        return [*self.signature(), *self.walk()]

    def signature(self, name: str = KERNEL) -> list[str]:
        """Returns the ``def`` line of the kernel, with its decorator, or of a function with the same arguments."""
        counts = [f'"{p}"' for p in self.parameters if p in COUNTS and name == KERNEL]
        loose = f"(do_not_specialize=[{', '.join(counts)}])" if counts else ""
        return [f"@triton.jit{loose}", f"def {name}({', '.join(self.parameters)}):"]

    def walk(self) -> list[str]:
        """Writes and returns all statements of the kernel."""
        self._prologue()
        self._body()
        return self.lines

    def _body(self) -> None:
        """Writes the statements after the prologue."""
        for step in range(self.plan.passes):
            self._rows_before(step)
            self._pass(step)
        self._store_rows()

    def _header(self) -> list[str]:
        """Returns comments that list the region's nodes. Node ``%5`` here is ``5`` in names of the kernel."""
        tile = self.tile
        at_once = f" ({tile.steps} steps at once)" if tile.steps > 1 else ""
        lines = [
            f"# Region by {self.region.by.value}: {tile.rows} row(s) per program, {tile.edges} edge(s) per step"
            f"{at_once}, {self.plan.passes} pass(es) over the edges of a row; walks {self._walked()}.",
        ]
        for i, n in enumerate(self.region.nodes):
            what = f"t{n.value}: {n.dtype}" if n.op == "input" else ", ".join(f"%{a}" for a in n.args)
            what = str(n.value) if n.op == "const" else what
            lines.append(f"#   %{i} = {n.op}({what})  {n.space.value} {n.shape}")
        for k, out in enumerate(self.region.outputs):
            lines.append(f"#   out{k}: {out.dtype} = %{out.node}")
        return lines

    # -- parts of the kernel --------------------------------------------------------------------------------------

    def _walked(self) -> str:
        part = self.part
        return f"{part.walks}, pass {part.step + 1}" if part.walks == "pieces" else part.walks

    def _prologue(self) -> None:
        self._rows()
        if self.plan.passes:
            self.line(f"lane = tl.arange(0, {self.tile.edges})")
        nodes = [self.region.nodes[i] for i in self.plan.need if i not in self.region.only_columns]
        for at, axis in enumerate(FEATURE_AXES):
            for length in sorted({n.shape[at] for n in nodes} - {1}):
                self._feature_axis(axis, length)
        for width in sorted({n.shape[0] * n.shape[1] for n in nodes if self.flat.holds(n)}):
            self.line(f"element{width} = {self.flat.axis(width)}")

    def _rows(self) -> None:
        """Writes the program's rows, and where their edges begin and end."""
        several = self.tile.rows > 1
        if several:
            program = "(tl.program_id(0) - num_pieces)" if self.part.walks == "both" else "tl.program_id(0)"
            self.line(f"row = {program}.to(tl.int64) * {self.tile.rows} + tl.arange(0, {self.tile.rows})")
        else:
            self.line("row = tl.program_id(0).to(tl.int64)")
        if self.plan.passes:
            mask = ", mask=row < num_rows, other=0" if several else ""
            self.line(f"begin = tl.load(rowptr + row{mask})")
            self.line(f"end = tl.load(rowptr + row + 1{mask})")
            if self.part.walks != "all":
                self._leave_hubs(several)
            if several:
                self.line("longest = tl.max(end - begin)")
            self.line(f"occupied = {self.expand('(begin < end)', 'row') if several else 'begin < end'}")
        if several:
            self.line(f"row = {self.expand('row', 'row')}")
            ordinary = f" & {self.expand('ordinary', 'row')}" if self.part.walks != "all" else ""
            self.line(f"row_in = (row < num_rows){ordinary}")

    def _leave_hubs(self, several: bool) -> None:
        """Skips rows with too many edges: other programs walk the pieces of these rows."""
        if several:
            self.line("ordinary = end - begin <= most_edges")
            self.line("end = tl.where(ordinary, end, begin)")
        else:
            self.line("if end - begin > most_edges:")
            self.line("    return")

    def _feature_axis(self, axis: str, length: int) -> None:
        extent = self.extent(axis, length)
        lanes = self.expand(f"tl.arange(0, {extent})", axis)
        if extent < power_of_two(length):
            lanes = f"{self.block} * {extent} + {lanes}"
        self.line(f"{axis}{length} = {lanes}")
        if self.padded(axis, length):
            self.line(f"{axis}{length}_in = {axis}{length} < {length}")

    def _rows_before(self, step: int) -> None:
        """Writes the row values that must be ready before pass `step`, or after the last pass for the outputs."""
        for i in self.plan.finished_in(step - 1):
            node = self.region.nodes[i]
            if node.op in (*REDUCTIONS, "ties"):
                self._finish_reduction(i)
            elif node.op == "softmax":
                self.softmax.finish(i)
            elif not self.varies(node) and node.op != "const" and node.space is not Space.FEATURE:
                self._compute(i)

    def _pass(self, step: int) -> None:
        """Writes one loop over the edges of the row."""
        targets = self._reduced_in(step)
        last = step == self.plan.passes - 1
        stores = [(k, o) for k, o in enumerate(self.region.outputs) if self._is_edge(o.node)] if last else []
        roots = [a for i in targets for a in reads(self.region, self.plan, i)] + [o.node for _, o in stores]
        needed = self._edge_closure(roots)
        depth = self.indent
        self.line(f"# pass {step + 1} of {self.plan.passes} over the edges")
        for i in targets:
            self._start(i)
        self._open_loop(needed, bool(stores))
        outside = dict(self.names)
        for i in needed:
            self._compute(i)
        for i in targets:
            self._accumulate(i)
        for k, out in stores:
            self._store(k, out)
        self.names, self.indent = outside, depth

    def _store_rows(self) -> None:
        self._rows_before(self.plan.passes)
        for k, out in enumerate(self.region.outputs):
            if not self.region.per_edge(out):
                self._store(k, out)

    def _open_loop(self, needed: list[int], stores: bool) -> None:
        edges = self.tile.edges
        if self.tile.rows > 1:
            at_once, first = edges * self.tile.steps, "begin + start"
            self.line(f"for start in range(0, longest, {at_once}):")
            self.indent += 1
            if at_once > edges:
                self.line(f"for further in tl.static_range(0, {at_once}, {edges}):")
                self.indent += 1
                first += " + further"
            self.line(f"position = ({first})[:, None] + lane[None, :]")
            self.line("inside = position < end[:, None]")
        else:
            staged = f", num_stages={self.tile.stages}" if self.tile.stages > 1 else ""
            self.line(f"for start in {'tl.' if staged else ''}range(begin, end, {edges}{staged}):")
            self.indent += 1
            self.line("position = start + lane")
            self.line("inside = position < end")
        over = ("row", "edge") if self.tile.rows > 1 else ("edge",)
        self.line(f"alive = {self.expand('inside', *over)}")
        nodes = [self.region.nodes[i] for i in needed]
        if any(self.flat.holds(n) for n in nodes):
            self.line(f"flat_alive = {self.flat.expand('inside')}")
        read = {n.space for n in nodes if n.op == "input"}
        for name, text, used in (
            ("other", "tl.load(col + position, mask=inside, other=0)", self.region.by.opposite in read),
            (
                "edge_at",
                "tl.load(edge + position, mask=inside, other=0)",
                stores or any(n.numbers_edges for n in nodes),
            ),
            ("here", "position", Space.ORDERED in read),
        ):
            if used:
                self.line(f"{name} = {text}.to(tl.int64)")
                if any(self.flat.holds(n) and self.index(n) == name for n in nodes):
                    self.line(f"flat_{name} = {self.flat.expand(name)}")
                if (shown := self.expand(name, *over)) != name:
                    self.line(f"{name} = {shown}")

    def _reduced_in(self, step: int) -> list[int]:
        return [i for i in self.plan.finished_in(step) if self.region.nodes[i].op in ENDS]

    def _is_edge(self, i: int) -> bool:
        return self.varies(self.region.nodes[i])

    def _edge_closure(self, roots: list[int]) -> list[int]:
        """Returns the values per edge that `roots` are computed from, and `roots` themselves, in program order."""
        found: set[int] = set()
        todo = [i for i in roots if self._is_edge(i)]
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo.extend(a for a in self.region.nodes[i].args if self._is_edge(a))
        return sorted(found)

    # -- reductions over edges ------------------------------------------------------------------------------------

    def _start(self, i: int) -> None:
        node = self.region.nodes[i]
        if node.op == "softmax":
            self.softmax.start(i)
        else:
            shape = self.tile_shape(node.shape, 1 if every_step(node) else self.tile.edges)
            self.line(f"acc{i} = tl.full({shape}, {start_of(node)}, {self.compute})")

    def _accumulate(self, i: int) -> None:
        node = self.region.nodes[i]
        if node.op == "softmax":
            self.softmax.accumulate(i)
        elif i in self.plan.weighted_sums:
            softmax, factors = self.plan.weighted_sums[i]
            product = " * ".join([f"weight{softmax}", *map(self.operand, factors)])
            self._combine(i, f"tl.where(alive, {product}, 0.0)")
        elif i in self.plan.counted:
            self.ties.accumulate(i)
        else:
            self._accumulate_alone(i)

    def _accumulate_alone(self, i: int) -> None:
        node = self.region.nodes[i]
        arg = node.args[0]
        value = self.operand(arg)
        if node.op in REDUCTIONS and REDUCTIONS[node.op].adds:
            source_node = self.region.nodes[arg]
            zero_already = source_node.op == "input" and self.varies(source_node)
            self._combine(i, value if zero_already else f"tl.where(alive, {value}, 0.0)")
        elif node.op == "ties":
            self._combine(i, f"tl.where(alive & ({self.operand(self.region.nodes[arg].args[0])} == {value}), 1.0, 0.0)")
        else:
            self._combine(i, f"tl.where(alive, {value}, {start_of(node)})")

    def _combine(self, i: int, masked: str) -> None:
        """Combines a tile with the accumulator of a reduction. Masked lanes hold the reduction's start value."""
        combine = combining(self.region.nodes[i])
        masked = self.over_lanes(i, masked)
        if combine:
            if i in self.plan.counted.values():
                self.line(f"before{i} = acc{i}")
            both = REDUCTIONS[self.region.nodes[i].op].triton.format(f"acc{i}", masked)
            self.line(f"acc{i} = {both}")
        elif i in self.plan.weighted_sums:
            self.line(f"acc{i} = acc{i} * keep{self.plan.weighted_sums[i].softmax} + {masked}")
        else:
            self.line(f"acc{i} += {masked}")

    def _finish_reduction(self, i: int) -> None:
        node = self.region.nodes[i]
        total = self._reduced(i)
        if i in self.plan.weighted_sums:
            total = f"tl.where(occupied, {total} / sum{self.plan.weighted_sums[i].softmax}, 0.0)"
        elif combining(node):
            total = f"tl.where(occupied, {total}, 0.0)"
        if total == f"acc{i}":
            self.names[i] = total
        else:
            self._bind(i, f"i{i}", total)

    def _reduced(self, i: int) -> str:
        """Returns a reduction's result: its accumulator, reduced over the lanes."""
        node = self.region.nodes[i]
        if every_step(node):
            return f"acc{i}"
        if i in self.plan.counted:
            return self.ties.join_lanes(i)
        lanes = f"acc{i}"
        if i in self.plan.weighted_sums and not shares_maximum(
            self.region, self.plan, self.plan.weighted_sums[i].softmax
        ):
            lanes += f" * share{self.plan.weighted_sums[i].softmax}"
        total = self.over_edges(lanes, node.shape, combining(node))
        if i in self.plan.counted.values():
            self.line(f"top{i} = {total}")
            return f"top{i}"
        return total
