"""The C++ helpers that generated kernels call: storage types, ordered sums, dropout.

A kernel gets only the helpers that it mentions. No helper includes a header heavier than <cstdint>, since parsing
<cmath> alone costs more than compiling a kernel. All helpers are written so that the compiler can vectorise them.
"""

from __future__ import annotations

import re

from gnncompile.codegen.cpp.math import functions
from gnncompile.ir import philox

STORAGE = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "uint16_t",
    "float16": "uint16_t",
    "bool": "uint8_t",
    "int64": "int64_t",
    "int32": "int32_t",
    "bits": "uint32_t",
}
"""The C++ type with which a kernel reads a tensor of each storage type."""

_BITS = """\
static inline uint32_t as_bits(float x) { uint32_t bits; __builtin_memcpy(&bits, &x, 4); return bits; }
static inline float as_float(uint32_t bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
"""

_FROM_BFLOAT16 = "static inline float from_bfloat16(uint16_t v) { return as_float(uint32_t(v) << 16); }\n"

_TO_BFLOAT16 = """\
// Rounds to nearest even; a NaN stays one.
static inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(x == x ? rounded : 0x7fc0u);
}
"""

_FROM_FLOAT16 = """\
// By bits, because compilers do not vectorise the conversion of _Float16. Scaling makes subnormals right.
static inline float from_float16(uint16_t v) {
  const uint32_t magnitude = uint32_t(v & 0x7fffu) << 13;
  const uint32_t scaled = as_bits(as_float(magnitude) * 0x1p112f);
  const uint32_t value = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : scaled;
  return as_float(value | (uint32_t(v & 0x8000u) << 16));
}
"""

_TO_FLOAT16 = """\
static inline uint16_t to_float16(float x) {
  const _Float16 half = _Float16(x);
  uint16_t bits;
  __builtin_memcpy(&bits, &half, 2);
  return bits;
}
"""

_MAX = "static inline T op_max(T a, T b) { return b > a || b != b ? b : a; }  // NaN if either is\n"
_MIN = "static inline T op_min(T a, T b) { return b < a || b != b ? b : a; }  // NaN if either is\n"

_PICK = """\
// first ? a : b, by masks. Where all steps of a loop have one `first`, gcc makes branches of ?: and no vectors.
static inline T pick(bool first, T a, T b) {
  typedef {word} Word;
  Word x, y;
  __builtin_memcpy(&x, &a, sizeof(T));
  __builtin_memcpy(&y, &b, sizeof(T));
  const Word mask = -Word(first), z = (x & mask) | (y & ~mask);
  T result;
  __builtin_memcpy(&result, &z, sizeof(T));
  return result;
}
"""

_TOTAL = """\
// Sums in an order fixed by this text and not by the vectoriser: `lanes` partial sums, then halves. Vector types,
// because gcc makes slow shuffles of the same thing written with arrays.
template <int lanes>
struct Lanes {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
  static T fold(const type& v) {
    typename Lanes<lanes / 2>::type low, high;
    __builtin_memcpy(&low, &v, sizeof(low));
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof(low), sizeof(high));
    return Lanes<lanes / 2>::fold(low + high);
  }
};
template <>
struct Lanes<1> {
  typedef T type;
  static T fold(T v) { return v; }
};
template <int lanes>
static inline T total(const T* v, int64_t n) {
  typename Lanes<lanes>::type part = {}, next;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    __builtin_memcpy(&next, v + i, sizeof(next));
    part += next;
  }
  T sum = Lanes<lanes>::fold(part);
  for (; i < n; ++i) sum += v[i];
  return sum;
}
"""

_LARGEST = """\
static inline T largest(const T* v, int64_t n) {
  T most = v[0];
  for (int64_t i = 1; i < n; ++i) most = op_max(most, v[i]);
  return most;
}
"""

_SOFTMAX = """\
// Turns the logits of one row into their softmax. `n` is the degree rounded up to a multiple of 16.
static inline void softmax_row(T* __restrict__ v, int64_t degree, int64_t n, T& max, T& sum) {
  if (degree == 0) return;
  for (int64_t k = degree; k < n; ++k) v[k] = T(-__builtin_inf());
  typename Lanes<16>::type top, next;
  __builtin_memcpy(&top, v, sizeof(top));
  for (int64_t k = 16; k < n; k += 16) {
    __builtin_memcpy(&next, v + k, sizeof(next));
    top = (next > top) | (next != next) ? next : top;
  }
  T most = top[0];
  for (int l = 1; l < 16; ++l) most = op_max(most, top[l]);
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) v[k] = op_exp(v[k] - most);
  max = most;
  sum = total<16>(v, n);
  const T all = sum;
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) v[k] /= all;
}
"""

