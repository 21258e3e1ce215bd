// The compiled module bipace_kernels._native.
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/parallel.h"

namespace bipace {

void bind_stages(py::module_& m);
void bind_action_keys(py::module_& m);

namespace {

// For the tests of the pool: every task runs once, at any thread count.
py::list parallel_squares(int64_t n_tasks, int n_threads) {
  std::vector<int64_t> out(static_cast<size_t>(n_tasks));
  {
    const GilReleased release;
    parallel_for(n_tasks, n_threads, [&](int64_t task, int) { out[static_cast<size_t>(task)] += task * task; });
  }
  py::list result;
  for (const int64_t value : out) result.append(value);
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
  m.def("parallel_squares", &bipace::parallel_squares);
  bipace::bind_stages(m);
  bipace::bind_similar(m);
  bipace::bind_action_keys(m);
  bipace::bind_clusters(m);
}
