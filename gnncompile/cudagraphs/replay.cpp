// What the host does at a call of a recording: compares inputs, replays, hands out results and gradients.
//
// The same as recording.py does, which serves until this is built (native.py) and says what each step is for. On a
// small graph a step takes as long as its host: a replay by this code costs a third of one by Python, and gradients of
// parameters are put where autograd would put them one by one.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;
namespace autograd = torch::autograd;
using at::Tensor;
using autograd::variable_list;
using Sizes = std::vector<std::int64_t>;

// -- inputs ------------------------------------------------------------------------------------------------------------

// The items of a list or a tuple.
PyObject** items(py::handle sequence) { return PySequence_Fast_ITEMS(sequence.ptr()); }

const Tensor& tensor_at(py::handle args, std::size_t at) { return THPVariable_Unpack(items(args)[at]); }

// What one input of a recording has to be: this number; or a tensor of this form, perhaps in this place, perhaps
// unchanged.
struct Input {
  py::object number;  // none if it is a tensor
  at::ScalarType type{};
  Sizes sizes, strides;
  std::optional<const void*> place, storage;
  std::int64_t version = 0, offset = 0;
  std::optional<std::size_t> beside;  // another input, in whose memory it stands

  Input(py::handle given, bool is_copied, bool is_kept) {
    if (!THPVariable_Check(given.ptr())) {
      number = py::reinterpret_borrow<py::object>(given);
      return;
    }
    const Tensor& tensor = THPVariable_Unpack(given.ptr());
    type = tensor.scalar_type();
    sizes = tensor.sizes().vec();
    strides = tensor.strides().vec();
    if (!is_copied) place = tensor.data_ptr();
    if (is_kept) {
      storage = tensor.storage().unsafeGetStorageImpl();
      version = tensor._version();
    }
  }

  void stands_beside(std::size_t other, const Tensor& given) {
    beside = other;
    offset = given.storage_offset();
  }

  bool fits(PyObject* given, PyObject** all) const {
    if (number) {
      const int equal = given == number.ptr() || PyObject_RichCompareBool(given, number.ptr(), Py_EQ);
      if (equal < 0) throw py::error_already_set();
      return equal;
    }
    if (!THPVariable_Check(given)) return false;
    const Tensor& tensor = THPVariable_Unpack(given);
    if (place && tensor.data_ptr() != *place) return false;
    if (tensor.scalar_type() != type || tensor.sizes() != at::IntArrayRef(sizes) ||
        tensor.strides() != at::IntArrayRef(strides))
      return false;
    // That the other is a tensor is known: it comes before, or is this one.
    if (beside && (tensor.storage_offset() != offset ||
                   tensor.storage().data() != THPVariable_Unpack(all[*beside]).storage().data()))
      return false;
    // Other tensors over the same memory, of an array say, count its changes anew.
    return !storage || (!tensor.is_inference() && tensor._version() == version &&
                        tensor.storage().unsafeGetStorageImpl() == *storage);
  }
};

struct Inputs {
  std::vector<Input> inputs;

  Inputs(py::handle args, const std::vector<std::size_t>& copied, const std::vector<std::size_t>& kept,
         const std::vector<std::vector<std::size_t>>& together) {
    const auto among = [](const std::vector<std::size_t>& some, std::size_t at) {
      return std::find(some.begin(), some.end(), at) != some.end();
    };
    const std::size_t count = PySequence_Fast_GET_SIZE(args.ptr());
    for (std::size_t at = 0; at < count; ++at)
      inputs.emplace_back(items(args)[at], among(copied, at), among(kept, at));
    for (const auto& members : together)
      for (const std::size_t at : members) inputs[at].stands_beside(members.front(), tensor_at(args, at));
  }

  bool fit(py::handle args) const {
    if (PySequence_Fast_GET_SIZE(args.ptr()) != static_cast<Py_ssize_t>(inputs.size())) return false;
    PyObject** given = items(args);
    PyObject** const all = given;
    return std::all_of(inputs.begin(), inputs.end(), [&](const Input& input) { return input.fits(*given++, all); });
  }
};

