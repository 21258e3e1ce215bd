#include "cpu/dot.h"

#include <atomic>
#include <cstring>

namespace bipace {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
std::atomic<int> g_cap{2};

// The best set supported by both this build and this machine.
int supported() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  const bool avx2 =
      dot_avx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = dot_avx512() && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? 2 : avx2 ? 1 : 0;
#else
  return 0;
#endif
}

}  // namespace

const DotKernels& dot_kernels() {
  static const int best = supported();
  const int cap = g_cap.load(std::memory_order_relaxed);
  const int level = cap < best ? cap : best;
  return *(level == 2 ? dot_avx512() : level == 1 ? dot_avx2() : dot_baseline());
}

bool set_isa(const char* name) {
  for (int level = 0; level < 3; ++level) {
    if (std::strcmp(name, kNames[level]) == 0) {
      g_cap.store(level, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace bipace
