"""Writes the products of matrices of a tiled region: by torch's library, or in vectors of the kernel's own.

The library is as fast as a processor allows, except where it uses half of the processor's vectors: see
:attr:`gnncompile.device.Device.multiplies_in_own_vectors`.
"""

from __future__ import annotations

from math import prod

from gnncompile import tuning
from gnncompile.codegen.cpp.nest import size_of
from gnncompile.codegen.cpp.phases import Phases, Product
from gnncompile.ir.region import Region

ALIGNED = """\
// The first address of a cache line from `data` on.
static inline T* aligned(T* data) {
  constexpr uintptr_t LINE = 64 / sizeof(T);
  return data + -(reinterpret_cast<uintptr_t>(data) / sizeof(T)) % LINE;
}
"""

LIBRARY = """\
// Torch's functions for products of matrices: torch/csrc/inductor/aoti_torch/c/shim.h.
typedef void* Tensor;
struct Products {
  int32_t (*wrap)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Tensor*);
  int32_t (*drop)(Tensor);
  int32_t (*mm)(Tensor, Tensor, Tensor);
  int32_t (*addmm)(Tensor, Tensor, Tensor, Tensor, double, double);
  int64_t type;
};
struct Matrix {
  const Products& with;
  Tensor tensor;
  bool failed;
  Matrix(const Products& with, T* data, int64_t rows, int64_t columns, bool transposed) : with(with) {
    const int64_t sizes[2] = {rows, columns};
    const int64_t strides[2] = {transposed ? 1 : columns, transposed ? rows : 1};
    failed = with.wrap(data, 2, sizes, strides, 0, int32_t(with.type), 0, -1, &tensor) != 0;
  }
  ~Matrix() { if (!failed) with.drop(tensor); }
};
// result = first @ other, or the sum of both for `adds`; the matrices are [rows, inner] and [inner, columns].
static bool multiply(const Products& with, T* result, T* first, T* other, int64_t rows, int64_t inner, int64_t columns,
                     bool first_transposed, bool other_transposed, bool adds) {
  if (!rows || (adds && !inner)) return true;
  Matrix to(with, result, rows, columns, false), a(with, first, rows, inner, first_transposed),
      b(with, other, inner, columns, other_transposed);
  if (to.failed || a.failed || b.failed) return false;
  return (adds ? with.addmm(to.tensor, to.tensor, a.tensor, b.tensor, 1, 1)
               : with.mm(to.tensor, a.tensor, b.tensor)) == 0;
}
"""

_TYPES = """\
// Products of matrices. The sums of a block of rows and columns stay in registers of 64 bytes.
constexpr int64_t LANES = 64 / sizeof(T), STRIP = 4 * LANES;
typedef T Vector __attribute__((vector_size(64)));
typedef T Loose __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
"""

_ADD = """\
static inline __attribute__((always_inline)) Vector add_product(Vector sum, T one, Vector other) {
  return sum + one * other;
}
"""