// -- the recording -----------------------------------------------------------------------------------------------------

// A view of a copy of a common buffer: which gradient it is, its sizes, strides and offset.
using Place = std::tuple<std::size_t, Sizes, Sizes, std::int64_t>;

// Gradients that stand alone, by position, and those in common buffers.
using Gradients = std::pair<std::vector<std::pair<std::size_t, Tensor>>,
                            std::vector<std::pair<Tensor, std::vector<Place>>>>;

// Copies of inputs to where a recording reads them: single ones, by position; and pieces of memory in which some stand,
// with the position of one of them, the byte from which on is copied, and the copy.
using Single = std::pair<std::size_t, Tensor>;
using Together = std::tuple<std::size_t, std::int64_t, Tensor>;

struct CudaGraphRun {
  std::vector<Tensor> made;  // results, which each replay writes to
  std::vector<std::tuple<std::size_t, std::int64_t, std::size_t>> padded;  // which result, dimension, kind of things
  std::vector<bool> differentiable;
  std::vector<std::size_t> graded, saved, mutated;  // positions of inputs
  std::vector<Tensor> cotangents;                   // of the differentiable results, which the backward reads
  std::vector<Single> singles;
  std::vector<Together> together;
  py::object forward, backward, refuse, refuse_second;
  Gradients parts;
  bool backward_in_caller;

  void copy_inputs(py::handle args) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (auto& [at, target] : singles) target.copy_(tensor_at(args, at));
    for (auto& [at, first, target] : together) {
      const Tensor source = at::empty({0}, target.options());
      source.set_(tensor_at(args, at).storage(), first, target.sizes(), target.strides());
      target.copy_(source);
    }
  }

  // Copies of the results without their padding, by how many things of each kind there are.
  variable_list results(const std::vector<std::int64_t>& counts) const {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list found = made;
    for (const auto& [at, dim, kind] : padded) found[at] = found[at].narrow(dim, 0, counts.at(kind));
    for (Tensor& result : found) result = result.clone();
    return found;
  }

  variable_list gradients() const {
    variable_list found(graded.size());
    for (const auto& [at, gradient] : parts.first) found[at] = gradient.clone();
    for (const auto& [buffer, places] : parts.second) {
      const Tensor copied = buffer.clone();
      for (const auto& [at, sizes, strides, offset] : places) found[at] = copied.as_strided(sizes, strides, offset);
    }
    return found;
  }
};

// Calls a Python function; autograd knows how to carry its error to another thread.
template <typename... Args>
void call(const py::object& function, Args... args) {
  if (!THPObjectPtr(PyObject_CallFunctionObjArgs(function.ptr(), args..., nullptr))) {
    python_error error;
    error.persist();
    throw error;
  }
}

// -- the backward ------------------------------------------------------------------------------------------------------

// Whether there may be more to a cotangent than its numbers, or more asked for than gradients: Python knows.
bool is_unusual(const variable_list& cotangents) {
  const bool transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  if (at::GradMode::is_enabled() || transformed) return true;
  for (const Tensor& given : cotangents)
    if (given.defined() && (given.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Batched,
                                                                         c10::DispatchKey::FuncTorchBatched})) ||
                            given._fw_grad(0).defined()))
      return true;
  return false;
}

// Autograd's threads are off in a thread as long as a backward of a recording may come there: see backward_thread.py.
class Awaited {
 public:
  Awaited() : thread_(local()) {
    ++thread_->waiting;
    auto& state = c10::AutogradState::get_tls_state();
    if (!state.get_multithreading_enabled()) return;
    state.set_multithreading_enabled(false);
    thread_->ours = true;
  }
  // Python's side, which counted until this was built, has turned them off in this thread.
  static void take_over() { local()->ours = true; }

  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;

  ~Awaited() {
    const bool last = --thread_->waiting == 0;
    // In a backward, torch would undo it at its end; of another thread it can't be set.
    const bool here = thread_->id == std::this_thread::get_id() && autograd::get_current_graph_task_id() < 0;
    if (!last || !here || !thread_->ours) return;
    c10::AutogradState::get_tls_state().set_multithreading_enabled(true);
    thread_->ours = false;
  }

