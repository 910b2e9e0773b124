"""Writes a tiled region as one C++17 translation unit with a plain C entry point, ``int run(const int64_t*)``.

A thread walks a share of the rows, some edges (a *tile*) at a time. Values that products of matrices take or give stand
in buffers with a row per edge of the tile, which stay in the cache. :mod:`gnncompile.codegen.cpp.products` writes the
products.

The arguments are those of :mod:`gnncompile.codegen.cpp.source`, and the address of torch's functions for products. The
shares depend on the graph only, so results do not depend on the number of threads, and a backward computes the
products of its forward again, bit for bit.

Names in the source, beside those of :mod:`gnncompile.codegen.cpp.source`:

- ``b2``: buffer 2, ``[tile, width]``; ``r2`` and ``q2``: its values as pairs of bfloat16, in rows and in columns.
- ``w3``: tensor 3 as a matrix of type ``T``; ``v3``: its transpose.
- ``total5``: the sum of a row's earlier tiles for reduction 5.
"""

from __future__ import annotations

from itertools import accumulate

from gnncompile import tuning
from gnncompile.codegen.cpp.nest import size_of, to_storage
from gnncompile.codegen.cpp.phases import Phase, Phases, phases
from gnncompile.codegen.cpp.plan import Kind, Step, plan
from gnncompile.codegen.cpp.prelude import prelude
from gnncompile.codegen.cpp.products import ALIGNED, ALIGNMENT, PairWriter, ProductWriter, VectorWriter, whole_vectors
from gnncompile.codegen.cpp.rows import INDEX, RowWriter, tensors
from gnncompile.device import device_of
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import Node, Region, Space


def tiled_source(region: Region, own_products: bool | None = None) -> str:
    """Returns the C++ source of a tiled region.

    Args:
        region: The region.
        own_products: Whether the kernel multiplies matrices itself. None stands for the faster way on this machine.

    Raises:
        UnsupportedRegion: The region can't be cut into phases.
    """
    writer = _Writer(region, phases(region), _product_writer(region, own_products))
    body = f"{ALIGNED}\n{writer.matrices.helpers}\n{writer.text()}"
    return f"{prelude(body, region.double)}\n{body}"


def _product_writer(region: Region, own_products: bool | None) -> type[ProductWriter]:
    """Returns the class that writes the products of a region."""
    device = device_of("cpu")
    own = device.multiplies_in_own_vectors if own_products is None else own_products
    if own and region.factor == "bfloat16" and device.multiplies_pairs:
        return PairWriter
    return VectorWriter if own else ProductWriter


