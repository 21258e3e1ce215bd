#include "cuda/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

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

// Errors of work that ran: they persist in the context, and every later call returns them.
bool sticks(cudaError_t error) {
  const auto all = {cudaErrorIllegalAddress,    cudaErrorLaunchFailure,      cudaErrorLaunchTimeout,
                    cudaErrorMisalignedAddress, cudaErrorIllegalInstruction, cudaErrorInvalidAddressSpace,
                    cudaErrorInvalidPc,         cudaErrorHardwareStackError, cudaErrorAssert,
                    cudaErrorECCUncorrectable};
  return std::find(all.begin(), all.end(), error) != all.end();
}

std::runtime_error failed(const Kernel& kernel, const Shape& shape, cudaError_t error) {
  cudaGetLastError();  // else the next launch would report this one's error
  std::string text = described(kernel, shape) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  if (sticks(error)) {
    text +=
        ". It was found at this launch, but kernels run later than they are called, so work put on the GPU before it "
        "is the likelier cause: CUDA_LAUNCH_BLOCKING=1 makes the error come from the call that failed. The GPU answers "
        "no more in this process; start a new one";
  } else if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
             error == cudaErrorUnsupportedPtxVersion) {
    text += std::string(". This build has kernels for ") + built() + ", and the GPU can run none of them";
  }
  return std::runtime_error(text);
}

// Makes a GPU the current one of the calling thread, to this runtime too.  The runtime is linked into this module and
// torch has another: what torch made current is what this one goes by only as far as both ask the driver.
cudaError_t make_current(int device) {
  int current = 0;
  const cudaError_t error = cudaGetDevice(&current);
  return error != cudaSuccess || current == device ? error : cudaSetDevice(device);
}

// Lets the kernel have more shared memory than every kernel may, on the current device.  Asked once per kernel, device
// and larger size, and never lowered: another thread may be about to launch with more.
cudaError_t allow_shared(const Kernel& kernel, int64_t bytes, int device) {
  static std::mutex mutex;
  static std::map<std::pair<const Kernel*, int>, int64_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t& most = allowed[{&kernel, device}];
  if (bytes <= most) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) most = bytes;
  return error;
}

}  // namespace

Kernel::Kernel(const char* kernel, const void* function, size_t bytes)
    : name(kernel), entry(function), args_bytes(bytes), next(head()) {
  head() = this;
}

const Kernel* find(const char* name) {
  const Kernel* kernel = head();
  while (kernel && std::strcmp(kernel->name, name) != 0) kernel = kernel->next;
  return kernel;
}

// The runtime is linked into this module, so its last error is only ours: torch neither sees nor clears it.  Errors
// that persist in the context are returned by the launch itself.
void launch(const Kernel& kernel, const Shape& shape, const void* struct_of_args, size_t n_bytes, int device,
            void* stream) {
  if (n_bytes != kernel.args_bytes) {
    throw std::runtime_error(described(kernel, shape) + " takes " +
                             std::to_string(kernel.args_bytes / sizeof(uint64_t)) + " arguments, got " +
                             std::to_string(n_bytes / sizeof(uint64_t)));
  }
  cudaError_t error = make_current(device);
  if (error == cudaSuccess && shape.shared > kSharedWithoutAsking) error = allow_shared(kernel, shape.shared, device);
  if (error != cudaSuccess) throw failed(kernel, shape, error);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y), 1);
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), 1, 1);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared);
  config.stream = static_cast<cudaStream_t>(stream);
  void* args[] = {const_cast<void*>(struct_of_args)};  // the struct itself is the kernel's one argument
  error = cudaLaunchKernelExC(&config, kernel.entry, args);
  if (error != cudaSuccess) throw failed(kernel, shape, error);
}

std::pair<int, int> versions() {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  cudaGetLastError();
  return {driver, runtime};
}

int64_t shared_memory(int device) {
  int bytes = 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return bytes;
}

const char* built() { return BIPACE_CUDA_BUILT; }

}  // namespace cuda
}  // namespace bipace
