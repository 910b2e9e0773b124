"""Writes the kernels for hubs: kernels that walk pieces of hubs, and kernels that join the results of the pieces."""

from __future__ import annotations

from gnncompile.codegen.triton.hub_tile import hub_tile, large_programs, large_tile
from gnncompile.codegen.triton.plan import Part, Schedule, partials
from gnncompile.codegen.triton.text import masked
from gnncompile.codegen.triton.tile import Tile
from gnncompile.codegen.triton.writer import Writer, start_of
from gnncompile.ir.region import Region


class HubWriter(Writer):
    """Writes a kernel whose programs each join the results of a hub's pieces, and finish the hub's row.

    The host may launch more programs than there are hubs or pieces.
    """

    def __init__(self, region: Region, plan: Schedule, tile: Tile, part: Part) -> None:
        super().__init__(region, plan, tile, part)
        self.partials, self.partial_length = partials(region, plan)

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
        self.line("row = tl.load(hubs + hub * 3).to(tl.int64)")
        self.line("first_piece = tl.load(hubs + hub * 3 + 1)")
        self.line("last_piece = first_piece + tl.load(hubs + hub * 3 + 2)")
        self.line("occupied = first_piece < last_piece")

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

    def _partial(self, i: int, piece: str, further: int = 0) -> tuple[str, list[str]]:
        """Returns the pointer to a partial result, and its masks."""
        offset, masks = self.feature(self.region.nodes[i].shape)
        at = self.partials[i] + further
        return f"partial + {piece} * {self.partial_length}{f' + {at}' if at else ''}{offset}", masks

    def _gather_pieces(self, step: int) -> None:
        """Writes a loop that joins the results of all pieces of a hub in a pass, in the order of the pieces."""
        self.line(f"# pass {step + 1} of {self.plan.passes}: what the pieces reduce to")
        targets = self._reduced_in(step)
        for i in targets:
            self._start(i)
        self.line(f"for start in range(first_piece, last_piece, {self.tile.edges}):")
        self.indent += 1
        self.line("part = (start + lane).to(tl.int64)")
        self.line("inside = part < last_piece")
        self.line(f"part = {self.expand('part', 'edge')}")
        self.line(f"alive = {self.expand('inside', 'edge')}")
        for i in targets:
            node = self.region.nodes[i]
            if node.op == "softmax":
                sums = self._load_partial(i, "0.0", node.shape[0] * node.shape[1])
                self.softmax.merge(i, self._load_partial(i, 'float("-inf")'), sums)
            elif i in self.plan.weighted_sums:
                self._combine(i, f"{self._load_partial(i, '0.0')} * weight{self.plan.weighted_sums[i].softmax}")
            elif i in self.plan.counted:
                self.ties.merge(i, self._load_partial(i, "0.0"))
            elif i in self.plan.counted.values():
                self.line(f"piece{i} = {self._load_partial(i, start_of(node))}")
                self._combine(i, f"piece{i}")
            else:
                self._combine(i, self._load_partial(i, start_of(node)))
        self.indent -= 1

    def _load_partial(self, i: int, other: str, further: int = 0) -> str:
        place, masks = self._partial(i, "part", further)
        return f"tl.load({place}{masked(['alive', *masks], other)})"


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
        for i in self._reduced_in(self.part.step):
            node = self.region.nodes[i]
            if node.op == "softmax":
                self.softmax.join_lanes(i)
                self._store_partial(i, f"max{i}")
                self._store_partial(i, f"sum{i}", node.shape[0] * node.shape[1])
            else:
                self._store_partial(i, self._reduced(i))

    def _store_partial(self, i: int, text: str, further: int = 0) -> None:
        place, masks = self._partial(i, "piece.to(tl.int64)", further)
        self.line(f"tl.store({place}, {text}{masked(masks)})")


class BothWriter(PieceWriter):
    """Writes a kernel whose first programs walk a piece each and whose other programs walk a row each, in one pass.

    In separate launches, the second launch would wait for the last program of the first. Pieces and rows share a body
    and a tile. Compiled for an H200, attention of 4 heads with 32 channels then takes 64 registers per thread; pieces
    with a tile of their own take 114.
    """

    def _rows(self) -> None:
        self.line("piece = tl.program_id(0)")
        self.line("is_piece = piece < num_pieces")
        self.line("hub = tl.load(pieces + piece, mask=is_piece, other=0)")
        self.line("if hub < 0:")
        self.line("    return")
        self.line("row = piece - num_pieces")
        self.line("first = 0")
        self.line("if is_piece:")
        self.line("    row = tl.load(hubs + hub * 3)")
        self.line("    first = (piece - tl.load(hubs + hub * 3 + 1)) * most_edges")
        self.line("row = row.to(tl.int64)")
        self.line("begin = tl.load(rowptr + row) + first")
        self.line("end = tl.load(rowptr + row + 1)")
        self.line("if (end - begin > most_edges) & (piece >= num_pieces):")
        self.line("    return")
        self.line("end = tl.minimum(begin + most_edges, end)")
        self.line("occupied = begin < end")

    def _body(self) -> None:
        self._rows_before(0)
        self._pass(0)
        if self._reduced_in(0):
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
