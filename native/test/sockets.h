// Connected pairs of stream sockets, and listeners on loopback.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "test/check.h"
#include "transport/connector.h"

namespace shoal::test {

inline std::array<int, 2> unix_sockets() {
  std::array<int, 2> fds{};
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), 0);
  return fds;
}

inline int listen_on_loopback() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const Address any = Address::of("127.0.0.1", 0);
  CHECK_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&any.at), any.length), 0);
  CHECK_EQ(listen(listener, 64), 0);
  return listener;
}

// The address that a socket is bound to.
inline Address address_of(int fd) {
  Address address;
  address.length = sizeof(address.at);
  CHECK_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address.at), &address.length), 0);
  return address;
}

// A blocking connection to that address.
inline int connect_to(const Address& there) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&there.at), there.length), 0);
  return fd;
}

// The connected TCP sockets of this process.
inline std::vector<int> connections() {
  std::vector<int> found;
  for (int fd = 3; fd < 256; ++fd) {
    sockaddr_storage far{};
    socklen_t length = sizeof(far);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&far), &length) == 0 &&
        far.ss_family == AF_INET)
      found.push_back(fd);
  }
  return found;
}

inline std::array<int, 2> tcp_sockets() {
  const int listener = listen_on_loopback();
  const int near = connect_to(address_of(listener));
  const int far = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  CHECK(far >= 0);
  close(listener);
  return {near, far};
}

}  // namespace shoal::test
