// A server without Python: loads a package, answers requests from several threads, and reports latencies.
//
//   server PACKAGE REQUESTS ANSWERS [--threads N] [--repeat N] [--device cpu] [--layout each|once]
//
// REQUESTS holds lists of tensors, as `torch.save([[x, edge_index], ...], REQUESTS)` writes them. ANSWERS gets a list
// of tensors for each request, or the text of the error; `torch.load(ANSWERS, weights_only=False)` reads it. Each thread
// answers every N-th request, `repeat` times, and keeps the last answers. With `--layout once`, the edges of each request
// are sorted once, by the models of a package that was written with `keep_layout=True`. On a GPU (`--device cuda`), the
// time of a request begins when it is in the GPU's memory, and ends when the answer is complete there; each thread has a
// stream of its own. The numbers are written to stdout as JSON, times in microseconds.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include "fixed_graph.h"
#include "package_file.h"

namespace {

using Request = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string package, requests, answers;
  int64_t threads = 1, repeat = 1;
  at::Device device = at::kCPU;
  bool once = false;
};

Options parse(const std::vector<std::string>& arguments) {
  if (arguments.size() < 3 || arguments.size() % 2 == 0)
    throw std::invalid_argument("usage: server PACKAGE REQUESTS ANSWERS [--threads N] [--repeat N] [--device cpu] "
                                "[--layout each|once]");
  Options options{arguments[0], arguments[1], arguments[2]};
  for (size_t i = 3; i < arguments.size(); i += 2) {
    const std::string& value = arguments[i + 1];
    if (arguments[i] == "--threads") options.threads = std::stoll(value);
    else if (arguments[i] == "--repeat") options.repeat = std::stoll(value);
    else if (arguments[i] == "--device") options.device = at::Device(value);
    else if (arguments[i] == "--layout" && (value == "each" || value == "once")) options.once = value == "once";
    else throw std::invalid_argument("found " + arguments[i] + " " + value +
                                     ", expected --threads N, --repeat N, --device cpu or --layout each|once");
  }
  if (options.threads < 1 || options.repeat < 1) throw std::invalid_argument("--threads and --repeat must be positive");
  return options;
}

std::vector<Request> read(const Options& options) {
  std::ifstream file(options.requests, std::ios::binary);
  if (!file) throw std::invalid_argument("no file " + options.requests);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const c10::IValue loaded = torch::pickle_load(bytes);
  std::vector<Request> requests;
  for (const c10::IValue& one : loaded.toListRef()) {
    Request request;
    for (const c10::IValue& tensor : one.toListRef()) request.push_back(tensor.toTensor().to(options.device));
    requests.push_back(std::move(request));
  }
  return requests;
}

// Answers requests: each on its own, or with layouts that their first answers leave.
class Server {
 public:
  Server(const Options& options, const std::vector<Request>& requests) : requests_(requests) {
    // One runner for each thread: with fewer, a refused call can leave another thread waiting for ever.
    if (!options.once) {
      plain_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(options.package, "model", false, options.threads,
                                                                         options.device.index());
      return;
    }
    fixed_ = std::make_unique<FixedGraph>(options.package, options.threads, options.device.index());
    layouts_.resize(requests.size());
  }

  // One thread at a time may ask for the same request.
  std::vector<at::Tensor> answer(size_t at) {
    if (plain_) return plain_->run(requests_[at]);
    if (layouts_[at].empty()) layouts_[at] = fixed_->layout(requests_[at]);
    return fixed_->run(layouts_[at], requests_[at]);
  }

 private:
  const std::vector<Request>& requests_;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> plain_;
  std::unique_ptr<FixedGraph> fixed_;
  std::vector<std::vector<at::Tensor>> layouts_;
};

// The words of an error, without torch's stack.
std::string words(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs ? torchs->what_without_backtrace() : error.what();
}

// What one thread did: the answer to each of its requests, the number of calls that were answered, and the times of the
// last of them.
struct Work {
  static constexpr size_t kTimes = 1 << 16;

