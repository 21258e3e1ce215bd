#include "cpu/similar.h"

#include <limits>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"

namespace bipace {
namespace {

Text view(PyObject* object, Py_ssize_t row) {
  if (!PyUnicode_Check(object)) {
    throw py::type_error("observation must hold str for partition 'similar', got " +
                         std::string(Py_TYPE(object)->tp_name) + " at index " + std::to_string(row) +
                         "; convert it to str, or use partition='exact'");
  }
#if PY_VERSION_HEX < 0x030C0000
  if (PyUnicode_READY(object) != 0) throw py::error_already_set();
#endif
  if (PyUnicode_GET_LENGTH(object) > std::numeric_limits<int32_t>::max()) {
    throw py::value_error("observation must hold texts of at most 2**31 - 1 characters, got " +
                          std::to_string(PyUnicode_GET_LENGTH(object)) + " at index " + std::to_string(row) +
                          "; cut it off, or use partition='exact'");
  }
  return {PyUnicode_DATA(object), PyUnicode_GET_LENGTH(object), static_cast<int>(PyUnicode_KIND(object))};
}

// The tuple keeps every string alive while the GIL is released.
void cluster_similar_binding(const py::tuple& texts, Address group_offsets, int64_t n_groups, double similarity,
                             int n_threads, Address labels) {
  const int64_t* offsets = pointer<const int64_t>(group_offsets);
  const Py_ssize_t n = PyTuple_GET_SIZE(texts.ptr());
  if (offsets[n_groups] != n) throw py::value_error("group_offsets must end at the number of texts");
  std::vector<Text> views;
  views.reserve(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) views.push_back(view(PyTuple_GET_ITEM(texts.ptr(), i), i));
  const GilReleased release;
  cluster_similar(views.data(), offsets, n_groups, similarity, n_threads, pointer<int64_t>(labels));
}

}  // namespace

void bind_similar(py::module_& m) { m.def("cluster_similar", &cluster_similar_binding); }

}  // namespace bipace
