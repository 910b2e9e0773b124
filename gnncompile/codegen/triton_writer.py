"""Writes a region as the text of a Python module with one Triton kernel. Needs no Triton.

Every value of the kernel is a tile whose axes are, in this order, those of (row, edge, head, channel) that the region
has more than one of. A value keeps length 1 on axes it does not vary along, and Triton broadcasts it; a value with one
element per program is a scalar. Feature axes are padded to powers of two: padded lanes hold anything and are masked
where a feature axis is summed and where a value is stored. Lanes behind the last edge of a row hold anything as well,
and are masked where edges are reduced.
"""

from __future__ import annotations

import re

from gnncompile.codegen import triton_bits, triton_flat, triton_layers, triton_softmax, triton_ties
from gnncompile.codegen.triton_plan import ENDS, WHOLE, Part, Schedule, edgewise, every_step, reads, shares_maximum
from gnncompile.codegen.triton_text import PROPAGATE, literal, masked, without_parentheses
from gnncompile.codegen.triton_tile import Tile, large_tile, power_of_two
from gnncompile.errors import Unsupported
from gnncompile.ir import philox
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import (
    BITS,
    BOOL,
    FEATURE_REDUCTIONS,
    FEATURE_SUMS,
    REDUCTIONS,
    SEED,
    SOFTMAX_ROWS,
    Node,
    Output,
    Region,
    Shape,
    Space,
)

KERNEL = "region_kernel"
"""Name of the kernel in the generated module."""

FEATURE_AXES = ("head", "channel")

COMBINE = {"reduce_max": "maximum", "reduce_min": "minimum"}
START = {"reduce_sum": "0.0", "ties": "0.0", "reduce_max": 'float("-inf")', "reduce_min": 'float("inf")'}


