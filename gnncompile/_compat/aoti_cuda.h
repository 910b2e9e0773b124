#include <cuda.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <mutex>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

namespace gnncompile __attribute__((visibility("hidden"))) {

inline void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || !text) text = "an unknown error";
  refuse(what + ": " + text);
}

inline void check(cudaError_t result, const std::string& what) {
  if (result != cudaSuccess) refuse(what + ": " + cudaGetErrorString(result));
}

// The kernels are machine code for one compute capability.
inline void check_card(const Inputs& given, int major, int minor) {
  check(cudaFree(nullptr), "the context of the GPU");  // gives this thread the context of its GPU, and frees nothing
  int device = given.device, found_major = 0, found_minor = 0;
  if (device < 0) check(cudaGetDevice(&device), "the current GPU");
  check(cudaDeviceGetAttribute(&found_major, cudaDevAttrComputeCapabilityMajor, device), "the GPU");
  check(cudaDeviceGetAttribute(&found_minor, cudaDevAttrComputeCapabilityMinor, device), "the GPU");
  if (found_major != major || found_minor != minor)
    refuse("made for a GPU of compute capability " + std::to_string(major) + "." + std::to_string(minor) + ", found " +
           std::to_string(found_major) + "." + std::to_string(found_minor) +
           "; package the model on a machine with the GPU of the server");
}

// A kernel, whose machine code is a part of this file. It is loaded once into each context.
struct Kernel {
  const unsigned char* const code;
  const char* const symbol;
  const unsigned threads, shared;
  const int pointers, numbers, scratches;
  const bool aligned;
  std::mutex lock;
  std::map<CUcontext, CUfunction> loaded;

  Kernel(const unsigned char* code, const char* symbol, unsigned threads, unsigned shared, int pointers, int numbers,
         int scratches, bool aligned)
      : code(code), symbol(symbol), threads(threads), shared(shared), pointers(pointers), numbers(numbers),
        scratches(scratches), aligned(aligned) {}

  CUfunction function() {
    CUcontext context = nullptr;
    check(cuCtxGetCurrent(&context), "the context of the GPU");
    if (!context) refuse("the GPU has no context in this thread; call cudaSetDevice first");
    std::lock_guard<std::mutex> guard(lock);
    CUfunction& found = loaded[context];
    if (found) return found;
    CUmodule module = nullptr;
    CUfunction made = nullptr;
    check(cuModuleLoadData(&module, code), std::string("the code of the kernel ") + symbol);
    check(cuModuleGetFunction(&made, module, symbol), std::string("the kernel ") + symbol);
    if (shared > 48 * 1024)
      check(cuFuncSetAttribute(made, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int(shared)),
            std::string("the shared memory of the kernel ") + symbol);
    return found = made;
  }
};

// The errors that kernels find.
enum class Error { index, layout };

[[noreturn]] inline void refuse_index() {
  refuse("index out of range: an entry of edge_index, of batch, or of another index is outside of the graph; "
         "check edge_index against the number of nodes, and batch against the number of graphs");
}

inline void check_rows(int64_t rows, int64_t entries) {
  if (!rows && entries) refuse_index();
}

inline void compare_sizes(std::initializer_list<int64_t> found, std::initializer_list<int64_t> expected) {
  if (!std::equal(found.begin(), found.end(), expected.begin(), expected.end())) refuse_layout();
}

// The flags of one call. They are bools in the host's memory, which kernels set where they find an error. So no launch
// clears or copies them. They are read when the results are complete.
class Flags {
  static constexpr int most = 64, apart = 16;  // kernels take addresses that are multiples of 16
  static inline std::mutex lock;
  static inline std::vector<unsigned char*> free;
  cudaStream_t stream;
  unsigned char* host = nullptr;
  Error errors[most];
  int count = 0;

 public:
  explicit Flags(cudaStream_t stream) : stream(stream) {
    std::lock_guard<std::mutex> guard(lock);
    if (free.empty()) {
      void* made = nullptr;
      check(cudaHostAlloc(&made, most * apart, cudaHostAllocMapped | cudaHostAllocPortable), "no pinned memory");
      free.push_back(static_cast<unsigned char*>(made));
    }
    host = free.back();
    free.pop_back();
  }

  ~Flags() {
    if (count) cudaStreamSynchronize(stream);  // an error of another part of the call left kernels that may set flags
    std::lock_guard<std::mutex> guard(lock);
    free.push_back(host);
  }

  // The address of another flag.
  CUdeviceptr next(Error error) {
    if (count == most) read();
    unsigned char* flag = host + apart * count;
    *flag = 0;
    errors[count++] = error;
    return reinterpret_cast<CUdeviceptr>(flag);  // pinned memory has one address on the host and on GPUs
  }

  void read() {
    if (!count) return;
    check(cudaStreamSynchronize(stream), "the GPU");
    const int found = count;
    count = 0;
    for (int at = 0; at < found; ++at)
      if (host[apart * at]) errors[at] == Error::layout ? refuse_layout() : refuse_index();
  }
};