 private:
  struct Thread {
    std::thread::id id = std::this_thread::get_id();
    std::atomic<int> waiting{0};
    bool ours = false;  // turned off here, and not by the user
  };

  static std::shared_ptr<Thread> local() {
    static thread_local auto thread = std::make_shared<Thread>();
    return thread;
  }

  std::shared_ptr<Thread> thread_;
};

using NodePtr = decltype(autograd::Edge::function);

class GnncompileReplayBackward : public autograd::Node {
 public:
  GnncompileReplayBackward(std::shared_ptr<CudaGraphRun> recording, const py::handle args, py::object lease)
      : recording_(std::move(recording)), lease_(std::move(lease)) {
    for (const std::size_t at : recording_->graded) add_next_edge(autograd::impl::gradient_edge(tensor_at(args, at)));
    for (const std::size_t at : recording_->saved) saved_.emplace_back(tensor_at(args, at), false);
    if (recording_->backward_in_caller && autograd::get_current_graph_task_id() < 0) awaited_.emplace();
  }

  ~GnncompileReplayBackward() override {
    if (!Py_IsInitialized()) {  // nothing of Python's may be touched any more
      (void)lease_.release();
      (void)new std::shared_ptr<CudaGraphRun>(std::move(recording_));
      return;
    }
    py::gil_scoped_acquire gil;
    lease_ = py::object();
    recording_.reset();
  }

  std::string name() const override { return "GnncompileReplayBackward"; }

  void release_variables() override {
    for (autograd::SavedVariable& saved : saved_) saved.reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    throw std::runtime_error(
        "compiled autograd: found a recorded model, whose backward it can't trace. Compile the model with "
        "gnncompile.compile(model, ..., options={\"native\": False}).");
  }

  variable_list apply(variable_list&& cotangents) override {
    py::gil_scoped_acquire gil;
    if (is_unusual(cotangents)) refuse(cotangents);
    for (const autograd::SavedVariable& saved : saved_) saved.unpack(getptr());  // raises where one was changed
    if (std::exchange(spent_, true)) call(recording_->refuse_second);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t at = 0; at < cotangents.size(); ++at) take(cotangents[at], recording_->cotangents[at]);
    call(recording_->backward);
    variable_list gradients = recording_->gradients();
    if (autograd::get_current_graph_task_keep_graph()) return gradients;
    lease_ = py::object();
    return without_those_put(std::move(gradients));
  }

 private:
  // Puts a cotangent, which may be for less than the whole result, to where the recording reads it.
  static void take(const Tensor& given, Tensor target) {
    if (!given.defined() || given.sizes() != target.sizes()) target.zero_();
    if (!given.defined()) return;
    for (std::int64_t dim = 0; dim < given.dim(); ++dim)
      if (given.size(dim) != target.size(dim)) target = target.narrow(dim, 0, given.size(dim));
    target.copy_(given);
  }

  void refuse(const variable_list& cotangents) const {
    py::list given;
    for (const Tensor& cotangent : cotangents) given.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(cotangent)));
    call(recording_->refuse, given.ptr());
  }

  // Puts the gradients of parameters into their `.grad` where autograd would do just that, and returns the others, with
  // the edges that they go along: to find its way to each parameter takes autograd a fifth of a small step.
  variable_list without_those_put(variable_list gradients) {
    const bool all_of_graph = autograd::get_current_graph_task_exec_info()->empty();  // and not torch.autograd.grad
    if (!all_of_graph || !post_hooks().empty() || autograd::AnomalyMode::is_enabled()) return gradients;
    variable_list left;
    autograd::edge_list edges;
    for (std::size_t at = 0; at < gradients.size(); ++at) {
      if (put(next_edges_[at].function, gradients[at])) continue;
      left.push_back(std::move(gradients[at]));
      edges.push_back(std::move(next_edges_[at]));
    }
    next_edges_ = std::move(edges);
    return left;
  }

  // Does what AccumulateGrad does with a first gradient, if this is all that it would do and nobody else leads to it.
  static bool put(const NodePtr& function, Tensor& gradient) {
    auto* target = gradient.defined() ? dynamic_cast<autograd::AccumulateGrad*>(function.get()) : nullptr;
    if (target == nullptr || function.use_count() != 1) return false;
    const Tensor& leaf = target->variable;
    const bool first = leaf.requires_grad() && !leaf.grad_fn() && !leaf.grad().defined();
    const bool watched = !autograd::impl::hooks(leaf).empty() || autograd::impl::post_acc_grad_hooks(leaf) ||
                         !target->pre_hooks().empty() || !target->post_hooks().empty();
    if (!first || watched || target->input_metadata(0).grad_dtype() != gradient.scalar_type() ||
        leaf.device() != gradient.device() || leaf.sizes() != gradient.sizes() ||
        !autograd::utils::obeys_layout_contract(gradient, leaf))
      return false;
    leaf.mutable_grad() = std::move(gradient);
    return true;
  }

  std::shared_ptr<CudaGraphRun> recording_;
  py::object lease_;
  std::vector<autograd::SavedVariable> saved_;
  std::optional<Awaited> awaited_;
  bool spent_ = false;
};

