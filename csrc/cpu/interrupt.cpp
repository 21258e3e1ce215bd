#include "cpu/interrupt.h"

#include <chrono>

namespace bipace {
namespace {

using Clock = std::chrono::steady_clock;

struct State {
  Asking::Ask ask = nullptr;
  void* context = nullptr;
  Clock::time_point next;  // when to ask again
  const std::atomic<bool>* stop = nullptr;
};
thread_local State t_state;

Clock::time_point later() { return Clock::now() + std::chrono::milliseconds(kPollEvery); }

}  // namespace

void poll_interrupt() {
  State& state = t_state;
  if (state.stop && state.stop->load(std::memory_order_relaxed)) throw Interrupted();
  if (!state.ask || Clock::now() < state.next) return;
  if (state.ask(state.context)) throw Interrupted();
  state.next = later();
}

Asking::Asking(Ask ask, void* context) : ask_before_(t_state.ask), context_before_(t_state.context) {
  t_state.ask = ask;
  t_state.context = context;
  t_state.next = later();
}

Asking::~Asking() {
  t_state.ask = ask_before_;
  t_state.context = context_before_;
}

Following::Following(const std::atomic<bool>* stop) : before_(t_state.stop) { t_state.stop = stop; }

Following::~Following() { t_state.stop = before_; }

}  // namespace bipace
