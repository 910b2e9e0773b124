"""The C++ code of layouts on a CPU: ``gnncompile::csr``, ``csr_with_loops`` and ``inverse_degree``.

The first two are counting sorts, which keep the order of the edges of a row. All give the same results as
:mod:`gnncompile.layout.csr`.
"""

from __future__ import annotations

CSR = r"""
#include <cstdint>
#include <cstdlib>

// arguments: edges, rows, columns, wrap rows, wrap columns, whether index and other are int64, index, other, alive,
// rowptr, col, edge, found. Returns 0; 1: no memory; 2: an edge is out of range, and found holds the edge and its ends.
template <typename Row, typename Column>
static int sort(const int64_t* a) {
  const int64_t edges = a[0], rows = a[1], columns = a[2], low = a[3] ? -rows : 0, left = a[4] ? -columns : 0;
  const Row* const index = reinterpret_cast<const Row*>(a[7]);
  const Column* const other = reinterpret_cast<const Column*>(a[8]);
  const uint8_t* const alive = reinterpret_cast<const uint8_t*>(a[9]);
  int32_t* const rowptr = reinterpret_cast<int32_t*>(a[10]);
  int32_t* const col = reinterpret_cast<int32_t*>(a[11]);
  int32_t* const edge = reinterpret_cast<int32_t*>(a[12]);
  int64_t* const found = reinterpret_cast<int64_t*>(a[13]);
  int32_t* const place = static_cast<int32_t*>(calloc(rows + 2, sizeof(int32_t)));
  if (!place) return 1;
  for (int64_t e = 0; e < edges; ++e) {
    const int64_t row = index[e], column = other[e];
    if (row < low || row >= rows || column < left || column >= columns) {
      found[0] = e, found[1] = row, found[2] = column;
      free(place);
      return 2;
    }
    const int64_t at = alive && !alive[e] ? rows : row < 0 ? row + rows : row;
    ++place[at + 1];
  }
  for (int64_t r = 0; r <= rows; ++r) place[r + 1] += place[r];
  for (int64_t r = 0; r <= rows; ++r) rowptr[r] = place[r];
  for (int64_t e = 0; e < edges; ++e) {
    const int64_t row = index[e], column = other[e];
    const int32_t p = place[alive && !alive[e] ? rows : row < 0 ? row + rows : row]++;
    col[p] = int32_t(column < 0 ? column + columns : column);
    edge[p] = int32_t(e);
  }
  free(place);
  return 0;
}

extern "C" int run(const int64_t* arguments) {
  const bool wide = arguments[5], wide_other = arguments[6];
  if (wide) return wide_other ? sort<int64_t, int64_t>(arguments) : sort<int64_t, int32_t>(arguments);
  return wide_other ? sort<int32_t, int64_t>(arguments) : sort<int32_t, int32_t>(arguments);
}
"""

LOOPS = r"""
#include <cstdint>

// arguments: edges, rows, rowptr, col, edge, alive, new rowptr, new col, new edge.
extern "C" int run(const int64_t* a) {
  const int64_t edges = a[0], rows = a[1];
  const int32_t* const rowptr = reinterpret_cast<const int32_t*>(a[2]);
  const int32_t* const col = reinterpret_cast<const int32_t*>(a[3]);
  const int32_t* const edge = reinterpret_cast<const int32_t*>(a[4]);
  const uint8_t* const alive = reinterpret_cast<const uint8_t*>(a[5]);
  int32_t* const starts = reinterpret_cast<int32_t*>(a[6]);
  int32_t* const new_col = reinterpret_cast<int32_t*>(a[7]);
  int32_t* const new_edge = reinterpret_cast<int32_t*>(a[8]);
  int32_t k = 0;
  starts[0] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int32_t p = rowptr[r]; p < rowptr[r + 1]; ++p) {
      if (alive && !alive[edge[p]]) continue;
      new_col[k] = col[p];
      new_edge[k++] = edge[p];
    }
    new_col[k] = int32_t(r);
    new_edge[k++] = int32_t(edges + r);
    starts[r + 1] = k;
  }
  for (int64_t p = 0; p < edges; ++p) {
    if (p < rowptr[rows] && !(alive && !alive[edge[p]])) continue;
    new_col[k] = col[p];
    new_edge[k++] = edge[p];
  }
  return 0;
}
"""

DEGREES = r"""
#include <cstdint>

// arguments: rows, rowptr, out.
template <typename T>
static int degrees(const int64_t* a) {
  const int32_t* const rowptr = reinterpret_cast<const int32_t*>(a[1]);
  T* const out = reinterpret_cast<T*>(a[2]);
  for (int64_t r = 0; r < a[0]; ++r) {
    const int32_t degree = rowptr[r + 1] - rowptr[r];
    out[r] = T(1) / T(degree < 1 ? 1 : degree);
  }
  return 0;
}

extern "C" int run_float32(const int64_t* arguments) { return degrees<float>(arguments); }
extern "C" int run_float64(const int64_t* arguments) { return degrees<double>(arguments); }
"""
