"""Writes a region, or a part of its work, as the text of a Python module with one Triton kernel.

Each class writes the kernel for another part of the work: rows, pieces of hubs, or hubs whose pieces are joined. Triton
need not be installed. See :mod:`gnncompile.codegen.triton.values` for the form of a kernel's values.
"""

from __future__ import annotations

import re
from functools import cached_property

from gnncompile.codegen.triton.hub_tile import hub_tile, large_programs, large_tile
from gnncompile.codegen.triton.plan import Part, Pass, Schedule
from gnncompile.codegen.triton.reductions import ReductionWriter
from gnncompile.codegen.triton.text import ELEMENTARY, masked
from gnncompile.codegen.triton.tile import Tile, fills_warps, power_of_two, spreads_channels
from gnncompile.codegen.triton.values import FEATURE_AXES
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import Region, Space

KERNEL = "region_kernel"
"""Name of the kernel in the generated module."""

COUNTS = ("num_rows", "num_pieces", "num_large", "most_edges")
"""The integer arguments, which come last.

They are the number of rows, of programs that walk a piece, and of programs for large hubs, and the most edges of a row
that is no hub.
"""

_PRODUCTS = "dot", "plus_product"
"""Functions that multiply matrices. A module may hold the text of several writers, so its text tells which it calls."""

_WARP = 32
"""The threads of a warp."""

_FEWEST_HALVES = 4 * _WARP
"""Fewest 16-bit channels of which each thread of a warp gets at least 8 bytes."""


