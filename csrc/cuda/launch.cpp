#include "cuda/launch.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

namespace bipace {
namespace cuda {
namespace {

const Kernel*& head() {
  static const Kernel* first = nullptr;  // a function's static: kernels register before main(), in any order
  return first;
}

constexpr int64_t kSharedWithoutAsking = 48 * 1024;

std::string described(const Kernel& kernel, const Shape& shape) {
  return std::string("CUDA kernel ") + kernel.name + " of " + std::to_string(shape.grid_x) + " × " +
         std::to_string(shape.grid_y) + " blocks of " + std::to_string(shape.threads) + " threads, " +
         std::to_string(shape.shared) + " bytes of shared memory";
}

Status failed(const Kernel& kernel, const Shape& shape, cudaError_t error) {
  return Status::error(described(kernel, shape) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
                       ")");
}

}  // namespace

Kernel::Kernel(const char* kernel, const void* function, size_t bytes, int threads)
    : name(kernel), entry(function), args_bytes(bytes), most_threads(threads), next(head()) {
  head() = this;
}

const Kernel* all() { return head(); }

const Kernel* find(const char* name) {
  const Kernel* kernel = head();
  while (kernel && std::strcmp(kernel->name, name) != 0) kernel = kernel->next;
  return kernel;
}

Status launch(const Kernel& kernel, const Shape& shape, const uint64_t* words, size_t n_words, void* stream) {
  if (n_words * sizeof(uint64_t) != kernel.args_bytes) {
    return Status::error(described(kernel, shape) + " takes " + std::to_string(kernel.args_bytes / sizeof(uint64_t)) +
                         " arguments, got " + std::to_string(n_words));
  }
  // An error of earlier, asynchronous work sticks to the context; this launch is not its cause, and says so.
  if (const cudaError_t before = cudaPeekAtLastError(); before != cudaSuccess) {
    return Status::error(std::string("an error from before the launch of ") + described(kernel, shape) + ": " +
                         cudaGetErrorString(before) + " (" + cudaGetErrorName(before) + ")");
  }
  if (shape.shared > kSharedWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
    if (error != cudaSuccess) return failed(kernel, shape, error);
  }
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y), 1);
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), 1, 1);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared);
  config.stream = static_cast<cudaStream_t>(stream);
  if (shape.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  void* args[] = {const_cast<uint64_t*>(words)};  // the struct itself is the kernel's one argument
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel.entry, args);
  return error == cudaSuccess ? Status::ok() : failed(kernel, shape, error);
}

Versions versions() {
  Versions found{0, 0};
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  if (cudaRuntimeGetVersion(&found.runtime) != cudaSuccess) found.runtime = 0;
  cudaGetLastError();
  return found;
}

}  // namespace cuda
}  // namespace bipace
