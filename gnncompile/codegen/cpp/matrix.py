"""Products of float32 matrices with many rows, in vectors of our own: see :mod:`gnncompile.codegen.cpp.products`.

The kernels are C++ that is compiled once per machine. A result does not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.cpp.arguments import address, pack
from gnncompile.codegen.cpp.compiler import load
from gnncompile.codegen.cpp.products import ALIGNED, VECTORS
from gnncompile.device import device_of, least_product_in_vectors
from gnncompile.exc import KernelMemoryError, UnsupportedRegion

SOURCE = f"""\
#include <cstdint>

using T = float;

{ALIGNED}
{VECTORS}
// to (+)= a @ b for a strip of at most STRIP columns. Rows of `a` are `row` apart, columns are `step` apart.
template <bool ADDS>
static void any_strip(T* to, int64_t columns, int64_t left, const T* a, int64_t row, int64_t step, const T* b,
                      int64_t next, int64_t rows, int64_t inner) {{
  if (left > 3 * LANES) strip<4, ADDS>(to, columns, left, a, row, step, b, next, rows, inner);
  else if (left > 2 * LANES) strip<3, ADDS>(to, columns, left, a, row, step, b, next, rows, inner);
  else if (left > LANES) strip<2, ADDS>(to, columns, left, a, row, step, b, next, rows, inner);
  else strip<1, ADDS>(to, columns, left, a, row, step, b, next, rows, inner);
}}

// Copies columns of a matrix with any strides to rows of STRIP elements, padded with zeros.
static void copy_strip(T* to, const T* from, int64_t rows, int64_t left, int64_t row, int64_t column) {{
  for (int64_t k = 0; column == 1 && k < rows; ++k)
    for (int64_t j = 0; j < STRIP; ++j) to[k * STRIP + j] = j < left ? from[k * row + j] : T(0);
  // In a transpose, neighbours in a column are neighbours in memory: LANES rows at a time read whole cache lines.
  for (int64_t first = 0; column != 1 && first < rows; first += LANES) {{
    const int64_t last = first + LANES < rows ? first + LANES : rows;
    for (int64_t j = 0; j < STRIP; ++j)
      for (int64_t k = first; k < last; ++k) to[k * STRIP + j] = j < left ? from[k * row + j * column] : T(0);
  }}
}}

// Arguments: rows, inner, columns, threads, the strides of right, whether it adds to out, whether added has one row,
// whether a ReLU follows; left, right, added, gate, out.
extern "C" int by_rows(const int64_t* g) {{
  const int64_t rows = g[0], inner = g[1], columns = g[2], threads = g[3], one = g[7], relu = g[8];
  const T* const left = reinterpret_cast<const T*>(g[9]);
  const T* const right = reinterpret_cast<const T*>(g[10]);
  const T* const added = reinterpret_cast<const T*>(g[11]);
  const T* const gate = reinterpret_cast<const T*>(g[12]);
  T* const out = reinterpret_cast<T*>(g[13]);
  if (!rows) return 0;
  T* const space = static_cast<T*>(__builtin_malloc((in_strips(inner, columns) + 2 * LANES) * sizeof(T)));
  if (!space) return 1;
  T* const strips = aligned(space);
  const int64_t copying = inner * columns > {tuning.LOOPS.serial_work} ? threads : 1;
#pragma omp parallel for schedule(static) num_threads(copying) if (copying > 1)
  for (int64_t j = 0; j < columns; j += STRIP)
    copy_strip(strips + j * inner, right + j * g[5], inner, columns - j, g[4], g[5]);
  // The rows of a chunk stay in a core's second-level cache.
  const int64_t depth = inner ? inner : 1, wanted = {tuning.LOOPS.product_elements} / depth / 24 * 24 + 24;
  const int64_t even = (rows + threads - 1) / threads;
  const int64_t chunk = wanted < even ? wanted : (even + 23) / 24 * 24, chunks = (rows + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < chunks; ++t) {{
    const int64_t first = t * chunk, count = first + chunk < rows ? chunk : rows - first;
    const T* const a = left + first * inner;
    T* const to = out + first * columns;
    for (int64_t j = 0; j < columns; j += STRIP) {{
      if (g[6]) any_strip<true>(to + j, columns, columns - j, a, inner, 1, strips + j * inner, STRIP, count, inner);
      else any_strip<false>(to + j, columns, columns - j, a, inner, 1, strips + j * inner, STRIP, count, inner);
    }}
    for (int64_t i = 0; i < count && (added || relu || gate); ++i) {{
      T* const row = to + i * columns;
      if (added) {{
        const T* const more = added + (one ? 0 : (first + i) * columns);
        for (int64_t j = 0; j < columns; ++j) row[j] += more[j];
      }}
      for (int64_t j = 0; relu && j < columns; ++j) row[j] = row[j] < 0 ? T(0) : row[j];
      const T* const open = gate + (first + i) * columns;
      for (int64_t j = 0; gate && j < columns; ++j) row[j] = open[j] <= 0 ? T(0) : row[j];
    }}
  }}
  __builtin_free(space);
  return 0;
}}

