// Bindings of the stages that need no more than their arguments converted.
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/clusters.h"
#include "cpu/critic.h"
#include "cpu/episode.h"
#include "cpu/ngrams.h"
#include "cpu/observations.h"
#include "cpu/returns.h"
#include "cpu/sweep.h"
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
  m.def(
      "kernel_values",
      [](const Rows& rows, Address order, Address returns, Address time, Address group_offsets, int64_t n_groups,
         Address usable, Address landmarks, int64_t n_landmarks, int share, double width, double horizon, double noise,
         double same, Address value, Address products, int threads) {
        kernel_values(rows, pointer<const int64_t>(order), pointer<const float>(returns), pointer<const int64_t>(time),
                      pointer<const int64_t>(group_offsets), n_groups, pointer<const uint8_t>(usable),
                      pointer<const int64_t>(landmarks), n_landmarks, static_cast<Share>(share),
                      ValueKernel{width, horizon, noise, same}, pointer<double>(value), pointer<double>(products),
                      threads);
      },
      release);
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