_RESERVE = """\
// Scratch of one thread; it only ever grows.
static inline bool reserve(T*& scratch, int64_t& capacity, int64_t wanted) {
  if (wanted <= capacity) return true;
  __builtin_free(scratch);
  capacity = wanted * 2;
  scratch = static_cast<T*>(__builtin_malloc(capacity * sizeof(T)));
  return scratch != nullptr;
}
"""

_BOUND = """\
// The first row of a thread's share, which is `target` of all rows and edges counted together.
static int64_t share(const int32_t* rowptr, int64_t rows, int64_t target) {
  int64_t low = 0, high = rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (rowptr[middle] + middle < target) low = middle + 1; else high = middle;
  }
  return low;
}
"""

_PACK = """\
// Each byte of `flags` is 0 or 1; the product moves the bits of eight of them into its highest byte.
static inline void pack(const uint8_t* flags, int64_t words, uint32_t* __restrict__ packed) {
  for (int64_t w = 0; w < words; ++w) {
    uint32_t word = 0;
    for (int part = 0; part < 4; ++part) {
      uint64_t eight;
      __builtin_memcpy(&eight, flags + w * 32 + part * 8, 8);
      word |= uint32_t((eight * 0x0102040810204080u) >> 56) << (part * 8);
    }
    packed[w] = word;
  }
}
"""

_UNPACK = """\
static inline void unpack(const uint32_t* packed, int64_t words, uint8_t* __restrict__ flags) {
  for (int64_t w = 0; w < words; ++w) {
    const uint32_t word = packed[w];
#pragma omp simd
    for (int b = 0; b < 32; ++b) flags[w * 32 + b] = (word >> b) & 1u;
  }
}
"""

_DROPOUT = f"""\
// What dropout multiplies with: `scale`, or 0 where the word of Philox-4x32-{philox.ROUNDS} is below `least`.
static inline T dropout(uint64_t seed, uint32_t edge, uint32_t feature, uint32_t least, T scale) {{
  uint32_t c0 = edge, c1 = feature, c2 = 0, c3 = 0, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma GCC unroll {philox.ROUNDS}
  for (int round = 0; round < {philox.ROUNDS}; ++round) {{
    const uint64_t a = uint64_t({philox.MULTIPLIERS[0]:#x}u) * c0, b = uint64_t({philox.MULTIPLIERS[1]:#x}u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += {philox.KEY_STEPS[0]:#x}u;
    k1 += {philox.KEY_STEPS[1]:#x}u;
  }}
  return c0 >= least ? scale : T(0);
}}
"""

_SHARED = {
    "dropout": _DROPOUT,
    "pack": _PACK,
    "unpack": _UNPACK,
    "op_max": _MAX,
    "op_min": _MIN,
    "total": _TOTAL,
    "largest": _LARGEST,
    "softmax_row": _SOFTMAX,
    "reserve": _RESERVE,
    "share": _BOUND,
}


def _helpers(double: bool) -> dict[str, str]:
    """Returns the source of every helper by name. Each helper follows those that it calls."""
    helpers = {
        "as_bits": _BITS,
        "from_bfloat16": _FROM_BFLOAT16,
        "to_bfloat16": _TO_BFLOAT16,
        "from_float16": _FROM_FLOAT16,
        "to_float16": _TO_FLOAT16,
    }
    pick = _PICK.replace("{word}", "uint64_t" if double else "uint32_t")
    return helpers | functions(double) | {"pick": pick} | _SHARED


def prelude(body: str, double: bool) -> str:
    """Returns the helpers that `body` mentions, and those that they mention in turn; ``T`` is double or float."""
    helpers = _helpers(double)
    used: set[str] = set()
    text = body
    for name in reversed(helpers):
        mentioned = ("as_bits", "as_float") if name == "as_bits" else (name, "Lanes") if name == "total" else (name,)
        if any(re.search(rf"\b{m}\b", text) for m in mentioned):
            used.add(name)
            text += helpers[name]
    head = f"#include <cstdint>\n\nusing T = {'double' if double else 'float'};\n\n"
    return head + "\n".join(helpers[name] for name in helpers if name in used)
