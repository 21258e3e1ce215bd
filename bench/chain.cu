// The dependency of the greedy scan and nothing else: how fast can records follow each other at all?
//
// One block repeats, `steps` times: the largest of K values in shared memory and the oldest place that holds it, known to
// every thread; one fused multiply-add on the winner.  The next step depends on it, as the next record's decision
// depends on the centroid that the last one joined.  No Gram matrix, no rows, no memory traffic: a floor under any scan.
//
// Values lie at [p * THREADS + thread], so that each thread
// reads and writes places of its own and one barrier a step is enough.

namespace {

constexpr int kMaxWarps = 32;

// Larger floats are larger unsigned numbers; 0 is below every float.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}

struct Best {
  unsigned key;
  unsigned place;
};

// The largest key of a warp and its smallest place, known to all lanes.
__device__ __forceinline__ Best best_of_warp(Best mine) {
  const unsigned key = __reduce_max_sync(0xffffffffu, mine.key);
  const unsigned place = __reduce_min_sync(0xffffffffu, mine.key == key ? mine.place : 0xffffffffu);
  return {key, place};
}

template <int THREADS, int PER>
__device__ __forceinline__ void chain(float* values,       // [k], read at the start, written at the end
                                      unsigned* checksum,  // [1], of the winners
                                      int k, int steps, float a, float b) {
  constexpr int kWarps = THREADS / 32;
  __shared__ volatile float held[THREADS * PER];
  __shared__ Best warps[2][kMaxWarps];
  const unsigned thread = threadIdx.x;
  for (int p = 0; p < PER; ++p) {
    const unsigned place = p * THREADS + thread;
    held[place] = place < static_cast<unsigned>(k) ? values[place] : __uint_as_float(0xff800000u);
  }
  if (thread < kMaxWarps) warps[0][thread] = warps[1][thread] = {0u, 0xffffffffu};
  __syncthreads();

  unsigned sum = 0;
  for (int step = 0; step < steps; ++step) {
    Best best = {0u, 0xffffffffu};
#pragma unroll
    for (int p = 0; p < PER; ++p) {
      const unsigned key = ordered(held[p * THREADS + thread]);
      if (key > best.key) best = {key, p * THREADS + thread};
    }
    best = best_of_warp(best);
    if (kWarps > 1) {
      Best* of_warps = warps[step & 1];  // the other half may still be read by a slower warp
      if (thread % 32 == 0) of_warps[thread / 32] = best;
      __syncthreads();
      best = best_of_warp(of_warps[thread % 32]);
    }
    sum = sum * 31u + best.place;
    if (best.place % THREADS == thread) held[best.place] = fmaf(held[best.place], a, b);
  }

  for (int p = 0; p < PER; ++p) {
    const unsigned place = p * THREADS + thread;
    if (place < static_cast<unsigned>(k)) values[place] = held[place];
  }
  if (thread == 0) *checksum = sum;
}

}  // namespace

// bench/chain.py reads this list: threads of the block, values of a thread.
#define FOR_EACH_VARIANT(DO) \
  DO(32, 1) DO(32, 2) DO(32, 4) DO(64, 1) DO(64, 2) DO(128, 1) DO(32, 16) DO(64, 8) DO(128, 4) DO(256, 2) DO(512, 1) \
  DO(64, 32) DO(128, 16) DO(256, 8) DO(512, 4) DO(1024, 2)

#define DEFINE(THREADS, PER) \
  extern "C" __global__ void __launch_bounds__(THREADS) chain_##THREADS##x##PER( \
      float* values, unsigned* checksum, int k, int steps, float a, float b) { \
    chain<THREADS, PER>(values, checksum, k, steps, a, b); \
  }
FOR_EACH_VARIANT(DEFINE)

// 0, or the CUDA error; 1 (invalid value) where there is no such variant.
#define LAUNCH(THREADS, PER) \
  if (threads == THREADS && per == PER) { \
    chain_##THREADS##x##PER<<<1, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(values, checksum, k, steps, a, b); \
    return static_cast<int>(cudaGetLastError()); \
  }
extern "C" int chain_launch(int threads, int per, float* values, unsigned* checksum, int k, int steps, float a, float b,
                            void* stream) {
  FOR_EACH_VARIANT(LAUNCH)
  return 1;
}
