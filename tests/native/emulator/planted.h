// The arguments of planted.cu, as csrc/cuda/arguments.h has those of the package.
#pragma once

#include "cuda/arguments.h"

// clang-format off
namespace bipace {

ARGUMENTS(BeyondArgs, planted, write_beyond)
POINTER(out, int32_t)           // [kThreads]
INTEGER(shared)                 // into shared memory or into out
INTEGER(beyond)                 // elements
END

ARGUMENTS(FlagArgs, planted, leave_early, part_ways)
INTEGER(fault)
END

ARGUMENTS(CollectivesArgs, planted, collectives)
POINTER(values, const int32_t)  // [32]
POINTER(out, int32_t)           // [8, 32]: shuffle, _xor, _up, warp_max, ballot, count_bits, lowest_bit, highest
POINTER(least, uint64_t)        // the least of v as unsigned numbers, and of what stands there
END

ARGUMENTS(WidenArgs, planted, widen)
POINTER(values, const uint16_t)  // [blocks, 32] float16
POINTER(out, float)
END

ARGUMENTS(ProductArgs, planted, multiply_together)
POINTER(x, const uint16_t)      // [64, 64] bfloat16 or float16
POINTER(y, const uint16_t)      // [128, 64]
POINTER(out, float)             // [64, 128] = x · yᵀ + x · yᵀ
INTEGER(bf16)
INTEGER(fault)  // 0 none; 1 copies are not shown, 2 sums are read early, 3 rows are overwritten early, 4 not begun
END

}  // namespace bipace
