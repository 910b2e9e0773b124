"""Writes C++ loop nests over the features of a row or an edge: they compute, reduce and store values.

The names in the text are those of :mod:`gnncompile.codegen.cpp.source`.
"""

from __future__ import annotations

import math

from gnncompile.codegen.cpp.plan import Kind, Nest, Step, is_buffered, is_direct, iteration, reads
from gnncompile.codegen.cpp.prelude import STORAGE
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir import bits, philox
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import BITS, BOOL, FEATURE_MAXIMA, FEATURE_SUMS, SEED, Node, Region, Shape


def size_of(shape: Shape) -> int:
    """Returns the number of elements (heads * channels) of a value."""
    return shape[0] * shape[1]


SHORTEST_VECTORS = 8
"""Fewest iterations of a loop that is vectorised."""


def _lanes(channels: int) -> int:
    """Returns the number of partial sums of a sum over channels, which are read together as one vector.

    A processor can't read elements together that it has just stored one at a time, or in shorter vectors: it waits
    until the stores are done. A loop over few channels stores one element at a time. A loop over 16 channels of 16-bit
    values stores 8 at a time, and one over 32 channels 16.
    """
    if channels < SHORTEST_VECTORS:
        return 1
    return 8 if channels < 32 else 16


def to_storage(value: str, dtype: str) -> str:
    """Returns an expression of a number, in the type with which C++ stores a float dtype."""
    return f"to_{dtype}(float({value}))" if dtype in ("bfloat16", "float16") else f"{STORAGE[dtype]}({value})"


