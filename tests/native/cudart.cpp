// A CUDA runtime that launches nothing and writes down what it is asked, for csrc/cuda/launch.cpp where no GPU is: four
// GPUs, 0 the current one.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace {

int current = 0;
std::string said;
const int kernel_entry = 0;
const bipace::cuda::Kernel kernel("one", &kernel_entry, 16);

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  said += "set " + std::to_string(device) + "; ";
  if (device < 0 || device > 3) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  said += "allow " + std::to_string(value) + " on " + std::to_string(current) + "; ";
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  said += "launch on " + std::to_string(current) + ", stream " +
          std::to_string(reinterpret_cast<size_t>(config->stream)) + "; ";
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "";
}
const char* cudaGetErrorString(cudaError_t) { return "words"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int*) { return cudaErrorUnknown; }
cudaError_t cudaRuntimeGetVersion(int*) { return cudaErrorUnknown; }
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorUnknown; }

// What the runtime was asked by a launch, and the words of its error.
const char* launch_one(int device, long long shared, size_t stream) {
  said.clear();
  const char words[16] = {};
  try {
    bipace::cuda::launch(*bipace::cuda::find("one"), {2, 1, 32, shared}, words, sizeof words, device,
                         reinterpret_cast<void*>(stream));
  } catch (const std::runtime_error& error) {
    said += error.what();
  }
  return said.c_str();
}
}
