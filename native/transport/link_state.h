// The state of a link, for people to read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

// The kernel's TCP_INFO (tcp(7)).
struct SocketState {
  bool is_tcp = false;  // if not, the other fields mean nothing
  uint32_t rtt_us = 0, rtt_var_us = 0;
  uint32_t congestion_window = 0;  // segments
  uint32_t n_unacked = 0;          // segments
  uint32_t n_retransmits = 0;      // segments, ever
  uint32_t unsent_bytes = 0;       // written to the socket, not sent yet
};

SocketState state_of_socket(int fd);

// A connection of a link: open, lost, or not made yet.
struct PathState {
  enum class Is : uint8_t {
    kUnmade,   // not needed yet
    kDialled,  // for the first time
    kOpen,     //
    kLost,     // and being reconnected
    kEnded,    // the peer has left or is given up, or the link was closed
  };
  Is is = Is::kOpen;
  int64_t lost_ns = 0;        // kDialled, kLost: since when; 0: a moment ago
  uint32_t n_reconnects = 0;  // ever
  std::string why;            // it was lost last
};

struct LinkState {
  size_t n_queued = 0;      // frames that wait in this process
  size_t queued_bytes = 0;  // of these, with their headers
  uint64_t n_full = 0;      // how often the ring or the socket had no room
  std::vector<SocketState> sockets;
  std::vector<PathState> paths;
};

}  // namespace shoal
