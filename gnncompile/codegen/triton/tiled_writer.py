"""Writes the walk of a tiled region as the text of a Python module with one Triton kernel.

A program walks a share of the edges, tile by tile, in the order of their rows. A row that ends in a tile is written.
If a row goes on in the next tile of the program, its partial result is carried over. If a row began before the share
or goes on after it, the program stores a partial result, and the kernel of
:mod:`gnncompile.codegen.triton.tiled_finish` joins these results.
"""

from __future__ import annotations

from gnncompile.codegen.triton.text import masked
from gnncompile.codegen.triton.tiled_plan import TiledPlan, padded
from gnncompile.codegen.triton.tiled_tile import TiledTile
from gnncompile.codegen.triton.tiled_values import NEVER, TileValues
from gnncompile.ir.region import BOOL, SEED, Space

KERNEL = "walk_tiles"
"""Name of the kernel in the generated module."""

NUMBERS = ("num_rows", "share")
"""The integer arguments: the number of rows, and the edges that a program walks, a multiple of a tile's edges."""

FUNCTIONS = (
    "add_outer",
    "larger",
    "largest",
    "layer",
    "layer_of_parts",
    "outer",
    "row_maxima",
    "row_sums",
    "row_ties",
    "ties_of_both",
)
"""The functions of :mod:`gnncompile.codegen.triton.tiled_functions` that generated kernels call."""


def head(title: str) -> list[str]:
    """Returns the first lines of a generated module."""
    return [
        f"# {title}",
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "from gnncompile.codegen.triton.tiled_functions import (",
        *(f"    {name}," for name in FUNCTIONS),
        ")",
        "",
        "",
    ]


def start_of(op: str) -> str:
    """Returns the start value of a row result. A minimum is computed as the maximum of the negative values."""
    return "0.0" if op in ("reduce_sum", "ties") else 'float("-inf")'