class _PhaseWriter(RowWriter):
    """Writes the loops of one phase over the edges of a tile.

    Args:
        phase: The phase.
        count: The number of tensors of the whole region. Inputs at later positions are buffers.
        last: Whether the phase reduces and writes results.
        depth: The indentation of its lines.
    """

    def __init__(self, phase: Phase, count: int, last: bool, depth: int) -> None:
        super().__init__(phase.region)
        self.phase, self.count, self.last, self.depth = phase, count, last, depth
        self.plan = plan(phase.region)
        self.steps = [s for nests in self.plan.loops for nest in nests for s in nest.steps]

    # Accumulators, which outlive a tile.

    def _accumulators(self) -> list[tuple[str, Node, str]]:
        """Returns the name, the node and the start value of every accumulator."""
        found = []
        for step in self.steps:
            if step.kind is Kind.REDUCE:
                node, reduction = self.nodes[step.node], REDUCTIONS[self.nodes[step.node].op]
                start = reduction.cpp_start if reduction.adds else f"opens == end ? T(0) : {reduction.cpp_start}"
                found.append((f"acc{step.node}", node, start))
                if step.node in self.counted:
                    found.append((f"ties{step.node}", node, "T(0)"))
        return found

    def _row_sums(self) -> list[tuple[str, str, int]]:
        """Returns each sum over edges, the sum of the row's earlier tiles, and their number of elements."""
        steps = [s for s in self.steps if self._adds(s)]
        return [(f"acc{s.node}", f"total{s.node}", size_of(self.nodes[s.node].shape)) for s in steps]

    def declarations(self) -> list[str]:
        """Returns the declarations of the accumulators."""
        names = [(name, size_of(node.shape)) for name, node, _ in self._accumulators()]
        names += [(total, size) for _, total, size in self._row_sums()]
        return [f"T {name}{'' if size == 1 else f'[{size}]'};" for name, size in names]

    @staticmethod
    def _each(name: str, size: int) -> str:
        return name if size == 1 else f"for (int i = 0; i < {size}; ++i) {name}[i]"

    @staticmethod
    def _one(name: str, size: int) -> str:
        return name if size == 1 else f"{name}[i]"

    # The loops.

    def text(self) -> list[str]:
        """Returns the lines of the phase."""
        self._open("")
        self._row_pointers(Space.PARAMETER)
        for nest in self.plan.setup:
            self._nest(nest)
        if self.last:
            self._last_rows()
        else:
            self._rows()
        self._close()
        return self.lines

    def _rows(self) -> None:
        """Writes the loop over the rows of a tile's edges, in a phase that only fills buffers."""
        self._put("int64_t p = begin;")
        self._open("for (int64_t row = current; p < until; ++row)")
        self._put("const int64_t end = rowptr[row + 1] < until ? rowptr[row + 1] : until;")
        self._put("if (p == end) continue;")
        self._row_pointers(self.region.by)
        for nest in self.plan.rows[0]:
            self._nest(nest)
        self._edges()
        self._close()

    def _last_rows(self) -> None:
        """Writes the loop that reduces rows, and writes those that end in the tile."""
        self._open("for (; current < last; ++current)")
        self._put("const int64_t row = current, opens = rowptr[row], close = rowptr[row + 1];")
        self._put("int64_t p = opens < begin ? begin : opens;")
        self._put("const int64_t end = close < until ? close : until;")
        starts = [f"{self._each(n, size_of(node.shape))} = {start};" for n, node, start in self._accumulators()]
        if starts:
            self._put("if (opens >= begin) {", *(f"  {line}" for line in starts), "}")
        self._row_pointers(self.region.by)
        for nest in self.plan.rows[0]:
            self._nest(nest)
        if self.plan.loops:
            self._edges()
        sums = self._row_sums()
        self._put("if (close > until) {")
        for name, total, size in sums:
            self._put(
                f"  {self._each(total, size)} = (opens < begin ? {self._one(total, size)} : T(0))"
                f" + {self._one(name, size)};",
                f"  {self._each(name, size)} = 0;",
            )
        self._put("  break;", "}")
        if sums:
            folds = [f"{self._each(n, size)} += {self._one(total, size)};" for n, total, size in sums]
            self._put("if (opens < begin) {", *(f"  {line}" for line in folds), "}")
        for nest in self.plan.rows[-1] if self.plan.loops else ():
            self._nest(nest)
        self._close()

    def _edges(self) -> None:
        """Writes the loop over the edges ``p`` of a row, up to ``end``."""
        self._open("for (; p < end; ++p)")
        gathered = {i: self.nodes[i] for i in self.plan.gathered[0]}
        if any(nest.shape != (1, 1) for nest in self.plan.loops[0]):
            self._put('asm volatile("");  // otherwise gcc may vectorise over edges, with gathers')
        rows = {i: node for i, node in gathered.items() if not self._is_buffer(node)}
        self._edge_pointers(rows, [], any(self._numbers_edges(s) for s in self.steps if not self._fills(s)))
        for i, node in gathered.items():
            if self._is_buffer(node):
                at = f"b{int(node.value or 0) - self.count} + (p - begin) * {size_of(node.shape)}"
                self._put(f"const T* const p{i} = {at};")
        for nest in self.plan.loops[0]:
            self._nest(nest)
        self._close()

    def _is_buffer(self, node: Node) -> bool:
        return node.op == "input" and int(node.value or 0) >= self.count

    def _fills(self, step: Step) -> bool:
        """Whether a step stores to a buffer."""
        return step.kind is Kind.STORE and step.output < len(self.phase.fills)

    def _target(self, step: Step) -> tuple[str, str]:
        if self._fills(step):
            return f"b{self.phase.fills[step.output]}", "(p - begin)"
        output = self.phase.stores[step.output - len(self.phase.fills)]
        return f"o{output}", "e" if self._on_edges(step) else "row"


