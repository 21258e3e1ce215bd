// Shared by the two ways of clustering: block by block (clusters.cpp), and from one Gram matrix (sweep.cpp).
#pragma once

#include <cfenv>

#include "common/greedy.h"

namespace bipace {

// Squares of norms inside these limits: products neither overflow nor underflow, and the row is read unscaled.
inline bool readable_in_place(double square) { return square >= 1e-23 && square <= 1e30; }

// Callers may have set flush-to-zero on their thread, unlike the pool's threads: this makes the arithmetic the same.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace bipace
