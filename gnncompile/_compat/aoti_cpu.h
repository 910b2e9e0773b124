#include <omp.h>
#include <sys/mman.h>

namespace gnncompile __attribute__((visibility("hidden"))) {

// A number for tensors and sizes: see gnncompile/ops/seal.py, which computes the same.
template <typename T>
uint64_t seal_of(const T* data, int64_t count, uint64_t at) {
  const uint64_t start = (at << 40) + 1;
  uint64_t total = 0;
#pragma omp parallel for simd reduction(+ : total) if (count > 32768)
  for (int64_t i = 0; i < count; ++i) {
    uint64_t mixed = (start + uint64_t(i)) * 0x9E3779B97F4A7C15u;
    mixed = ((mixed ^ (mixed >> 32)) * 0xC4CEB9FE1A85EC53u) | 1;
    total += mixed * uint64_t(int64_t(data[i]));
  }
  return total;
}

inline int64_t seal(const std::vector<AtenTensorHandle>& tensors, std::vector<int64_t> sizes) {
  uint64_t total = 0, at = 0;
  for (AtenTensorHandle tensor : tensors) {
    int32_t dtype = 0;
    int64_t count = 0;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor, &count));
    const void* data = reinterpret_cast<void*>(address(tensor));
    ++at;
    switch (aoti_torch_dtype_element_size(dtype)) {
      case 1: total += seal_of(static_cast<const uint8_t*>(data), count, at); break;
      case 2: total += seal_of(static_cast<const int16_t*>(data), count, at); break;
      case 4: total += seal_of(static_cast<const int32_t*>(data), count, at); break;
      default: total += seal_of(static_cast<const int64_t*>(data), count, at);
    }
    sizes.push_back(count);
  }
  return int64_t(total + seal_of(sizes.data(), int64_t(sizes.size()), 0));
}

inline void write_seal(const std::vector<AtenTensorHandle>& tensors, std::vector<int64_t> sizes,
                       AtenTensorHandle out) {
  *reinterpret_cast<int64_t*>(address(out)) = seal(tensors, std::move(sizes));
}

// A layout that the caller kept is that of this call's graph.
inline void check_layout(const Inputs& given, int64_t at, std::initializer_list<int64_t> sealed,
                         std::vector<int64_t> sizes) {
  std::vector<AtenTensorHandle> found;
  for (int64_t one : sealed) found.push_back(given.tensors[one]);
  if (seal(found, std::move(sizes)) != *reinterpret_cast<int64_t*>(address(given.tensors[at])))
    refuse_layout();
}

// Runs a kernel. Its last argument may be an array in which it tells what it found.
inline void call(int (*kernel)(const int64_t*), const char* what, std::initializer_list<int64_t> arguments) {
  const int failed = kernel(arguments.begin());
  if (failed) refuse(std::string(what) + ": no memory");
}

inline int64_t threads() { return omp_get_max_threads(); }

// Faulting in small pages takes longer than writing them.
inline void fresh(AtenTensorHandle tensor, int64_t bytes, bool zero) {
  const int64_t first = address(tensor);
  if (zero && bytes) __builtin_memset(reinterpret_cast<void*>(first), 0, bytes);
#ifdef MADV_HUGEPAGE
  if (bytes < (int64_t(1) << 25)) return;
  const int64_t page = 4096, begin = (first + page - 1) / page * page, end = (first + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Copies an index, and returns the position of an entry outside of a range, or -1.
template <typename T>
int64_t copy_within(const T* index, T* copy, int64_t count, int64_t low, int64_t high) {
  for (int64_t i = 0; i < count; ++i) {
    if (index[i] < low || index[i] >= high) return i;
    copy[i] = index[i];
  }
  return -1;
}

// Copies an index, and refuses entries that name no row. Inductor's own check would end the process.
inline void bound(AtenTensorHandle index, int64_t rows, bool wraps, AtenTensorHandle copy) {
  int32_t type = 0;
  int64_t count = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(index, &type));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(index, &count));
  const int64_t low = wraps ? -rows : 0;
  const void* const data = reinterpret_cast<void*>(address(index));
  void* const out = reinterpret_cast<void*>(address(copy));
  const bool wide = type == aoti_torch_dtype_int64();
  const int64_t wrong =
      wide ? copy_within(static_cast<const int64_t*>(data), static_cast<int64_t*>(out), count, low, rows)
           : copy_within(static_cast<const int32_t*>(data), static_cast<int32_t*>(out), count, low, rows);
  if (wrong < 0) return;
  const int64_t found = wide ? static_cast<const int64_t*>(data)[wrong] : static_cast<const int32_t*>(data)[wrong];
  refuse("index out of range: entry " + std::to_string(wrong) + " of an index is " + std::to_string(found) +
         ", expected numbers from " + std::to_string(low) + " to " + std::to_string(rows - 1) +
         "; check the indices of nodes, edges and types among the inputs");
}

struct Layout {
  int64_t edges, rows, columns;
  bool wrap_rows, wrap_columns;
};

// Sorts edges by row, and refuses edges outside of the graph.
inline void sort(int (*kernel)(const int64_t*), Layout is, AtenTensorHandle index, AtenTensorHandle other,
                 int64_t alive, AtenTensorHandle rowptr, AtenTensorHandle col, AtenTensorHandle edge) {
  if (is.edges > most_rows || is.rows > most_rows || is.columns > most_rows)
    refuse("graph with " + std::to_string(is.edges) + " edges and " + std::to_string(is.rows) + " nodes: at most " +
           std::to_string(most_rows) + " are possible");
  int32_t type = 0, other_type = 0;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(index, &type));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(other, &other_type));
  const int32_t wide = aoti_torch_dtype_int64();
  int64_t found[3] = {0, 0, 0};
  const int64_t arguments[14] = {is.edges, is.rows, is.columns, is.wrap_rows, is.wrap_columns, type == wide,
                                 other_type == wide, address(index), address(other), alive, address(rowptr),
                                 address(col), address(edge), reinterpret_cast<int64_t>(found)};
  const int failed = kernel(arguments);
  if (failed == 1) refuse("no memory to sort edges");
  if (failed == 2)
    refuse("index out of range: entry " + std::to_string(found[0]) + " of edge_index or batch joins " +
           std::to_string(found[1]) + " and " + std::to_string(found[2]) + ", expected indices below " +
           std::to_string(is.rows) + " and " + std::to_string(is.columns) + "; check edge_index and batch");
}

}  // namespace gnncompile
