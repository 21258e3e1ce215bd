// What the two ways of clustering share: block by block (clusters.cpp), and from one Gram matrix (sweep.cpp).
#pragma once

#include <cfenv>
#include <cmath>

namespace bipace {

constexpr double kBand = 1e-5;  // tau of the two decisions

// Squares of norms inside these limits: no product over- or underflows, and the row is read as it stands.
inline bool readable_in_place(double square) { return square >= 1e-23 && square <= 1e30; }

// |a c + b x|^2 for a = 1 - 1/m, b = 1/m: x joins as member m the unit centroid c with s = c . x.
inline double joined_square(double m, double s) {
  const double b = 1.0 / m, a = 1.0 - b;
  return 1.0 - 2.0 * a * b * (1.0 - s);
}

struct Join {
  double change, weight;  // c . y becomes c . y + change (c . y) + weight (x . y)
};

inline Join join(double m, double s) {
  const double b = 1.0 / m, a = 1.0 - b, q = 2.0 * a * b * (1.0 - s), u = std::sqrt(1.0 - q);
  return {q / (u * (1.0 + u)) - b / u, b / u};
}

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
