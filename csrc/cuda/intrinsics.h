// Everything of CUDA that the kernels use: where a thread stands, barriers, shuffles, shared memory, asynchronous
// copies, tensor cores.  Kernels name nothing of CUDA's own, so that the same sources compile three ways:
//
//   nvcc        into the wheel (csrc/cuda/launch.cpp launches them);
//   NVRTC       through cupy.RawModule, where the wheel came without them: no host header is included here;
//   BIPACE_EMULATOR as plain C++ for the CPU (tests/native/emulator), where every thread of a block is a fibre and the
//               order in which they run is the test's to choose.
//
// A kernel is  BIPACE_KERNEL(name, NameArgs, threads) { … a.field … }  with one argument `a`, a struct of arguments.h.
#pragma once

#include "common/hd.h"

#ifdef BIPACE_EMULATOR
#include "emulator.h"
#else

#define BIPACE_DEVICE __device__ __forceinline__
// At most `threads` per block: the compiler then knows how many registers a thread may take.
#define BIPACE_ENTRY(name, Args, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name(const Args a)
#ifdef __CUDACC_RTC__
#define BIPACE_KERNEL(name, Args, threads) BIPACE_ENTRY(name, Args, threads)
#else
#include "cuda/launch.h"
#define BIPACE_KERNEL(name, Args, threads)                                                                    \
  BIPACE_ENTRY(name, Args, threads);                                                                          \
  static const bipace::cuda::Kernel kernel_##name(#name, reinterpret_cast<const void*>(&name), sizeof(Args)); \
  BIPACE_ENTRY(name, Args, threads)
#endif

namespace bipace {
namespace gpu {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// ---- where the thread stands ----------------------------------------------------------------------------------------
BIPACE_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
BIPACE_DEVICE int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
BIPACE_DEVICE int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
BIPACE_DEVICE int64_t block() { return blockIdx.x; }
BIPACE_DEVICE int64_t block_y() { return blockIdx.y; }
BIPACE_DEVICE int64_t blocks() { return gridDim.x; }

// ---- barriers: every thread of the block, every lane of the warp, must arrive ---------------------------------------
BIPACE_DEVICE void sync_block() { __syncthreads(); }
BIPACE_DEVICE void sync_warp() { __syncwarp(); }

// ---- shared memory: as many bytes as the launch asked for, from a multiple of 1,024 on -----------------------------
BIPACE_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char bipace_shared[];
  return bipace_shared;
}

// By its own addresses, which are of 32 bits; those of two and four values are aligned to 8 and 16 bytes.
BIPACE_DEVICE uint32_t shared_address(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }
BIPACE_DEVICE float load_shared(uint32_t at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}
BIPACE_DEVICE void load_shared(float& x, float& y, uint32_t at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(at) : "memory");
}
BIPACE_DEVICE void load_shared(float (&v)[4], uint32_t at) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(at)
               : "memory");
}
BIPACE_DEVICE void store_shared(uint32_t at, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}
BIPACE_DEVICE void store_shared(uint32_t at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

// ---- among the lanes of a warp --------------------------------------------------------------------------------------
template <typename T>
BIPACE_DEVICE T shuffle(T value, int from) {
  return __shfl_sync(kAllLanes, value, from);
}
template <typename T>
BIPACE_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
template <typename T>
BIPACE_DEVICE T shuffle_up(T value, int by) {
  return __shfl_up_sync(kAllLanes, value, by);
}
BIPACE_DEVICE bool any(bool value) { return __any_sync(kAllLanes, value) != 0; }
BIPACE_DEVICE uint32_t ballot(bool value) { return __ballot_sync(kAllLanes, value); }
// One instruction from compute capability 8.0 on.
BIPACE_DEVICE int32_t warp_max(int32_t value) { return __reduce_max_sync(kAllLanes, value); }

// ---- bits of a ballot -----------------------------------------------------------------------------------------------
BIPACE_DEVICE int count_bits(uint32_t bits) { return __popc(bits); }
BIPACE_DEVICE int count_below(uint32_t bits, int lane) { return __popc(bits & ((1u << lane) - 1u)); }
BIPACE_DEVICE int lowest_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }  // -1: there is none
BIPACE_DEVICE int highest_bit(uint32_t bits) { return 31 - __clz(static_cast<int>(bits)); }