class Writer(ReductionWriter):
    """Writes the text of one kernel, statement by statement. A program of this kernel walks all edges of its rows."""

    # -- text -----------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> list[str]:
        """The names of the kernel's arguments, in order.

        The names are ``t<position>``, ``rowptr``, ``col``, ``edge``, ``hubs``, ``pieces``, ``rows``, ``partial``,
        ``out<position>`` and :data:`COUNTS`. Arguments that the kernel does not need are left out.
        """
        names, walks = self._read_tensors(), self.part.walks
        if walks in ("pieces", "both", "hubs"):
            names += ["hubs", "pieces", "partial"]
        names += [f"out{k}" for k in range(len(self.region.outputs))]
        large = walks == "hubs" and large_tile(self.region, self.tile) is not None
        needed = self.tile.rows > 1, walks == "both", large, walks in ("ordinary", "pieces", "both")
        return names + [count for count, used in zip(COUNTS, needed, strict=True) if used]

    def _read_tensors(self) -> list[str]:
        """Returns the names of the arguments that hold the region's tensors and the layout."""
        nodes = [self.region.nodes[i] for i in self.plan.need]
        inputs = [n for n in nodes if n.op == "input"]
        names = [f"t{position}" for position in sorted({int(n.value or 0) for n in inputs})]
        if self.plan.passes:
            names.append("rowptr")
        if any(n.space is self.region.by.opposite for n in inputs):
            names.append("col")
        if any(n.numbers_edges for n in nodes) or any(map(self.region.per_edge, self.region.outputs)):
            names.append("edge")
        return names

    def module(self) -> str:
        """Returns the text of the module."""
        functions = self.functions()
        text = "\n".join(functions)
        called = [name for name in _PRODUCTS if re.search(rf"(?<!\.)\b{name}\(", text)]
        product = [f"from gnncompile.codegen.gemm.parts import {', '.join(called)}"] if called else []
        head = [*self._header(), "", "import triton", "import triton.language as tl", "", *product, ELEMENTARY, ""]
        for reduction in REDUCTIONS.values():
            name = f"_{reduction.triton_function}"
            if reduction.triton_function and name in text:
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
        tile, part = self.tile, self.part
        walked = f"{part.walks}, pass {part.step + 1}" if part.walks == "pieces" else part.walks
        at_once = f" ({tile.steps} steps at once)" if tile.steps > 1 else ""
        lines = [
            f"# Region by {self.region.by.value}: {tile.rows} row(s) per program, {tile.edges} edge(s) per step"
            f"{at_once}, {self.plan.passes} pass(es) over the edges of a row; walks {walked}.",
        ]
        for i, n in enumerate(self.region.nodes):
            what = f"t{n.value}: {n.dtype}" if n.op == "input" else ", ".join(f"%{a}" for a in n.args)
            what = str(n.value) if n.op == "const" else what
            lines.append(f"#   %{i} = {n.op}({what})  {n.space.value} {n.shape}")
        for k, out in enumerate(self.region.outputs):
            lines.append(f"#   out{k}: {out.dtype} = %{out.node}")
        return lines

    # -- parts of the kernel --------------------------------------------------------------------------------------

    def _prologue(self) -> None:
        self._rows()
        if self.plan.passes:
            self.line(f"lane = tl.arange(0, {self.tile.edges})")
        nodes = [self.region.nodes[i] for i in self.plan.need if i not in self.region.only_columns]
        for at, axis in enumerate(FEATURE_AXES):
            for length in sorted({n.shape[at] for n in nodes} - {1}):
                self._feature_axis(axis, length)
        for width in sorted({n.shape[0] * n.shape[1] for n in nodes if self.is_flat(n)}):
            self.line(f"element{width} = tl.arange(0, {width})[{'None, ' * (2 if self.tile.rows > 1 else 1)}:]")
        self._product_axes()

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
        if axis == "channel" and self._spreads(extent):
            each = [1] * (len(self.axes) - 1) + [extent // _WARP]
            lanes = f"tl.max_contiguous({lanes}, {each})"
        self.line(f"{axis}{length} = {lanes}")
        if self.padded(axis, length):
            self.line(f"{axis}{length}_in = {axis}{length} < {length}")

    def _spreads(self, extent: int) -> bool:
        """Whether the lanes of a warp share this number of channels, each with equally many neighbours."""
        if extent < _WARP or self.tile.num_warps > 1:
            return False
        filled = extent >= _FEWEST_HALVES and self.tile.rows == 1 and fills_warps(self.region, self.plan)
        return filled or spreads_channels(self.region)

    def _rows_before(self, step: int) -> None:
        """Writes the row values that must be ready before pass `step`, or after the last pass for the outputs."""
        for i in self.plan.ready[step]:
            node = self.region.nodes[i]
            if node.op in (*REDUCTIONS, "ties", "softmax"):
                self._finish(i)
            elif node.op != "const" and node.space not in (*self.plan.edge_spaces, Space.FEATURE):
                self._compute(i)

    def _pass(self, step: int) -> None:
        """Writes one loop over the edges of the row."""
        loop, outside, depth = self.plan.loops[step], dict(self.names), self.indent
        self.line(f"# pass {step + 1} of {self.plan.passes} over the edges")
        for i in loop.reductions:
            self._start(i)
        self._load_weights(loop.values)
        self._open_loop(loop)
        for i in loop.values:
            self._compute(i)
        for i in loop.reductions:
            self._accumulate(i)
        for k in loop.stores:
            self._store(k, self.region.outputs[k])
        self.names, self.indent = outside, depth

    def _store_rows(self) -> None:
        self._rows_before(self.plan.passes)
        for k, out in enumerate(self.region.outputs):
            if not self.region.per_edge(out):
                self._store(k, out)

    def _open_loop(self, loop: Pass) -> None:
        """Writes the head of a loop over the edges of the rows, and the indices of a step."""
        nodes = [self.region.nodes[i] for i in loop.values]
        read = {n.space for n in nodes if n.op == "input"}
        numbered = bool(loop.stores) or any(n.numbers_edges for n in nodes)
        tables = {"col": self.region.by.opposite in read, "edge": numbered}
        loads = {table: self._load_index(table) for table, used in tables.items() if used}
        self._open_steps()
        over = ("row", "edge") if self.tile.rows > 1 else ("edge",)
        self.line(f"alive = {self.expand('inside', *over)}")
        flat = {n.space for n in nodes if self.is_flat(n)}
        if flat:
            self.line(f"flat_alive = {self.flat('inside')}")
        texts = {self.region.by.opposite: loads.get("col"), Space.EDGE: loads.get("edge")}
        texts[Space.ORDERED] = "position" if Space.ORDERED in read else None
        for space, text in texts.items():
            if text is None:
                continue
            name = self.index[space]
            self.line(f"{name} = {text}.to(tl.int64)")
            if space in flat:
                self.line(f"flat_{name} = {self.flat(name)}")
            if (shown := self.expand(name, *over)) != name:
                self.line(f"{name} = {shown}")
        if self._reads_ahead():
            for table in loads:
                at = f"position + {self.tile.edges}"
                self.line(f"next_{table} = tl.load({table} + {at}, mask={at} < end, other=0)")

    def _reads_ahead(self) -> bool:
        """Whether a step loads the indices of the next step: in attention with heads, if a program walks one row.

        The step would otherwise wait twice: for the indices, then for the rows that they point to.
        """
        one_row = self.tile.rows == self.tile.stages == 1
        return one_row and (self.tile.heads > 0 or (self.region.grid[0] > 1 and bool(self.region.softmaxes)))

    def _load_index(self, table: str) -> str:
        """Returns the text of a step's indices in ``col`` or ``edge``. Writes the load of the first step's indices."""
        if not self._reads_ahead():
            return f"tl.load({table} + position, mask=inside, other=0)"
        self.line(f"next_{table} = tl.load({table} + begin + lane, mask=begin + lane < end, other=0)")
        return f"next_{table}"

    def _open_steps(self) -> None:
        """Writes the head of the loop, and the positions of a step's edges."""
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


class HubWriter(Writer):
    """Writes a kernel whose programs each join the results of a hub's pieces, and finish the hub's row.

    The host may launch more programs than there are hubs or pieces.
    """

    def functions(self) -> list[str]:
        """Returns the kernel. If large hubs have another tile, it calls one function for them or one for the others."""
        if "num_large" not in self.parameters:
            return super().functions()
        large = LargeHubWriter(self.region, self.plan, self.tile, self.part)
        return either("num_large", self, join_large_hub=large, join_hub=self)

    def _rows(self) -> None:
        large = "num_large" in self.parameters
        self.line(f"hub = tl.program_id(0){' - num_large' if large else ''}")
        self._hub()
        self._if(f"occupied & (last_piece - first_piece <= {self.tile.edges})" if large else "occupied")

    def _hub(self) -> None:
        """Writes the loads of the hub's row and of its range of pieces."""
        self.line(
            "row = tl.load(hubs + hub * 3).to(tl.int64)",
            "first_piece = tl.load(hubs + hub * 3 + 1)",
            "last_piece = first_piece + tl.load(hubs + hub * 3 + 2)",
            "occupied = first_piece < last_piece",
        )

    def _if(self, condition: str) -> None:
        """Puts the following statements under a condition.

        An early return would not do, since Triton can't call a function with an early return inside a branch.
        """
        self.line(f"if {condition}:")
        self.indent += 1

    def _body(self) -> None:
        for step in range(self.plan.passes):
            self._rows_before(step)
            self._gather_pieces(step)
        self._store_rows()

    def _partial(self, i: int, k: int, piece: str) -> tuple[str, list[str]]:
        """Returns the pointer to partial result `k` of a reduction, and its masks."""
        shape = self.region.nodes[i].shape
        offset, masks = self.feature(shape)
        at = self.plan.offsets[i] + k * shape[0] * shape[1]
        return f"partial + {piece} * {self.plan.partial_length}{f' + {at}' if at else ''}{offset}", masks

    def _gather_pieces(self, step: int) -> None:
        """Writes a loop that joins the results of all pieces of a hub in a pass, in the order of the pieces."""
        self.line(f"# pass {step + 1} of {self.plan.passes}: what the pieces reduce to")
        reductions = self.plan.loops[step].reductions
        for i in reductions:
            self._start(i)
        self.line(f"for start in range(first_piece, last_piece, {self.tile.edges}):")
        self.indent += 1
        self.line(
            "part = (start + lane).to(tl.int64)",
            "inside = part < last_piece",
            f"part = {self.expand('part', 'edge')}",
            f"alive = {self.expand('inside', 'edge')}",
        )
        for i in reductions:
            loads = []
            for k, start in enumerate(self._starts(i)):
                place, masks = self._partial(i, k, "part")
                loads.append(f"tl.load({place}{masked(['alive', *masks], start)})")
            self._merge(i, loads)
        self.indent -= 1


class LargeHubWriter(HubWriter):
    """Writes the function that joins the pieces of a large hub. `tile` is the tile of smaller hubs.

    A large hub has several programs for each program of a smaller hub, with fewer channels each. One program would
    read the pieces in many steps, one after another.
    """

    def __init__(self, region: Region, plan: Schedule, tile: Tile, part: Part) -> None:
        large = large_tile(region, tile)
        assert large is not None
        super().__init__(region, plan, large, part)
        self.smaller, self.block = tile, "block"

    def _rows(self) -> None:
        programs = large_programs(self.region, self.smaller)
        across, blocks = (tile.across(self.region.grid) for tile in (self.smaller, self.tile))
        self.line(f"hub = tl.program_id(0) // {programs}")
        self.line(f"block = tl.program_id(0) % {programs} * {across} + tl.program_id(1)")
        self._hub()
        self._if(f"(last_piece - first_piece > {self.smaller.edges}) & (block < {blocks})")


class PieceWriter(HubWriter):
    """Writes a kernel whose programs each walk the edges of one piece, in one pass, and store the partial results.

    Each program first joins the results of earlier passes over all pieces of its hub.
    """

    def _rows(self) -> None:
        self.line("piece = tl.program_id(0)")
        self.line("hub = tl.load(pieces + piece)")
        self._if("hub >= 0")
        self._hub()
        self.line("begin = tl.load(rowptr + row) + (piece - first_piece) * most_edges")
        self.line("end = tl.minimum(begin + most_edges, tl.load(rowptr + row + 1))")

    def _body(self) -> None:
        for step in range(self.part.step):
            self._rows_before(step)
            self._gather_pieces(step)
        self._rows_before(self.part.step)
        self._pass(self.part.step)
        self._store_piece()

    def _store_piece(self) -> None:
        """Writes the stores of a piece's partial results."""
        for i in self.plan.loops[self.part.step].reductions:
            for k, text in enumerate(self._results(i)):
                place, masks = self._partial(i, k, "piece.to(tl.int64)")
                self.line(f"tl.store({place}, {text}{masked(masks)})")


class BothWriter(PieceWriter):
    """Writes a kernel whose first programs walk a piece each and whose other programs walk a row each, in one pass.

    In separate launches, the second launch would wait for the last program of the first. Pieces and rows share a body
    and a tile. Compiled for an H200, attention of 4 heads with 32 channels then takes 64 registers per thread; pieces
    with a tile of their own take 114.
    """

    def _rows(self) -> None:
        self.line(
            "piece = tl.program_id(0)",
            "is_piece = piece < num_pieces",
            "hub = tl.load(pieces + piece, mask=is_piece, other=0)",
            "if hub < 0:",
            "    return",
            "row = piece - num_pieces",
            "first = 0",
            "if is_piece:",
            "    row = tl.load(hubs + hub * 3)",
            "    first = (piece - tl.load(hubs + hub * 3 + 1)) * most_edges",
            "row = row.to(tl.int64)",
            "begin = tl.load(rowptr + row) + first",
            "end = tl.load(rowptr + row + 1)",
            "if (end - begin > most_edges) & (piece >= num_pieces):",
            "    return",
            "end = tl.minimum(begin + most_edges, end)",
            "occupied = begin < end",
        )

    def _body(self) -> None:
        self._rows_before(0)
        self._pass(0)
        if self.plan.loops[0].reductions:
            self.line("if is_piece:")
            self.indent += 1
            self._store_piece()
            self.indent -= 1
        if not all(map(self.region.per_edge, self.region.outputs)):
            self.line("if piece >= num_pieces:")
            self.indent += 1
            self._store_rows()
            self.indent -= 1


class SeveralBothWriter(Writer):
    """Like :class:`BothWriter`, but the other programs walk several rows each, and pieces have a tile of their own.

    With the tile of several rows, a piece would need many short steps, one after another.
    """

    def functions(self) -> list[str]:
        """Returns the functions for a piece and for rows, and the kernel that calls them."""
        tile = hub_tile(self.region, self.plan, self.tile)
        assert tile is not None
        piece = PieceWriter(self.region, self.plan, tile, self.part)
        return either("num_pieces", self, walk_piece=piece, walk_rows=self)


def either(count: str, kernel: Writer, **functions: Writer) -> list[str]:
    """Returns a kernel whose first `count` programs run the first of two functions, and the others the second.

    The branches are functions because Triton wants one type per name across the branches of an ``if``.
    """
    first, second = (f"{name}({', '.join(kernel.parameters)})" for name in functions)
    lines = []
    for name, writer in functions.items():
        lines += [*kernel.signature(name), *writer.walk(), "", ""]
    branches = [f"    if tl.program_id(0) < {count}:", f"        {first}", "    else:", f"        {second}"]
    return [*lines, *kernel.signature(), *branches]


def writer_of(region: Region, plan: Schedule, tile: Tile, part: Part) -> Writer:
    """Returns the writer of the kernel that does a part of the work per row.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel; the message says why.
    """
    kinds = {"all": Writer, "ordinary": Writer, "pieces": PieceWriter, "both": BothWriter, "hubs": HubWriter}
    writer = SeveralBothWriter if part.walks == "both" and tile.rows > 1 else kinds[part.walks]
    return writer(region, plan, tile, part)