class TiledWriter(TileValues):
    """Writes the kernel of the walk, statement by statement.

    Attributes:
        parameters: The names of the kernel's pointers, in order.
    """

    def __init__(self, plan: TiledPlan, tile: TiledTile) -> None:
        super().__init__(plan, tile)
        self.inputs = [self.region.nodes[i] for i in plan.need if self.region.nodes[i].op == "input"]
        self.spaces = {n.space for n in self.inputs}
        numbered = any(self.region.nodes[i].numbers_edges for i in plan.need) or bool(plan.edge_outputs)
        used = {
            "rowptr": True,
            "col": self.region.by.opposite in self.spaces,
            "edge": numbered,
            "rows": bool(plan.results) or self.region.by in self.spaces,
            "partial": bool(plan.results),
            "sums": bool(plan.outers),
        }
        parts = sorted({name for name in plan.layers.values() if name[0] == "w"})
        self.parameters = [*self._tensors(), *parts, *(name for name, needed in used.items() if needed)]
        self.parameters += [s.name for s in plan.stored] + [f"out{k}" for k in plan.edge_outputs]

    def _tensors(self) -> list[str]:
        parts = {int(name[1:]) for name in self.plan.layers.values() if name[0] == "w"}
        positions = {int(n.value or 0) for n in self.inputs}
        return [f"t{p}" for p in sorted(positions - parts)]

    def module(self) -> str:
        """Returns the text of the module."""
        numbers = ", ".join(f'"{name}"' for name in NUMBERS)
        tile = self.tile
        title = f"Region by {self.region.by.value}, in tiles of {tile.edges} edges."
        signature = f"def {KERNEL}({', '.join((*self.parameters, *NUMBERS))}):"
        self._prologue()
        self._loop()
        self._store_sums()
        decorator = f"@triton.jit(do_not_specialize=[{numbers}])"
        return "\n".join([*head(title), decorator, signature, *self.lines]) + "\n"

    # -- the walk -------------------------------------------------------------------------------------------------

    def _prologue(self) -> None:
        self.line("program = tl.program_id(0)")
        self.line("first = program * share")
        self.line("total = tl.load(rowptr + num_rows)")
        self.line("last = tl.minimum(first + share, total)")
        self.line(f"lane = tl.arange(0, {self.tile.edges})")
        nodes = self.region.nodes
        read = {*self.plan.need, *self.plan.results, *self.plan.outers}
        lengths = {nodes[i].shape[1] for i in read if nodes[i].dtype != SEED}
        layers = [nodes[i] for i in read if nodes[i].op in ("linear", "transposed", "outer")]
        lengths |= {length for n in layers for length in self.plan.matrix(n)}
        for length in sorted(lengths):
            self.axis(length)
        for i in self.plan.need:
            if nodes[i].space in (Space.PARAMETER, Space.FEATURE):
                self.value(i)
        if self.plan.results:
            self.line("before = tl.load(rows + first - 1, mask=first > 0, other=-2)")
            self.line("after = tl.load(rows + last, mask=last < total, other=-2)")
        for i in self.plan.results:
            start = start_of(nodes[i].op)
            self.line(f"carry{i} = tl.full({self.shape(nodes[i].shape[1], rows=1)}, {start}, {self.compute})")
        for i in self.plan.outers:
            if self._in_registers(i):
                self.line(f"acc{i} = tl.zeros({self._sum_shape(i)}, {self.compute})")

    def _loop(self) -> None:
        self.line(f"for start in tl.range(first, last, {self.tile.edges}, num_stages=1):")
        self.indent += 1
        self._open_tile()
        waiting = [*self.plan.edge_outputs]
        results, outers = list(self.plan.results), list(self.plan.outers)
        done: set[int] = {i for i in self.plan.need if self.region.nodes[i].space in (Space.PARAMETER, Space.FEATURE)}
        for i in [*self.plan.need, -1]:
            if i >= 0 and i not in done:
                self.value(i)
                done.add(i)
            for k in [k for k in waiting if self.region.outputs[k].node in done]:
                self._store_edges(k)
                waiting.remove(k)
            for r in [r for r in results if self.region.nodes[r].op != "ties" and self.region.nodes[r].args[0] in done]:
                self._reduce(r)
                results.remove(r)
            for o in [o for o in outers if done.issuperset(self.region.nodes[o].args)]:
                self._add_outer(o)
                outers.remove(o)
        if any(not self._in_registers(i) for i in self.plan.outers):
            self.line("tl.debug_barrier()  # sums in memory are complete before the next tile reads them")
        self.indent -= 1

    def _open_tile(self) -> None:
        if self.plan.layers:
            # Weights that are read here must not be kept in registers for all tiles.
            self.line(f"never = tl.where(start < 0, {NEVER}, 0)")
        self.line("position = start + lane")
        self.line("inside = position < last")
        self.line("alive = inside[:, None]")
        if "col" in self.parameters:
            self.line("other = tl.load(col + position, mask=inside, other=0).to(tl.int64)[:, None]")
        if "edge" in self.parameters:
            self.line("edge_at = tl.load(edge + position, mask=inside, other=0).to(tl.int64)[:, None]")
        if Space.ORDERED in self.spaces:
            self.line("here = position.to(tl.int64)[:, None]")
        if "rows" in self.parameters:
            self.line("row = tl.load(rows + position, mask=inside, other=-1)")
        if self.region.by in self.spaces:
            self.line("own = row.to(tl.int64)[:, None]")
        if self.plan.results:
            self._local_rows()

    def _local_rows(self) -> None:
        """Writes the rows of a tile, and how each of them is stored."""
        self.line("behind = tl.load(rows + position - 1, mask=(lane > 0) & (position <= last), other=-1)")
        self.line("local = tl.cumsum(tl.where((lane > 0) & (row != behind), 1, 0), 0)")
        self.line("count = tl.max(tl.where(inside, local, -1), 0) + 1")
        self.line("row_of = tl.max(tl.where(lane[:, None] == local[None, :], row[None, :], -1), 1)")
        self.line(
            f"next_row = tl.load(rows + start + {self.tile.edges}, mask=start + {self.tile.edges} < last, other=-2)"
        )
        self.line("ends = (row_of >= 0) & (row_of != next_row)")
        self.line("cut = (row_of == before) | (row_of == after)")
        self.line("goes_on = (row_of == next_row)[:, None]")
        self.line("is_first = lane[:, None] == 0")
        self.line("writes, leaves = (ends & (cut == 0))[:, None], (ends & cut)[:, None]")
        self.line("at_row = row_of.to(tl.int64)[:, None]")
        self.line("slot = (program * 2 + tl.where(row_of == before, 0, 1)).to(tl.int64)[:, None]")

    def _store_edges(self, k: int) -> None:
        out = self.region.outputs[k]
        self.load_again([out.node])
        node = self.region.nodes[out.node]
        length = node.shape[1]
        offset, masks = self.columns(length)
        value = self.edgewise(out.node, length)
        if out.dtype != BOOL:
            value = f"({value}).to(tl.{out.dtype})"
        elif not node.boolean:
            value = f"({value} != 0)"
        self.line(f"tl.store(out{k} + edge_at * {length}{offset}, {value}{masked(['alive', *masks])})")

    # -- row results ----------------------------------------------------------------------------------------------

    def _reduce(self, i: int) -> None:
        """Writes the results of a tile's rows, the carry to the next tile, and the stores."""
        node = self.region.nodes[i]
        length = node.shape[1]
        self.load_again(node.args)
        if node.op == "reduce_sum":
            parts = 0 if self.region.double else 3 if self.plan.factor == "float32" else 2
            value = self.zeroed(node.args[0], length, edges=True)
            self.line(f"r{i} = row_sums({value}, local, count, {parts})")
            self.line(f"r{i} = tl.where(is_first, r{i} + carry{i}, r{i})")
            self.line(f"carry{i} = tl.sum(tl.where(goes_on, r{i}, 0.0), 0, keep_dims=True)")
            self._store_result(i, f"r{i}")
            return
        sign = "-" if node.op == "reduce_min" else ""
        self.line(f"v{i} = {sign}{self.edgewise(node.args[0], length)}")
        self.line(f"m{i} = row_maxima(v{i}, local, count)")
        self.line(f"r{i} = tl.where(is_first, larger(m{i}, carry{i}), m{i})")
        for t in self.plan.results:
            if self.region.nodes[t].op == "ties" and self.region.nodes[t].args[0] == i:
                self.line(f"r{t} = row_ties(v{i}, m{i}, local, count)")
                joined = f"ties_of_both(r{i}, m{i}, r{t}, carry{i}, carry{t})"
                self.line(f"r{t} = tl.where(is_first, {joined}, r{t})")
                self.line(f"carry{t} = tl.sum(tl.where(goes_on, r{t}, 0.0), 0, keep_dims=True)")
                self._store_result(t, f"r{t}")
        self.line(f'carry{i} = largest(tl.where(goes_on, r{i}, float("-inf")))')
        self._store_result(i, f"r{i}", sign)

    def _store_result(self, i: int, value: str, sign: str = "") -> None:
        length = self.region.nodes[i].shape[1]
        offset, masks = self.columns(length)
        for one in self.plan.stored:
            if one.node == i:
                at = f"{one.name} + at_row * {length}{offset}"
                self.line(f"tl.store({at}, ({sign}{value}).to(tl.{one.dtype}){masked(['writes', *masks])})")
        offsets, size = self.plan.offsets
        at = f"partial + slot * {size} + {offsets[i]}{offset}"
        self.line(f"tl.store({at}, {value}{masked(['leaves', *masks])})")

    # -- sums over all edges --------------------------------------------------------------------------------------

    def _in_registers(self, i: int) -> bool:
        return self.tile.sums_in_registers or min(self.plan.matrix(self.region.nodes[i])) == 1

    def _sum_shape(self, i: int) -> str:
        rows, columns = self.plan.matrix(self.region.nodes[i])
        if min(rows, columns) == 1:
            return f"[1, {padded(max(rows, columns))}]"
        return f"[{padded(rows)}, {padded(columns)}]"

    def _add_outer(self, i: int) -> None:
        features, value = self.region.nodes[i].args
        rows, columns = self.plan.matrix(self.region.nodes[i])
        self.load_again([features, value])
        if min(rows, columns) == 1:
            product = f"{self.edgewise(features, rows)} * {self.edgewise(value, columns)}"
            self.line(f"acc{i} += tl.sum(tl.where(alive, {product}, 0.0), 0, keep_dims=True)")
            return
        x, y = self.zeroed(features, rows, edges=True), self.zeroed(value, columns, edges=True)
        if self.plan.factor != "float32":
            x, y = (f"({block}).to(tl.{self.plan.factor})" for block in (x, y))
        if self._in_registers(i):
            self.line(f"acc{i} += outer({x}, {y})")
        else:
            self.line(f"add_outer({self._sum_start(i)}, {x}, {y}, start > first, {rows}, {columns})")
        self.age()

    def _sum_start(self, i: int) -> str:
        offsets, size = self.plan.sum_offsets
        return f"sums + program.to(tl.int64) * {size} + {offsets[i]}"

    def _sum_place(self, i: int) -> tuple[str, list[str]]:
        """Returns the pointers to the sums of a program, and their masks."""
        rows, columns = self.plan.matrix(self.region.nodes[i])
        start = self._sum_start(i)
        if min(rows, columns) == 1:
            offset, masks = self.columns(max(rows, columns))
            return f"{start}{offset or ' + tl.zeros([1, 1], tl.int32)'}", masks
        return f"{start} + tl.arange(0, {padded(rows)})[:, None] * {columns} + c{columns}", [
            f"(tl.arange(0, {padded(rows)}) < {rows})[:, None]",
            *self.columns(columns)[1],
        ]

    def _store_sums(self) -> None:
        for i in self.plan.outers:
            if self._in_registers(i):
                at, masks = self._sum_place(i)
                self.line(f"tl.store({at}, acc{i}{masked(masks)})")
