// Which accesses to memory nothing but luck puts in order: those of two threads, one of them a write, between which
// there is no barrier that both passed.
//
// Every thread counts its barriers, and knows of each other thread up to which count it has seen that one's work: a
// barrier tells all who stand at it what each of them knows.  Of every byte the last write is kept, and who has read
// since. Accesses of different blocks are in no order at all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace bipace {
namespace emulator {

using Counts = std::vector<uint32_t>;  // [threads]

struct Seen {
  std::shared_ptr<const Counts> others;
  uint32_t own = 1;  // the barriers passed, from 1 on
};

// Who stand at a barrier know from there on what each of them knew.
inline void meet(const std::vector<Seen*>& present, const std::vector<int>& threads, size_t of) {
  auto all = std::make_shared<Counts>(of, 0u);
  const Counts* last = nullptr;
  for (const Seen* seen : present) {
    if (!seen->others || seen->others.get() == last) continue;
    last = seen->others.get();
    for (size_t t = 0; t < of; ++t) (*all)[t] = std::max((*all)[t], (*last)[t]);
  }
  for (size_t i = 0; i < present.size(); ++i) {
    uint32_t& known = (*all)[static_cast<size_t>(threads[i])];
    known = std::max(known, present[i]->own++);
  }
  for (Seen* seen : present) seen->others = all;
}

class Races {
 public:
  struct Access {
    int64_t block = -1;
    int thread = 0;
    uint32_t count = 0;
  };

  // The access that this one is not ordered after; none: null.
  const Access* enter(uintptr_t at, size_t bytes, bool writes, const Access& now, const Seen& seen) {
    const auto before = [&](const Access& one) {
      if (one.block < 0) return true;
      if (one.block != now.block) return false;
      return one.thread == now.thread || (seen.others && (*seen.others)[static_cast<size_t>(one.thread)] >= one.count);
    };
    for (size_t i = 0; i < bytes; ++i) {
      Byte& byte = of(at + i);
      if (!before(byte.write)) return &byte.write;
      if (writes) {
        for (const Access& read : byte.reads) {
          if (!before(read)) return &read;
        }
        byte.write = now;
        byte.reads.clear();
      } else if (byte.reads.empty() || byte.reads.back().thread != now.thread || byte.reads.back().block != now.block) {
        if (byte.reads.size() >= 64) {  // those that come before this one need not be kept
          byte.reads.erase(std::remove_if(byte.reads.begin(), byte.reads.end(), before), byte.reads.end());
        }
        byte.reads.push_back(now);
      } else {
        byte.reads.back() = now;
      }
    }
    return nullptr;
  }
  // Memory that ends: a block's own.
  void forget(uintptr_t from, size_t bytes) {
    for (uintptr_t at = from; at < from + bytes; ++at) of(at) = {};
  }

 private:
  struct Byte {
    Access write;
    std::vector<Access> reads;
  };
  static constexpr uintptr_t kPage = 1024;
  Byte& of(uintptr_t at) {
    if (at / kPage != page_) {
      page_ = at / kPage;
      auto& page = pages_[page_];
      if (!page) page.reset(new Byte[kPage]);
      bytes_ = page.get();
    }
    return bytes_[at % kPage];
  }
  std::unordered_map<uintptr_t, std::unique_ptr<Byte[]>> pages_;
  uintptr_t page_ = 0;
  Byte* bytes_ = nullptr;
};

}  // namespace emulator
}  // namespace bipace
