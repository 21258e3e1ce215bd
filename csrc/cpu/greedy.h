// What the two ways of clustering share: block by block (clusters.cpp), and from one Gram matrix (sweep.cpp).
#pragma once

#include <cfenv>

#include "common/greedy.h"

namespace bipace {

// Squares of norms inside these limits: no product over- or underflows, and the row is read as it stands.
inline bool readable_in_place(double square) { return square >= 1e-23 && square <= 1e30; }

// Callers may have set flush-to-zero on their thread and the pool's threads have not: the same arithmetic for all.
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
