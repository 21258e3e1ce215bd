// Status of a native call.  No exceptions cross a stage's border: a stage returns a Status, the binding raises.
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
