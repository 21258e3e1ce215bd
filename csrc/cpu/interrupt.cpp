#include "cpu/interrupt.h"

namespace bipace {
namespace {

using Clock = std::chrono::steady_clock;

thread_local Polled t_polled;

Clock::time_point later() { return Clock::now() + std::chrono::milliseconds(kPollEvery); }

}  // namespace

void poll_interrupt() {
  Polled& now = t_polled;
  if (now.stop && now.stop->load(std::memory_order_relaxed)) throw Interrupted();
  if (!now.ask || Clock::now() < now.next) return;
  if (now.ask(now.context)) throw Interrupted();
  now.next = later();
}

Polling::Polling(bool (*ask)(void* context), void* context) : before_(t_polled) {
  t_polled = {ask, context, later(), before_.stop};
}

Polling::Polling(const std::atomic<bool>* stop) : before_(t_polled) { t_polled.stop = stop; }

Polling::~Polling() { t_polled = before_; }

}  // namespace bipace
