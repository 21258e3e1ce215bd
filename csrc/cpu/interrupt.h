// Ctrl-C for long native calls.  csrc/cpu does not know Python: the bindings provide the function to ask.
#pragma once

#include <atomic>
#include <chrono>

namespace bipace {

// Thrown by a kernel whose call must end.  The asking function has the reason (in Python: the error is set).
struct Interrupted {};

// For loops that may take seconds, on any thread.  Throws Interrupted if the call must end; the call's own thread
// asks at most every kPollEvery, the pool's threads follow its answer.
void poll_interrupt();

constexpr int kPollEvery = 50;  // ms

// What poll_interrupt() of a thread goes by; null: nothing.
struct Polled {
  bool (*ask)(void* context) = nullptr;  // true: the call must end
  void* context = nullptr;
  std::chrono::steady_clock::time_point next;  // when to ask again
  const std::atomic<bool>* stop = nullptr;     // set: the call must end
};

// During its lifetime, poll_interrupt() of this thread also calls ask(context), or also reads the flag.
class Polling {
 public:
  Polling(bool (*ask)(void* context), void* context);
  explicit Polling(const std::atomic<bool>* stop);
  ~Polling();
  Polling(const Polling&) = delete;
  Polling& operator=(const Polling&) = delete;

 private:
  Polled before_;
};

}  // namespace bipace
