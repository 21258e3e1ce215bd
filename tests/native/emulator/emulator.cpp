// The scheduler of the CPU emulator: fibres, rendezvous, and a launch that Python calls through ctypes.
#include <cuda/intrinsics.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "common/half.h"
#include "races.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#error "the emulator switches fibres by a few instructions of x86-64"
#endif

// Keeps what a function must keep, leaves its stack at *from, and goes on where the other stack was left.
extern "C" void bipace_emulator_switch(void** from, void* to);
asm(R"(
.text
.globl bipace_emulator_switch
.type bipace_emulator_switch, @function
bipace_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size bipace_emulator_switch, .-bipace_emulator_switch
)");

namespace bipace {
namespace emulator {
namespace {

constexpr size_t kStack = 256 * 1024;
constexpr size_t kWidest = 64;  // bytes a lane may leave in an exchange
constexpr int kWarp = gpu::kWarp;

// Where a number of fibres wait for one another; used again and again.
struct Rendezvous {
  int expected = 0, arrived = 0;
  int64_t generation = 0;
  const char* what = "";
  std::vector<struct Fibre*> present;
};

struct Warp {
  Rendezvous meeting;
  // Two sets in turn: a lane leaves its next value only after all have left the one before, and so have read it.
  unsigned char values[2][kWarp][kWidest];
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// A product of a group of warps, and a thread's part in it.
struct Product {
  float* sums;
  std::vector<float> found;  // sums with it
  uint64_t a, b;
  uint64_t read;  // a hash of its operands
};

struct Fibre {
  Place place;
  Warp* warp = nullptr;
  Rendezvous* group = nullptr;  // of its four warps
  int* hidden = nullptr;        // threads of the block whose copies tensor cores do not see
  Rendezvous* block = nullptr;
  std::unique_ptr<unsigned char[]> stack;
  void* at = nullptr;  // its stack while others run
  void* fake_stack = nullptr;
  const Rendezvous* waits = nullptr;
  bool done = false;
  std::vector<std::vector<Copy>> copies{1};  // groups; the last one is still open
  bool hides = false, begun = false;         // copies from tensor cores; products
  Seen seen;
  std::vector<std::vector<Product>> products{1};
};

// Of a launch: garbage, as on a GPU, NaN at first and then what the block before has left, with a margin in which
// nothing may be written; AddressSanitizer has its own.
struct SharedMemory {
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kMargin = 0;
#else
  static constexpr size_t kMargin = 1024;
#endif
  explicit SharedMemory(int64_t bytes) {
    void* at = nullptr;
    if (bytes > 0 && posix_memalign(&at, 1024, static_cast<size_t>(bytes) + kMargin) == 0) {
      std::memset(at, 0xFF, static_cast<size_t>(bytes) + kMargin);
      memory.reset(static_cast<unsigned char*>(at));
      beyond = memory.get() + bytes;
    }
  }
  bool is_overrun() const {
    return memory && std::any_of(beyond, beyond + kMargin, [](unsigned char byte) { return byte != 0xFF; });
  }
  std::unique_ptr<unsigned char, decltype(&std::free)> memory{nullptr, &std::free};
  const unsigned char* beyond = nullptr;  // the end of what was asked for
};

struct Block {
  explicit Block(int threads)
      : warps(static_cast<size_t>(threads / kWarp)), groups(static_cast<size_t>(threads / gpu::kGroup)) {
    barrier.expected = threads;
    for (Warp& warp : warps) warp.meeting.expected = kWarp;
    for (Rendezvous& group : groups) group.expected = gpu::kGroup;
  }
  Rendezvous barrier;
  std::vector<Warp> warps;
  std::vector<Rendezvous> groups;
  int hidden = 0;
};

struct Run {
  const Kernel* kernel = nullptr;
  const void* words = nullptr;
  Fibre* now = nullptr;
  void* scheduler = nullptr;
  void* fake_stack = nullptr;
  const void* scheduler_bottom = nullptr;
  size_t scheduler_size = 0;
  std::string failure;
  std::vector<Fibre*> ready;  // those that can go on
  Races races;
};
Run* run = nullptr;

const Kernel*& head() {
  static const Kernel* first = nullptr;
  return first;
}

void to_scheduler(bool for_good) {
  Fibre& self = *run->now;
  (void)for_good;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &self.fake_stack, run->scheduler_bottom, run->scheduler_size);
#endif
  bipace_emulator_switch(&self.at, run->scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self.fake_stack, &run->scheduler_bottom, &run->scheduler_size);
#endif
}

void begin() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &run->scheduler_bottom, &run->scheduler_size);
#endif
  run->kernel->body(run->words);
  finish_copies(0);
  if (run->now->products.size() > 1) fail("products are under way at the end of the kernel");
  run->now->done = true;
  to_scheduler(true);
  std::abort();  // a finished fibre is never resumed
}

void resume(Fibre& fibre) {
  run->now = &fibre;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&run->fake_stack, fibre.stack.get(), kStack);
#endif
  bipace_emulator_switch(&run->scheduler, fibre.at);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(run->fake_stack, nullptr, nullptr);
#endif
  run->now = nullptr;
}

