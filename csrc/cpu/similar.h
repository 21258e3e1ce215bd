// First-fit clusters of texts by the Ratcliff/Obershelp ratio, as Python's difflib.SequenceMatcher defines it.
#pragma once

#include <cstdint>

namespace bipace {

// The code points of one string, 1, 2 or 4 bytes each (CPython's own storage, so nothing is copied).
struct Text {
  const void* data;
  int64_t size;  // code points, at most 2³¹ − 1
  int width;     // bytes per code point: 1, 2 or 4
};

// Labels [M]: inside each group, in the order given, a text joins the oldest cluster whose first member b satisfies
// SequenceMatcher(None, text, b).ratio() >= similarity, else it seeds one.  Dense over the batch, numbered by first
// appearance. Threads share the groups; labels do not depend on their number.  similarity must be at most 1.
void cluster_similar(const Text* texts,             // [M]
                     const int64_t* group_offsets,  // [G+1]
                     int64_t n_groups, double similarity, int n_threads,
                     int64_t* labels);  // [M]

}  // namespace bipace
