// What one look at each fingerprint row tells: whether it has a direction, how to scale it, and its hash
// (cpu/rows.cpp).
#include "cuda/elements.h"

namespace bipace {
namespace {

constexpr int kThreads = 256;

enum Found : int { kFine = 0, kNotFinite = 1, kZero = 2 };
enum Kind : int { kUsable = 0, kAlone = 1, kNotTaken = 2 };

// Rows whose largest magnitude lies in [2^kLeast, 2^kMost) are multiplied as they are: no square over- or underflows.
constexpr int kLeast = -40, kMost = 40;

template <int dtype>
struct Format {
  static constexpr uint32_t kInfinity = dtype == kFloat32 ? 0x7F800000u : dtype == kBfloat16 ? 0x7F80u : 0x7C00u;
  static constexpr int kMantissa = dtype == kFloat32 ? 23 : dtype == kBfloat16 ? 7 : 10;
  static constexpr uint32_t kMagnitude = dtype == kFloat32 ? 0x7FFFFFFFu : 0x7FFFu;
};

// The power of two that brings a magnitude outside [2^kLeast, 2^kMost) near 1; 1 for all others.  2^-p need not be a
// float32 where p = floor(log2); the nearest one leaves at least 2^-22.
template <int dtype>
BIPACE_DEVICE float scale_of(uint32_t magnitude) {
  constexpr int kBias = static_cast<int>(Format<dtype>::kInfinity >> (Format<dtype>::kMantissa + 1));
  const int exponent = static_cast<int>(magnitude >> Format<dtype>::kMantissa);
  // Of a denormal: the place of its highest bit.
  const int highest = static_cast<int>(gpu::bits_of(static_cast<float>(magnitude)) >> 23) - 127;
  const int power = exponent > 0 ? exponent - kBias : highest - kBias + 1 - Format<dtype>::kMantissa;
  if (power >= kLeast && power < kMost) return 1.0f;
  const int opposite = -power < -126 ? -126 : -power > 127 ? 127 : -power;
  return gpu::float_of(static_cast<uint32_t>(opposite + 127) << 23);
}

// Of an element and its place; products wrap around.
BIPACE_DEVICE uint64_t mix(uint32_t bits, int64_t e) {
  uint64_t z = bits * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(e) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 29)) * 0x94D049BB133111EBull;
  return z ^ (z >> 32);
}

}  // namespace

struct LookArgs {
  Rows rows;
  int64_t n;              // M
  uint8_t* state;         // [M] Found, or null
  uint8_t* kind;          // [M] Kind, or null
  float* scale;           // [M], with kind
  uint64_t* row_hash;     // [M] equal for rows that compare equal, or null
  int64_t hash_bits;      // fewer than 64 make rows collide, for tests
  const uint8_t* usable;  // [M] bool, or null
  const uint8_t* taken;   // [M] bool, or null
};

namespace {

template <int dtype>
BIPACE_DEVICE void look(const LookArgs& a, int64_t i) {
  uint32_t most = 0;
  uint64_t mixed = 0;
  const bool hashes = a.row_hash != nullptr;
  for_elements<dtype>(a.rows, a.rows.at(i), a.rows.aligned(), [&](int64_t e, uint32_t bits) {
    const uint32_t magnitude = bits & Format<dtype>::kMagnitude;
    most = magnitude > most ? magnitude : most;
    if (hashes) mixed += mix(magnitude ? bits : 0, e);  // −0.0 equals 0.0
  });
  most = gpu::warp_max(most);
  if (hashes) {
    for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) mixed += gpu::shuffle_xor(mixed, mask);
    mixed ^= mixed >> 31;
    if (a.hash_bits < 64) mixed &= (1ull << a.hash_bits) - 1;
  }
  if (gpu::lane() != 0) return;
  const int found = most >= Format<dtype>::kInfinity ? kNotFinite : most == 0 ? kZero : kFine;
  if (a.state) a.state[i] = static_cast<uint8_t>(found);
  if (a.kind) {
    int what = found == kFine && (!a.usable || a.usable[i]) ? kUsable : kAlone;
    if (a.taken && !a.taken[i]) what = kNotTaken;
    a.kind[i] = static_cast<uint8_t>(what);
    a.scale[i] = found == kFine ? scale_of<dtype>(most) : 1.0f;
  }
  if (hashes) a.row_hash[i] = mixed;
}

}  // namespace

// A warp per row.
BIPACE_KERNEL(look_at_rows, LookArgs, kThreads) {
  const int64_t i = gpu::block() * (kThreads / gpu::kWarp) + gpu::warp();
  if (i >= a.n) return;
  if (a.rows.dtype == kFloat32) {
    look<kFloat32>(a, i);
  } else if (a.rows.dtype == kBfloat16) {
    look<kBfloat16>(a, i);
  } else {
    look<kFloat16>(a, i);
  }
}

struct FirstEqualRowArgs {
  Rows rows;
  const int64_t* group_offsets;  // [G+1]
  const uint8_t* kind;           // [M]
  const uint64_t* row_hash;      // [M]
  int64_t blocks;                // of kRecords records that the longest group has
  int64_t* first;  // [M]: the first record whose row equals this one; itself where there is none; −1: not taken
};

namespace {

constexpr int kRecords = kThreads / gpu::kWarp;

// Whether rows i and j are equal as given, −0.0 equal to 0.0; by a warp.
template <int dtype>
BIPACE_DEVICE bool equal_rows(const Rows& rows, int64_t i, int64_t j) {
  const int64_t other = rows.at(j);
  bool differs = false;
  for (int64_t e = gpu::lane(); e < rows.dim; e += gpu::kWarp) {
    const uint32_t mine = element_bits<dtype>(rows, rows.at(i), e), theirs = element_bits<dtype>(rows, other, e);
    differs |= mine != theirs && ((mine | theirs) & Format<dtype>::kMagnitude) != 0;
  }
  return !gpu::any(differs);
}

template <int dtype>
BIPACE_DEVICE void find_first_equal(const FirstEqualRowArgs& a, int64_t begin, int64_t i) {
  int64_t found = i;
  if (a.kind[i] == kUsable) {
    for (int64_t start = begin; start < i && found == i; start += gpu::kWarp) {
      const int64_t j = start + gpu::lane();
      uint32_t alike = gpu::ballot(j < i && a.kind[j] == kUsable && a.row_hash[j] == a.row_hash[i]);
      for (int place = 0; alike && found == i; ++place, alike >>= 1) {
        if ((alike & 1u) && equal_rows<dtype>(a.rows, i, start + place)) found = start + place;
      }
    }
  }
  if (gpu::lane() == 0) a.first[i] = a.kind[i] == kNotTaken ? -1 : found;
}

}  // namespace

// ε = 0.  A warp per record looks through the group's earlier hashes; rows whose hashes agree are compared themselves.
BIPACE_KERNEL(first_equal_row, FirstEqualRowArgs, kThreads) {
  const int64_t group = gpu::block() / a.blocks;
  const int64_t begin = a.group_offsets[group];
  const int64_t i = begin + gpu::block() % a.blocks * kRecords + gpu::warp();
  if (i >= a.group_offsets[group + 1]) return;
  if (a.rows.dtype == kFloat32) {
    find_first_equal<kFloat32>(a, begin, i);
  } else if (a.rows.dtype == kBfloat16) {
    find_first_equal<kBfloat16>(a, begin, i);
  } else {
    find_first_equal<kFloat16>(a, begin, i);
  }
}

}  // namespace bipace