_ADD_PAIRS = """\
// Both products of a pair are added in float32. The compiler's builtins need a large header, and differ.
static inline __attribute__((always_inline)) Vector add_product(Vector sum, T one, Vector other) {
  Vector ones;
  __asm__("vbroadcastss %1, %0" : "=v"(ones) : "v"(one));
  __asm__("vdpbf16ps %1, %2, %0" : "+v"(sum) : "v"(ones), "v"(other));
  return sum;
}
// The values of two vectors, rounded to bfloat16: first those of `low`.
static inline __attribute__((always_inline)) Vector rounded(Vector low, Vector high) {
  Vector both;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low), "v"(high));
  return both;
}
static inline T pair(float low, float high) {
  const uint32_t bits = uint32_t(to_bfloat16(low)) | uint32_t(to_bfloat16(high)) << 16;
  return as_float(bits);
}
// Pairs of neighbours in a row: to[i][k] holds from[i][2 k] and from[i][2 k + 1].
static inline void pair_columns(T* to, const T* from, int64_t rows, int64_t width) {
  const int64_t half = (width + 1) / 2;
  for (int64_t i = 0; i < rows; ++i, from += width, to += half) {
    int64_t k = 0;
    for (; 2 * (k + LANES) <= width; k += LANES)
      *reinterpret_cast<Loose*>(to + k) = rounded(*reinterpret_cast<const Loose*>(from + 2 * k),
                                                  *reinterpret_cast<const Loose*>(from + 2 * k + LANES));
    for (; k < half; ++k) to[k] = pair(from[2 * k], 2 * k + 1 < width ? from[2 * k + 1] : 0);
  }
}
#ifdef __clang__
#define MIX(values, ...) __builtin_shufflevector(values, values, __VA_ARGS__)
#else  // GCC has the other builtin from release 12 on
#define MIX(values, ...) __builtin_shuffle(values, Halves{__VA_ARGS__})
#endif
// Pairs of neighbours in a column: to[k][j] holds from[2 k][j] and from[2 k + 1][j].
static inline void pair_rows(T* to, const T* from, int64_t rows, int64_t width) {
  typedef uint16_t Halves __attribute__((vector_size(64)));
  for (int64_t k = 0; k < rows; k += 2, from += 2 * width, to += width) {
    int64_t j = 0;
    for (; k + 1 < rows && j + LANES <= width; j += LANES) {
      const Halves both = (Halves)rounded(*reinterpret_cast<const Loose*>(from + j),
                                          *reinterpret_cast<const Loose*>(from + width + j));
      *reinterpret_cast<Loose*>(to + j) =
          (Vector)MIX(both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12,
                      28, 13, 29, 14, 30, 15, 31);
    }
    for (; j < width; ++j) to[j] = pair(from[j], k + 1 < rows ? from[width + j] : 0);
  }
}
"""

_BLOCKS = """\
// Writes the first lanes of a vector. This is a function, since a loop in `block` would keep its sums in memory.
static __attribute__((noinline)) void write_lanes(T* to, Vector part, int64_t lanes, bool adds) {
  for (int64_t lane = 0; lane < lanes; ++lane) to[lane] = adds ? to[lane] + part[lane] : part[lane];
}
// to[i][j] = sum of a[i * row + k * step] * b[k * next + j] over k < inner, for ROWS rows and columns j < left.
template <int ROWS, int WIDE, bool ADDS>
static inline __attribute__((always_inline)) void block(T* to, int64_t columns, int64_t left, const T* a, int64_t row,
                                                        int64_t step, const T* b, int64_t next, int64_t inner) {
  Vector sums[ROWS][WIDE] = {};
#pragma GCC unroll 1
  for (int64_t k = 0; k < inner; ++k) {
    Vector other[WIDE];
#pragma GCC unroll 4
    for (int j = 0; j < WIDE; ++j) other[j] = *reinterpret_cast<const Loose*>(b + k * next + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const T one = a[i * row + k * step];
#pragma GCC unroll 4
      for (int j = 0; j < WIDE; ++j) sums[i][j] = add_product(sums[i][j], one, other[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < WIDE; ++j) {
      T* const at = to + i * columns + j * LANES;
      if ((j + 1) * LANES <= left) {
        Loose& whole = *reinterpret_cast<Loose*>(at);
        whole = ADDS ? whole + sums[i][j] : sums[i][j];
      } else {
        write_lanes(at, sums[i][j], left - j * LANES, ADDS);
      }
    }
  }
}
// A strip of columns, which takes WIDE vectors: its part of `b` stays in the first-level cache.
template <int WIDE, bool ADDS>
static __attribute__((noinline)) void strip(T* to, int64_t columns, int64_t left, const T* a, int64_t row, int64_t step,
                                            const T* b, int64_t next, int64_t rows, int64_t inner) {
  constexpr int ROWS = WIDE == 4 ? 6 : WIDE == 3 ? 8 : WIDE == 2 ? 12 : 14;
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS)
    block<ROWS, WIDE, ADDS>(to + i * columns, columns, left, a + i * row, row, step, b, next, inner);
  for (; i + 2 <= rows; i += 2)
    block<2, WIDE, ADDS>(to + i * columns, columns, left, a + i * row, row, step, b, next, inner);
  if (i < rows) block<1, WIDE, ADDS>(to + i * columns, columns, left, a + i * row, row, step, b, next, inner);
}
// to = a @ b, or the sum of both for ADDS. A strip of `b` starts `far` after the one before it. Up to LANES - 1
// elements after a row of `b` are read.
template <int COLUMNS, bool ADDS>
static inline void multiply(T* to, const T* a, int64_t row, int64_t step, const T* b, int64_t next, int64_t far,
                            int64_t rows, int64_t inner) {
  constexpr int64_t FULL = COLUMNS / STRIP * STRIP, REST = (COLUMNS - FULL + LANES - 1) / LANES;
  for (int64_t j = 0; j < FULL; j += STRIP)
    strip<4, ADDS>(to + j, COLUMNS, STRIP, a, row, step, b + j / STRIP * far, next, rows, inner);
  if constexpr (REST > 0)
    strip<REST, ADDS>(to + FULL, COLUMNS, COLUMNS - FULL, a, row, step, b + FULL / STRIP * far, next, rows, inner);
}
// The number of elements of a matrix as strips.
static constexpr int64_t in_strips(int64_t inner, int64_t columns) {
  return (columns + STRIP - 1) / STRIP * STRIP * inner;
}
"""