  std::vector<std::pair<size_t, c10::IValue>> answers;
  size_t answered = 0;
  std::vector<double> times;

  void took(double microseconds) {
    if (times.size() < kTimes) times.push_back(microseconds);
    else times[answered % kTimes] = microseconds;
    ++answered;
  }
};

Work serve(Server& server, size_t requests, int64_t thread, const Options& options, const c10::Stream& own) {
  const c10::InferenceMode inference;
  c10::OptionalStreamGuard stream;
  if (options.device.is_cuda()) stream.reset_stream(own);
  // Threads that serve at the same time share the cores.
  at::set_num_threads(std::max<int>(1, std::thread::hardware_concurrency() / options.threads));
  Work work;
  for (int64_t round = 0; round < options.repeat; ++round) {
    for (size_t at = thread; at < requests; at += options.threads) {
      const auto start = Clock::now();
      c10::IValue answer;
      try {
        const std::vector<at::Tensor> found = server.answer(at);
        if (options.device.is_cuda()) stream.current_stream()->synchronize();
        work.took(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
        if (round + 1 < options.repeat) continue;
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& one : found) tensors.push_back(one.cpu());
        answer = tensors;
      } catch (const std::exception& error) {
        answer = words(error);
      }
      if (round + 1 == options.repeat) work.answers.emplace_back(at, std::move(answer));
    }
  }
  return work;
}

double quantile(const std::vector<double>& sorted, double part) {
  return sorted.empty() ? 0 : sorted[std::min(sorted.size() - 1, size_t(part * sorted.size()))];
}

// The memory of this process in MiB, where Linux tells it.
int64_t resident() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, pages = 0;
  file >> total >> pages;
  return pages * 4096 / (1 << 20);
}

void run(const Options& options) {
  PackageFile(options.package).check();
  const std::vector<Request> requests = read(options);
  Server server(options, requests);
  for (size_t at = 0; at < requests.size(); ++at) {
    try {
      server.answer(at);
    } catch (const std::exception&) {  // answered below
    }
  }
  if (options.device.is_cuda())
    c10::impl::VirtualGuardImpl(options.device.type()).getStream(options.device).synchronize();
  const int64_t before = resident();
  std::vector<Work> works(options.threads);
  std::vector<c10::Stream> streams;  // each thread has its own on a GPU
  for (int64_t t = 0; t < options.threads; ++t)
    streams.push_back(options.device.is_cuda()
                          ? c10::impl::VirtualGuardImpl(options.device.type()).getStreamFromGlobalPool(options.device)
                          : c10::Stream(c10::Stream::DEFAULT, options.device));
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < options.threads; ++t)
    threads.emplace_back([&, t] { works[t] = serve(server, requests.size(), t, options, streams[t]); });
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();

  std::vector<c10::IValue> answers(requests.size());
  std::vector<double> times;
  size_t answered = 0;
  for (Work& work : works) {
    answered += work.answered;
    for (auto& [at, answer] : work.answers) answers[at] = std::move(answer);
    times.insert(times.end(), work.times.begin(), work.times.end());
  }
  std::sort(times.begin(), times.end());
  c10::List<c10::IValue> all(c10::AnyType::get());
  for (c10::IValue& answer : answers) all.push_back(std::move(answer));
  const std::vector<char> bytes = torch::pickle_save(all);
  std::ofstream(options.answers, std::ios::binary).write(bytes.data(), bytes.size());
  std::cout << "{\"answered\": " << answered << ", \"p50\": " << quantile(times, 0.5)
            << ", \"p99\": " << quantile(times, 0.99) << ", \"per second\": " << answered / seconds
            << ", \"MiB before\": " << before << ", \"MiB after\": " << resident() << "}\n";
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(parse({arguments + 1, arguments + count}));
  } catch (const std::exception& error) {
    std::cerr << "server: " << words(error) << '\n';
    return 1;
  }
  return 0;
}
