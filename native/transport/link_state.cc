#include "transport/link_state.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace shoal {

SocketState state_of_socket(int fd) {
  SocketState state;
  tcp_info info{};
  socklen_t length = sizeof(info);  // older kernels know less, and leave the rest zero
  if (fd < 0 || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return state;
  state.is_tcp = true;
  state.rtt_us = info.tcpi_rtt;
  state.rtt_var_us = info.tcpi_rttvar;
  state.congestion_window = info.tcpi_snd_cwnd;
  state.n_unacked = info.tcpi_unacked;
  state.n_retransmits = info.tcpi_total_retrans;
  state.unsent_bytes = info.tcpi_notsent_bytes;
  return state;
}

}  // namespace shoal