VECTORS = _TYPES + _ADD + _BLOCKS
"""The functions that multiply matrices of type ``T``."""

PAIRS = _TYPES + _ADD_PAIRS + _BLOCKS
"""The functions that multiply matrices of pairs. A pair is two bfloat16 values in the bits of a float32."""

ALIGNMENT = 16
"""The number of float32 elements of a cache line."""


def whole_vectors(elements: int) -> int:
    """Returns a number of elements, rounded up to whole cache lines."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


class ProductWriter:
    """Writes the products of one region, and the matrices that hold its weights.

    Args:
        region: The region.
        made: Its phases.
        sums: For each product over all edges, the first element of its result among all sums.
    """

    helpers = LIBRARY
    """The functions that the lines call."""

    parameter, argument = ", const Products& with", ", with"
    """The last parameter of the walk, and its argument."""

    def __init__(self, region: Region, made: Phases, sums: dict[int, int]) -> None:
        self.region, self.made, self.sums = region, made, sums
        self.dtypes = {int(n.value or 0): n.dtype for n in region.inputs}
        self.products = [p for phase in made.phases for p in phase.products if p.op != "outer"]

    def names(self) -> list[str]:
        """Returns the names of the matrices of weights."""
        return [f"w{at}" for at in self._weights()]

    def opening(self, table: int) -> list[str]:
        """Returns the line that finds torch's products, in the argument at position `table`."""
        return [f"const Products& with = *reinterpret_cast<const Products*>(arguments[{table}]);"]

    def room(self) -> str:
        """Returns the number of elements that copies of weights take."""
        copied = sum(self._elements(p) for at, p in self._weights().items() if self._is_copied(at))
        return str(copied)

    def copies(self) -> dict[str, int]:
        """Returns the names of further buffers of a tile, and their numbers of elements."""
        return {}

    def prepare(self) -> list[str]:
        """Returns the lines that copy weights to `free_space`."""
        lines = []
        for at, product in self._weights().items():
            if not self._is_copied(at):
                lines.append(f"T* const w{at} = const_cast<T*>(t{at});")
                continue
            size = self._elements(product)
            lines += [f"T* const w{at} = free_space;", f"free_space += {size};"]
            lines.append(f"for (int64_t i = 0; i < {size}; ++i) w{at}[i] = {self._load(at, 'i')};")
        return lines

    def line(self, product: Product) -> str:
        """Returns the line that computes a product of a tile."""
        width, size = self._widths(product)
        if product.op == "outer":
            given = f"sums + {self.sums[product.node]}, b{product.first}, b{product.other}, {width}, count, {size}"
            call = f"multiply(with, {given}, true, false, true)"
        else:
            turned = "true" if product.op == "transposed" else "false"
            given = f"b{product.result}, b{product.first}, w{product.other}, count, {width}, {size}"
            call = f"multiply(with, {given}, false, {turned}, false)"
        return f"if (!{call}) return false;"

    def _widths(self, product: Product) -> tuple[int, int]:
        """Returns the elements per edge of a product's first argument, and the columns of its result."""
        return self.made.buffers[product.first].width, size_of(self.region.nodes[product.node].shape)

    def _weights(self) -> dict[int, Product]:
        return {p.other: p for p in self.products}

    def _is_copied(self, at: int) -> bool:
        return self.dtypes[at] != self.region.compute

    def _elements(self, product: Product) -> int:
        node = self.region.nodes[product.node]
        return prod(self.region.nodes[node.args[1]].shape) * self.region.features(product.node)

    def _load(self, at: int, index: str) -> str:
        load = {"bfloat16": "from_bfloat16(", "float16": "from_float16("}.get(self.dtypes[at], "(")
        return f"T({load}t{at}[{index}]))"


