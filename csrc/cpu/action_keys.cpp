#include "cpu/action_keys.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/xxh64.h"
#include "cpu/parallel.h"

namespace bipace {
namespace {

constexpr char kOpen[] = "<action>";
constexpr char kClose[] = "</action>";
constexpr int64_t kOpenSize = sizeof kOpen - 1, kCloseSize = sizeof kClose - 1;
constexpr int64_t kChunk = 64;        // tokens joined between two searches for a tag
constexpr int64_t kRowsPerTask = 16;  // limits contention on the pool's counter: a row takes a microsecond
constexpr int64_t kLongToken = 1024;  // bytes
constexpr int64_t kQuickBytes = 16;   // most tokens fit; copied in one load and store

// Position of the tag in text[from, size), or -1.  The needle is of fixed size, so the search is linear.
int64_t find_tag(const uint8_t* text, int64_t from, int64_t size, const char* tag, int64_t tag_size) {
  while (from + tag_size <= size) {
    const auto* hit = static_cast<const uint8_t*>(std::memchr(text + from, tag[0], size - tag_size - from + 1));
    if (!hit) return -1;
    if (std::memcmp(hit, tag, tag_size) == 0) return hit - text;
    from = hit - text + 1;
  }
  return -1;
}

bool is_space(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

struct Span {
  const uint8_t* start;
  int64_t size;
};

// As Python's bytes.strip(): white space of ASCII only.
Span strip(Span text) {
  while (text.size > 0 && is_space(text.start[text.size - 1])) --text.size;
  while (text.size > 0 && is_space(text.start[0])) ++text.start, --text.size;
  return text;
}

// XXH64 of the text with A-Z lowered; other bytes, including those of UTF-8 letters, do not change.
int64_t hash_lowered(Span text, uint64_t seed, std::vector<uint8_t>& scratch) {
  if (static_cast<int64_t>(scratch.size()) < text.size) scratch.resize(text.size);
  uint8_t* lowered = scratch.data();
  for (int64_t i = 0; i < text.size; ++i) {
    const uint8_t c = text.start[i];
    lowered[i] = static_cast<uint8_t>(c | (static_cast<uint8_t>(c - 'A') < 26 ? 0x20 : 0));
  }
  return static_cast<int64_t>(xxh64(lowered, text.size, seed));
}

// Searches for the tags in a text that grows at its end; visits each byte once.
class TagSearch {
 public:
  // True once the body is known.
  bool advance(const uint8_t* text, int64_t size) {
    if (body_ < 0) {
      const int64_t open = find_tag(text, from_, size, kOpen, kOpenSize);
      if (open < 0) {
        from_ = std::max(from_, size - kOpenSize + 1);
        return false;
      }
      body_ = from_ = open + kOpenSize;
    }
    end_ = find_tag(text, from_, size, kClose, kCloseSize);
    if (end_ < 0) from_ = std::max(from_, size - kCloseSize + 1);
    return end_ >= 0;
  }
  Span body(const uint8_t* text) const { return {text + body_, end_ - body_}; }

 private:
  int64_t from_ = 0, body_ = -1, end_ = -1;
};

struct Scratch {
  std::vector<uint8_t> text, lowered;
  std::vector<int64_t> ids;
};

// One row of TokenRows.
class Row {
 public:
  Row(const TokenRows& rows, int64_t row) : rows_(rows) {
    if (rows.row_offsets) {
      id_base_ = mask_base_ = rows.row_offsets[row];
      size_ = rows.row_offsets[row + 1] - id_base_;
      id_stride_ = mask_stride_ = 1;
    } else {
      id_base_ = row * rows.id_row_stride;
      mask_base_ = row * rows.mask_row_stride;
      size_ = rows.n_columns;
      id_stride_ = rows.id_column_stride;
      mask_stride_ = rows.mask_column_stride;
    }
  }
  int64_t size() const { return size_; }

  // Copies the valid ids of columns [begin, end) to out; returns their number.
  int64_t gather(int64_t begin, int64_t end, int64_t* out) const {
    return rows_.id_bytes == 4 ? gather_ids<int32_t>(begin, end, out) : gather_ids<int64_t>(begin, end, out);
  }

 private:
  template <typename Id>
  int64_t gather_ids(int64_t begin, int64_t end, int64_t* out) const {
    if (rows_.mask) {
      return rows_.mask_bytes == 1   ? gather_masked<Id, uint8_t>(begin, end, out)
             : rows_.mask_bytes == 4 ? gather_masked<Id, int32_t>(begin, end, out)
                                     : gather_masked<Id, int64_t>(begin, end, out);
    }
    const Id* ids = static_cast<const Id*>(rows_.ids) + id_base_;
    for (int64_t t = begin; t < end; ++t) out[t - begin] = ids[t * id_stride_];
    return end - begin;
  }
  template <typename Id, typename Mask>
  int64_t gather_masked(int64_t begin, int64_t end, int64_t* out) const {
    const Id* ids = static_cast<const Id*>(rows_.ids) + id_base_;
    const Mask* mask = static_cast<const Mask*>(rows_.mask) + mask_base_;
    int64_t count = 0;
    for (int64_t t = begin; t < end; ++t) {
      out[count] = ids[t * id_stride_];  // overwritten by the next id where the mask is zero: no branch
      count += mask[t * mask_stride_] != 0;
    }
    return count;
  }

  const TokenRows& rows_;
  int64_t id_base_, mask_base_, size_, id_stride_, mask_stride_;
};

int64_t hash_first_n(const Row& row, int64_t n, Scratch& scratch) {
  n = std::min(n, row.size());
  if (static_cast<int64_t>(scratch.ids.size()) < n + kChunk) scratch.ids.resize(n + kChunk);
  int64_t count = 0;
  const int64_t step = std::min(n, kChunk);
  for (int64_t begin = 0; begin < row.size() && count < n; begin += step) {
    count += row.gather(begin, std::min(begin + step, row.size()), scratch.ids.data() + count);
  }
  count = std::min(count, n);
  if (static_cast<int64_t>(scratch.text.size()) < 8 * count) scratch.text.resize(8 * count);
  uint8_t* out = scratch.text.data();
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<uint64_t>(scratch.ids[i]);
    for (int b = 0; b < 8; ++b) out[8 * i + b] = static_cast<uint8_t>(id >> (8 * b));
  }
  return static_cast<int64_t>(xxh64(out, 8 * count, kSeedFirstN));
}

bool all_inside(const int64_t* ids, int64_t count, int64_t table_size) {
  uint64_t bad = 0;  // its sign bit: some id < 0, or some table_size - 1 - id < 0.  No 64-bit compare: SSE2 has none
  const auto last = static_cast<uint64_t>(table_size - 1);
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<uint64_t>(ids[i]);
    bad |= id | (last - id);
  }
  return bad >> 63 == 0;
}

// Appends the bytes of at most kChunk tokens, all inside the table, to text[size..]; returns the new size.  longest:
// bytes of the longest token.
int64_t append_tokens(const TokenTable& table, int64_t longest, const int64_t* ids, int64_t count, int64_t size,
                      std::vector<uint8_t>& text) {
  const int64_t* offsets = table.offsets;
  const uint8_t* bytes = table.bytes;
  int64_t more = kChunk * longest;
  if (longest > kLongToken) {  // a single huge token must not make every row's scratch large
    more = 0;
    for (int64_t i = 0; i < count; ++i) more += offsets[ids[i] + 1] - offsets[ids[i]];
  }
  if (static_cast<int64_t>(text.size()) < size + more + kQuickBytes) text.resize(2 * size + more + kQuickBytes);
  // The quick copy always reads kQuickBytes: only used if the table extends that far.
  const int64_t quick_end = offsets[table.size] - kQuickBytes;
  uint8_t* out = text.data() + size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = offsets[ids[i]], length = offsets[ids[i] + 1] - begin;
    if (length <= kQuickBytes && begin <= quick_end) {
      std::memcpy(out, bytes + begin, kQuickBytes);
    } else if (length > 0) {
      std::memcpy(out, bytes + begin, length);
    }
    out += length;
  }
  return out - text.data();
}