// Arguments: rows, depth, columns, threads, left, right, out, sums. The rows of a step stay in the first-level cache.
// Vectors take the wider matrix, so partial sums may be those of the transpose: [height, width].
extern "C" int over_rows(const int64_t* g) {{
  constexpr int64_t STEP = {tuning.LOOPS.tile_edges}, WIDEST = {tuning.LOOPS.widest_product};
  constexpr int64_t ROOM = STEP * STRIP < WIDEST ? WIDEST : STEP * STRIP;
  const int64_t rows = g[0], depth = g[1], columns = g[2], threads = g[3];
  const T* const left = reinterpret_cast<const T*>(g[4]);
  const T* const right = reinterpret_cast<const T*>(g[5]);
  T* const out = reinterpret_cast<T*>(g[6]);
  T* const totals = reinterpret_cast<T*>(g[7]);
  const bool turned = depth > columns;
  const int64_t height = turned ? columns : depth, width = turned ? depth : columns;
  const int64_t rest = width % LANES ? width % STRIP : 0;
  const int64_t parts = 1 + rows / {tuning.LOOPS.rows_of_share};
  const int64_t shares = parts < {tuning.LOOPS.product_shares} ? parts : {tuning.LOOPS.product_shares};
  const int64_t size = (depth * (columns + 1) + LANES - 1) / LANES * LANES + ROOM;
  T* const space = static_cast<T*>(__builtin_calloc(shares * size + 2 * LANES, sizeof(T)));
  if (!space) return 1;
  T* const sums = aligned(space);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < shares; ++t) {{
    T* const padded = sums + t * size;
    T* const part = padded + ROOM;
    const int64_t last = rows * (t + 1) / shares;
    for (int64_t first = rows * t / shares; first < last; first += STEP) {{
      const int64_t count = first + STEP < last ? STEP : last - first;
      const T* const a = (turned ? right : left) + first * height;
      const T* const b = (turned ? left : right) + first * width;
      for (int64_t j = 0; j < width - rest; j += STRIP)
        any_strip<true>(part + j, width, width - rest - j, a, 1, height, b + j, width, height, count);
      if (rest) {{
        copy_strip(padded, b + width - rest, count, rest, width, 1);
        any_strip<true>(part + width - rest, width, rest, a, 1, height, padded, STRIP, height, count);
      }}
      if (!totals) continue;
      const T* const added = left + first * depth;
      for (int64_t k = 0; k < depth; ++k) padded[k] = T(0);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t k = 0; k < depth; ++k) padded[k] += added[i * depth + k];  // the sums of a step
      for (int64_t k = 0; k < depth; ++k) part[depth * columns + k] += padded[k];
    }}
  }}
  T* const part = sums + ROOM;
  for (int64_t t = 1; t < shares; ++t)
    for (int64_t i = 0; i < depth * (columns + 1); ++i) part[i] += part[t * size + i];
  for (int64_t i = 0; i < height; ++i)
    for (int64_t j = 0; j < width; ++j) out[turned ? j * columns + i : i * columns + j] = part[i * width + j];
  for (int64_t i = 0; totals && i < depth; ++i) totals[i] = part[depth * columns + i];
  __builtin_free(space);
  return 0;
}}
"""


def pays(left: Tensor, columns: int) -> bool:
    """Whether our product of a matrix with one of `columns` columns is faster than the library's.

    Args:
        left: `left` of :func:`by_rows` or of :func:`over_rows`, ``[rows, depth]``.
        columns: The number of columns of the right matrix.
    """
    if left.is_meta or left.dtype is not torch.float32:
        return False
    (rows, depth), loops = left.shape, tuning.LOOPS  # sizes tell in no time that a matrix of a small graph is small
    if max(depth, columns) > loops.widest_product or rows * depth * columns < least_product_in_vectors():
        return False
    if rows < loops.least_rows:  # by_rows copies the weight in each call
        return False
    return device_of(left.device).multiplies_in_own_vectors and can_compile()


def by_rows(left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor) -> None:
    """Writes ``left @ right + added`` to `out`: see :func:`gnncompile.ops.gemm.write_product`."""
    adds = added is not None and added.data_ptr() == out.data_ptr()
    more = None if adds else added
    flags = adds, more is not None and more.dim() == 1, relu
    given = (*left.shape, right.size(1), torch.get_num_threads(), *right.stride(), *flags)
    _check(_library().by_rows(pack(*given, *map(address, (left, right, more, gate, out)))))


def over_rows(left: Tensor, right: Tensor, out: Tensor, sums: Tensor | None) -> None:
    """Writes ``left.T @ right`` to `out`: see :func:`gnncompile.ops.gemm.write_product_over_rows`."""
    given = (*left.shape, right.size(1), torch.get_num_threads())
    _check(_library().over_rows(pack(*given, *map(address, (left, right, out, sums)))))


def _check(status: int) -> None:
    if status:
        raise KernelMemoryError("C++ kernel: no memory for a product of matrices; use fewer rows or channels")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load(SOURCE, contract=True)
    for entry in (library.by_rows, library.over_rows):
        entry.argtypes, entry.restype = (ctypes.c_char_p,), ctypes.c_int
    return library


@lru_cache(maxsize=1)
def can_compile() -> bool:
    """Whether the kernels can be compiled here. Compiles them."""
    try:
        _library()
    except UnsupportedRegion:
        return False
    return True