class VectorWriter(ProductWriter):
    """Writes products in vectors of the kernel's own. Weights are copied in strips of columns, padded with zeros."""

    helpers = VECTORS
    parameter = argument = ""

    def opening(self, table: int) -> list[str]:
        """Returns no line: torch's products are not called."""
        return []

    def names(self) -> list[str]:
        """Returns the names of the matrices of weights."""
        return list(self._matrices())

    def room(self) -> str:
        """Returns the number of elements that copies of weights take."""
        sizes = [f"in_strips({width}, {size})" for width, size in map(self._widths, self._matrices().values())]
        return " + ".join(sizes) or "0"

    def prepare(self) -> list[str]:
        """Returns the lines that copy weights to `free_space`."""
        lines = []
        for name, product in self._matrices().items():
            width, size = self._widths(product)
            index = f"(j + l) * {width} + k" if product.op == "transposed" else f"k * {size} + j + l"
            lines += [f"T* {name} = free_space;", f"free_space += in_strips({width}, {size});"]
            lines.append(f"for (int64_t j = 0; j < {size}; j += STRIP)")
            lines.append(f"  for (int64_t k = 0; k < {width}; ++k, {name} += STRIP)")
            lines.append("    for (int64_t l = 0; l < STRIP; ++l)")
            lines.append(f"      {name}[l] = j + l < {size} ? {self._load(product.other, index)} : T(0);")
            lines.append(f"{name} -= in_strips({width}, {size});")
        return lines

    def line(self, product: Product) -> str:
        """Returns the line that computes a product of a tile."""
        width, size = self._widths(product)
        if product.op == "outer" and size == 1:
            result = f"sums + {self.sums[product.node]}"
            given = f"{result}, b{product.other}, 1, 1, b{product.first}, {width}, STRIP, 1, count"
            return f"multiply<{width}, true>({given});"
        if product.op == "outer":
            result = f"sums + {self.sums[product.node]}"
            given = f"{result}, b{product.first}, 1, {width}, b{product.other}, {size}, STRIP, {width}, count"
            return f"multiply<{size}, true>({given});"
        matrix = self._name(product)
        given = f"b{product.result}, b{product.first}, {width}, 1, {matrix}, STRIP, STRIP * {width}, count, {width}"
        return f"multiply<{size}, false>({given});"

    def _matrices(self) -> dict[str, Product]:
        return {self._name(p): p for p in self.products}

    @staticmethod
    def _name(product: Product) -> str:
        return f"{'v' if product.op == 'transposed' else 'w'}{product.other}"


