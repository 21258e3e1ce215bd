// The CPU emulator of csrc/cuda/intrinsics.h: the same names, with every thread of a block a fibre.  A fibre runs until
// it has to wait for others; whose turn comes next is drawn every time, so that what is right under one order of
// the threads only comes out wrong under another.  Stricter than a GPU: a barrier that a thread has left out, by
// returning or by standing at another one, is an error; shared memory begins as garbage; asynchronous copies arrive as
// late as they may, and their places hold garbage until then.  Blocks follow one another.
//
// Compiled with -fsanitize=thread, kernels report each access to memory (races.h), and one that only luck orders after
// another thread's is an error as well.  What orders are the barriers of intrinsics.h; that lanes exchange values is no
// promise about memory.
//
// A test names a place in the kernels, by file and line, whose barrier or wait is left out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

using std::max;
using std::min;

#include "common/half.h"

// The vector type of CUDA that kernels load through, aligned as there.
struct alignas(16) float4 {
  float x, y, z, w;
};

#define BIPACE_DEVICE inline
#define BIPACE_KERNEL(name, Args, threads)                                                              \
  static void name(const Args& a);                                                                      \
  static const bipace::emulator::Kernel emulator_##name(                                                \
      #name, sizeof(Args), threads, [](const void* words) { name(*static_cast<const Args*>(words)); }); \
  static void name(const Args& a)

namespace bipace {
namespace emulator {

struct Kernel {
  using Body = void (*)(const void* words);
  Kernel(const char* kernel, size_t bytes, int threads, Body run);

  const char* name;
  size_t args_bytes;
  int most_threads;
  Body body;
  const Kernel* next;
};

struct Place {
  int thread, threads;
  int64_t block, block_y, blocks;
  unsigned char* shared;
};
const Place& place();  // of the fibre that runs

// What an instruction reads that the compiler does not see.
void read(const void* at, size_t bytes);
// Whether a call is the one that is left out.
bool is_left_out(const char* file, int line);
#define BIPACE_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

void wait_for_block(const char* what);
void wait_for_warp(const char* what);
// All lanes leave a value and, once every one has, see all 32.
const unsigned char* exchange(const char* what, const void* value, size_t bytes, size_t& stride);
void start_copy(void* to, const void* from, int bytes);
void commit_copies();
void finish_copies(int pending);
void show_copies();
void begin_products();
void start_product(float* sums, uint64_t a, uint64_t b, bool add, bool bf16);
void commit_products();
void finish_products(int pending);
[[noreturn]] void fail(const std::string& why);

}  // namespace emulator

namespace gpu {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

inline int thread() { return emulator::place().thread; }
inline int lane() { return thread() % kWarp; }
inline int warp() { return thread() / kWarp; }
inline int64_t block() { return emulator::place().block; }
inline int64_t block_y() { return emulator::place().block_y; }
inline int64_t blocks() { return emulator::place().blocks; }
inline void sync_block(BIPACE_PLACE) {
  if (!emulator::is_left_out(file, line)) emulator::wait_for_block("sync_block");
}
inline void sync_warp(BIPACE_PLACE) {
  if (!emulator::is_left_out(file, line)) emulator::wait_for_warp("sync_warp");
}
inline unsigned char* shared_memory() { return emulator::place().shared; }

// Addresses of shared memory: bytes from its beginning on.
inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(at) - emulator::place().shared);
}
inline float* in_shared(uint32_t at, uint32_t bytes) {
  if (at % bytes) emulator::fail("an access of " + std::to_string(bytes) + " bytes of shared memory is not aligned");
  return reinterpret_cast<float*>(emulator::place().shared + at);
}
inline float load_shared(uint32_t at) { return *in_shared(at, 4); }
inline void load_shared(float& x, float& y, uint32_t at) {
  const float* const from = in_shared(at, 8);
  x = from[0], y = from[1];
}
inline void load_shared(float (&v)[4], uint32_t at) {
  const float* const from = in_shared(at, 16);
  for (int i = 0; i < 4; ++i) v[i] = from[i];
}
inline void store_shared(uint32_t at, float value) { *in_shared(at, 4) = value; }
inline void store_shared(uint32_t at, float x, float y) {
  float* const to = in_shared(at, 8);
  to[0] = x, to[1] = y;
}