// The key of a whole text, or of the body that was found in it.  False if there is none: the key is that of a prefix.
inline bool hash_action(Span text, const TagSearch* body, KeyMode mode, int64_t* key, uint8_t* parsed,
                        std::vector<uint8_t>& scratch) {
  *parsed = 0;
  if (mode != KeyMode::kText && !body) return false;
  const Span action = strip(body ? body->body(text.start) : text);
  *key = hash_lowered(action, body ? kSeedActionTag : kSeedText, scratch);
  *parsed = body || action.size > 0;
  return true;
}

// Returns false if a valid id is outside the table.
bool hash_row(const TokenRows& rows, int64_t index, const TokenTable& table, int64_t longest, KeyMode mode, int64_t n,
              int64_t* key, uint8_t* parsed, Scratch& scratch) {
  const Row row(rows, index);
  TagSearch tags;
  bool found = false;
  int64_t size = 0;
  *parsed = 0;
  scratch.ids.resize(std::max<size_t>(scratch.ids.size(), kChunk));
  for (int64_t begin = 0; mode != KeyMode::kFirstN && begin < row.size(); begin += kChunk) {
    const int64_t count = row.gather(begin, std::min(begin + kChunk, row.size()), scratch.ids.data());
    if (!all_inside(scratch.ids.data(), count, table.size)) return false;
    if (found) continue;  // the rest of the row is only checked
    size = append_tokens(table, longest, scratch.ids.data(), count, size, scratch.text);
    found = mode == KeyMode::kActionTag && tags.advance(scratch.text.data(), size);
  }
  const Span text{scratch.text.data(), size};
  if (!hash_action(text, found ? &tags : nullptr, mode, key, parsed, scratch.lowered)) {
    *key = hash_first_n(row, n, scratch);
  }
  return true;
}

}  // namespace

