#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

namespace gnncompile __attribute__((visibility("hidden"))) {

// Torch's functions for products of matrices and its code of a dtype: the struct Products of tiled kernels.
inline int64_t products(int32_t dtype, int64_t (&table)[5]) {
  table[0] = reinterpret_cast<int64_t>(&aoti_torch_create_tensor_from_blob);
  table[1] = reinterpret_cast<int64_t>(&aoti_torch_delete_tensor_object);
  table[2] = reinterpret_cast<int64_t>(&aoti_torch_cpu_mm_out);
  table[3] = reinterpret_cast<int64_t>(&aoti_torch_cpu_addmm_out);
  table[4] = dtype;
  return reinterpret_cast<int64_t>(&table);
}

inline int64_t products_float() {
  static int64_t table[5];
  static const int64_t made = products(aoti_torch_dtype_float32(), table);
  return made;
}

inline int64_t products_double() {
  static int64_t table[5];
  static const int64_t made = products(aoti_torch_dtype_float64(), table);
  return made;
}

}  // namespace gnncompile
