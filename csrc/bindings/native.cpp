// The compiled module bipace_kernels._native.
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/gram.h"
#include "cpu/greedy.h"
#include "cpu/parallel.h"

namespace bipace {

void bind_stages(py::module_& m);
void bind_action_keys(py::module_& m);

namespace {

// For the tests of the pool: every task runs once, at any thread count.
py::list parallel_squares(int64_t n_tasks, int n_threads) {
  std::vector<int64_t> out(n_tasks);
  {
    const GilReleased release;
    parallel_for(n_tasks, n_threads, [&](int64_t task, int) { out[task] += task * task; });
  }
  py::list result;
  for (const int64_t value : out) result.append(value);
  return result;
}

// For the tests of the kernels: x_i . x_j for all pairs of contiguous float32 rows.
std::vector<double> dot_products(Address data, int64_t n, int64_t dim) {
  const Rows rows{data.memory, DType::kFloat32, dim, 1, dim};
  std::vector<ScaledRow> a;
  for (int64_t i = 0; i < n; ++i) a.push_back({i, 1.0f});
  const std::vector<ScaledRow> b = a;  // not the same rows to multiply_rows: all pairs
  const int64_t stride = round_up(n, kTileA);
  std::vector<double> out(n * stride, 0.0), result;
  multiply_rows(rows, dot_kernels(), a.data(), n, b.data(), n, out.data(), stride);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) result.push_back(out[j * stride + i]);
  }
  return result;
}

}  // namespace
}  // namespace bipace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of bipace_kernels.  Private: call the functions of bipace_kernels instead.";
  m.attr("cuda_decision") = BIPACE_CUDA_DECISION;  // whether this build has CUDA kernels, and why not
  bipace::prepare_unwinding();
  pybind11::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const bipace::Interrupted&) {
      // PyErr_CheckSignals has set the error already: KeyboardInterrupt, or what the user's handler raised.
    }
  });
  m.def("isa", [] { return std::string(bipace::dot_kernels().name); });
  m.def("set_isa", &bipace::set_isa);
  m.def("parallel_squares", &bipace::parallel_squares);
  m.def("dot_products", &bipace::dot_products);
  bipace::bind_stages(m);
  bipace::bind_action_keys(m);
}
