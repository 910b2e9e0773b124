// Answers requests about a graph that stays the same: its edges are sorted once.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

// Two models of a package that was written with `gnncompile.package(..., keep_layout=True)`.
class FixedGraph {
 public:
  using Tensors = std::vector<at::Tensor>;

  // `runners` is the number of threads that call run(), and `device` the number of the GPU, or -1.
  FixedGraph(const std::string& package, size_t runners, c10::DeviceIndex device = -1)
      : layout_(package, "layout", false, 1, device), model_(package, "with_layout", false, runners, device) {}

  // Returns the layout of the graph in the arguments of a call.
  Tensors layout(const Tensors& inputs) { return layout_.run(inputs); }

  // Answers a call about the graph that a layout was made for; throws std::runtime_error for another graph.
  Tensors run(const Tensors& layout, const Tensors& inputs) {
    Tensors all = layout;
    all.insert(all.end(), inputs.begin(), inputs.end());
    return model_.boxed_run(std::move(all));
  }

 private:
  torch::inductor::AOTIModelPackageLoader layout_, model_;
};
