#include "cpu/pooling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/half.h"
#include "cpu/parallel.h"

namespace bipace {
namespace {

constexpr int64_t kColumns = 1024;  // columns summed at a time: their float64 sums stay in the first-level cache

// Eight partial sums, added as a tree.
double dot(const float* a, const float* b, int64_t n) {
  double part[8] = {};
  int64_t e = 0;
  for (; e + 8 <= n; e += 8) {
    for (int64_t l = 0; l < 8; ++l) part[l] += static_cast<double>(a[e + l]) * b[e + l];
  }
  for (int64_t l = 0; e + l < n; ++l) part[l] += static_cast<double>(a[e + l]) * b[e + l];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

double squared_norm(const double* x, int64_t n) {
  double part[8] = {};
  int64_t e = 0;
  for (; e + 8 <= n; e += 8) {
    for (int64_t l = 0; l < 8; ++l) part[l] += x[e + l] * x[e + l];
  }
  for (int64_t l = 0; e + l < n; ++l) part[l] += x[e + l] * x[e + l];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

// Softmax of the token's scores over its prompt, mean over the heads.
void attention_weights(const Attention& attention, const DotKernels& dots, int64_t state, int64_t batch, int64_t first,
                       int64_t last, std::vector<double>* scores, std::vector<float>* key, double* weight) {
  const int64_t len = last - first + 1, width = attention.head_dim, per_key = attention.heads / attention.key_heads;
  const float* query = attention.query + state * attention.heads * width;
  const Rows rows = attention.keys.rows(batch);
  scores->resize(static_cast<size_t>(attention.heads * len));
  key->resize(static_cast<size_t>(attention.keys.dim));
  for (int64_t t = 0; t < len; ++t) {
    const float* k = read_panel(rows, dots, {first + t, 1.0f}, 0, attention.keys.dim, key->data());
    for (int64_t h = 0; h < attention.heads; ++h) {
      double score = attention.scale * dot(query + h * width, k + h / per_key * width, width);
      if (attention.softcap != 0.0) score = attention.softcap * std::tanh(score / attention.softcap);
      (*scores)[static_cast<size_t>(h * len + t)] = score;
    }
  }
  std::fill(weight, weight + len, 0.0);
  for (int64_t h = 0; h < attention.heads; ++h) {
    double* score = scores->data() + h * len;
    const double most = *std::max_element(score, score + len);
    double total = 0.0;
    for (int64_t t = 0; t < len; ++t) total += score[t] = std::exp(score[t] - most);
    total *= static_cast<double>(attention.heads);
    for (int64_t t = 0; t < len; ++t) weight[t] += score[t] / total;
  }
}

// sum = sum over the tokens of weight * token.
void weighted_sum(const Rows& rows, const DotKernels& dots, int64_t first, int64_t len, const double* weight,
                  double* sum) {
  float buffer[kColumns];
  for (int64_t column = 0; column < rows.dim; column += kColumns) {
    const int64_t width = std::min(kColumns, rows.dim - column);
    double* to = sum + column;
    std::fill(to, to + width, 0.0);
    for (int64_t t = 0; t < len; ++t) {
      const float* x = read_panel(rows, dots, {first + t, 1.0f}, column, width, buffer);
      const double w = weight[t];
      for (int64_t e = 0; e < width; ++e) to[e] += w * static_cast<double>(x[e]);
    }
  }
}

void write(const double* x, int64_t n, double factor, DType dtype, void* out, int64_t row) {
  if (dtype == DType::kFloat32) {
    float* to = static_cast<float*>(out) + row * n;
    for (int64_t e = 0; e < n; ++e) to[e] = static_cast<float>(x[e] * factor);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out) + row * n;
  if (dtype == DType::kBfloat16) {
    for (int64_t e = 0; e < n; ++e) to[e] = float_to_bf16(static_cast<float>(x[e] * factor));
  } else {
    for (int64_t e = 0; e < n; ++e) to[e] = float_to_f16(static_cast<float>(x[e] * factor));
  }
}

struct Scratch {
  std::vector<double> sum, weight, scores;
  std::vector<float> key;
};

}  // namespace

Rows Tokens::rows(int64_t batch) const {
  const int64_t item = dtype == DType::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(data) + batch * batch_stride * item, dtype, token_stride, column_stride, dim};
}

void pool_rows(const Tokens& hidden, const int64_t* batch, const int64_t* first, const int64_t* last, int64_t n,
               Pooling pooling, const Attention* attention, bool unit, int n_threads, DType out_dtype, void* out) {
  const DotKernels& dots = dot_kernels();
  std::vector<Scratch> scratch(static_cast<size_t>(std::max(n_threads, 1)));
  parallel_for(n, n_threads, [&](int64_t i, int worker) {
    Scratch& own = scratch[static_cast<size_t>(worker)];
    own.sum.assign(static_cast<size_t>(hidden.dim), 0.0);
    const int64_t begin = pooling == Pooling::kLast ? last[i] : first[i], len = last[i] - begin + 1;
    const bool inside = batch[i] >= 0 && batch[i] < hidden.batches && begin >= 0 && last[i] < hidden.tokens && len > 0;
    double factor = 1.0;
    if (inside) {
      own.weight.assign(static_cast<size_t>(len), 1.0);
      if (pooling == Pooling::kAttention) {
        attention_weights(*attention, dots, i, batch[i], begin, last[i], &own.scores, &own.key, own.weight.data());
      } else {
        factor = 1.0 / static_cast<double>(len);
      }
      weighted_sum(hidden.rows(batch[i]), dots, begin, len, own.weight.data(), own.sum.data());
      if (unit) {
        const double norm = std::sqrt(squared_norm(own.sum.data(), hidden.dim));
        factor = norm > 0.0 ? 1.0 / norm : 0.0;
      }
    }
    write(own.sum.data(), hidden.dim, factor, out_dtype, out, i);
  });
}

}  // namespace bipace
