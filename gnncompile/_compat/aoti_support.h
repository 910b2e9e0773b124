#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>
#include <omp.h>
#include <sys/mman.h>

namespace gnncompile {

using namespace torch::aot_inductor;

constexpr int64_t any = std::numeric_limits<int64_t>::min();

[[noreturn]] inline void refuse(const std::string& message) { throw std::runtime_error("gnncompile: " + message); }

inline int64_t address(AtenTensorHandle tensor) {
  void* data = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
  return reinterpret_cast<int64_t>(data);
}

inline void check_torch(int major, int minor) {
  const uint64_t found = aoti_torch_abi_version();
  const int here = int(found >> 56), there = int((found >> 48) & 255);
  if (here != major || there != minor)
    refuse("made with torch " + std::to_string(major) + "." + std::to_string(minor) + ", found torch " +
           std::to_string(here) + "." + std::to_string(there) + "; package the model with the torch of the server");
}

inline void need_cpu(bool supported, const char* feature) {
  if (!supported)
    refuse(std::string("made for a CPU with ") + feature + ", which this one lacks; package the model on a machine " +
           "like the server, or for a CPU such as cpu=\"x86-64-v3\"");
}

// The loader of a system with glibc 2.33 or newer refuses a file for a CPU of a higher level: "CPU ISA level is lower
// than required". Without this note the first instruction that the CPU lacks would end the process. The numbers are
// those of the x86-64 psABI: GNU_PROPERTY_X86_ISA_1_NEEDED, and the bit of the level.
#if defined(__x86_64__) && defined(__linux__)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define GNNCOMPILE_LEVEL "8"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__BMI2__) && defined(__F16C__) && defined(__LZCNT__) && defined(__MOVBE__)
#define GNNCOMPILE_LEVEL "4"
#endif
#endif
#ifdef GNNCOMPILE_LEVEL
__asm__(".pushsection .note.gnu.property,\"a\",@note\n.p2align 3\n.long 4, 16, 5\n.asciz \"GNU\"\n"
        ".long 0xc0008002, 4, " GNNCOMPILE_LEVEL ", 0\n.popsection");
#endif

// The compiler used the instructions of the machine that made this code, or of the stated CPU.
inline void check_cpu() {
#ifdef __AVX2__
  need_cpu(__builtin_cpu_supports("avx2"), "AVX2");
#endif
#ifdef __FMA__
  need_cpu(__builtin_cpu_supports("fma"), "FMA");
#endif
#ifdef __BMI2__
  need_cpu(__builtin_cpu_supports("bmi2"), "BMI2");
#endif
#ifdef __AVX512F__
  need_cpu(__builtin_cpu_supports("avx512f"), "AVX512F");
#endif
#ifdef __AVX512BW__
  need_cpu(__builtin_cpu_supports("avx512bw"), "AVX512BW");
#endif
#ifdef __AVX512DQ__
  need_cpu(__builtin_cpu_supports("avx512dq"), "AVX512DQ");
#endif
#ifdef __AVX512VL__
  need_cpu(__builtin_cpu_supports("avx512vl"), "AVX512VL");
#endif
#ifdef __AVX512IFMA__
  need_cpu(__builtin_cpu_supports("avx512ifma"), "AVX512IFMA");
#endif
#ifdef __AVX512VNNI__
  need_cpu(__builtin_cpu_supports("avx512vnni"), "AVX512VNNI");
#endif
#ifdef __AVX512VBMI__
  need_cpu(__builtin_cpu_supports("avx512vbmi"), "AVX512VBMI");
#endif
#ifdef __AVX512VBMI2__
  need_cpu(__builtin_cpu_supports("avx512vbmi2"), "AVX512VBMI2");
#endif
#ifdef __AVX512BITALG__
  need_cpu(__builtin_cpu_supports("avx512bitalg"), "AVX512BITALG");
#endif
#ifdef __AVX512VPOPCNTDQ__
  need_cpu(__builtin_cpu_supports("avx512vpopcntdq"), "AVX512VPOPCNTDQ");
#endif
#if defined(__GNUC__) && __GNUC__ >= 12
#ifdef __AVX512BF16__
  need_cpu(__builtin_cpu_supports("avx512bf16"), "AVX512BF16");
#endif
#ifdef __AVX512FP16__
  need_cpu(__builtin_cpu_supports("avx512fp16"), "AVX512FP16");
#endif
#ifdef __AVXVNNI__
  need_cpu(__builtin_cpu_supports("avxvnni"), "AVX-VNNI");
#endif
#endif
}

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

inline const char* dtype_name(int32_t dtype) {
  static const std::map<int32_t, const char*> names = {
      {aoti_torch_dtype_float32(), "float32"}, {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float16(), "float16"}, {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_int64(), "int64"},     {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int16(), "int16"},     {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},     {aoti_torch_dtype_bool(), "bool"}};
  const auto found = names.find(dtype);
  return found == names.end() ? "another dtype" : found->second;
}

inline std::string shape(const int64_t* sizes, int64_t dims) {
  std::string text = "[";
  for (int64_t d = 0; d < dims; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}

// The inputs of one call. The model owns them: they are freed where a check fails.
struct Inputs {
  AtenTensorHandle* const tensors;
  const int64_t count;
  bool passed = false;
  std::map<int64_t, std::pair<int64_t, std::string>> symbols;

  Inputs(AtenTensorHandle* tensors, int64_t count) : tensors(tensors), count(count) {}
  ~Inputs() {
    for (int64_t i = 0; !passed && i < count; ++i) aoti_torch_delete_tensor_object(tensors[i]);
  }

  void check(int64_t at, const std::string& name, int32_t dtype, const char* type, int32_t device, const char* place,
             std::initializer_list<int64_t> expected) {
    AtenTensorHandle tensor = tensors[at];
    int32_t found_dtype = 0, found_device = 0, layout = 0;
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &found_device));
    if (found_device != device) refuse(name + ": found another device, expected " + place + "; copy it there");
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
    if (layout != aoti_torch_layout_strided()) refuse(name + ": found a sparse tensor, expected a dense one; call to_dense()");
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &found_dtype));
    if (found_dtype != dtype)
      refuse(name + ": found dtype " + dtype_name(found_dtype) + ", expected " + type + "; convert it");
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dims));
    if (dims != int64_t(expected.size()))
      refuse(name + ": found " + std::to_string(dims) + " dimensions, expected " + std::to_string(expected.size()) +
             "; reshape it");
    if (!dims) return;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    int64_t d = 0, elements = 1;
    for (int64_t size : expected) {
      if (size >= 0 && sizes[d] != size)
        refuse(name + ": found shape " + shape(sizes, dims) + ", expected " + std::to_string(size) + " in dimension " +
               std::to_string(d));
      if (size < 0 && size != any) same(size, sizes[d], name, d);
      ++d;
    }
    for (d = dims - 1; d >= 0; --d) {
      if (sizes[d] > 1 && strides[d] != elements && elements)
        refuse(name + ": found strides " + shape(strides, dims) + ", expected a contiguous tensor; call contiguous()");
      elements *= sizes[d];
    }
  }

  // A layout that the caller kept is that of this call's graph.
  void check_layout(int64_t at, std::initializer_list<int64_t> sealed, std::vector<int64_t> sizes) {
    std::vector<AtenTensorHandle> found;
    for (int64_t one : sealed) found.push_back(tensors[one]);
    if (seal(found, std::move(sizes)) != *reinterpret_cast<int64_t*>(address(tensors[at])))
      refuse("layout: found the layout of another graph, or tensors in another order; call the model \"layout\" of " +
             std::string("this package with the same graph, and pass its results as they are"));
  }

  int64_t size(int64_t at, int64_t d) const {
    int64_t* sizes = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensors[at], &sizes));
    return sizes[d];
  }

  // Sizes of one symbol are equal in all inputs.
  void same(int64_t symbol, int64_t size, const std::string& name, int64_t d) {
    const std::string where = name + " in dimension " + std::to_string(d);
    const auto known = symbols.emplace(symbol, std::make_pair(size, where)).first->second;
    if (known.first != size)
      refuse(name + ": found size " + std::to_string(size) + " in dimension " + std::to_string(d) + ", expected " +
             std::to_string(known.first) + " like " + known.second);
  }
};

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

struct Layout {
  int64_t edges, rows, columns;
  bool wrap_rows, wrap_columns;
};

// Sorts edges by row, and refuses edges outside of the graph.
inline void sort(int (*kernel)(const int64_t*), Layout is, AtenTensorHandle index, AtenTensorHandle other,
                 int64_t alive, AtenTensorHandle rowptr, AtenTensorHandle col, AtenTensorHandle edge) {
  constexpr int64_t most = (int64_t(1) << 31) - 1 - (1 << 13);
  if (is.edges > most || is.rows > most || is.columns > most)
    refuse("graph with " + std::to_string(is.edges) + " edges and " + std::to_string(is.rows) + " nodes: at most " +
           std::to_string(most) + " are possible");
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
