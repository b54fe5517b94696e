// A socket address, as the kernel takes it.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace shoal {

struct Address {
  sockaddr_storage at{};
  socklen_t length = 0;  // 0: none

  // From numbers, as "10.0.0.2", "fd00::2" or "fe80::2%eth0"; empty if it is none of these.
  static Address of(const std::string& host, uint16_t port);
  // A name in the abstract namespace of Unix sockets; empty if it is too long.
  static Address abstract(std::string_view name);
  // The address of this end of a connection, with port 0; empty if the kernel does not give it.
  static Address local_of(int fd);
  static int family_of(int fd);
  bool is_local() const { return at.ss_family == AF_UNIX; }
  std::string text() const;
};

// False if the kernel says that the other end of this Unix socket belongs to another user.
bool is_of_our_user(int fd);

}  // namespace shoal