int64_t hash_token_rows(const TokenRows& rows, const TokenTable& table, KeyMode mode, int64_t n, int64_t* keys,
                        uint8_t* parsed, int n_threads) {
  std::vector<uint8_t> bad(rows.n_rows, 0);
  std::vector<Scratch> scratch(std::max(n_threads, 1));
  int64_t longest = 0;
  for (int64_t v = 0; mode != KeyMode::kFirstN && v < table.size; ++v) {
    longest = std::max(longest, table.offsets[v + 1] - table.offsets[v]);
  }
  parallel_each(rows.n_rows, kRowsPerTask, n_threads, [&](int64_t r, int worker) {
    bad[r] = !hash_row(rows, r, table, longest, mode, n, keys + r, parsed + r, scratch[worker]);
  });
  const int64_t index = std::find(bad.begin(), bad.end(), uint8_t{1}) - bad.begin();
  if (index == rows.n_rows) return -1;
  const Row row(rows, index);
  int64_t column = 0, id;
  while (row.gather(column, column + 1, &id) == 0 || all_inside(&id, 1, table.size)) ++column;
  return column + (rows.row_offsets ? rows.row_offsets[index] : index * rows.n_columns);
}

void hash_texts(const uint8_t* const* texts, const int64_t* sizes, int64_t n_rows, KeyMode mode, int64_t* keys,
                uint8_t* parsed, int n_threads) {
  std::vector<std::vector<uint8_t>> scratch(std::max(n_threads, 1));
  parallel_each(n_rows, kRowsPerTask, n_threads, [&](int64_t r, int worker) {
    TagSearch tags;
    const bool found = mode == KeyMode::kActionTag && tags.advance(texts[r], sizes[r]);
    if (!hash_action({texts[r], sizes[r]}, found ? &tags : nullptr, mode, keys + r, parsed + r, scratch[worker])) {
      keys[r] = static_cast<int64_t>(xxh64(texts[r], std::min(sizes[r], kTextPrefixBytes), kSeedTextPrefix));
    }
  });
}

}  // namespace bipace
