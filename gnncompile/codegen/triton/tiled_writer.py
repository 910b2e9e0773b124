"""Writes one phase of the walk of a tiled region as the text of a Python module with one Triton kernel.

The edges of a share are walked in the order of their rows, so that rows which edges share stay in the caches. A program
takes a tile of edges, then the tile that lies as many tiles further on as there are programs, and so on.
"""

from __future__ import annotations

from gnncompile.codegen.triton.text import ELEMENTARY, masked
from gnncompile.codegen.triton.tile import NARROWEST, padded
from gnncompile.codegen.triton.tiled_layers import counts_edges, matrix
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.codegen.triton.tiled_tile import TiledTile
from gnncompile.codegen.triton.tiled_values import NEVER, TileValues
from gnncompile.ir.region import BOOL, SEED, Space

KERNEL = "walk_tiles"
"""Name of the kernel in the generated module."""

NUMBERS = ("num_rows", "first", "end")
"""The integer arguments: the number of rows, and the share of the edges, from `first` up to `end`."""

FUNCTIONS = ("add_rows", "layer", "layer_of_parts", "product", "weights", "weights_of_part")
"""The functions of :mod:`gnncompile.codegen.triton.tiled_functions` that generated kernels call."""


class TiledWriter(TileValues):
    """Writes the kernel, statement by statement.

    Attributes:
        parameters: The names of the kernel's pointers, in order.
    """

    def __init__(self, plan: TiledPlan, phase: Phase, tile: TiledTile) -> None:
        super().__init__(plan, phase, tile)
        nodes = self.region.nodes
        self.inputs = [nodes[i] for i in phase.need if nodes[i].op == "input"]
        self.spaces = {n.space for n in self.inputs}
        self.written = [i for i in phase.stores if plan.places[i].startswith("temp")]
        numbered = any(nodes[i].numbers_edges for i in phase.need) or bool(phase.outputs)
        numbered = numbered or not plan.brief.issuperset((*self.written, *phase.loads))
        used = {
            "rowptr": True,
            "col": self.region.by.opposite in self.spaces,
            "edge": numbered,
            "rows": self.region.by in self.spaces,
            "sums": bool(phase.sums),
        }
        self.parameters = [*self._tensors(), *(name for name, needed in used.items() if needed)]
        self.parameters += [f"out{k}" for k in phase.outputs] + [plan.places[i] for i in self.written]
        self.parameters += sorted({plan.places[i] for i in phase.loads} - set(self.parameters))

    def _tensors(self) -> list[str]:
        weights = {self.plan.layers[i] for i in self.plan.layers_of(self.phase)}
        parts = {int(name[1:]) for name in weights if name[0] == "w"}
        positions = {int(n.value or 0) for n in self.inputs}
        return [*(f"t{p}" for p in sorted(positions - parts)), *sorted(n for n in weights if n[0] == "w")]

    def module(self) -> str:
        """Returns the text of the module."""
        self._prologue()
        self._loop()
        self._store_sums()
        numbers = ", ".join(f'"{name}"' for name in NUMBERS)
        head = [
            f"# Region by {self.region.by.value}, in tiles of {self.tile.edges} edges.",
            "",
            "import triton",
            "import triton.language as tl",
            "",
            "from gnncompile.codegen.gemm.parts import once",
            "from gnncompile.codegen.gemm.scaled import power_of_parts, scaled_product",
            ELEMENTARY,
            "from gnncompile.codegen.triton.tiled_functions import (",
            *(f"    {name}," for name in FUNCTIONS),
            ")",
            "",
            "",
            f"@triton.jit(do_not_specialize=[{numbers}])",
            f"def {KERNEL}({', '.join((*self.parameters, *NUMBERS))}):",
        ]
        return "\n".join([*head, *self.lines]) + "\n"

    # -- the walk -------------------------------------------------------------------------------------------------

    def _prologue(self) -> None:
        nodes = self.region.nodes
        self.line("program = tl.program_id(0)")
        self.line("last = tl.minimum(tl.load(rowptr + num_rows), end)")
        self.line(f"lane = tl.arange(0, {self.tile.edges})")
        read = {*self.phase.need, *self.phase.sums}
        lengths = {nodes[i].shape[1] for i in read if nodes[i].dtype != SEED}
        layers = [nodes[i] for i in read - self.phase.loads if nodes[i].op in ("linear", "transposed", "outer")]
        lengths |= {length for n in layers for length in matrix(self.region, n)}
        for length in sorted(lengths):
            self.axis(length)
        for i in self.phase.need:
            if nodes[i].space in (Space.PARAMETER, Space.FEATURE):
                self.value(i)
        if self.tile.keeps_weights:
            self.keep_weights()
        for i in self.phase.sums:
            self.line(f"acc{i} = tl.zeros({self._sum_shape(i)}, {self.compute})")

    def _loop(self) -> None:
        nodes, step = self.region.nodes, f"tl.num_programs(0) * {self.tile.edges}"
        begin = f"first + program * {self.tile.edges}"
        self.line(f"for start in tl.range({begin}, last, {step}, num_stages={self.tile.stages}):")
        self.indent += 1
        self._open_tile()
        outputs, stores, sums = list(self.phase.outputs), list(self.written), list(self.phase.sums)
        done: set[int] = {i for i in self.phase.need if nodes[i].space in (Space.PARAMETER, Space.FEATURE)}
        for i in [*self.phase.need, -1]:
            if i >= 0 and i not in done:
                self.value(i)
                done.add(i)
            for k in [k for k in outputs if self.region.outputs[k].node in done]:
                self._store(f"out{k}", self.region.outputs[k].node, self.region.outputs[k].dtype)
                outputs.remove(k)
            for s in [s for s in stores if s in done]:
                self._store(self.plan.places[s], s, self.plan.stored[s])
                stores.remove(s)
            for s in [s for s in sums if done.issuperset(self._needed(s))]:
                self._add_sum(s)
                sums.remove(s)
        self.indent -= 1

    def _open_tile(self) -> None:
        if self.plan.layers and not self.tile.keeps_weights:
            # Weights that are read here must not be kept in registers for all tiles.
            self.line(f"never = tl.where(start < 0, {NEVER}, 0)")
        self.line("position = tl.minimum(start + lane, last - 1)")
        self.line("alive = (start + lane < last)[:, None]")
        if "col" in self.parameters:
            self.line("other = tl.load(col + position).to(tl.int64)[:, None]")
        if "edge" in self.parameters:
            self.line("edge_at = tl.load(edge + position).to(tl.int64)[:, None]")
        if not self.plan.brief.isdisjoint((*self.written, *self.phase.loads)):
            self.line("share_at = (position - first).to(tl.int64)[:, None]")
        if Space.ORDERED in self.spaces:
            self.line("here = position.to(tl.int64)[:, None]")
        if "rows" in self.parameters:
            self.line("own = tl.load(rows + position).to(tl.int64)[:, None]")

    def _store(self, tensor: str, i: int, dtype: str) -> None:
        self.load_again([i])
        node = self.region.nodes[i]
        length = node.shape[1]
        offset, masks = self.columns(length)
        value = self.edgewise(i, length)
        if dtype != BOOL:
            value = f"({value}).to(tl.{dtype})"
        elif not node.boolean:
            value = f"({value} != 0)"
        row = self.row_of_stored(i) if tensor.startswith("temp") else "edge_at"
        at = f"{row} * {length}{offset}" if length > 1 else row
        self.line(f"tl.store({tensor} + {at}, {value}{masked(['alive', *masks])})")

    # -- sums over all edges --------------------------------------------------------------------------------------

    def _needed(self, i: int) -> tuple[int, ...]:
        """Returns the values that a sum reads. A plain sum reads no ones per edge, and so comes early."""
        args = self.region.nodes[i].args
        return args[1:] if counts_edges(self.region, args[0]) else args

    def _sum_shape(self, i: int) -> str:
        rows = NARROWEST if i in self.sums_by_product else 1  # all rows of a product hold the sum
        return f"[{rows}, {padded(max(matrix(self.region, self.region.nodes[i])))}]"

    def _add_sum(self, i: int) -> None:
        features, value = self.region.nodes[i].args
        rows, columns = matrix(self.region, self.region.nodes[i])
        if i in self.sums_by_product:
            self.line(f"acc{i} = add_rows({self.factor(value, columns)}, acc{i})")
            return
        counts = counts_edges(self.region, features)
        self.load_again([value] if counts else [features, value])
        product = self.edgewise(value, columns)
        if not counts:
            product = f"{self.edgewise(features, rows)} * {product}"
        self.line(f"acc{i} += tl.sum(tl.where(alive, {product}, 0.0), 0, keep_dims=True)")

    def _store_sums(self) -> None:
        offsets, size = self.phase.offsets(self.region)
        if self.sums_by_product:
            self.line(f"first = tl.arange(0, {NARROWEST})[:, None]")
        for i in self.phase.sums:
            offset, masks = self.columns(max(matrix(self.region, self.region.nodes[i])))
            at = f"sums + program * {size} + {offsets[i]}{offset or ' + tl.zeros([1, 1], tl.int32)'}"
            if i in self.sums_by_product:
                at, masks = f"{at} + 0 * first", ["(first == 0)", *masks]
            self.line(f"tl.store({at}, acc{i}{masked(masks)})")
