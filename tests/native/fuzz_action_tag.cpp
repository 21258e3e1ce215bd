// Fuzz target for tag matching in action keys: text and token rows against a naive matcher over the whole byte string.
//
// Standalone (any compiler):   fuzz_action_tag SECONDS [SEED]     mutates a built-in corpus, no coverage feedback
//                              fuzz_action_tag --replay FILE...   runs saved inputs again
// With clang's libFuzzer:      clang++ -DBIPACE_LIBFUZZER -fsanitize=fuzzer,address,undefined ...
//
// The first four bytes of an input choose the shape of the batch, the rest is the response.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/xxh64.h"
#include "cpu/action_keys.h"

namespace {

using bipace::KeyMode;

struct Result {
  int64_t key;
  bool parsed;
};

int64_t hash(const std::string& bytes, uint64_t seed) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  return static_cast<int64_t>(bipace::xxh64(data, static_cast<int64_t>(bytes.size()), seed));
}

std::string strip_and_lower(std::string s) {
  const char* const white = " \t\n\r\v\f";
  const size_t first = s.find_first_not_of(white);
  if (first == std::string::npos) return "";
  s = s.substr(first, s.find_last_not_of(white) - first + 1);
  for (char& c : s) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + ('a' - 'A'));
  }
  return s;
}

// The body of the first `<action>(.*?)</action>`; false where there is none.
bool naive_body(const std::string& text, std::string* body) {
  const size_t open = text.find("<action>");
  if (open == std::string::npos) return false;
  const size_t begin = open + 8;
  const size_t end = text.find("</action>", begin);
  if (end == std::string::npos) return false;
  *body = text.substr(begin, end - begin);
  return true;
}

Result naive_text(const std::string& text, KeyMode mode) {
  std::string body;
  if (mode == KeyMode::kText) {
    body = strip_and_lower(text);
    return {hash(body, 4), !body.empty()};
  }
  if (mode == KeyMode::kActionTag && naive_body(text, &body)) return {hash(strip_and_lower(body), 2), true};
  return {hash(text.substr(0, 64), 3), false};
}

struct Row {
  std::vector<int64_t> ids;
  std::vector<uint8_t> valid;
  std::string text;    // bytes of the valid tokens
  std::string prefix;  // the first n valid ids, little-endian
};

Result naive_tokens(const Row& row, KeyMode mode) {
  std::string body;
  if (mode == KeyMode::kText) {
    body = strip_and_lower(row.text);
    return {hash(body, 4), !body.empty()};
  }
  if (mode == KeyMode::kActionTag && naive_body(row.text, &body)) return {hash(strip_and_lower(body), 2), true};
  return {hash(row.prefix, 1), false};
}

// A copy of exactly the size needed, on the heap: the sanitizer then sees one byte too many.
template <typename To, typename From>
std::unique_ptr<To[]> exact(const std::vector<From>& values) {
  auto out = std::unique_ptr<To[]>(new To[values.size()]);
  for (size_t i = 0; i < values.size(); ++i) out[i] = static_cast<To>(values[i]);
  return out;
}

uint64_t g_parsed = 0;

void expect(const Result& want, int64_t key, uint8_t parsed, const char* where) {
  g_parsed += want.parsed;
  if (want.key == key && want.parsed == (parsed != 0)) return;
  std::fprintf(stderr, "fuzz_action_tag: %s: wanted key %lld parsed %d, got key %lld parsed %d\n", where,
               static_cast<long long>(want.key), want.parsed, static_cast<long long>(key), parsed);
  std::abort();
}

constexpr KeyMode kModes[] = {KeyMode::kFirstN, KeyMode::kActionTag, KeyMode::kText};

void check_texts(const std::vector<std::string>& texts) {
  const size_t n = texts.size();
  std::vector<std::unique_ptr<uint8_t[]>> storage;
  std::vector<const uint8_t*> starts;
  std::vector<int64_t> sizes;
  for (const std::string& text : texts) {
    storage.push_back(exact<uint8_t>(std::vector<char>(text.begin(), text.end())));
    starts.push_back(storage.back().get());
    sizes.push_back(static_cast<int64_t>(text.size()));
  }
  for (const KeyMode mode : kModes) {
    std::vector<int64_t> keys(n);
    std::vector<uint8_t> parsed(n, 7);
    bipace::hash_texts(starts.data(), sizes.data(), static_cast<int64_t>(n), mode, keys.data(), parsed.data(), 1);
    for (size_t r = 0; r < n; ++r) expect(naive_text(texts[r], mode), keys[r], parsed[r], "text");
  }
}

