#include <algorithm>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/dot.h"

namespace bipace {
namespace {

// The kernel itself, for the tests: x_i . x_j for all pairs of contiguous float32 rows.
py::list dot_products(Address data, int64_t n, int64_t dim) {
  const DotKernels& dot = dot_kernels();
  const float* x = pointer<const float>(data);
  const int64_t panel = panel_length(dim), stride = (n + kTileA - 1) / kTileA * kTileA;
  std::vector<double> out(static_cast<size_t>(n * stride), 0.0);
  for (int64_t first = 0; first < dim; first += panel) {
    for (int64_t i = 0; i < n; i += kTileA) {
      const float* a[kTileA];
      const float* b[kTileB];
      for (int64_t m = 0; m < kTileA; ++m) a[m] = x + std::min(i + m, n - 1) * dim + first;
      for (int64_t j = 0; j < n; j += kTileB) {
        const int64_t width = std::min<int64_t>(kTileB, n - j);
        double* to[kTileB];
        for (int64_t m = 0; m < width; ++m) {
          b[m] = x + (j + m) * dim + first;
          to[m] = out.data() + (j + m) * stride + i;
        }
        dot.tile[n - i > 4 ? 1 : 0][width - 1](a, b, std::min(panel, dim - first), reinterpret_cast<const char*>(x),
                                               to);
      }
    }
  }
  py::list result;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) result.append(out[static_cast<size_t>(i * stride + j)]);
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