void prepare(Fibre& fibre) {
  if (!fibre.stack) fibre.stack.reset(new unsigned char[kStack]);  // a block follows another on the same stacks
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fibre.stack.get(), kStack);  // what a fibre left that never returned
#endif
  uintptr_t top = reinterpret_cast<uintptr_t>(fibre.stack.get() + kStack) & ~static_cast<uintptr_t>(63);
  void** at = reinterpret_cast<void**>(top) - 1;  // as after a call: the stack is 8 beyond a multiple of 16
  *at = nullptr;
  *--at = reinterpret_cast<void*>(&begin);
  for (int saved = 0; saved < 6; ++saved) *--at = nullptr;
  fibre.at = at;
}

// `orders`: whether memory is in order among those who met.
void arrive(Rendezvous& here, const char* what, bool orders) {
  if (here.arrived == 0) {
    here.what = what;
  } else if (std::strcmp(here.what, what) != 0) {
    fail(std::string("some threads stand at ") + here.what + " and others at " + what);
  }
  Fibre& self = *run->now;
  here.present.push_back(&self);
  self.waits = &here;
  if (++here.arrived == here.expected) {
    here.arrived = 0;
    ++here.generation;
#if defined(__SANITIZE_THREAD__)
    if (orders) {
      std::vector<Seen*> seen;
      std::vector<int> threads;
      for (Fibre* fibre : here.present) {
        seen.push_back(&fibre->seen);
        threads.push_back(fibre->place.thread);
      }
      meet(seen, threads, static_cast<size_t>(self.place.threads));
    }
#else
    (void)orders;
#endif
    run->ready.insert(run->ready.end(), here.present.begin(), here.present.end());
    here.present.clear();
  }
  to_scheduler(false);
  self.waits = nullptr;
}

void say_who_waits(const std::vector<Fibre>& fibres) {
  for (const Fibre& fibre : fibres) {
    if (fibre.done || !fibre.waits) continue;
    run->failure = std::string("threads wait for ever at ") + fibre.waits->what + ": " +
                   std::to_string(fibre.waits->arrived) + " of " + std::to_string(fibre.waits->expected) + " came";
    return;
  }
}

// Whoever can go on may be next, drawn anew every time.
void run_to_the_end(std::vector<Fibre>& fibres, std::mt19937_64& random) {
  std::vector<Fibre*>& ready = run->ready;
  for (Fibre& fibre : fibres) ready.push_back(&fibre);
  size_t left = fibres.size();
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    Fibre& fibre = *ready.back();
    ready.pop_back();
    resume(fibre);
    if (!run->failure.empty()) return;
    left -= fibre.done;
  }
  if (left > 0) say_who_waits(fibres);
}

std::string left_out_file;
int left_out_line = 0;

#if defined(__SANITIZE_THREAD__)
// An access to memory of the fibre that runs; what is on its own stack is nobody else's.
void enter(const void* at, size_t bytes, bool writes) {
  if (!run || !run->now) return;
  Fibre& self = *run->now;
  const uintptr_t address = reinterpret_cast<uintptr_t>(at), stack = reinterpret_cast<uintptr_t>(self.stack.get());
  if (address - stack < kStack) return;
  const int64_t block = self.place.block_y * self.place.blocks + self.place.block;
  const Races::Access now{block, self.place.thread, self.seen.own};
  const Races::Access* const other = run->races.enter(address, bytes, writes, now, self.seen);
  if (!other) return;
  const uintptr_t shared = reinterpret_cast<uintptr_t>(self.place.shared);
  fail(
      std::string("a race: ") + (writes ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes " +
      (address - shared < (size_t{1} << 18) ? "of shared memory at " + std::to_string(address - shared) : "of memory") +
      " is not ordered after what thread " + std::to_string(other->thread) + " of block " +
      std::to_string(other->block) + " did");
}

// As on a GPU, where an access of so many bytes that is not aligned to them is an error.
void aligned(const void* at, size_t bytes) {
  if (run && run->now && reinterpret_cast<uintptr_t>(at) % bytes) {
    fail("an access of " + std::to_string(bytes) + " bytes is not aligned");
  }
}
#else
void enter(const void*, size_t, bool) {}
#endif

}  // namespace

