#include "cpu/keyed_hash.h"

#include <random>

namespace bipace {

const HashKey& hash_key() {
  static const HashKey drawn = [] {
    std::random_device device;
    const auto word = [&] { return static_cast<uint64_t>(device()) << 32 | device(); };
    const uint64_t first = word();
    return HashKey{first, word()};
  }();
  return drawn;
}

}  // namespace bipace