// ---- atomics: on integers alone, where the order of additions changes no bit ----------------------------------------
BIPACE_DEVICE uint64_t atomic_min(uint64_t* at, uint64_t value) {
  return atomicMin(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}

// ---- arithmetic whose rounding is meant -----------------------------------------------------------------------------
BIPACE_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
BIPACE_DEVICE float div_rn(float a, float b) { return __fdiv_rn(a, b); }
BIPACE_DEVICE float sqrt_rn(float a) { return __fsqrt_rn(a); }
// One instruction each, within 2 ulp; 0 and infinity for what is subnormal.
BIPACE_DEVICE float rsqrt_quick(float a) {
  float value;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
BIPACE_DEVICE float reciprocal_quick(float a) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
BIPACE_DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
BIPACE_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
BIPACE_DEVICE float from_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// The same element of another row, of so many bytes, in memory that no kernel writes meanwhile.
BIPACE_DEVICE float load_of_row(const float* first, uint32_t row, uint32_t bytes) {
  float value;
  asm("{.reg .b64 at; mad.wide.u32 at, %1, %2, %3; ld.global.f32 %0, [at];}"
      : "=f"(value)
      : "r"(row), "r"(bytes), "l"(first));
  return value;
}

// ---- global to shared memory, behind the thread's back --------------------------------------------------------------
// 16 bytes, both ends aligned to 16; of which the first `bytes` (0 to 16) are read and the rest are zeros.
BIPACE_DEVICE void copy_async(void* to_shared, const void* from, int bytes) {
  const uint32_t to = shared_address(to_shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
BIPACE_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most `pending` of this thread's groups are under way; other threads' copies need a barrier after it.
template <int pending>
BIPACE_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// ---- tensor cores ---------------------------------------------------------------------------------------------------
// Four 8 × 8 matrices of 16-bit values: lane 8q + r names row r of matrix q (16 bytes, aligned); each lane gets two
// neighbours of row lane / 4 of each.
BIPACE_DEVICE void load_matrices(uint32_t (&out)[4], const void* row_in_shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row_in_shared))
               : "memory");
}
// c += a · b for a [16, 16] and b [16, 8] of bfloat16 (or float16), c [16, 8] float32, spread over the warp as PTX lays
// down for mma.m16n8k16.
template <bool bf16>
BIPACE_DEVICE void multiply_warp(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- tensor cores of compute capability 9.0, which groups of four warps feed ----------------------------------------
// Code for 9.0 itself (sm_90a) has them, and nothing else.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BIPACE_WARPGROUPS 1
constexpr int kGroup = 4 * kWarp;
// The group of the thread, known to the compiler to be the same for a whole warp: products stand in no branch but such.
BIPACE_DEVICE int group() { return __shfl_sync(kAllLanes, thread() / kGroup, 0); }

// What this thread has written to shared memory, its asynchronous copies that it has waited for among it, tensor cores
// see after a barrier.
BIPACE_DEVICE void show_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of sums that products under way may change: nothing of theirs moves past here.
template <int n>
BIPACE_DEVICE void hold(float (&c)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

// Before products that add to registers which have been written, and before the first.
template <int n>
BIPACE_DEVICE void products_begin(float (&c)[n]) {
  hold(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
BIPACE_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `pending` committed sets of products of the warp are under way.
template <int pending>
BIPACE_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// c (+)= a · b for a of 64 rows and b of 128, of 16 elements each (`described`), spread over the group as PTX lays down
// for wgmma.m64n128k16; without `add` c is written.  All warps of the group together; c changes until products_wait.
#define BIPACE_MULTIPLY(kind)                                                                                       \
  asm volatile(                                                                                                     \
      "{.reg .pred p;\n"                                                                                            \
      "setp.ne.b32 p, %66, 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind                                                  \
      " {"                                                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                            \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                            \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                           \
      "%64, %65, p, 1, 1, 0, 0;}\n"                                                                                 \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), \
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),      \
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),     \
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),     \
        "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),     \
        "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),     \
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),     \
        "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])                   \
      : "l"(a), "l"(b), "r"(static_cast<int>(add))                                                                  \
      : "memory")
template <bool bf16>
BIPACE_DEVICE void multiply_group(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  if (bf16) {
    BIPACE_MULTIPLY("bf16");
  } else {
    BIPACE_MULTIPLY("f16");
  }
}
#undef BIPACE_MULTIPLY
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace gpu
}  // namespace bipace
#endif

namespace bipace {
namespace gpu {

// The matrix descriptor (PTX manual) of 16 elements of rows of 128 bytes in shared memory, for tensor cores of 9.0:
// eight rows to a multiple of 1,024 bytes, and within a row the 16-byte pieces of row r exchanged by r % 8.
BIPACE_DEVICE uint64_t described(const void* rows) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024ull >> 4 << 32, kUnused = 1ull << 16;
  return kSwizzle128 | kEightRows | kUnused | (shared_address(rows) & 0x3FFFFu) >> 4;
}

}  // namespace gpu
}  // namespace bipace