Kernel::Kernel(const char* kernel, size_t bytes, int threads, Body run_it)
    : name(kernel), args_bytes(bytes), most_threads(threads), body(run_it), next(head()) {
  head() = this;
}

const Place& place() { return run->now->place; }

void fail(const std::string& why) {
  run->failure =
      why + " (thread " + std::to_string(place().thread) + " of block " + std::to_string(place().block) + ")";
  to_scheduler(true);
  std::abort();
}

void read(const void* at, size_t bytes) { enter(at, bytes, false); }

bool is_left_out(const char* file, int line) {
  if (line != left_out_line) return false;
  const std::string in = file;
  return in.size() >= left_out_file.size() && in.compare(in.size() - left_out_file.size(), in.npos, left_out_file) == 0;
}

void wait_for_block(const char* what) { arrive(*run->now->block, what, true); }
void wait_for_warp(const char* what) { arrive(run->now->warp->meeting, what, true); }

const unsigned char* exchange(const char* what, const void* value, size_t bytes, size_t& stride) {
  if (bytes > kWidest) fail("lanes exchange too many bytes");
  Warp& warp = *run->now->warp;
  auto& values = warp.values[warp.meeting.generation & 1];
  std::memcpy(values[place().thread % kWarp], value, bytes);
  arrive(warp.meeting, what, false);
  stride = kWidest;
  return &values[0][0];
}

void start_copy(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (bytes && reinterpret_cast<uintptr_t>(from) % 16)) {
    fail("an asynchronous copy of 16 bytes is not aligned to 16");
  }
  std::memset(to, 0xFF, 16);  // it may arrive at once, too: what was there is gone
  enter(to, 16, true);
  run->now->copies.back().push_back({to, from, bytes});
}

void commit_copies() { run->now->copies.emplace_back(); }

void finish_copies(int pending) {
  auto& groups = run->now->copies;
  while (groups.size() > static_cast<size_t>(pending) + 1) {
    if (!groups.front().empty() && !run->now->hides) {
      run->now->hides = true;
      ++*run->now->hidden;
    }
    for (const Copy& copy : groups.front()) {
      if (copy.bytes) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      std::memset(static_cast<unsigned char*>(copy.to) + copy.bytes, 0, static_cast<size_t>(16 - copy.bytes));
      enter(copy.to, 16, true);
      enter(copy.from, static_cast<size_t>(copy.bytes), false);
    }
    groups.erase(groups.begin());
  }
}

void show_copies() {
  *run->now->hidden -= run->now->hides;
  run->now->hides = false;
}

namespace {

// Element e of row r of the matrix that a descriptor names, by the PTX manual: bits 0 to 13 hold the address, 32 to 45
// the distance between eights of rows, both without their last four bits; 62 and 63 the exchange, 1 for that of 128
// bytes, which is one of bits of the address.
const unsigned char* element(uint64_t matrix, int r, int e) {
  const uint64_t begin = (matrix & 0x3FFF) << 4, eights = (matrix >> 32 & 0x3FFF) << 4;
  const uint64_t at =
      begin + static_cast<uint64_t>(r) / 8 * eights + static_cast<uint64_t>(r) % 8 * 128 + static_cast<uint64_t>(e) * 2;
  return place().shared + (at ^ (at >> 3 & 0x70));
}

uint16_t bits(uint64_t matrix, int r, int e) {
  uint16_t value;
  std::memcpy(&value, element(matrix, r, e), 2);
  return value;
}

uint64_t hash(uint64_t a, uint64_t b) {
  uint64_t h = 1469598103934665603u;
  for (int r = 0; r < 64 + 128; ++r) {
    for (int e = 0; e < 16; ++e) h = (h ^ (r < 64 ? bits(a, r, e) : bits(b, r - 64, e))) * 1099511628211u;
  }
  return h;
}

}  // namespace

void begin_products() { run->now->begun = true; }