// Up to torch 2.12 a node is held by a std::shared_ptr, with a deleter that does not recurse.
template <typename... Args>
NodePtr make_node(Args&&... args) {
#if TORCH_VERSION_MINOR < 13 && TORCH_VERSION_MAJOR == 2
  return NodePtr(new GnncompileReplayBackward(std::forward<Args>(args)...), autograd::deleteNode);
#else
  return c10::make_intrusive<GnncompileReplayBackward>(std::forward<Args>(args)...);
#endif
}

// -- the forward -------------------------------------------------------------------------------------------------------

py::tuple replay(const std::shared_ptr<CudaGraphRun>& recording, const py::object& args, const py::object& lease,
                 const std::vector<std::int64_t>& counts) {
  variable_list made;
  {
    at::NoGradGuard no_grad;
    recording->copy_inputs(args);
    call(recording->forward);
    made = recording->results(counts);
  }
  for (const std::size_t at : recording->mutated) tensor_at(args, at).unsafeGetTensorImpl()->bump_version();
  if (at::GradMode::is_enabled()) {
    const NodePtr node = make_node(recording, args, lease);
    for (std::size_t at = 0; at < made.size(); ++at)
      if (recording->differentiable[at]) autograd::set_history(made[at], node);
  }
  py::tuple results(made.size());
  for (std::size_t at = 0; at < made.size(); ++at)
    PyTuple_SET_ITEM(results.ptr(), at, THPVariable_Wrap(std::move(made[at])));
  return results;
}

}  // namespace

PYBIND11_MODULE(gnncompile_replay, module) {
  using py::arg;
  py::class_<Awaited>(module, "Awaited").def(py::init<>()).def_static("take_over", &Awaited::take_over);
  py::class_<Inputs>(module, "Inputs")
      .def(py::init<py::handle, const std::vector<std::size_t>&, const std::vector<std::size_t>&,
                    const std::vector<std::vector<std::size_t>>&>())
      .def("fit", &Inputs::fit);
  py::class_<CudaGraphRun, std::shared_ptr<CudaGraphRun>>(module, "CudaGraphRun")
      .def(py::init<std::vector<Tensor>, decltype(CudaGraphRun::padded), std::vector<bool>, std::vector<std::size_t>,
                    std::vector<std::size_t>, std::vector<std::size_t>, std::vector<Tensor>, std::vector<Single>,
                    std::vector<Together>, py::object, py::object, py::object, py::object, Gradients, bool>(),
           arg("made"), arg("padded"), arg("differentiable"), arg("graded"), arg("saved"), arg("mutated"),
           arg("cotangents"), arg("singles"), arg("together"), arg("forward"), arg("backward"), arg("refuse"),
           arg("refuse_second"), arg("gradients"), arg("backward_in_caller"))
      .def("__call__", &replay);
}
