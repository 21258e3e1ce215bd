#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/gram.h"
#include "cpu/greedy.h"

namespace bipace {
namespace {

// For the tests of the kernels: x_i . x_j for all pairs of contiguous float32 rows.
std::vector<double> dot_products(Address data, int64_t n, int64_t dim) {
  const Rows rows{data.memory, DType::kFloat32, dim, 1, dim};
  std::vector<ScaledRow> a;
  for (int64_t i = 0; i < n; ++i) a.push_back({i, 1.0f});
  const std::vector<ScaledRow> b = a;  // not the same rows to multiply_rows: all pairs
  const int64_t stride = round_up(n, kTileA);
  std::vector<double> out(static_cast<size_t>(n * stride), 0.0), result;
  multiply_rows(rows, dot_kernels(), a.data(), n, b.data(), n, out.data(), stride);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) result.push_back(out[j * stride + i]);
  }
  return result;
}

}  // namespace

void bind_clusters(py::module_& m) {
  m.def("isa", [] { return std::string(dot_kernels().name); });
  m.def("set_isa", [](const std::string& name) {
    if (!set_isa(name.c_str())) {
      throw py::value_error("isa must be one of baseline, avx2, avx512, got '" + name +
                            "'; leave it out to use the best");
    }
  });
  m.def("dot_products", &dot_products);
}

}  // namespace bipace
