// Bindings of the stages: of all but the texts of cluster_similar only the arguments are converted.
#include "cpu/stages.h"

#include <limits>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/critic.h"

namespace bipace {
namespace {

// The tuple keeps every string alive while the GIL is released.
void cluster_texts(const py::tuple& texts, Address group_offsets, int64_t n_groups, double similarity, int n_threads,
                   Address labels) {
  const int64_t* offsets = pointer<const int64_t>(group_offsets);
  if (offsets[n_groups] != static_cast<int64_t>(texts.size())) throw py::value_error("group_offsets must end at texts");
  std::vector<Text> views;
  for (const py::handle& item : texts) {
    PyObject* text = item.ptr();
    if (!PyUnicode_Check(text)) throw py::type_error("texts must be str");
#if PY_VERSION_HEX < 0x030C0000
    if (PyUnicode_READY(text) != 0) throw py::error_already_set();
#endif
    if (PyUnicode_GET_LENGTH(text) > std::numeric_limits<int32_t>::max()) {
      throw py::value_error("observation must hold texts of fewer than 2**31 characters; cut them off");
    }
    views.push_back({PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text), static_cast<int>(PyUnicode_KIND(text))});
  }
  const GilReleased release;
  cluster_similar(views.data(), offsets, n_groups, similarity, n_threads, pointer<int64_t>(labels));
}

}  // namespace

void bind_stages(py::module_& m) {
  const auto release = py::call_guard<GilReleased>();
  m.def("discounted_returns", bound(&discounted_returns), release);
  m.def("trajectory_returns", bound(&trajectory_returns), release);
  m.def("episode_advantage", bound(&episode_advantage), release);
  m.def("step_advantage", bound(&step_advantage), release);
  m.def("hgpo_advantage", bound(&hgpo_advantage), release);
  m.def("cluster_values", bound(&cluster_values), release);
  m.def("unit_rows", bound(&unit_rows), release);
  m.def("whitened_rows", bound(&whitened_rows), release);
  m.def("centred_rows", bound(&centred_rows), release);
  m.def("kernel_values", bound(&kernel_values), release);
  m.def("gae_advantage", bound(&gae_advantage), release);
  m.def("same_action_advantage", bound(&same_action_advantage), release);
  m.def("normed_advantage", bound(&normed_advantage), release);
  m.def("ngram_fingerprints", bound(&ngram_fingerprints), release);
  m.def("cluster_exact", bound(&cluster_exact), release);
  m.def("cluster_history", bound(&cluster_history), release);
  m.def("scan_rows", bound(&scan_rows), release);
  m.def("cluster_cosine", bound(&cluster_cosine), release);
  m.def("cluster_sweep", bound(&cluster_sweep), release);
  m.def("cluster_similar", &cluster_texts);
  m.attr("longest_sweep") = kLongestSweep;
}

}  // namespace bipace
