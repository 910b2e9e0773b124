"""Writes a region as one C++17 translation unit with a plain C entry point, ``int run(const int64_t* arguments)``.

The arguments are the number of rows, the number of threads, and addresses. The addresses are those of rowptr, col and
edge, of the tensors at :func:`gnncompile.codegen.cpp.rows.positions`, and of the outputs. The result is 0, or 1 if
there was no memory for scratch.

Names in the source:

- ``t2``: tensor 2; ``o0``: output 0.
- ``p5``: the row of an input tensor that node 5 reads, or the one that it takes in the current head.
- ``x5``: the value of node 5; ``kept5``: the value of node 5, kept in an array for later loops.
- ``row5``: the channels of node 5 in the current head.
- ``acc5``: the accumulator of reduction 5; ``ties5``: the number of edges that reach its result.
- ``max5``, ``sum5``: the maximum and the sum of exponentials of softmax 5.
"""

from __future__ import annotations

import math

from gnncompile import tuning
from gnncompile.codegen.cpp import long_rows
from gnncompile.codegen.cpp.nest import size_of
from gnncompile.codegen.cpp.plan import Kind, Plan, Step, is_buffered, plan
from gnncompile.codegen.cpp.prelude import STORAGE, prelude
from gnncompile.codegen.cpp.rows import INDEX, RowWriter, tensors
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, Region, Space

LARGEST_TILE = 1 << 14
"""The most elements (heads * channels) of a value. The arrays of a row live on the stack."""


def source(region: Region) -> str:
    """Returns the C++ source of `region`.

    Raises:
        UnsupportedRegion: A dtype has no C++ storage type, a value is too wide, or an output is a gathered row.
    """
    _check(region)
    body = _Writer(region).text()
    double = region.double
    return f"{_header(region)}\n{prelude(body, double)}\n{body}"


def _check(region: Region) -> None:
    for dtype in [n.dtype for n in region.inputs] + [o.dtype for o in region.outputs]:
        if dtype not in STORAGE:
            raise UnsupportedRegion(
                f"C++ kernel: found dtype {dtype}, expected one of {', '.join(STORAGE)}; cast it first"
            )
    for node in region.nodes:
        if node.shape[0] * node.shape[1] > LARGEST_TILE:
            raise UnsupportedRegion(
                f"C++ kernel: found a value of {node.shape} features, expected at most {LARGEST_TILE}"
            )
    for out in region.outputs:
        node = region.nodes[out.node]
        if node.space is region.by.opposite:
            raise UnsupportedRegion("C++ kernel: an output is a gathered row; add it in EDGE space or do not store it")
        if out.dtype != BITS and math.prod(out.trailing) != math.prod(node.shape):
            raise UnsupportedRegion(f"C++ kernel: output shape {out.trailing} does not hold features {node.shape}")


def _header(region: Region) -> str:
    """Returns C++ comments that say what the kernel computes."""
    lines = [f"// Edges are walked by {region.by.value}; features are [heads, channels]."]
    for i, node in enumerate(region.nodes):
        if node.op == "input":
            what = f"tensor {node.value} ({node.dtype})"
        elif node.op == "const":
            what = repr(node.value)
        else:
            what = f"{node.op}({', '.join(f'x{a}' for a in node.args)})"
        lines.append(f"//   x{i} = {what}: {node.space.value} {list(node.shape)}")
    stored = [f"o{i} = x{out.node} ({out.dtype})" for i, out in enumerate(region.outputs)]
    return "\n".join([*lines, f"//   {', '.join(stored)}"]) + "\n"


