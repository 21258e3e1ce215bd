// bfloat16 and float16 to float32, exactly (every value of either is a float32), and back, rounded once.
// static: a source built for another instruction set keeps its own copy, or the linker might choose that one for all.
#pragma once

#include <cstdint>
#include <cstring>

namespace bipace {

static inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float bf16_to_float(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

static inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1F) return float_from_bits(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return float_from_bits(sign);
  uint32_t shift = 0;  // a denormal of float16 is a normal float32
  while (!(mantissa & 0x400u)) mantissa <<= 1, ++shift;
  return float_from_bits(sign | ((113 - shift) << 23) | ((mantissa & 0x3FFu) << 13));
}

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// To the nearest, ties to even; NaN stays NaN.
static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// To the nearest, ties to even; beyond 65,504 and its rounding comes infinity, NaN stays NaN.
static inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7FFFFFFFu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the result, a multiple of 2^-24, in the low bits, rounded by the addition itself.
    const float rounded = float_from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(rounded) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace bipace