template <typename T>
struct Lanes {
  T value[kWarp];
};
template <typename T>
Lanes<T> gather(const char* what, const T& mine) {
  static_assert(std::is_trivially_copyable<T>::value, "lanes exchange plain values");
  size_t stride = 0;
  const unsigned char* all = emulator::exchange(what, &mine, sizeof mine, stride);
  Lanes<T> out;
  for (int i = 0; i < kWarp; ++i) std::memcpy(&out.value[i], all + static_cast<size_t>(i) * stride, sizeof(T));
  return out;
}

template <typename T>
T shuffle(T value, int from) {
  return gather("shuffle", value).value[from & (kWarp - 1)];
}
template <typename T>
T shuffle_xor(T value, int mask) {
  return gather("shuffle_xor", value).value[lane() ^ mask];
}
template <typename T>
T shuffle_up(T value, int by) {
  return gather("shuffle_up", value).value[lane() < by ? lane() : lane() - by];
}
inline uint32_t ballot(bool value) {
  const Lanes<bool> all = gather("ballot", value);
  uint32_t bits = 0;
  for (int i = 0; i < kWarp; ++i) bits |= static_cast<uint32_t>(all.value[i]) << i;
  return bits;
}
inline bool any(bool value) { return ballot(value) != 0; }
template <typename T>
T warp_max(T value) {
  const Lanes<T> all = gather("warp_max", value);
  return *std::max_element(all.value, all.value + kWarp);
}

inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }
inline int count_below(uint32_t bits, int lane) { return __builtin_popcount(bits & ((1u << lane) - 1u)); }
inline int lowest_bit(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)) - 1; }
inline int highest_bit(uint32_t bits) { return bits ? 31 - __builtin_clz(bits) : -1; }

// One fibre runs at a time, so plain arithmetic is atomic.
__attribute__((no_sanitize("thread"))) inline uint64_t atomic_min(uint64_t* at, uint64_t value) {
  const uint64_t old = *at;
  *at = std::min(old, value);
  return old;
}

inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float div_rn(float a, float b) { return a / b; }
inline float sqrt_rn(float a) { return std::sqrt(a); }
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A GPU's answers are off by an ulp or two, and not by the same on every architecture: here by one, now up, now down.
inline float nearly(double exact) {
  const float value = static_cast<float>(exact);
  const uint32_t bits = bits_of(value), hash = bits * 2654435761u >> 30;
  return std::isfinite(value) && value != 0.0f ? float_of(bits + (hash == 0) - (hash == 1)) : value;
}
inline float rsqrt_quick(float a) { return nearly(1.0 / std::sqrt(static_cast<double>(a))); }
inline float reciprocal_quick(float a) { return nearly(1.0 / static_cast<double>(a)); }

inline float load_of_row(const float* first, uint32_t row, uint32_t bytes) {
  return first[static_cast<size_t>(row) * (bytes / 4)];
}
inline float from_f16(uint16_t bits) { return f16_to_float(bits); }

inline void copy_async(void* to_shared, const void* from, int bytes) { emulator::start_copy(to_shared, from, bytes); }
inline void copy_commit() { emulator::commit_copies(); }
template <int pending>
void copy_wait(BIPACE_PLACE) {
  if (!emulator::is_left_out(file, line)) emulator::finish_copies(pending);
}

void load_matrices(uint32_t (&out)[4], const void* row_in_shared);
template <bool bf16>
void multiply_warp(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// Groups of four warps.  What a product reads must be there when it begins and stay until it is waited for, and until
// then its sums are NaN.
#define BIPACE_WARPGROUPS 1
constexpr int kGroup = 4 * kWarp;
inline int group() { return thread() / kGroup; }
inline void show_tensor_cores(BIPACE_PLACE) {
  if (!emulator::is_left_out(file, line)) emulator::show_copies();
}
template <int n>
void hold(float (&)[n]) {}
template <int n>
void products_begin(float (&)[n]) {
  emulator::begin_products();
}
inline void products_commit() { emulator::commit_products(); }
template <int pending>
void products_wait(BIPACE_PLACE) {
  if (!emulator::is_left_out(file, line)) emulator::finish_products(pending);
}
template <bool bf16>
void multiply_group(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  emulator::start_product(c, a, b, add, bf16);
}

}  // namespace gpu
}  // namespace bipace
