// The state of a rank as plain data, for `shoal dump`: every call in flight with its steps, every
// peer, and memory. docs/dump.md lists the fields.
#pragma once

#include <cstdint>
#include <string>

#include "base/value.h"
#include "engine/shell/engine.h"

namespace shoal {

// Changes nothing. Long lists are cut short, with the number of entries left out: a rank with ten
// thousand calls in flight must not need as much memory again to list them.
//
// Threads: under the channel's lock, for as long as it lives.
class StateReader {
 public:
  StateReader(const Engine& engine, int64_t now_ns) : engine_(engine), now_(now_ns) {}

  Value read();

  static constexpr size_t kLastFinished = 64;  // finished calls that are listed, the last ones

 private:
  Value group(const Group& group);
  Value call(const Call& call);
  Value steps(const Call& call);
  Value step(const Call& call, uint32_t at, const char* awaits) const;
  List peers_of(const Call& call) const;
  Value early(const Group& group) const;
  Value finished(const Group& group) const;
  Value peer(int peer) const;
  const char* awaits(const Call& call, uint32_t at) const;
  const char* send_awaits(const Call& call, uint32_t at) const;
  const char* recv_awaits(const Call& call, uint32_t at) const;
  int64_t since(const Call& call, uint32_t at) const;
  double seconds_since(int64_t ns) const { return static_cast<double>(now_ - ns) / 1e9; }

  const Engine& engine_;
  const int64_t now_;
  size_t n_calls_listed_ = 0, n_steps_listed_ = 0;
};

}  // namespace shoal