// Launches `programs` x `columns` programs. The kernel takes pointers, perhaps that of a flag, int32 numbers, and
// pointers to scratch memory, which no kernel here needs.
inline void launch(Kernel& kernel, cudaStream_t stream, int64_t programs, int64_t columns,
                   std::initializer_list<AtenTensorHandle> tensors, std::initializer_list<int64_t> numbers,
                   Flags* flags = nullptr, Error error = Error::index) {
  if (programs <= 0) return;
  const int pointers = int(tensors.size()) + (flags != nullptr);
  if (pointers != kernel.pointers || int(numbers.size()) != kernel.numbers)
    refuse(std::string("the kernel ") + kernel.symbol + " is launched with other arguments; please report it");
  std::vector<CUdeviceptr> addresses;
  std::vector<int32_t> counts;
  std::vector<void*> arguments;
  addresses.reserve(pointers + kernel.scratches);
  counts.reserve(numbers.size());
  for (AtenTensorHandle tensor : tensors) {
    addresses.push_back(CUdeviceptr(address(tensor)));
    if (kernel.aligned && addresses.back() & 15)
      refuse(std::string("the kernel ") + kernel.symbol + " got an address that is no multiple of 16; please report it");
  }
  if (flags) addresses.push_back(flags->next(error));
  addresses.resize(pointers + kernel.scratches, 0);
  for (int64_t number : numbers) {
    if (number > most_rows)
      refuse("found " + std::to_string(number) + " edges, rows or entries of an index, at most " +
             std::to_string(most_rows) + " are possible; split the batch");
    counts.push_back(int32_t(number));
  }
  for (int at = 0; at < pointers; ++at) arguments.push_back(&addresses[at]);
  for (int32_t& count : counts) arguments.push_back(&count);
  for (int at = 0; at < kernel.scratches; ++at) arguments.push_back(&addresses[pointers + at]);
  check(cuLaunchKernel(kernel.function(), unsigned(programs), unsigned(columns), 1, kernel.threads, 1, 1, kernel.shared,
                       stream, arguments.data(), nullptr),
        std::string("the launch of the kernel ") + kernel.symbol);
}

// The kernels that sort edges: see gnncompile/codegen/triton/sorting.py, which does the same.
struct Sort {
  Kernel &rank, &keys, &place, &place_radix, &count_rows, &scan, &scatter, &count;
  int64_t few, ranked, block, placed, radix_edges, radix_rows, radix_block, bins, scanned, digit;
};

struct Size {
  int64_t edges, rows, columns;
};

inline int64_t blocks_of(int64_t number, int64_t block) { return (number + block - 1) / block; }

// A new tensor of numbers on the device of another tensor.
inline RAIIAtenTensorHandle new_numbers(AtenTensorHandle like, int64_t size, int32_t dtype) {
  const int64_t stride = 1;
  int32_t device = 0;
  AtenTensorHandle made = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like, &device));
  AOTI_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, dtype, aoti_torch_device_type_cuda(), device, &made));
  return RAIIAtenTensorHandle(made);
}

// Sorts by rows of one or two digits, and writes the layout.
inline void radix_sort_edges(const Sort& sort, cudaStream_t stream, const Size& is, AtenTensorHandle index,
                             AtenTensorHandle other, AtenTensorHandle alive, AtenTensorHandle rowptr,
                             AtenTensorHandle col, AtenTensorHandle edge, Flags* flags) {
  const std::initializer_list<int64_t> sizes = {is.edges, is.rows, is.columns};
  const int64_t blocks = blocks_of(is.edges, sort.radix_block);
  const int32_t word = aoti_torch_dtype_int32();
  const auto counts = new_numbers(edge, blocks * sort.bins, aoti_torch_dtype_int16());
  const auto earlier = new_numbers(edge, blocks * sort.bins, word), totals = new_numbers(edge, sort.bins, word);
  const auto first_key = new_numbers(edge, is.edges, word), key = new_numbers(edge, is.edges, word),
             order = new_numbers(edge, is.edges, word);
  const bool two_digits = is.rows >= sort.bins;
  launch(sort.count_rows, stream, blocks, 1, {index, other, alive, first_key, counts}, sizes, flags);
  const auto scan = [&] {
    launch(sort.scan, stream, sort.bins / sort.scanned, 1, {counts, earlier, totals}, {blocks});
  };
  scan();
  launch(sort.scatter, stream, blocks, 1,
         {first_key, first_key, counts, earlier, totals, key, two_digits ? edge : order.get()}, {is.edges, 0});
  if (two_digits) {
    launch(sort.count, stream, blocks, 1, {key, counts}, {is.edges, sort.digit});
    scan();
    launch(sort.scatter, stream, blocks, 1, {key, edge, counts, earlier, totals, first_key, order},
           {is.edges, sort.digit});
  }
  launch(sort.place_radix, stream, blocks_of(is.edges, sort.placed) + blocks_of(is.rows + 1, sort.placed), 1,
         {two_digits ? first_key.get() : key.get(), order, other, rowptr, col, edge}, sizes);
}

inline void sort_edges(const Sort& sort, cudaStream_t stream, const Size& is, AtenTensorHandle index,
                       AtenTensorHandle other, AtenTensorHandle alive, AtenTensorHandle rowptr, AtenTensorHandle col,
                       AtenTensorHandle edge, Flags* flags) {
  const std::initializer_list<int64_t> sizes = {is.edges, is.rows, is.columns};
  const auto programs = [&](int64_t block) { return blocks_of(is.edges, block) + blocks_of(is.rows + 1, block); };
  if (is.edges <= sort.few && is.rows < sort.few)
    return launch(sort.rank, stream, programs(sort.ranked), 1, {index, other, alive, rowptr, col, edge}, sizes, flags);
  if (is.edges <= sort.radix_edges && is.rows <= sort.radix_rows)
    return radix_sort_edges(sort, stream, is, index, other, alive, rowptr, col, edge, flags);
  launch(sort.keys, stream, blocks_of(is.edges, sort.block), 1, {index, other, alive, edge}, sizes, flags);
  int32_t stable = 1;
  AtenTensorHandle key = nullptr, order = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_sort_stable(edge, &stable, 0, 0, &key, &order));
  const RAIIAtenTensorHandle owned_key(key), owned_order(order);
  launch(sort.place, stream, programs(sort.placed), 1, {key, order, other, rowptr, col, edge}, sizes);
}

}  // namespace gnncompile
