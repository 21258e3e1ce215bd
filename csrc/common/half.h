// bfloat16 and float16 to float32, exactly: every value of either is a float32.
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

}  // namespace bipace
