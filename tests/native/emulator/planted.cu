// Kernels with a fault each, which the emulator has to find, and the same without it.
#include "cuda/intrinsics.h"
#include "planted.h"

namespace bipace {

constexpr int kThreads = 128;

BIPACE_KERNEL(write_beyond, BeyondArgs, kThreads) {
  int32_t* at = a.shared ? reinterpret_cast<int32_t*>(gpu::shared_memory()) : a.out;
  at[gpu::thread() + a.beyond] = gpu::thread();
}

BIPACE_KERNEL(leave_early, FlagArgs, kThreads) {
  if (a.fault && gpu::thread() == 77) return;
  gpu::sync_block();
}

BIPACE_KERNEL(part_ways, FlagArgs, kThreads) {
  if (a.fault && gpu::lane() < 16) {
    gpu::any(true);
  } else {
    gpu::shuffle(1, 0);
  }
}

BIPACE_KERNEL(collectives, CollectivesArgs, 32) {
  const int l = gpu::lane();
  const int32_t v = a.values[l];
  a.out[l] = gpu::shuffle(v, (l + 5) % 32);
  a.out[32 + l] = gpu::shuffle_xor(v, 3);
  a.out[64 + l] = gpu::shuffle_up(v, 2);
  a.out[96 + l] = gpu::warp_max(v);
  const uint32_t positive = gpu::ballot(v > 0), before = positive & ((1u << l) - 1);
  a.out[128 + l] = static_cast<int32_t>(positive);
  a.out[160 + l] = gpu::count_bits(before);
  a.out[192 + l] = gpu::lowest_bit(before);
  a.out[224 + l] = gpu::highest_bit(before);
  gpu::atomic_min(a.least, static_cast<uint64_t>(static_cast<int64_t>(v)));
}

BIPACE_KERNEL(widen, WidenArgs, 32) {
  const int64_t i = gpu::block() * 32 + gpu::lane();
  a.out[i] = gpu::from_f16(a.values[i]);
}

constexpr int kGroupThreads = gpu::kGroup;

// Twice the product of four sets of 16 elements each, by a group of warps.
BIPACE_KERNEL(multiply_together, ProductArgs, kGroupThreads) {
  unsigned char* const rows = gpu::shared_memory();  // [192, 128 bytes]: x, then y
  const int t = gpu::thread();
  for (int c = t; c < 192 * 8; c += kGroupThreads) {
    const int row = c / 8, copy = c % 8;
    const uint16_t* const from = row < 64 ? a.x + row * 64 : a.y + (row - 64) * 64;
    gpu::copy_async(rows + row * 128 + ((copy ^ (row & 7)) << 4), from + copy * 8, 16);
  }
  gpu::copy_commit();
  gpu::copy_wait<0>();
  if (a.fault != 1) gpu::show_tensor_cores();
  gpu::sync_block();
  float sums[64];
  for (int time = 0; time < 2; ++time) {
    if (a.fault != 4) gpu::products_begin(sums);
    for (int k = 0; k < 4; ++k) {
      const uint64_t x = gpu::described(rows + k * 32), y = gpu::described(rows + 64 * 128 + k * 32);
      if (a.bf16) {
        gpu::multiply_group<true>(sums, x, y, time || k);
      } else {
        gpu::multiply_group<false>(sums, x, y, time || k);
      }
    }
    gpu::products_commit();
  }
  gpu::products_wait<1>();
  if (a.fault == 3) rows[t] ^= 1;
  gpu::sync_block();
  if (a.fault != 2) gpu::products_wait<0>();
  const int at_i = t / 32 * 16 + t % 32 / 4, at_j = t % 4 * 2;
  for (int e = 0; e < 64; ++e) a.out[(at_i + e / 2 % 2 * 8) * 128 + at_j + e / 4 * 8 + e % 2] = sums[e];
  gpu::products_wait<0>();
}

}  // namespace bipace