def parameters(region: Region, plan: Schedule, tile: Tile, part: Part = WHOLE) -> list[str]:
    """Names of the kernel's arguments: ``t<position>``, ``rowptr``, ``col``, ``edge``, ``hubs``, ``pieces``, ``rows``,
    ``partial``, ``out<position>``, and of :data:`COUNTS` those that it needs.

    A tensor or an index that the outputs do not need is left out.
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
"""Arguments that are numbers, which come last: of rows, of programs that walk a piece, and of those for large hubs; of
edges of the longest row that is no hub.
"""


class Writer:
    """Grows the text of one kernel, statement by statement. This one walks whole rows."""

    def __init__(self, region: Region, plan: Schedule, tile: Tile, part: Part) -> None:
        self.region, self.plan, self.tile, self.part = region, plan, tile, part
        self.compute = f"tl.{region.compute}"
        self.parameters = parameters(region, plan, tile, part)
        many = {
            "row": tile.rows > 1,
            "edge": plan.passes > 0,
            "head": region.grid[0] > 1,
            "channel": region.grid[1] > 1,
        }
        self.axes = [name for name, used in many.items() if used]
        self.block = "tl.program_id(1)"  # of a row that programs share
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.indent = 1

    # -- text -----------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Adds a statement at the present depth."""
        self.lines.append("    " * self.indent + text)

    def module(self) -> str:
        """The whole module."""
        functions = self.functions()
        head = [*self._header(), "", "import triton", "import triton.language as tl", ""]
        text = "\n".join(functions)
        for combine in COMBINE.values():
            if f", _{combine}" in text:
                body = f"    return tl.{combine}(a, b, {PROPAGATE})"
                head += ["", "@triton.jit", f"def _{combine}(a, b):", body, ""]
        return "\n".join([*head, "", *functions]) + "\n"

    def functions(self) -> list[str]:
        """The kernel, behind what it calls."""
        return [*self.signature(), *self.walk()]

    def signature(self, name: str = KERNEL) -> list[str]:
        """The head of the kernel, or of a function that takes the same arguments."""
        counts = [f'"{p}"' for p in self.parameters if p in COUNTS and name == KERNEL]
        loose = f"(do_not_specialize=[{', '.join(counts)}])" if counts else ""
        return [f"@triton.jit{loose}", f"def {name}({', '.join(self.parameters)}):"]

    def walk(self) -> list[str]:
        """The statements that do all of it."""
        self._prologue()
        self._body()
        return self.lines

    def _body(self) -> None:
        """All behind the prologue."""
        for step in range(self.plan.passes):
            self._rows_before(step)
            self._pass(step)
        self._store_rows()

    def _header(self) -> list[str]:
        """What the kernel computes, as comments; ``5`` in names of the kernel is ``%5`` here."""
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

    # -- axes and addresses ---------------------------------------------------------------------------------------

    def expand(self, text: str, *axes: str) -> str:
        """Indexes a vector (or a matrix) over `axes` so that it broadcasts against every tile."""
        slots = [":" if a in axes else "None" for a in self.axes]
        return text if len(slots) == len(axes) else f"{text}[{', '.join(slots)}]"

    def extent(self, axis: str, length: int) -> int:
        """Tile length of a feature axis on which a value has `length` elements."""
        return min(power_of_two(length), self.tile.extent(self.region.grid, FEATURE_AXES.index(axis)))

    def padded(self, axis: str, length: int) -> bool:
        """Whether a feature axis has lanes that stand for no element: in a block, or in blocks that wider rows need."""
        extent = self.extent(axis, length)
        narrower = extent < power_of_two(length) and length < self.region.grid[FEATURE_AXES.index(axis)]
        return length % extent != 0 or narrower

    def feature(self, shape: Shape) -> tuple[str, list[str]]:
        """Offset of an element within its row, after a leading plus, and the masks that it needs."""
        heads, channels = shape
        terms, masks = [], []
        if heads > 1:
            terms.append(f"head{heads} * {channels}" if channels > 1 else f"head{heads}")
            masks += [f"head{heads}_in"] if self.padded("head", heads) else []
        if channels > 1:
            terms.append(f"channel{channels}")
            masks += [f"channel{channels}_in"] if self.padded("channel", channels) else []
        return "".join(f" + {t}" for t in terms), masks

    def varies(self, node: Node) -> bool:
        """Whether a value differs from edge to edge of those that the program's loop walks."""
        return edgewise(self.region, node)

    def index(self, node: Node) -> str:
        """What numbers the rows of a value."""
        rows = {Space.EDGE: "edge_at", Space.ORDERED: "here", self.region.by.opposite: "other", self.region.by: "row"}
        return rows[node.space]

    def place(self, node: Node) -> tuple[str, list[str]]:
        """Offset of a value's elements in its tensor, after a leading plus, and the masks that it needs."""
        offset, masks = self.feature(node.shape)
        width = node.shape[0] * node.shape[1]
        if node.space is Space.PARAMETER:
            return offset, masks
        index = self.index(node)
        if self.varies(node):
            masks = ["alive", *masks]
        elif self.tile.rows > 1:
            masks = ["row_in", *masks]
        return f" + {index}" + (f" * {width}" if width > 1 else "") + offset, masks

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
        for width in sorted({n.shape[0] * n.shape[1] for n in nodes if triton_flat.is_flat(self, n)}):
            self.line(f"element{width} = {triton_flat.axis(self, width)}")

    def _rows(self) -> None:
        """The program's rows and where their edges begin and end."""
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
        """Rows with too many edges are left to the programs of their pieces."""
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
        """Row-wise values that are ready before a pass (or, after the last one, for the outputs)."""
        for i in self.plan.finished_in(step - 1):
            node = self.region.nodes[i]
            if node.op in (*REDUCTIONS, "ties"):
                self._finish_reduction(i)
            elif node.op == "softmax":
                triton_softmax.finish(self, i)
            elif not self.varies(node) and node.op != "const" and node.space is not Space.FEATURE:
                self._compute(i)

    def _pass(self, step: int) -> None:
        """One loop over the edges of the row."""
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
        if any(triton_flat.is_flat(self, n) for n in nodes):
            self.line(f"flat_alive = {triton_flat.expand(self, 'inside')}")
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
                if any(triton_flat.is_flat(self, n) and self.index(n) == name for n in nodes):
                    self.line(f"flat_{name} = {triton_flat.expand(self, name)}")
                if (shown := self.expand(name, *over)) != name:
                    self.line(f"{name} = {shown}")

    def _reduced_in(self, step: int) -> list[int]:
        return [i for i in self.plan.finished_in(step) if self.region.nodes[i].op in ENDS]

    def _is_edge(self, i: int) -> bool:
        return self.varies(self.region.nodes[i])

    def _edge_closure(self, roots: list[int]) -> list[int]:
        """The edge-wise nodes behind `roots`, in program order."""
        found: set[int] = set()
        todo = [i for i in roots if self._is_edge(i)]
        while todo:
            i = todo.pop()
            if i not in found:
                found.add(i)
                todo.extend(a for a in self.region.nodes[i].args if self._is_edge(a))
        return sorted(found)

    # -- reductions over edges ------------------------------------------------------------------------------------

    def tile_shape(self, shape: Shape, edges: int) -> str:
        """The lengths of a tile that holds a value of this shape for so many edges."""
        lengths = {
            "row": self.tile.rows,
            "edge": edges,
            "head": self.extent("head", shape[0]),
            "channel": self.extent("channel", shape[1]),
        }
        return f"[{', '.join(str(lengths[a]) for a in self.axes)}]"

    def row_shape(self, shape: Shape) -> str:
        """The lengths of a tile that holds a value of this shape per row, as sums over its edges have."""
        return "()" if self.tile.rows == 1 and shape == (1, 1) else self.tile_shape(shape, 1)

    def _start(self, i: int) -> None:
        node = self.region.nodes[i]
        if node.op == "softmax":
            triton_softmax.start(self, i)
        else:
            shape = self.tile_shape(node.shape, 1 if every_step(node) else self.tile.edges)
            self.line(f"acc{i} = tl.full({shape}, {START[node.op]}, {self.compute})")

    def _accumulate(self, i: int) -> None:
        node = self.region.nodes[i]
        if node.op == "softmax":
            triton_softmax.accumulate(self, i)
        elif i in self.plan.weighed:
            softmax, factors = self.plan.weighed[i]
            product = " * ".join([f"weight{softmax}", *map(self.operand, factors)])
            self._combine(i, f"tl.where(alive, {product}, 0.0)")
        elif i in self.plan.counted:
            triton_ties.accumulate(self, i)
        else:
            self._accumulate_alone(i)

    def _accumulate_alone(self, i: int) -> None:
        node = self.region.nodes[i]
        arg = node.args[0]
        value = self.operand(arg)
        if node.op == "reduce_sum":
            source_node = self.region.nodes[arg]
            zero_already = source_node.op == "input" and self.varies(source_node)
            self._combine(i, value if zero_already else f"tl.where(alive, {value}, 0.0)")
        elif node.op == "ties":
            self._combine(i, f"tl.where(alive & ({self.operand(self.region.nodes[arg].args[0])} == {value}), 1.0, 0.0)")
        else:
            self._combine(i, f"tl.where(alive, {value}, {START[node.op]})")

    def _combine(self, i: int, masked: str) -> None:
        """Adds a tile to the accumulator of a reduction; dead lanes hold what changes nothing."""
        combine = COMBINE.get(self.region.nodes[i].op, "")
        masked = self.over_lanes(i, masked)
        if combine:
            if i in self.plan.counted.values():
                self.line(f"before{i} = acc{i}")
            self.line(f"acc{i} = tl.{combine}(acc{i}, {masked}, {PROPAGATE})")
        elif i in self.plan.weighed:
            self.line(f"acc{i} = acc{i} * keep{self.plan.weighed[i].softmax} + {masked}")
        else:
            self.line(f"acc{i} += {masked}")

    def over_lanes(self, i: int, text: str) -> str:
        """Reduces a tile over its edge axis, as its accumulator is."""
        node = self.region.nodes[i]
        return self.over_edges(text, node.shape, COMBINE.get(node.op, "")) if every_step(node) else text

    def over_edges(self, text: str, shape: Shape, combine: str = "") -> str:
        """Reduces a tile over its edge axis; one element per program becomes a scalar."""
        scalar = self.tile.rows == 1 and shape == (1, 1)
        axis = "None" if scalar else str(self.axes.index("edge"))
        keep = "" if scalar else ", keep_dims=True"
        if combine:
            return f"tl.reduce({text}, {axis}, _{combine}{keep})"
        return f"tl.sum({text}{'' if scalar else f', {axis}'}{keep})"

    def _finish_reduction(self, i: int) -> None:
        node = self.region.nodes[i]
        total = self._reduced(i)
        if i in self.plan.weighed:
            total = f"tl.where(occupied, {total} / sum{self.plan.weighed[i].softmax}, 0.0)"
        elif node.op in COMBINE:
            total = f"tl.where(occupied, {total}, 0.0)"
        if total == f"acc{i}":
            self.names[i] = total
        else:
            self._bind(i, f"i{i}", total)

    def _reduced(self, i: int) -> str:
        """The accumulator of a reduction, its lanes put together."""
        node = self.region.nodes[i]
        if every_step(node):
            return f"acc{i}"
        if i in self.plan.counted:
            return triton_ties.join_lanes(self, i)
        lanes = f"acc{i}"
        if i in self.plan.weighed and not shares_maximum(self.region, self.plan, self.plan.weighed[i].softmax):
            lanes += f" * share{self.plan.weighed[i].softmax}"
        total = self.over_edges(lanes, node.shape, COMBINE.get(node.op, ""))
        if i in self.plan.counted.values():
            self.line(f"top{i} = {total}")
            return f"top{i}"
        return total

    # -- values ---------------------------------------------------------------------------------------------------

    def _bind(self, i: int, name: str, text: str) -> None:
        self.line(f"{name} = {text}")
        self.names[i] = name

    def _compute(self, i: int) -> None:
        """Computes one value that is neither a constant nor a reduction."""
        node = self.region.nodes[i]
        letter = {self.region.by: "i", self.region.by.opposite: "j", Space.PARAMETER: "p"}.get(node.space, "e")
        if node.op in SOFTMAX_ROWS:
            self.names[i] = f"{'max' if node.op == 'softmax_max' else 'sum'}{node.args[0]}"
        elif node.op == "softmax":
            self._bind(i, f"alpha{i}", f"tl.exp({self.operand(node.args[0])} - max{i}) / sum{i}")
        elif node.op == "input":
            if i not in self.region.only_columns:
                text = triton_bits.load(self, i) if node.dtype == BITS else self._load(node)
                self._bind(i, f"{letter}{i}", text)
        elif node.op in FEATURE_REDUCTIONS:
            self._bind(i, f"{letter}{i}", self._over_features(node))
        elif node.op == "dropout":
            self._dropout(i, f"{letter}{i}")
        elif node.op == "linear":
            self._bind(i, f"{letter}{i}", triton_layers.linear(self, i))
        elif node.op == "transposed":
            self._bind(i, f"{letter}{i}", triton_layers.transposed(self, i))
        elif node.op in POINTWISE:
            self._bind(i, f"{letter}{i}", self._pointwise(node))
        else:
            raise Unsupported(f"no Triton code for the operation {node.op!r}")
        if i in self.region.columns:
            triton_layers.columns(self, i)

    def _load(self, node: Node) -> str:
        if triton_flat.is_flat(self, node):
            text = triton_flat.load(self, node)
        else:
            offset, masks = self.place(node)
            text = f"tl.load(t{node.value}{offset}{masked(masks, other='0')})"
        if node.dtype == SEED:
            return text
        return f"{text} != 0" if node.dtype == BOOL else f"{text}.to({self.compute})"

    def _dropout(self, i: int, name: str) -> None:
        """What dropout multiplies with; lanes behind the last edge or feature hold anything."""
        node = self.region.nodes[i]
        place = self.feature(node.shape)[0].removeprefix(" + ") or "0"
        p = float(node.value or 0.0)
        seed, least, scale = self.names[node.args[0]], philox.threshold(p), philox.scale(p)
        self.line(f"word, _, _, _ = tl.philox({seed}, edge_at.to(tl.uint32), {place}, 0, 0, {philox.ROUNDS})")
        kept, dropped = (f"tl.full((), {literal}, {self.compute})" for literal in (scale, 0.0))
        self._bind(i, name, f"tl.where(word >= tl.full((), {least}, tl.uint32), {kept}, {dropped})")

    def _over_features(self, node: Node) -> str:
        arg = self.region.nodes[node.args[0]]
        axis, at = ("head", 0) if node.op.endswith("heads") else ("channel", 1)
        function, neutral = ("sum", "0.0") if node.op in FEATURE_SUMS else ("max", 'float("-inf")')
        text, length = self.operand(node.args[0]), arg.shape[at]
        if length == 1:
            return text
        if self.padded(axis, length):
            text = f"tl.where({axis}{length}_in, {text}, {neutral})"
        if self._alone(node):
            return f"tl.{function}({text})"
        return f"tl.{function}({text}, {self.axes.index(axis)}, keep_dims=True)"

    def _alone(self, node: Node) -> bool:
        """Whether a value is one number for the whole program."""
        one_row = self.tile.rows == 1 or node.space is Space.PARAMETER
        return node.shape == (1, 1) and one_row and not self.varies(node)

    def _pointwise(self, node: Node) -> str:
        nodes = [self.region.nodes[a] for a in node.args]
        typed = nodes[1:] if node.op == "where" else nodes
        # A literal takes its type from the other operand; without one, Triton would compute in float32.
        bare = POINTWISE[node.op].bare and any(n.op != "const" for n in typed)
        args = [self.operand(a, bare) for a in node.args]
        if node.op in ("and", "or"):
            args = [a if n.boolean else f"({a} != 0)" for a, n in zip(args, nodes, strict=True)]
            alone = [self._alone(n) for n in nodes]
            if alone[0] != alone[1]:  # Triton's interpreter joins no single bool with a tile of them
                one, tile = args if alone[0] else reversed(args)
                return f"tl.where({one}, {tile}, False)" if node.op == "and" else f"tl.where({one}, True, {tile})"
        text = POINTWISE[node.op].triton.format(*args)
        return without_parentheses(re.sub(r"\bT\b", self.compute, text))

    def operand(self, i: int, bare: bool = False) -> str:
        """The text that stands for a value; a constant's, unless `bare`, with its type."""
        node = self.region.nodes[i]
        if node.op != "const":
            return self.names[i]
        number = literal(float(node.value or 0.0))
        return number if bare else f"tl.full((), {number}, {self.compute})"

    def _store_rows(self) -> None:
        self._rows_before(self.plan.passes)
        for k, out in enumerate(self.region.outputs):
            if not self.region.per_edge(out):
                self._store(k, out)

    def _store(self, k: int, out: Output) -> None:
        node = self.region.nodes[out.node]
        if out.dtype == BITS:
            triton_bits.store(self, k, out.node)
            return
        text = self.operand(out.node)
        if out.dtype != BOOL:
            text = f"{text}.to(tl.{out.dtype})"
        elif not node.boolean:
            text = f"({text} != 0)"
        rows = Node(node.op, (), self.region.by, node.shape) if node.space is Space.PARAMETER else node
        offset, masks = self.place(rows)
        # Where programs share a row, each of them stores a narrow value: the same bits, by the same code.
        self.line(f"tl.store(out{k}{offset}, {text}{masked(masks)})")
