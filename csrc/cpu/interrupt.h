// Ctrl-C for long native calls.  csrc/cpu does not know Python: the bindings provide the function to ask.
#pragma once

#include <atomic>

namespace bipace {

// Thrown by a kernel whose call must end.  The asking function has the reason (in Python: the error is set).
struct Interrupted {};

// For loops that may take seconds, on any thread.  Throws Interrupted if the call must end; the call's own thread
// asks at most every kPollEvery, the pool's threads follow its answer.
void poll_interrupt();

constexpr int kPollEvery = 50;  // ms

// During its lifetime, poll_interrupt() of this thread calls ask(context); true: the call must end.
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

// During its lifetime, poll_interrupt() of this thread throws if the flag is set.
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
