// Bindings of the small stages: returns, episode, values, critic, observations, n-grams.
#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "cpu/critic.h"
#include "cpu/episode.h"
#include "cpu/ngrams.h"
#include "cpu/observations.h"
#include "cpu/returns.h"
#include "cpu/values.h"

namespace bipace {

using Address = uintptr_t;

void bind_stages(py::module_& m) {
  const auto release = py::call_guard<GilReleased>();
  m.def(
      "discounted_returns",
      [](Address rewards, Address step, Address offsets, int64_t n_trajectories, double gamma, Address out,
         int threads) {
        discounted_returns(pointer<const double>(rewards), pointer<const int64_t>(step),
                           pointer<const int64_t>(offsets), n_trajectories, gamma, pointer<float>(out), threads);
      },
      release);
  m.def(
      "trajectory_returns",
      [](Address rewards, Address step, Address offsets, int64_t n_trajectories, Address out, int threads) {
        trajectory_returns(pointer<const double>(rewards), pointer<const int64_t>(step),
                           pointer<const int64_t>(offsets), n_trajectories, pointer<float>(out), threads);
      },
      release);
  m.def(
      "episode_advantage",
      [](Address returns, Address trajectory_offsets, Address group_trajectories, int64_t n_groups, bool over_steps,
         bool divide, bool lone_raw, double delta, Address out, int threads) {
        episode_advantage(pointer<const float>(returns), pointer<const int64_t>(trajectory_offsets),
                          pointer<const int64_t>(group_trajectories), n_groups,
                          EpisodeRule{over_steps, divide, lone_raw, delta}, pointer<float>(out), threads);
      },
      release);
  m.def(
      "step_advantage",
      [](Address returns, Address labels, int64_t n_records, int64_t n_clusters, Address action_key, int estimator,
         bool divide, double delta, Address step, Address branch, int threads) {
        step_advantage(pointer<const float>(returns), pointer<const int64_t>(labels), n_records, n_clusters,
                       pointer<const int64_t>(action_key), static_cast<Estimator>(estimator), divide, delta,
                       pointer<float>(step), pointer<uint8_t>(branch), threads);
      },
      release);
  m.def(
      "hgpo_advantage",
      [](Address returns, Address depth_labels, int64_t depth, int64_t n_records, Address episode, bool divide,
         double delta, double alpha, bool base_group, Address advantage, Address deepest, Address branch, int threads) {
        hgpo_advantage(pointer<const float>(returns), pointer<const int64_t>(depth_labels), depth, n_records,
                       pointer<const float>(episode), divide, delta, alpha, base_group, pointer<float>(advantage),
                       pointer<int64_t>(deepest), pointer<uint8_t>(branch), threads);
      },
      release);
  m.def(
      "cluster_values",
      [](Address returns, Address labels, Address group_offsets, int64_t n_groups, double shrinkage, Address value,
         int threads) {
        cluster_values(pointer<const float>(returns), pointer<const int64_t>(labels),
                       pointer<const int64_t>(group_offsets), n_groups, shrinkage, pointer<double>(value), threads);
      },
      release);
  m.def(
      "kernel_values",
      [](Address data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim, Address order,
         Address returns, Address time, Address group_offsets, int64_t n_groups, Address usable, Address landmarks,
         int64_t n_landmarks, int share, double width, double horizon, double noise, double same, Address value,
         Address products, int threads) {
        const Rows rows{pointer<const void>(data), static_cast<DType>(dtype), row_stride, column_stride, dim};
        kernel_values(rows, pointer<const int64_t>(order), pointer<const float>(returns), pointer<const int64_t>(time),
                      pointer<const int64_t>(group_offsets), n_groups, pointer<const uint8_t>(usable),
                      pointer<const int64_t>(landmarks), n_landmarks, static_cast<Share>(share),
                      ValueKernel{width, horizon, noise, same}, pointer<double>(value), pointer<double>(products),
                      threads);
      },
      release);
  m.def(
      "gae_advantage",
      [](Address rewards, Address value, Address step, Address trajectory_offsets, int64_t n_trajectories,
         Address truncated, double gamma, double gae_lambda, Address out, int threads) {
        gae_advantage(pointer<const double>(rewards), pointer<const double>(value), pointer<const int64_t>(step),
                      pointer<const int64_t>(trajectory_offsets), n_trajectories, pointer<const uint8_t>(truncated),
                      gamma, gae_lambda, pointer<double>(out), threads);
      },
      release);
  m.def(
      "same_action_advantage",
      [](Address data, int dtype, int64_t row_stride, int64_t column_stride, int64_t dim, Address order,
         Address advantage, Address time, Address action_key, Address group_offsets, int64_t n_groups, Address usable,
         Address parsed, double width, double horizon, double noise, Address products, Address out, int threads) {
        const Rows rows{pointer<const void>(data), static_cast<DType>(dtype), row_stride, column_stride, dim};
        same_action_advantage(rows, pointer<const int64_t>(order), pointer<const double>(advantage),
                              pointer<const int64_t>(time), pointer<const int64_t>(action_key),
                              pointer<const int64_t>(group_offsets), n_groups, pointer<const uint8_t>(usable),
                              pointer<const uint8_t>(parsed), width, horizon, noise, pointer<double>(products),
                              pointer<double>(out), threads);
      },
      release);
  m.def(
      "normed_advantage",
      [](Address advantage, Address returns, Address group_offsets, int64_t n_groups, int step_norm, Address out,
         int threads) {
        normed_advantage(pointer<const double>(advantage), pointer<const float>(returns),
                         pointer<const int64_t>(group_offsets), n_groups, static_cast<StepNorm>(step_norm),
                         pointer<float>(out), threads);
      },
      release);
  m.def(
      "ngram_fingerprints",
      [](Address bytes, Address offsets, int64_t n_rows, int64_t n, int64_t dim, Address out, int threads) {
        ngram_fingerprints(pointer<const uint8_t>(bytes), pointer<const int64_t>(offsets), n_rows, n, dim,
                           pointer<float>(out), threads);
      },
      release);
  m.def(
      "cluster_exact",
      [](Address codes, Address group_offsets, int64_t n_groups, Address labels) {
        return cluster_exact(pointer<const int64_t>(codes), pointer<const int64_t>(group_offsets), n_groups,
                             pointer<int64_t>(labels));
      },
      release);
  m.def(
      "cluster_history",
      [](Address codes, Address step, Address trajectory_offsets, int64_t n_trajectories, Address group_offsets,
         int64_t n_groups, int64_t depth, Address labels) {
        return cluster_history(pointer<const int64_t>(codes), pointer<const int64_t>(step),
                               pointer<const int64_t>(trajectory_offsets), n_trajectories,
                               pointer<const int64_t>(group_offsets), n_groups, depth, pointer<int64_t>(labels));
      },
      release);
}

}  // namespace bipace
