// Native code without the GIL: Ctrl-C ends it, and interpreter shutdown does not abort the process.
#pragma once

#include <Python.h>
#include <unistd.h>

#include "cpu/interrupt.h"

namespace bipace {

// Once, when the module is loaded.  Its static libgcc (-static-libgcc) can only catch what another libgcc unwinds after
// it has unwound something itself.
inline void prepare_unwinding() {
  try {
    throw 0;
  } catch (int) {
  }
}

// Releases the GIL during its lifetime; Ctrl-C ends the kernel inside by Interrupted, with Python's error set.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()), polling_(&GilReleased::ask, this) {}
  ~GilReleased() { take(); }

 private:
  // Python before 3.14 ends a daemon thread that requests the GIL during interpreter shutdown by unwinding its stack,
  // which would abort the process in the first C++ frame.  Such a thread waits for the end of the process instead.
  void take() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // of a C function, which throws nothing else
      for (;;) pause();
    }
  }
  static bool ask(void* self) {
    GilReleased& own = *static_cast<GilReleased*>(self);
    own.take();
    const bool ends = PyErr_CheckSignals() != 0;
    own.state_ = PyEval_SaveThread();
    return ends;
  }

  PyThreadState* state_;
  Polling polling_;
};

}  // namespace bipace
