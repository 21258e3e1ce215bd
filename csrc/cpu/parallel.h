// The package's own threads.  No OpenMP: a second libgomp next to torch's oversubscribes the cores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

namespace bipace {

// Calls body(task, worker) once for every task in [0, n_tasks) on at most n_threads threads, the caller among them;
// worker in [0, n_threads) names the thread, for scratch memory.  Which thread gets which task is not fixed, so a body
// may only write what its task owns: then results are the same at any thread count.
// Runs only on the caller's thread when called from inside a body or while another thread's call holds the pool.  Safe
// after fork(): the child starts its own pool.  An exception of a body is rethrown here, once all bodies have ended;
// Interrupted (interrupt.h) if the call must end.
void parallel_for(int64_t n_tasks, int n_threads, const std::function<void(int64_t task, int worker)>& body);

// body(i, worker) for every i in [0, n), per_task of them in a task: for bodies too short to be one.
template <typename Body>
void parallel_each(int64_t n, int64_t per_task, int n_threads, const Body& body) {
  parallel_for((n + per_task - 1) / per_task, n_threads, [&](int64_t task, int worker) {
    const int64_t end = std::min(n, (task + 1) * per_task);
    for (int64_t i = task * per_task; i < end; ++i) body(i, worker);
  });
}

}  // namespace bipace