class _Writer(RowWriter):
    """Writes the body of one kernel, top to bottom."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.plan: Plan = plan(region)
        self.buffered = [i for i in region.softmaxes if is_buffered(self.nodes[i])]
        self.scratch = sum(size_of(self.nodes[i].shape) for i in self.buffered)

    def text(self) -> str:
        self._walk()
        self._entry()
        return "\n".join(self.lines) + "\n"

    # The kernel, from the outermost function inwards.

    def _walk(self) -> None:
        """Writes the function that computes a range of rows."""
        sums = [("T*", "sums")] if self.region.sums_all else []
        arguments = [f"    {kind} __restrict__ {name}" for kind, name in INDEX + tensors(self.region) + sums]
        self._put("// Computes the rows from `first` up to `last`; false if memory ran out.")
        self._put("__attribute__((noinline)) static bool walk(", "    int64_t first, int64_t last,")
        self._put(*(f"{line}," for line in arguments[:-1]))
        self._open(f"{arguments[-1]})")
        self._row_pointers(Space.PARAMETER)
        self._row_pointers(Space.FEATURE)
        for nest in self.plan.setup:
            self._nest(nest)
        if self.scratch:
            self._put("T* scratch = nullptr;", "int64_t capacity = 0;")
        if self.plan.loops:
            self._put("const int64_t stop = rowptr[last];")
        self._open("for (int64_t row = first; row < last; ++row)")
        self._row()
        self._close()
        if self.scratch:
            self._put("__builtin_free(scratch);")
        self._put("return true;")
        self._close()
        self._put("")

    def _row(self) -> None:
        if self.plan.loops:
            self._put("const int64_t begin = rowptr[row], end = rowptr[row + 1];")
        if self.scratch:
            # Padded to 16 edges, so that SIMD loops over logits have no remainder.
            self._put("const int64_t padded = (end - begin + 15) / 16 * 16;")
            self._put(f"if (!reserve(scratch, capacity, padded * {self.scratch})) return false;")
            offset = 0
            for i in self.buffered:
                self._put(f"T* const alpha{i} = scratch + padded * {offset};")
                offset += size_of(self.nodes[i].shape)
        self._row_pointers(self.region.by)
        for k in range(len(self.plan.loops)):
            for nest in self.plan.rows[k]:
                self._nest(nest)
            self._loop(k)
        for nest in self.plan.rows[-1]:
            self._nest(nest)

    def _loop(self, k: int) -> None:
        """Writes loop `k` over the edges of the row."""
        steps = [s for nest in self.plan.loops[k] for s in nest.steps]
        for step in steps:
            self._accumulator(step)
        sums = [(f"acc{s.node}", size_of(self.nodes[s.node].shape)) for s in steps if self._adds(s)]
        self._put(*(long_rows.opening(sums) if sums else []))
        self._open("for (int64_t p = part; p < until; ++p)" if sums else "for (int64_t p = begin; p < end; ++p)")
        if any(nest.shape != (1, 1) for nest in self.plan.loops[k]):
            self._put('asm volatile("");  // otherwise gcc may vectorise over edges, with gathers')
        gathered = {i: self.nodes[i] for i in self.plan.gathered[k]}
        self._edge_pointers(
            gathered, [s.output for s in steps if self._on_edges(s)], any(map(self._numbers_edges, steps))
        )
        for nest in self.plan.loops[k]:
            self._nest(nest)
        self._close()
        self._put(*(long_rows.closing(sums) if sums else []))
        for step in steps:
            if step.kind is Kind.SOFTMAX:
                self._finish_softmax(step.node)

    def _entry(self) -> None:
        """Writes the entry point, which divides the rows between threads."""
        walks = bool(self.plan.loops)
        self._open('extern "C" int run(const int64_t* arguments)')
        self._put("const int64_t rows = arguments[0];")
        arguments = INDEX + tensors(self.region)
        for at, (kind, name) in enumerate(arguments, 2):
            self._put(f"{kind} const {name} = reinterpret_cast<{kind}>(arguments[{at}]);")
        self._put(f"const int64_t work = rows{' + rowptr[rows]' if walks else ''};")
        self._put(f"const int64_t useful = 1 + work * {size_of(self.region.grid)} / {tuning.LOOPS.serial_work};")
        self._put("const int64_t threads = arguments[1] < useful ? arguments[1] : useful;")
        names = ", ".join(name for _, name in arguments)
        if self.region.sums_all:
            self._shares(names)
            return
        self._put(f"if (threads <= 1) return !walk(0, rows, {names});")
        self._put("int failed = 0;")
        self._put("#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(| : failed)")
        self._open("for (int64_t t = 0; t < threads; ++t)")
        if walks:
            self._share("threads")
        else:
            self._put("const int64_t first = rows * t / threads, last = rows * (t + 1) / threads;")
        self._put(f"failed |= !walk(first, last, {names});")
        self._close()
        self._put("return failed;")
        self._close()

    def _share(self, count: str) -> None:
        """Writes the first and last row of share `t` of `count` shares."""
        self._put(f"const int64_t first = share(rowptr, rows, work * t / {count});")
        self._put(f"const int64_t last = t + 1 == {count} ? rows : share(rowptr, rows, work * (t + 1) / {count});")

    def _shares(self, names: str) -> None:
        """Writes the rest of the entry point, for sums over all edges.

        The number of partial sums depends on the size of the graph, but not on the number of threads.
        """
        self._put(f"const int64_t shares = useful < {tuning.LOOPS.shares} ? useful : {tuning.LOOPS.shares};")
        self._put(f"T* const sums = static_cast<T*>(__builtin_calloc(shares * {self.length}, sizeof(T)));")
        self._put("if (!sums) return 1;")
        self._put("#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)")
        self._open("for (int64_t t = 0; t < shares; ++t)")
        self._share("shares")
        self._put(f"walk(first, last, {names}, sums + t * {self.length});")
        self._close()
        for k, out in enumerate(self.region.outputs):
            size = size_of(self.nodes[out.node].shape) * self.region.features(out.node)
            self._open(f"for (int64_t i = 0; i < {size}; ++i)")
            self._put("T total = 0;")
            first = f"sums[t * {self.length} + {self.sums[out.node]} + i]"
            self._put(f"for (int64_t t = 0; t < shares; ++t) total += {first};")
            self._put(f"o{k}[i] = total;")
            self._close()
        self._put("__builtin_free(sums);", "return 0;")
        self._close()

    # The results of loops over edges: accumulators and softmaxes.

    def _accumulator(self, step: Step) -> None:
        node, i = self.nodes[step.node], step.node
        lowest = "begin == end ? T(0) : T(-__builtin_inf())"
        if step.kind is Kind.SOFTMAX:
            self._declare(f"max{i}", node.shape, "T(0)" if is_buffered(node) else lowest)
            self._declare(f"sum{i}", node.shape, "T(0)")
            if not is_buffered(node):
                self._declare(f"lost{i}", node.shape, "T(0)")
        elif step.kind is Kind.REDUCE:
            reduction = REDUCTIONS[node.op]
            start = reduction.cpp_start if reduction.adds else f"begin == end ? T(0) : {reduction.cpp_start}"
            self._declare(f"acc{i}", node.shape, start)
            if i in self.counted:
                self._declare(f"ties{i}", node.shape, "T(0)")

    def _finish_softmax(self, i: int) -> None:
        shape = self.nodes[i].shape
        at = "" if shape == (1, 1) else "[i]"
        loop = "" if shape == (1, 1) else f"for (int i = 0; i < {size_of(shape)}; ++i) "
        if is_buffered(self.nodes[i]):
            first = f"alpha{i}" if shape == (1, 1) else f"alpha{i} + i * padded"
            self._put(f"{loop}softmax_row({first}, end - begin, padded, max{i}{at}, sum{i}{at});")
        else:
            # If the maximum is infinite, exp(logit - max) is NaN for some edge. So the sum must be NaN.
            self._put(f"{loop}sum{i}{at} += max{i}{at} - max{i}{at};")