void start_product(float* sums, uint64_t a, uint64_t b, bool add, bool bf16) {
  Fibre& self = *run->now;
  if (!self.group) fail("fewer than four warps cannot multiply together");
  arrive(*self.group, "multiply_group", false);
  if (!self.begun) fail("products that have not begun");
  if (*self.hidden) fail("tensor cores do not see what was copied");
  for (const uint64_t matrix : {a, b}) {
    if (matrix >> 62 != 1 || (matrix >> 49 & 7))
      fail("rows of multiply_group are not exchanged as those of 128 bytes are");
    // Eight rows lie in a multiple of 1,024, whole; sixteen elements of them are not split.
    const uint64_t begin = (matrix & 0x3FFF) << 4;
    if (begin % 32 || begin & 0x380) fail("an operand of multiply_group is not aligned");
  }
  constexpr int n = 64;  // of 64 × 128 sums, a thread's
  Product mine{sums, std::vector<float>(n, 0.0f), a, b, 0};
  const Product* before = nullptr;
  for (const auto& set : self.products) {
    for (const Product& other : set) before = other.sums == sums ? &other : before;
  }
  if (add) mine.found = before ? before->found : std::vector<float>(sums, sums + n);
  for (int i = 0; i < n; ++i) {
    const int row = place().thread / kWarp % 4 * 16 + place().thread % kWarp / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + place().thread % 4 * 2 + i % 2;
    for (int e = 0; e < 16; ++e) {
      const uint16_t x = bits(a, row, e), y = bits(b, column, e);
      mine.found[static_cast<size_t>(i)] +=
          bf16 ? bf16_to_float(x) * bf16_to_float(y) : f16_to_float(x) * f16_to_float(y);
    }
    sums[i] = std::numeric_limits<float>::quiet_NaN();
  }
  if (place().thread % gpu::kGroup == 0) {
    mine.read = hash(a, b);
    for (int r = 0; r < 64 + 128; ++r) {  // two pieces of 16 bytes each
      for (int e = 0; e < 16; e += 8) enter(r < 64 ? element(a, r, e) : element(b, r - 64, e), 16, false);
    }
  }
  self.products.back().push_back(std::move(mine));
}

void commit_products() {
  run->now->begun = false;
  run->now->products.emplace_back();
}

void finish_products(int pending) {
  auto& sets = run->now->products;
  while (sets.size() > static_cast<size_t>(pending) + 1) {
    const std::vector<Product> done = std::move(sets.front());
    sets.erase(sets.begin());
    for (const Product& product : done) {
      if (place().thread % gpu::kGroup == 0 && product.read != hash(product.a, product.b)) {
        fail("what a product reads was written to before it was done");
      }
      bool last = true;  // of those that add to the same sums
      for (const auto& set : sets) {
        for (const Product& other : set) last = last && other.sums != product.sums;
      }
      if (last) std::copy(product.found.begin(), product.found.end(), product.sums);
    }
  }
}

}  // namespace emulator

namespace gpu {

void load_matrices(uint32_t (&out)[4], const void* row_in_shared) {
  if (reinterpret_cast<uintptr_t>(row_in_shared) % 16)
    emulator::fail("a row of load_matrices is not aligned to 16 bytes");
  const Lanes<const void*> rows = gather("load_matrices", row_in_shared);
  for (int q = 0; q < 4; ++q) {
    const unsigned char* row = static_cast<const unsigned char*>(rows.value[8 * q + lane() / 4]);
    emulator::read(row + 4 * (lane() % 4), 4);
    std::memcpy(&out[q], row + 4 * (lane() % 4), 4);
  }
}

namespace {

struct Fragments {
  uint32_t a[4], b[2];
};

}  // namespace

// Row and column of what a lane holds are those of PTX's mma.m16n8k16; sums are plain float32, k in order.
template <bool bf16>
void multiply_warp(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Lanes<Fragments> all = gather("multiply_warp", Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const auto half = [](uint32_t pair, int which) {
    const uint16_t bits = static_cast<uint16_t>(pair >> (16 * which));
    return bf16 ? bf16_to_float(bits) : f16_to_float(bits);
  };
  for (int e = 0; e < 4; ++e) {
    const int row = lane() / 4 + 8 * (e / 2), column = 2 * (lane() % 4) + e % 2;
    for (int k = 0; k < 16; ++k) {
      const Fragments& from_a = all.value[4 * (row % 8) + (k % 8) / 2];
      const Fragments& from_b = all.value[4 * column + (k % 8) / 2];
      c[e] += half(from_a.a[row / 8 + 2 * (k / 8)], k % 2) * half(from_b.b[k / 8], k % 2);
    }
  }
}

template void multiply_warp<true>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);
template void multiply_warp<false>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);

}  // namespace gpu
}  // namespace bipace

