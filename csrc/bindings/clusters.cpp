#include "cpu/clusters.h"

#include <algorithm>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/dot.h"
#include "cpu/sweep.h"

namespace bipace {
namespace {

Rows rows_of(uintptr_t data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim) {
  return {pointer<const void>(data), static_cast<DType>(dtype), row_stride, column_stride, dim};
}

// The kernel itself, for the tests: x_i . x_j for all pairs of contiguous float32 rows.
py::list dot_products(uintptr_t data, int64_t n, int64_t dim) {
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
  const auto release = py::call_guard<GilReleased>();
  m.def(
      "scan_rows",
      [](uintptr_t data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim, uintptr_t order,
         int64_t n_records, int n_threads, uintptr_t state) {
        scan_rows(rows_of(data, dtype, row_stride, column_stride, dim), pointer<const int64_t>(order), n_records,
                  n_threads, pointer<uint8_t>(state));
      },
      release);
  m.def(
      "cluster_cosine",
      [](uintptr_t data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim, uintptr_t order,
         uintptr_t group_offsets, int64_t n_groups, uintptr_t usable, double epsilon, int n_threads, uintptr_t labels) {
        cluster_cosine(rows_of(data, dtype, row_stride, column_stride, dim), pointer<const int64_t>(order),
                       pointer<const int64_t>(group_offsets), n_groups, pointer<const uint8_t>(usable), epsilon,
                       n_threads, pointer<int64_t>(labels));
      },
      release);
  m.attr("longest_sweep") = kLongestSweep;
  m.def(
      "cluster_sweep",
      [](uintptr_t data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim, uintptr_t order,
         uintptr_t group_offsets, int64_t n_groups, uintptr_t usable, uintptr_t epsilons, int64_t n_epsilons,
         int n_threads, uintptr_t labels) {
        cluster_sweep(rows_of(data, dtype, row_stride, column_stride, dim), pointer<const int64_t>(order),
                      pointer<const int64_t>(group_offsets), n_groups, pointer<const uint8_t>(usable),
                      pointer<const double>(epsilons), n_epsilons, n_threads, pointer<int64_t>(labels));
      },
      release);
}

}  // namespace bipace
