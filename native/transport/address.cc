#include "transport/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>

namespace shoal {
namespace {

// Of a link-local address: the number of an interface, or its name.
uint32_t scope_of(const std::string& name) {
  const uint32_t found = if_nametoindex(name.c_str());
  return found != 0 ? found : static_cast<uint32_t>(std::strtoul(name.c_str(), nullptr, 10));
}

}  // namespace

Address Address::of(const std::string& host, uint16_t port) {
  Address address;
  const size_t scope = host.find('%');
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.at);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.at);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.length = sizeof(*v4);
  } else if (inet_pton(AF_INET6, host.substr(0, scope).c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    if (scope != std::string::npos) v6->sin6_scope_id = scope_of(host.substr(scope + 1));
    v6->sin6_port = htons(port);
    address.length = sizeof(*v6);
  }
  return address;
}

Address Address::abstract(std::string_view name) {
  Address address;
  auto* unix_at = reinterpret_cast<sockaddr_un*>(&address.at);
  if (name.size() >= sizeof(unix_at->sun_path)) return {};
  unix_at->sun_family = AF_UNIX;
  std::ranges::copy(name, unix_at->sun_path + 1);  // after a zero byte: unix(7)
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Address Address::local_of(int fd) {
  Address address;
  address.length = sizeof(address.at);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address.at), &address.length) != 0) return {};
  if (address.at.ss_family == AF_INET)
    reinterpret_cast<sockaddr_in*>(&address.at)->sin_port = 0;
  else if (address.at.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6*>(&address.at)->sin6_port = 0;
  else
    return {};
  return address;
}

int Address::family_of(int fd) {
  int family = AF_UNSPEC;
  socklen_t length = sizeof(family);
  getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &length);
  return family;
}

std::string Address::text() const {
  std::array<char, INET6_ADDRSTRLEN> name{};
  if (is_local()) return "this host";
  if (at.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&at);
    inet_ntop(AF_INET, &v4->sin_addr, name.data(), name.size());
    std::string text(name.data());
    return text.append(":").append(std::to_string(ntohs(v4->sin_port)));
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&at);
  inet_ntop(AF_INET6, &v6->sin6_addr, name.data(), name.size());
  std::string text(1, '[');
  return text.append(name.data()).append("]:").append(std::to_string(ntohs(v6->sin6_port)));
}

bool is_of_our_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

}  // namespace shoal
