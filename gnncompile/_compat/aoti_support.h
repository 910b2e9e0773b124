#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// Hidden, for a process may load packages of several versions. Static variables of inline functions are otherwise shared.
namespace gnncompile __attribute__((visibility("hidden"))) {

using namespace torch::aot_inductor;

constexpr int64_t any = std::numeric_limits<int64_t>::min();

// Kernels count nodes and edges in int32, and may count a step of a loop past the end: MAX_INDEX of
// gnncompile/layout/csr.py. Inputs for a GPU are so small that this holds with self loops, too.
constexpr int64_t most_rows = (int64_t(1) << 31) - 1 - (1 << 13);
constexpr int64_t most_on_gpus = (int64_t(1) << 30) - (1 << 13);

[[noreturn]] inline void refuse(const std::string& message) { throw std::runtime_error("gnncompile: " + message); }

[[noreturn]] inline void refuse_layout() {
  refuse("layout: found the layout of another graph, or tensors in another order; call the model \"layout\" of this "
         "package with the same graph, and pass its results as they are");
}

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

inline void check_elements(int64_t found, int64_t most) {
  if (found > most)
    refuse("the inputs make a tensor of " + std::to_string(found) + " elements or rows, at most " +
           std::to_string(most) + " are possible; split the batch, or package the model with an example of this size");
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
  int32_t device = -1;  // the index of the inputs' GPU
  std::map<int64_t, std::pair<int64_t, std::string>> symbols;

  Inputs(AtenTensorHandle* tensors, int64_t count) : tensors(tensors), count(count) {}
  ~Inputs() {
    for (int64_t i = 0; !passed && i < count; ++i) aoti_torch_delete_tensor_object(tensors[i]);
  }

  void check(int64_t at, const std::string& name, int32_t dtype, const char* type, int32_t expected_device, const char* place,
             std::initializer_list<int64_t> expected) {
    AtenTensorHandle tensor = tensors[at];
    int32_t found_dtype = 0, found_device = 0, layout = 0;
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &found_device));
    if (found_device != expected_device) refuse(name + ": found another device, expected " + place + "; copy it there");
    if (expected_device != aoti_torch_device_type_cpu()) same_device(tensor, name);
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
      if (device >= 0 && sizes[d] > most_on_gpus)
        refuse(name + ": found shape " + shape(sizes, dims) + ", at most " + std::to_string(most_on_gpus) +
               " rows are possible on a GPU");
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

  int64_t size(int64_t at, int64_t d) const {
    int64_t* sizes = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensors[at], &sizes));
    return sizes[d];
  }

  void same_device(AtenTensorHandle tensor, const std::string& name) {
    int32_t found = 0;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &found));
    if (device >= 0 && found != device)
      refuse(name + ": found GPU " + std::to_string(found) + ", expected GPU " + std::to_string(device) +
             " like the inputs before it; copy it there");
    device = found;
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

}  // namespace gnncompile