// Runs a launch to its end.  0: done; else `error` says why not.
extern "C" int bipace_emulator_launch(const char* name, int64_t grid_x, int64_t grid_y, int threads, int64_t shared,
                                      const uint64_t* words, int64_t n_words, uint64_t seed, char* error,
                                      int64_t room) {
  using namespace bipace::emulator;
  const auto refuse = [&](const std::string& why) {
    std::strncpy(error, why.c_str(), static_cast<size_t>(room) - 1);
    error[room - 1] = '\0';
    return 1;
  };
  const Kernel* kernel = head();
  while (kernel && std::strcmp(kernel->name, name) != 0) kernel = kernel->next;
  if (!kernel) return refuse(std::string("there is no kernel ") + name);
  if (static_cast<size_t>(n_words) * 8 != kernel->args_bytes) {
    return refuse(std::string(name) + " takes " + std::to_string(kernel->args_bytes / 8) + " arguments, got " +
                  std::to_string(n_words));
  }
  if (threads < 1 || threads > kernel->most_threads || threads % kWarp || grid_x < 1 || grid_y < 1) {
    return refuse(std::string(name) + " cannot be launched in blocks of " + std::to_string(threads) + " threads");
  }
  std::mt19937_64 random(seed);
  std::vector<int64_t> order(static_cast<size_t>(grid_x * grid_y));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), random);
  Run mine;
  mine.kernel = kernel;
  mine.words = words;
  run = &mine;
  std::vector<Fibre> fibres(static_cast<size_t>(threads));
  const SharedMemory own(shared);
  unsigned char* const memory = own.memory.get();
  if (!memory && shared > 0) return refuse("no memory");
  for (const int64_t number : order) {
    Block block(threads);
    for (int t = 0; t < threads; ++t) {
      Fibre& fibre = fibres[static_cast<size_t>(t)];
      fibre.place = {t, threads, number % grid_x, number / grid_x, grid_x, memory};
      fibre.warp = &block.warps[static_cast<size_t>(t / kWarp)];
      fibre.block = &block.barrier;
      const size_t group = static_cast<size_t>(t / bipace::gpu::kGroup);
      fibre.group = group < block.groups.size() ? &block.groups[group] : nullptr;
      fibre.hidden = &block.hidden;
      fibre.hides = fibre.begun = fibre.done = false;
      fibre.waits = nullptr;
      fibre.copies.assign(1, {});
      fibre.products.assign(1, {});
      fibre.seen = {};
      prepare(fibre);
    }
    run_to_the_end(fibres, random);
    if (mine.failure.empty() && own.is_overrun()) mine.failure = "something was written beyond its shared memory";
#if defined(__SANITIZE_THREAD__)
    // What stands there next is another block's, or nobody's.
    mine.races.forget(reinterpret_cast<uintptr_t>(memory), static_cast<size_t>(shared));
#endif
    if (!mine.failure.empty()) break;
  }
  run = nullptr;
  return mine.failure.empty() ? 0 : refuse(std::string(name) + ": " + mine.failure);
}

// From here on the barrier or wait in that line is left out; line 0: none is.
extern "C" void bipace_emulator_leave_out(const char* file, int line) {
  bipace::emulator::left_out_file = file;
  bipace::emulator::left_out_line = line;
}

#if defined(__SANITIZE_THREAD__)
// What code compiled with -fsanitize=thread calls, in place of ThreadSanitizer's library, to which a switch of fibres
// would have to be explained, and Python.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define BIPACE_ACCESS(bytes)                                                                 \
  void __tsan_read##bytes(void* at) {                                                        \
    bipace::emulator::aligned(at, bytes);                                                    \
    bipace::emulator::enter(at, bytes, false);                                               \
  }                                                                                          \
  void __tsan_write##bytes(void* at) {                                                       \
    bipace::emulator::aligned(at, bytes);                                                    \
    bipace::emulator::enter(at, bytes, true);                                                \
  }                                                                                          \
  void __tsan_unaligned_read##bytes(void* at) { bipace::emulator::enter(at, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* at) { bipace::emulator::enter(at, bytes, true); }
BIPACE_ACCESS(1)
BIPACE_ACCESS(2)
BIPACE_ACCESS(4)
BIPACE_ACCESS(8)
BIPACE_ACCESS(16)
#undef BIPACE_ACCESS
void __tsan_read_range(void* at, unsigned long bytes) { bipace::emulator::enter(at, bytes, false); }
void __tsan_write_range(void* at, unsigned long bytes) { bipace::emulator::enter(at, bytes, true); }
void __tsan_vptr_update(void**, void*) {}
}
#endif