class NestWriter:
    """Writes one loop nest after the other.

    Attributes:
        sums: The offset of each sum over all edges in the array ``sums``, by node index.
        length: The number of elements of the array ``sums``.
        lines: The lines so far.
    """

    def __init__(self, region: Region) -> None:
        self.region, self.nodes = region, region.nodes
        self.counted = {n.args[0] for n in self.nodes if n.op == "ties"}
        self.sums: dict[int, int] = {}
        self.length = 0
        for i, node in enumerate(self.nodes):
            if node.op == "outer":
                self.sums[i] = self.length
                self.length += size_of(node.shape) * self.region.features(i)
        self.lines: list[str] = []
        self.depth = 0
        # The state of the current nest:
        self.shape: Shape = (1, 1)
        self.flat = False
        self.named: dict[int, str] = {}
        self.chosen: dict[int, Node] = {}  # values that are a row of one of several inputs, with one of these inputs
        self.masked: dict[int, tuple[int, str]] = {}  # values that are another in some heads, else 0: that, and when
        self.outer: list[str] = []
        self.nests = 0
        self.inner: list[str] = []

    def _put(self, *lines: str) -> None:
        self.lines += [("  " * self.depth + line) if line and not line.startswith("#") else line for line in lines]

    def _open(self, line: str) -> None:
        self._put(line + " {")
        self.depth += 1

    def _close(self) -> None:
        self.depth -= 1
        self._put("}")

    def _declare(self, name: str, shape: Shape, value: str) -> None:
        """Declares an accumulator: an array, or a scalar for shape (1, 1)."""
        if shape == (1, 1):
            self._put(f"T {name} = {value};")
            return
        self._put(f"T {name}[{size_of(shape)}];")
        self._put(f"for (int i = 0; i < {size_of(shape)}; ++i) {name}[i] = {value};")

    def _nest(self, nest: Nest) -> None:
        self.shape, self.named, self.outer, self.inner = nest.shape, {}, [], []
        self.chosen, self.masked = {}, {}
        self.nests += 1
        heads, channels = nest.shape
        whole = {a for s in nest.steps for a in reads(self.region, s)} - self.region.only_columns
        touched = {self.nodes[i].shape for i in (*whole, *(s.node for s in nest.steps))}
        if any(self.nodes[s.node].op == "transposed" for s in nest.steps):
            touched.add((heads, 1))
        self.flat = heads > 1 and channels > 1 and touched <= {nest.shape, (1, 1)}
        self._arrays(nest)
        after: list[str] = []
        for step in nest.steps:
            self._step(step, nest, after)
        over_heads = any(s.kind is Kind.FEATURES and not self._by_channels(s.node) for s in nest.steps)
        self._emit_loops(after, ordered=channels == 1 and over_heads)
        for step in nest.steps:
            if self._packs(step):
                words = self.region.outputs[step.output].trailing[0]
                self._put(f"pack(flags{step.output}, {words}, o{step.output} + e * {words});")

    def _on_edges(self, step: Step) -> bool:
        return step.kind is Kind.STORE and self.nodes[step.node].space in self.region.edge_spaces

    def _packs(self, step: Step) -> bool:
        return step.kind is Kind.STORE and self.region.outputs[step.output].dtype == BITS

    def _emit_loops(self, after: list[str], ordered: bool) -> None:
        """Writes the loops around the collected lines. An `ordered` loop must not be vectorised."""
        heads, channels = self.shape
        loops = (
            [("i", heads * channels)] if self.flat else [(v, n) for v, n in (("h", heads), ("c", channels)) if n > 1]
        )
        if not loops:
            self._put(*self.outer, *self.inner, *after)
            return
        for name, length in loops[:-1]:
            self._open(f"for (int {name} = 0; {name} < {length}; ++{name})")
        self._put(*self.outer)
        name, length = loops[-1]
        if length >= SHORTEST_VECTORS and not ordered:
            self._put("#pragma omp simd")
        self._open(f"for (int {name} = 0; {name} < {length}; ++{name})")
        self._put(*self.inner)
        self._close()
        self._put(*after)
        for _ in loops[:-1]:
            self._close()

    def _arrays(self, nest: Nest) -> None:
        """Declares the arrays in which the nest keeps values for later nests."""
        for step in nest.steps:
            node = self.nodes[step.node]
            if step.kind is Kind.VALUE and step.node in nest.keeps:
                self._put(f"{self._kept_type(node)} kept{step.node}[{size_of(node.shape)}];")
            elif step.kind is Kind.FEATURES and (node.op.endswith("heads") or node.op == "transposed"):
                start = "T(-__builtin_inf())" if node.op in FEATURE_MAXIMA else "T(0)"
                self._declare(f"x{step.node}" if node.shape == (1, 1) else f"kept{step.node}", node.shape, start)
            elif step.kind is Kind.FEATURES and node.shape != (1, 1):
                self._put(f"T kept{step.node}[{size_of(node.shape)}];")
            elif self._packs(step):
                self._put(f"uint8_t flags{step.output}[{bits.words(node.shape) * bits.PER_WORD}] = {{}};")

    def _step(self, step: Step, nest: Nest, after: list[str]) -> None:
        i, node = step.node, self.nodes[step.node]
        here = self._index(iteration(self.region, step))
        if step.kind is Kind.VALUE:
            if not (self._choose_row(i) or self._mask(i)):
                self.inner.append(f"const {self._type(node)} x{i} = {self._expression(i)};")
                self.named[i] = f"x{i}"
            if i in nest.keeps:
                self.inner.append(f"kept{i}[{here}] = {self._ref(i)};")
        elif step.kind is Kind.FEATURES and node.op == "transposed":
            self._transposed(i, node, after)
        elif step.kind is Kind.FEATURES:
            self._over_features(i, node, after)
        elif step.kind is Kind.OUTER:
            value, size = self._ref(node.args[1]), size_of(node.shape)
            for k, feature in enumerate(self._columns(node.args[0])):
                self.inner.append(f"sums[{self.sums[i] + k * size} + {here}] += {feature} * {value};")
        elif step.kind is Kind.REDUCE:
            acc, value = self._element(f"acc{i}", node.shape), self._ref(node.args[0])
            if REDUCTIONS[node.op].adds:
                self.inner.append(f"{acc} += {value};")
            else:
                top = REDUCTIONS[node.op].cpp.format(acc, value)
                if i in self.counted:
                    ties = self._element(f"ties{i}", node.shape)
                    self.inner.append(f"const T top{i} = {top};")
                    self.inner.append(f"{ties} = ({acc} == top{i} ? {ties} : T(0)) + T({value} == top{i});")
                    top = f"top{i}"
                self.inner.append(f"{acc} = {top};")
        elif step.kind is Kind.SOFTMAX:
            self._softmax(i, node)
        else:
            self._store(step)

    def _over_features(self, i: int, node: Node, after: list[str]) -> None:
        if node.op == "sum_heads" and node.args[0] in self.masked:
            base, condition = self.masked[node.args[0]]
            self._add_row(f"kept{i}", base, condition, after)
            return
        value, sums = self._ref(node.args[0]), node.op in FEATURE_SUMS
        if node.op.endswith("heads"):
            target = f"x{i}" if node.shape == (1, 1) else f"kept{i}[c]"
            self.inner.append(f"{target} += {value};" if sums else f"{target} = op_max({target}, {value});")
            return
        channels = self.shape[1]
        self.outer.append(f"T part{i}[{channels}];")
        self.inner.append(f"part{i}[c] = {value};")
        target = f"const T x{i}" if node.shape == (1, 1) else f"kept{i}[h]"
        after.append(f"{target} = {f'total<{_lanes(channels)}>' if sums else 'largest'}(part{i}, {channels});")

    def _by_channels(self, i: int) -> bool:
        """Whether a sum or maximum is over the channels of one head. Else many iterations share its accumulators."""
        node = self.nodes[i]
        if node.op == "transposed":
            return self.nodes[node.args[1]].shape[1] > 1
        return node.op.endswith("channels")

    def _transposed(self, i: int, node: Node, after: list[str]) -> None:
        """Writes the dot products of a value with all rows of the weights."""
        first, weights = node.args
        size, (_, channels) = size_of(self.nodes[weights].shape), self.nodes[weights].shape
        value, index = self._ref(first), self._index(self.nodes[weights].shape)
        if self._by_channels(i):
            self.outer.append(f"T part{i}[{node.shape[1]}][{channels}];")
        for k in range(node.shape[1]):
            target = f"x{i}" if node.shape == (1, 1) else f"kept{i}[{k}]"
            product = f"{value} * {self._load(weights, f'{k * size} + {index}')}"
            if self._by_channels(i):
                self.inner.append(f"part{i}[{k}][c] = {product};")
                after.append(f"{target} += total<{_lanes(channels)}>(part{i}[{k}], {channels});")
            else:
                self.inner.append(f"{target} += {product};")

    def _columns(self, i: int) -> list[str]:
        """Returns an expression for each feature of an edge; inputs become constants of the current nest."""
        node, names = self.nodes[i], []
        for k in range(node.shape[1]):
            if is_direct(self.region, node):
                names.append(f"c{i}_{k}_{self.nests}")  # numbered: an earlier nest may be in the same C++ block
                line = f"const T {names[-1]} = {self._load(i, str(k))};"
                if line not in self.outer:
                    self.outer.append(line)
            else:
                names.append(f"x{i}" if node.shape == (1, 1) else f"kept{i}[{k}]")
        return names

    def _softmax(self, i: int, node: Node) -> None:
        """Writes how a softmax takes in one logit: into a buffer, or into a running maximum and a sum scaled by it."""
        logit = self._ref(node.args[0])
        top, total = self._element(f"max{i}", node.shape), self._element(f"sum{i}", node.shape)
        if is_buffered(node):
            self.inner.append(f"{self._buffer(i)} = {logit};")
            return
        lost = self._element(f"lost{i}", node.shape)
        self.inner.append(f"const T step{i} = {logit} == {top} ? T(1) : op_exp(-op_abs({logit} - {top}));")
        # Kahan summation subtracts a sum's rounding error from the next summand: https://doi.org/10.1145/363707.363723
        self.inner.append(f"const T kept_{i} = {logit} > {top} ? {total} * step{i} : {total};")
        self.inner.append(f"const T more{i} = {logit} > {top} ? T(1) - {lost} * step{i} : step{i} - {lost};")
        self.inner.append(f"{total} = kept_{i} + more{i};")
        self.inner.append(f"{lost} = ({total} - kept_{i}) - more{i};")
        self.inner.append(f"{top} = op_max({top}, {logit});")

    def _store(self, step: Step) -> None:
        node, out = self.nodes[step.node], self.region.outputs[step.output]
        if out.dtype == BITS:
            self.inner.append(f"flags{step.output}[{self._index(node.shape)}] = {self._ref(step.node)};")
            return
        name, where = self._target(step)
        size, index = size_of(node.shape), self._index(node.shape)
        at = where if size == 1 else f"{where} * {size} + {index}"
        value = self._ref(step.node)
        if out.dtype != BOOL:
            value = to_storage(value, out.dtype)
        elif not node.boolean:
            value = f"{value} != 0"
        self.inner.append(f"{name}[{at}] = {value};")

    def _target(self, step: Step) -> tuple[str, str]:
        """Returns the array that a store writes to, and the row."""
        return f"o{step.output}", "e" if self._on_edges(step) else "row"

    # Values.

    def _load(self, i: int, index: str) -> str:
        node = self.chosen.get(i, self.nodes[i])
        raw = f"p{i}[{index}]"
        if node.boolean:
            return f"{raw} != 0"
        if node.dtype in ("bfloat16", "float16"):
            return f"T(from_{node.dtype}({raw}))" if self.region.double else f"from_{node.dtype}({raw})"
        same = node.dtype in (self.region.compute, SEED)
        return raw if same else f"T({raw})"

    def _kept_type(self, node: Node) -> str:
        """Returns the type of the elements that a nest keeps: bools as wide as numbers, since vectors hold as many."""
        word = "uint64_t" if self.region.double else "uint32_t"
        return word if self._type(node) == "bool" else self._type(node)

    def _type(self, node: Node) -> str:
        return {BOOL: "bool", BITS: "bool", SEED: "uint64_t"}.get(node.dtype, "T")

    def _index(self, shape: Shape) -> str:
        """Returns the index into the array of a value of this shape, inside the current nest."""
        if self.flat and shape == self.shape:
            return "i"
        if shape[0] > 1:
            return f"h * {shape[1]} + c" if shape[1] > 1 else "h"
        return "c" if shape[1] > 1 else "0"

    def _element(self, name: str, shape: Shape) -> str:
        return name if shape == (1, 1) else f"{name}[{self._index(shape)}]"

    def _buffer(self, i: int) -> str:
        shape = self.nodes[i].shape
        first = "" if shape == (1, 1) else f"{self._index(shape)} * padded + "
        return f"alpha{i}[{first}p - begin]"

    def _ref(self, i: int) -> str:
        """Returns an expression for the value of a node, inside the current nest."""
        node = self.nodes[i]
        if node.op == "const":
            return _literal(node.number)
        if i in self.named:
            return self.named[i]
        if node.op in REDUCTIONS:
            return self._element(f"acc{i}", node.shape)
        if node.op == "ties":
            return self._element(f"ties{node.args[0]}", node.shape)
        if node.op in ("softmax_max", "softmax_sum"):
            return self._element(f"{node.op[-3:]}{node.args[0]}", node.shape)
        if i in self.chosen or i in self.masked:
            text = self._load(i, "c") if i in self.chosen else self._expression(i)
            self.inner.append(f"const T x{i} = {text};")
            self.named[i] = f"x{i}"
            return f"x{i}"
        if is_direct(self.region, node):
            by_head = node.shape[1] == 1 and self.shape[0] > 1 and self.shape[1] > 1
            line = f"const {self._type(node)} x{i} = {self._load(i, self._index(node.shape))};"
            (self.outer if by_head else self.inner).append(line)
            self.named[i] = f"x{i}"
            return f"x{i}"
        return f"x{i}" if node.shape == (1, 1) else f"kept{i}[{self._index(node.shape)}]"

    def _expression(self, i: int) -> str:
        """Returns the expression that computes a node from its arguments."""
        node = self.nodes[i]
        if node.op == "input":
            return self._load(i, self._index(node.shape))
        if node.op == "softmax":
            if is_buffered(node):
                return self._buffer(i)
            top, total = self._element(f"max{i}", node.shape), self._element(f"sum{i}", node.shape)
            return f"op_exp({self._ref(node.args[0])} - {top}) / {total}"
        if node.op == "dropout":
            return self._dropout(node)
        if node.op == "linear":
            index, size = self._index(node.shape), size_of(node.shape)
            rows = [self._load(node.args[1], f"{k * size} + {index}") for k in range(self.region.features(i))]
            return " + ".join(f"{c} * {w}" for c, w in zip(self._columns(node.args[0]), rows, strict=True))
        if node.op not in POINTWISE:
            raise UnsupportedRegion(f"C++ kernel: found operation {node.op!r}, which has no C++ form")
        if node.op == "where" and not node.boolean and self._is_uniform(node.args[0]):
            return f"pick({', '.join(self._ref(a) for a in node.args)})"
        text = POINTWISE[node.op].cpp.format(*(self._ref(a) for a in node.args))
        # Plain `&` and `|` of bools vectorise. The prelude has an op_ function for each std:: function.
        return text.replace("std::", "op_").replace("&&", "&").replace("||", "|")

    def _choose_row(self, i: int) -> bool:
        """Writes the choice, if a value is a row of one of several inputs in each head; returns whether it is.

        One condition holds for all channels of a head, as where an index picks the filter of each component of a
        vector. Then no channel of the other row is read. Readers of the value load its channels.
        """
        node = self.nodes[i]
        if not self._is_by_head(node):
            return False
        condition, first, second = node.args
        rows = [self._row_of(a) for a in (first, second)]
        sources = [self.chosen.get(a, self.nodes[a]) for a in (first, second)]
        if "" in rows or sources[0].dtype != sources[1].dtype:
            return False
        self.chosen[i] = sources[0]
        kind = STORAGE[sources[0].dtype]
        self.outer.append(f"const {kind}* const p{i} = {self._ref(condition)} ? {rows[0]} : {rows[1]};")
        return True

    def _row_of(self, i: int) -> str:
        """Returns the address of a value's channels in the current head; empty if no input holds them."""
        node = self.nodes[i]
        if i in self.chosen:
            return f"p{i}"
        if node.boolean or not is_direct(self.region, node) or node.shape[1] != self.shape[1]:
            return ""
        return f"p{i} + h * {node.shape[1]}" if node.shape[0] > 1 else f"p{i}"

    def _mask(self, i: int) -> bool:
        """Notes a value that is another one, or 0, by the head; returns whether it is one. Its readers compute it."""
        node = self.nodes[i]
        if not self._is_by_head(node):
            return False
        condition, first, second = node.args
        for value, other, wanted in ((first, second, ""), (second, first, "!")):
            is_zero = self.nodes[other].op == "const" and self.nodes[other].number == 0
            if is_zero and self.nodes[value].shape == self.shape:
                base, outer = self.masked.get(value, (value, ""))
                own = f"{wanted}{self._ref(condition)}"
                self.masked[i] = base, f"{outer} && {own}" if outer else own
                return True
        return False

    def _add_row(self, total: str, i: int, condition: str, after: list[str]) -> None:
        """Adds a value to a sum over heads in those heads where a condition holds."""
        keep = f"row{i}[c] = {self._ref(i)};"
        if keep not in self.inner:
            self.outer.append(f"T row{i}[{self.shape[1]}];")
            self.inner.append(keep)
        after.append(f"if ({condition}) for (int c = 0; c < {self.shape[1]}; ++c) {total}[c] += row{i}[c];")

    def _is_by_head(self, node: Node) -> bool:
        """Whether a number is one of two others, and which of them depends only on the head, in the current nest."""
        chooses = node.op == "where" and not node.boolean
        return chooses and 1 not in self.shape and not self.flat and self._is_uniform(node.args[0])

    def _is_uniform(self, i: int) -> bool:
        """Whether a value is the same for all steps of the innermost loop of the current nest."""
        shape = self.nodes[i].shape
        return shape != self.shape and (shape[1] == 1 if self.shape[1] > 1 else shape[0] == 1)

    def _dropout(self, node: Node) -> str:
        p, seed, feature = node.number, self._ref(node.args[0]), self._index(node.shape)
        return f"dropout({seed}, e, {feature}, {philox.threshold(p)}u, {_literal(philox.scale(p))})"


def _literal(value: float) -> str:
    if math.isnan(value):
        return 'T(__builtin_nan(""))'
    if math.isinf(value):
        return "T(__builtin_inf())" if value > 0 else "T(-__builtin_inf())"
    return f"T({value!r})"