class _Writer:
    """Writes the kernel: the phases of a tile, the loop over tiles, and the entry point that shares rows out."""

    def __init__(self, region: Region, made: Phases, products: type[ProductWriter]) -> None:
        self.region, self.nodes, self.made = region, region.nodes, made
        last = len(made.phases) - 1
        self.writers = [_PhaseWriter(p, region.count, k == last, 3) for k, p in enumerate(made.phases)]
        self.lines: list[str] = []
        self.arguments = INDEX + tensors(region)
        # Sums over all edges: those of the last loop, then those of products.
        sizes = [size_of(self.nodes[at].shape) * region.features(at) for at in made.sums]
        starts = list(accumulate(map(whole_vectors, sizes), initial=whole_vectors(self.writers[-1].length)))
        self.products = dict(zip(made.sums, starts, strict=False))
        self.length = starts[-1]
        self.matrices = products(region, made, self.products)
        # The buffers of a tile, with the elements of each.
        tile = tuning.LOOPS.tile_edges
        self.buffers = {f"b{k}": tile * buffer.width for k, buffer in enumerate(made.buffers)}
        self.buffers |= self.matrices.copies()

    def text(self) -> str:
        """Returns the body of the kernel."""
        self._walk()
        self._entry()
        return "\n".join(self.lines) + "\n"

    def _put(self, *lines: str) -> None:
        self.lines += lines

    def _walk(self) -> None:
        """Writes the function that computes a range of rows, tile by tile."""
        given = [f"    {kind} __restrict__ {name}," for kind, name in self.arguments]
        given += [f"    T* {name}," for name in self.matrices.names()]
        self._put("// Computes the rows from `first` up to `last`; false if a product failed.")
        self._put("__attribute__((noinline)) static bool walk(", "    int64_t first, int64_t last,", *given)
        self._put(f"    T* sums, T* buffers{self.matrices.parameter}) {{")
        offsets = accumulate(self.buffers.values(), initial=0)
        self._put(*(f"  T* const {name} = buffers + {at};" for name, at in zip(self.buffers, offsets, strict=False)))
        self._put(*(f"  {line}" for line in self.writers[-1].declarations()))
        self._put("  const int64_t stop = rowptr[last];", "  int64_t current = first, begin = rowptr[first];", "  do {")
        tile = tuning.LOOPS.tile_edges
        self._put(f"    const int64_t until = begin + {tile} < stop ? begin + {tile} : stop, count = until - begin;")
        for phase, writer in zip(self.made.phases, self.writers, strict=True):
            if phase.region.outputs:
                self._put(*writer.text())
            self._put(*(f"    {self.matrices.line(product)}" for product in phase.products))
        self._put("    begin = until;", "  } while (begin < stop);", "  return true;", "}", "")

    # The entry point.

    def _entry(self) -> None:
        self._put('extern "C" int run(const int64_t* arguments) {', "  const int64_t rows = arguments[0];")
        for at, (kind, name) in enumerate(self.arguments, 2):
            self._put(f"  {kind} const {name} = reinterpret_cast<{kind}>(arguments[{at}]);")
        self._put(*(f"  {line}" for line in self.matrices.opening(2 + len(self.arguments))))
        self._put("  const int64_t work = rows + rowptr[rows];")
        self._put(f"  const int64_t useful = 1 + rowptr[rows] / {4 * tuning.LOOPS.tile_edges};")
        self._put(f"  const int64_t shares = useful < {tuning.LOOPS.shares} ? useful : {tuning.LOOPS.shares};")
        self._put("  const int64_t threads = arguments[1] < shares ? arguments[1] : shares;")
        self._scratch()
        names = ", ".join([name for _, name in self.arguments] + self.matrices.names())
        self._put("  int failed = 0;", "#pragma omp parallel num_threads(threads) reduction(| : failed)", "  {")
        room = f"({sum(self.buffers.values())} + {2 * ALIGNMENT}) * sizeof(T)"
        self._put(f"    T* const space = static_cast<T*>(__builtin_malloc({room}));", "    failed |= !space;")
        self._put("    T* const buffers = aligned(space);", "#pragma omp for schedule(dynamic, 1)")
        self._put("    for (int64_t t = 0; t < shares; ++t) {")
        self._put("      const int64_t first = share(rowptr, rows, work * t / shares);")
        self._put("      const int64_t last = t + 1 == shares ? rows : share(rowptr, rows, work * (t + 1) / shares);")
        self._put(
            f"      if (space && first < last)"
            f" failed |= !walk(first, last, {names}, sums + t * {self.length}, buffers{self.matrices.argument});"
        )
        self._put("    }", "    __builtin_free(space);", "  }")
        for k, out in enumerate(self.region.outputs):
            self._join(k, out.node)
        self._put("  __builtin_free(scratch);", "  return failed;", "}")

    def _scratch(self) -> None:
        """Writes the memory of sums over all edges, and the weights as matrices of type T."""
        room = f"shares * {self.length} + {self.matrices.room()}"
        self._put(f"  T* const scratch = static_cast<T*>(__builtin_calloc({room} + {2 * ALIGNMENT}, sizeof(T)));")
        self._put("  if (!scratch) return 1;", "  T* const sums = aligned(scratch);")
        self._put(f"  T* free_space = sums + shares * {self.length};")
        self._put(*(f"  {line}" for line in self.matrices.prepare()))

    def _join(self, k: int, at: int) -> None:
        """Writes the sum of all shares of a sum over all edges."""
        node, out = self.nodes[at], self.region.outputs[k]
        if node.op != "outer":
            return
        last = self.made.phases[-1]
        if k in last.stores:  # the last loop adds it up
            place = last.region.outputs[len(last.fills) + last.stores.index(k)].node
            start = self.writers[-1].sums[place]
        else:
            start = self.products[at]
        size = size_of(node.shape) * self.region.features(at)
        self._put(f"  for (int64_t i = 0; i < {size}; ++i) {{", "    T total = 0;")
        self._put(f"    for (int64_t t = 0; t < shares; ++t) total += sums[t * {self.length} + {start} + i];")
        self._put(f"    o{k}[i] = {to_storage('total', out.dtype)};", "  }")
