#include "cpu/ngrams.h"

#include "bindings/bindings.h"
#include "bindings/texts.h"

namespace bipace {
namespace {

void text_fingerprints(const py::sequence& items, int64_t n, int64_t dim, uintptr_t out, int n_threads) {
  const Texts texts(items);
  py::gil_scoped_release release;
  ngram_fingerprints(texts.starts(), texts.sizes(), texts.count(), n, dim, pointer<float>(out), n_threads);
}

}  // namespace

void bind_ngrams(py::module_& m) { m.def("ngram_fingerprints", &text_fingerprints); }

}  // namespace bipace
