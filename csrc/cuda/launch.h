// The kernels of this build by name, and one way to launch them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace bipace {
namespace cuda {

// A kernel makes itself known where it is defined (BIPACE_KERNEL).
struct Kernel {
  Kernel(const char* kernel, const void* function, size_t bytes);

  const char* name;
  const void* entry;
  size_t args_bytes;   // of its struct of 8-byte fields
  const Kernel* next;  // all kernels are a list
};

const Kernel* find(const char* name);

struct Shape {
  int64_t grid_x, grid_y;
  int threads;     // of a block, a multiple of 32
  int64_t shared;  // bytes per block
};

// Launches on a GPU, by its index in this process, and a stream of it, from any thread, without synchronizing.  `args`
// is the kernel's struct.  Throws std::runtime_error, which names the kernel and its shape.
void launch(const Kernel& kernel, const Shape& shape, const void* args, size_t n_bytes, int device, void* stream);

// Driver found and runtime built in, as CUDA numbers them (13000: 13.0); a driver of 0: there is none.
std::pair<int, int> versions();

// Bytes of shared memory available to a block of this GPU; 0 if CUDA does not say.
int64_t shared_memory(int device);

// Targets of the kernels: "sm_80 sm_90 compute_90" is machine code of two architectures and PTX of one.
const char* built();

}  // namespace cuda
}  // namespace bipace