template <typename Id, typename Mask>
void check_tokens(const std::vector<Row>& rows, const bipace::TokenTable& table, bool ragged, bool masked, int64_t n) {
  // A matrix is stored with columns first where `n` is odd, and padded with masked tokens that are valid ids.
  std::vector<int64_t> ids, offsets{0};
  std::vector<uint8_t> mask;
  bipace::TokenRows view{};
  size_t columns = 0;
  for (const Row& row : rows) columns = std::max(columns, row.ids.size());
  view.n_rows = static_cast<int64_t>(rows.size());
  if (ragged) {
    for (const Row& row : rows) {
      ids.insert(ids.end(), row.ids.begin(), row.ids.end());
      mask.insert(mask.end(), row.valid.begin(), row.valid.end());
      offsets.push_back(static_cast<int64_t>(ids.size()));
    }
    view.row_offsets = offsets.data();
    view.id_column_stride = view.mask_column_stride = 1;
  } else {
    ids.resize(rows.size() * columns);
    mask.resize(rows.size() * columns);
    const bool transposed = n % 2 == 1;
    view.n_columns = static_cast<int64_t>(columns);
    view.id_row_stride = view.mask_row_stride = transposed ? 1 : view.n_columns;
    view.id_column_stride = view.mask_column_stride = transposed ? view.n_rows : 1;
    for (size_t r = 0; r < rows.size(); ++r) {
      for (size_t c = 0; c < rows[r].ids.size(); ++c) {
        const size_t at = transposed ? c * rows.size() + r : r * columns + c;
        ids[at] = rows[r].ids[c];
        mask[at] = rows[r].valid[c];
      }
    }
  }
  const auto id_storage = exact<Id>(ids);
  const auto mask_storage = exact<Mask>(mask);
  view.ids = id_storage.get();
  view.id_bytes = sizeof(Id);
  view.mask = masked ? mask_storage.get() : nullptr;
  view.mask_bytes = sizeof(Mask);
  for (const KeyMode mode : kModes) {
    std::vector<int64_t> keys(rows.size());
    std::vector<uint8_t> parsed(rows.size(), 7);
    const int64_t outside = bipace::hash_token_rows(view, table, mode, n, keys.data(), parsed.data(), 1);
    if (outside != -1) {
      std::fprintf(stderr, "fuzz_action_tag: token %lld called outside the table\n", static_cast<long long>(outside));
      std::abort();
    }
    for (size_t r = 0; r < rows.size(); ++r) expect(naive_tokens(rows[r], mode), keys[r], parsed[r], "tokens");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const int longest = data[0] % 12 + 1;  // bytes per token
  const int64_t n = data[1] % 11 + 1;
  const int shape = data[2];
  const bool masked = (shape & 1) != 0;
  const bool ragged = !masked || (shape & 2) != 0;  // rows of a matrix without mask would need equal lengths
  const std::string text(reinterpret_cast<const char*>(data) + 4, size - 4);
  std::mt19937_64 rng(bipace::xxh64(data, static_cast<int64_t>(size), 99));
  const auto draw = [&](size_t below) { return static_cast<size_t>(rng() % below); };

  // The response, a piece of it, nothing, and the rest.
  const size_t cut = draw(text.size() + 1);
  const std::vector<std::string> texts{text, text.substr(0, cut), "", text.substr(cut)};
  check_texts(texts);

  // Each token is an id of its own, whose bytes lie anywhere in the table; some have no bytes, some are masked out.
  std::vector<std::string> pieces;
  std::vector<Row> rows;
  const auto append = [&](Row& row, const std::string& piece, bool valid) {
    const int64_t id = static_cast<int64_t>(pieces.size());
    pieces.push_back(piece);
    row.ids.push_back(id);
    row.valid.push_back(valid);
    if (!valid) return;
    row.text += piece;
    if (row.prefix.size() < 8 * static_cast<size_t>(n)) {
      for (int b = 0; b < 8; ++b) row.prefix += static_cast<char>(static_cast<uint64_t>(id) >> (8 * b) & 0xFF);
    }
  };
  for (const std::string& whole : texts) {
    Row row;
    for (size_t at = 0; at < whole.size();) {
      const size_t kind = draw(16);
      if (kind == 0) append(row, "", true);
      if (kind <= 2 && masked) append(row, kind == 1 ? "</action>" : "<action>", false);
      const size_t length = std::min(whole.size() - at, draw(static_cast<size_t>(longest)) + 1);
      append(row, whole.substr(at, length), true);
      at += length;
    }
    rows.push_back(row);
  }
  std::vector<int64_t> offsets{0};
  std::vector<uint8_t> bytes;
  for (const std::string& piece : pieces) {
    bytes.insert(bytes.end(), piece.begin(), piece.end());
    offsets.push_back(static_cast<int64_t>(bytes.size()));
  }
  const auto offset_storage = exact<int64_t>(offsets);
  const auto byte_storage = exact<uint8_t>(bytes);
  const bipace::TokenTable table{offset_storage.get(), byte_storage.get(), static_cast<int64_t>(pieces.size())};
  switch (shape >> 2 & 3) {
    case 0:
      check_tokens<int32_t, uint8_t>(rows, table, ragged, masked, n);
      break;
    case 1:
      check_tokens<int64_t, int32_t>(rows, table, ragged, masked, n);
      break;
    default:
      check_tokens<int64_t, int64_t>(rows, table, ragged, masked, n);
  }
  return 0;
}

#ifndef BIPACE_LIBFUZZER
namespace {

const std::vector<std::string> kWords = {
    "<action>",
    "</action>",
    "<action",
    "action>",
    "</action",
    "<ACTION>",
    "</Action>",
    "< action>",
    "</ action>",
    "<action >",
    "<<action>",
    "<actio",
    "n>",
    "</",
    "<",
    ">",
    "/",
    "<a",
    "<ac<action>",
    "</ac</action>",
    "</action><",
    "go to desk 1",
    "Take MUG",
    " ",
    "\n",
    "\t\r\v\f",
    std::string("\0", 1),
    "\xff",
    "\xc2\xa0",
    "\xc3\xa9",
    "\xf0\x9f\x98\x80",
    "\x1c",
    "\x85",
    "<think>",
    "</think>",
    "0123456789012345678901234567890123456789012345678901234567890123",
};

const std::vector<std::string> kSeeds = {
    "",
    "<action></action>",
    "<action> \n </action>",
    "<think>Where is it?</think><action>Go to Drawer 1</action>",
    "<action>a<action>b</action>c</action>",
    "</action><action>late</action>",
    "</action><action>",
    "<action>never closed",
    "<action></actio</action>n>",
    "<action<action>x</action>",
    "<<action>><</action>>",
    "<action>x</action><action>y</action>",
    "<actio"
    "n>split</act"
    "ion>",
    "<ACTION>no</ACTION><action>yes</action>",
    std::string("<action>a\0b</action>", 20),
    "no tag at all, and rather more than sixty-four bytes of it, so that the prefix is shorter than the text",
};

std::string g_current;  // the current input, saved by the handler of abort()

void save_current(int) {
  std::ofstream("fuzz_action_tag.crash", std::ios::binary) << g_current;
  std::fputs("fuzz_action_tag: input saved as fuzz_action_tag.crash; run it with --replay\n", stderr);
  std::_Exit(1);
}

std::string mutate(std::string s, std::mt19937_64& rng, const std::vector<std::string>& pool) {
  const auto draw = [&](size_t below) { return static_cast<size_t>(rng() % below); };
  const size_t changes = draw(6) + 1;
  for (size_t k = 0; k < changes; ++k) {
    const size_t at = draw(s.size() + 1);
    const size_t length = std::min(s.size() - at, draw(20));
    switch (draw(8)) {
      case 0:
      case 1:
      case 2:
        s.insert(at, kWords[draw(kWords.size())]);
        break;
      case 3:
        s.erase(at, length);
        break;
      case 4:
        s.insert(draw(s.size() + 1), s.substr(at, length));
        break;
      case 5:
        if (at < s.size()) s[at] = static_cast<char>(rng());
        break;
      case 6: {
        const std::string& other = pool[draw(pool.size())];
        s = s.substr(0, at) + other.substr(std::min(other.size(), draw(other.size() + 1)));
        break;
      }
      default:
        s.insert(at, std::string(draw(300), "a< "[draw(3)]));
    }
  }
  if (s.size() > 2000) s.resize(2000);
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc >= 3 && std::strcmp(argv[1], "--replay") == 0) {
    for (int k = 2; k < argc; ++k) {
      std::ifstream file(argv[k], std::ios::binary);
      const std::string input{std::istreambuf_iterator<char>(file), {}};
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
    }
    return 0;
  }
  if (argc < 2 || std::atof(argv[1]) <= 0) {
    std::fprintf(stderr, "usage: %s SECONDS [SEED] | --replay FILE...\n", argv[0]);
    return 2;
  }
  std::signal(SIGABRT, save_current);
  const double seconds = std::atof(argv[1]);
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::mt19937_64 rng(seed);
  std::vector<std::string> pool = kSeeds;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t cases = 0;
  const auto run = [&](const std::string& text) {
    const uint64_t head = rng();
    g_current.assign(reinterpret_cast<const char*>(&head), 4);
    g_current += text;
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(g_current.data()), g_current.size());
    ++cases;
  };
  for (const std::string& text : kSeeds) {
    for (int k = 0; k < 50; ++k) run(text);
  }
  while (elapsed() < seconds) {
    for (int k = 0; k < 100; ++k) {
      std::string text = mutate(pool[rng() % pool.size()], rng, pool);
      run(text);
      if (pool.size() < 512) {
        pool.push_back(std::move(text));
      } else if (rng() % 4 == 0) {
        pool[kSeeds.size() + rng() % (pool.size() - kSeeds.size())] = std::move(text);
      }
    }
  }
  std::printf("fuzz_action_tag: %llu inputs in %.0f s, seed %llu, %llu parsed keys, every key and flag as expected\n",
              static_cast<unsigned long long>(cases), elapsed(), static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(g_parsed));
  return 0;
}
#endif
