// Status of a native call.  A stage throws no exceptions of its own: it returns a Status, and the binding raises.
#pragma once

#include <string>
#include <utility>

namespace bipace {

struct Status {
  std::string message;  // empty: success

  static Status ok() { return {}; }
  static Status error(std::string text) { return {std::move(text)}; }
  bool is_ok() const { return message.empty(); }
};

}  // namespace bipace
