// The compiled module bipace_kernels._cuda: the kernels of csrc/cuda/ by name.
#include "bindings/bindings.h"
#include "cuda/launch.h"

namespace bipace {
namespace {

// Puts a kernel on a stream of a GPU; `words` is its struct, `device` the GPU's index as torch has it, `stream` the
// address of a cudaStream_t.
void launch(const char* name, int64_t grid_x, int64_t grid_y, int threads, int64_t shared, const py::bytes& words,
            int device, Address stream) {
  const cuda::Kernel* kernel = cuda::find(name);
  if (!kernel) throw std::runtime_error(std::string("this build has no CUDA kernel named ") + name);
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(words.ptr(), &data, &size) != 0) throw py::error_already_set();
  py::gil_scoped_release release;  // a launch waits where the stream's queue is full
  cuda::launch(*kernel, {grid_x, grid_y, threads, shared}, data, static_cast<size_t>(size), device,
               pointer<void>(stream));
}

}  // namespace
}  // namespace bipace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of bipace_kernels.  Private: call the functions of bipace_kernels instead.";
  m.def("launch", &bipace::launch);
  m.def("versions", &bipace::cuda::versions);            // of driver (0: none) and runtime, 13000 for 13.0
  m.def("shared_memory", &bipace::cuda::shared_memory);  // bytes that a block of a GPU may ask for
  m.attr("built") = bipace::cuda::built();               // e.g. "sm_80 sm_90 compute_90"
}