class PairWriter(VectorWriter):
    """Writes products of values that are rounded to bfloat16, in vectors of the kernel's own. Sums are in float32.

    Factors are copied as pairs. The pairs of a product with weights are neighbours in a row, and those of a sum over
    edges belong to neighbouring edges.
    """

    helpers = PAIRS

    def __init__(self, region: Region, made: Phases, sums: dict[int, int]) -> None:
        super().__init__(region, made, sums)
        self.makers: dict[str, Product] = {}
        for product in (p for phase in made.phases for p in phase.products):
            for name in self._factors(product):
                self.makers.setdefault(name, product)

    def copies(self) -> dict[str, int]:
        """Returns the names of the pairs of a tile, and their numbers of elements."""
        tile, widths = tuning.LOOPS.tile_edges, {at: buffer.width for at, buffer in enumerate(self.made.buffers)}
        return {
            name: whole_vectors(tile * _half(widths[at]) if kind == "r" else _half(tile) * widths[at])
            for name, (kind, at) in ((name, (name[0], int(name[1:]))) for name in self.makers)
        }

    def room(self) -> str:
        """Returns the number of elements that copies of weights take."""
        sizes = [f"in_strips({_half(width)}, {size})" for width, size in map(self._widths, self._matrices().values())]
        return " + ".join(sizes) or "0"

    def prepare(self) -> list[str]:
        """Returns the lines that copy weights to `free_space`, as pairs."""
        lines = []
        for name, product in self._matrices().items():
            width, size = self._widths(product)
            step, next_column = (1, width) if product.op == "transposed" else (size, 1)
            load, half = self._load, _half(width)
            odd = f"2 * k + 1 < {width} ? {load(product.other, f'at + {step}')} : 0"
            lines += [f"T* {name} = free_space;", f"free_space += in_strips({half}, {size});"]
            lines.append(f"for (int64_t j = 0; j < {size}; j += STRIP)")
            lines.append(f"  for (int64_t k = 0; k < {half}; ++k, {name} += STRIP)")
            lines.append(f"    for (int64_t l = 0; l < STRIP && j + l < {size}; ++l) {{")
            lines.append(f"      const int64_t at = 2 * k * {step} + (j + l) * {next_column};")
            lines.append(f"      {name}[l] = pair({load(product.other, 'at')}, {odd});")
            lines += ["    }", f"{name} -= in_strips({half}, {size});"]
        return lines

    def line(self, product: Product) -> str:
        """Returns the lines that compute a product of a tile."""
        width, size = self._widths(product)
        lines = [self._copy(name) for name, maker in self.makers.items() if maker is product]
        if product.op != "outer":
            matrix, half = self._name(product), _half(width)
            given = f"b{product.result}, r{product.first}, {half}, 1, {matrix}, STRIP, STRIP * {half}, count, {half}"
            return " ".join([*lines, f"multiply<{size}, false>({given});"])
        result, edges = f"sums + {self.sums[product.node]}", "(count + 1) / 2"
        if size == 1:
            given = f"{result}, q{product.other}, 1, 1, q{product.first}, {width}, STRIP, 1, {edges}"
            return " ".join([*lines, f"multiply<{width}, true>({given});"])
        given = f"{result}, q{product.first}, 1, {width}, q{product.other}, {size}, STRIP, {width}, {edges}"
        return " ".join([*lines, f"multiply<{size}, true>({given});"])

    def _copy(self, name: str) -> str:
        """Returns the line that copies a buffer of a tile as pairs."""
        at = int(name[1:])
        function = "pair_columns" if name[0] == "r" else "pair_rows"
        return f"{function}({name}, b{at}, count, {self.made.buffers[at].width});"

    @staticmethod
    def _factors(product: Product) -> tuple[str, ...]:
        """Returns the names of the pairs that a product reads: ``r2`` in rows of buffer 2, ``q2`` in its columns."""
        both = f"q{product.first}", f"q{product.other}"
        return both if product.op == "outer" else (f"r{product.first}",)


def _half(length: int) -> int:
    """Returns the number of pairs of elements."""
    return (length + 1) // 2
