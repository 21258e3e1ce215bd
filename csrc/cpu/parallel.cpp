#include "cpu/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/interrupt.h"

namespace bipace {
namespace {

thread_local bool t_inside = false;  // a body runs on this thread

class Pool {
 public:
  using Body = std::function<void(int64_t, int)>;

  void run(int64_t n_tasks, int n_threads, const Body& body) {
    grow(n_threads - 1);
    n_threads = std::min(n_threads, static_cast<int>(threads_.size()) + 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      n_tasks_ = n_tasks;
      next_.store(0, std::memory_order_relaxed);
      error_ = nullptr;
      stop_.store(false, std::memory_order_relaxed);
      wanted_ = n_threads - 1;
      running_ = n_threads - 1;
      ++round_;
    }
    wake_.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done_.wait_for(lock, std::chrono::milliseconds(kPollEvery), [&] { return running_ == 0; })) {
      lock.unlock();
      try {
        if (!stop_.load(std::memory_order_relaxed)) poll_interrupt();
      } catch (...) {
        fail();
      }
      lock.lock();
    }
    body_ = nullptr;
    if (error_) std::rethrow_exception(error_);
  }

  std::mutex busy;  // held by the call that owns the pool

 private:
  void grow(int n) {
    while (static_cast<int>(threads_.size()) < n) {
      const int worker = static_cast<int>(threads_.size()) + 1;
      uint64_t seen;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = round_;
      }
      try {
        threads_.emplace_back([this, worker, seen] { loop(worker, seen); });
      } catch (const std::system_error&) {
        return;  // the process may have no more threads: the existing ones do the work
      }
      threads_.back().detach();
    }
  }

  void loop(int worker, uint64_t seen) {
    t_inside = true;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (worker > wanted_) continue;
      lock.unlock();
      work(worker);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  void work(int worker) {
    const Polling polling(&stop_);
    try {
      for (;;) {
        poll_interrupt();
        const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= n_tasks_) break;
        (*body_)(task, worker);
      }
    } catch (...) {
      fail();
    }
  }

  // In a handler: no thread starts another task, and long ones end at their next poll.
  void fail() {
    next_.store(n_tasks_, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
    stop_.store(true, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  const Body* body_ = nullptr;
  int64_t n_tasks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stop_{false};
  std::exception_ptr error_;
  int wanted_ = 0, running_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed: its threads sleep until the process ends, and a child after fork() must not touch the parent's
// locks, whose owners do not exist there.
std::atomic<Pool*> g_pool{nullptr};

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      g_pool.store(nullptr, std::memory_order_relaxed);
      t_inside = false;
    });
  });
  Pool* current = g_pool.load(std::memory_order_acquire);
  if (!current) {
    Pool* fresh = new Pool;
    if (g_pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

struct Inside {
  Inside() { t_inside = true; }
  ~Inside() { t_inside = false; }
};

}  // namespace

void parallel_for(int64_t n_tasks, int n_threads, const std::function<void(int64_t, int)>& body) {
  n_threads = static_cast<int>(std::min<int64_t>(std::max(n_threads, 1), n_tasks));
  if (n_threads > 1 && !t_inside) {
    Pool& p = pool();
    std::unique_lock<std::mutex> owner(p.busy, std::try_to_lock);
    if (owner.owns_lock()) {
      const Inside inside;
      p.run(n_tasks, n_threads, body);
      return;
    }
  }
  for (int64_t task = 0; task < n_tasks; ++task) {
    poll_interrupt();
    body(task, 0);
  }
}

}  // namespace bipace
