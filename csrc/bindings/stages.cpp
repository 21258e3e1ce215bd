// Bindings of the stages that need no more than their arguments converted.
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/clusters.h"
#include "cpu/critic.h"
#include "cpu/episode.h"
#include "cpu/ngrams.h"
#include "cpu/observations.h"
#include "cpu/returns.h"
#include "cpu/values.h"

namespace bipace {

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
  m.attr("longest_sweep") = kLongestSweep;
}

}  // namespace bipace
