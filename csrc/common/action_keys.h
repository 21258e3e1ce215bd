// Seeds of action keys: they keep the kinds of key apart, so that equal bytes under different meanings differ.
#pragma once

#include "common/hd.h"

namespace bipace {

constexpr uint64_t kSeedFirstN = 1, kSeedActionTag = 2, kSeedTextPrefix = 3, kSeedText = 4;

}  // namespace bipace
