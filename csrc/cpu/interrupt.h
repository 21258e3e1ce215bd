// Ctrl-C for native code that runs for long.  csrc/cpu knows no Python: the bindings say whom to ask.
#pragma once

#include <atomic>

namespace bipace {

// Thrown out of a kernel whose call is to end.  Whoever asked knows why (in Python: the error is set).
struct Interrupted {};

// In loops that may take seconds, on any thread.  Throws Interrupted where the call is to end; the call's own thread
// asks at most every kPollEvery, the pool's threads see what it was told.
void poll_interrupt();

constexpr int kPollEvery = 50;  // ms

// While it lives, poll_interrupt() of this thread calls ask(context); true: the call is to end.
class Asking {
 public:
  using Ask = bool (*)(void* context);
  Asking(Ask ask, void* context);
  ~Asking();
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

 private:
  Ask ask_before_;
  void* context_before_;
};

// While it lives, poll_interrupt() of this thread throws where the flag is set.
class Following {
 public:
  explicit Following(const std::atomic<bool>* stop);
  ~Following();
  Following(const Following&) = delete;
  Following& operator=(const Following&) = delete;

 private:
  const std::atomic<bool>* before_;
};

}  // namespace bipace
