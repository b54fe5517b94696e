#include "transport/doorbell_socket.h"

#include <linux/filter.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/death_mark.h"

namespace shoal {
namespace {

struct Name {
  explicit Name(const DoorbellAddress& of) {
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path, of.name.data(), of.name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
  static constexpr socklen_t kLength =
      offsetof(sockaddr_un, sun_path) + sizeof(DoorbellAddress{}.name);
  sockaddr_un at{};
};

// One descriptor that rides along.
struct Rider {
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  void put(msghdr& message, int fd) {
    message.msg_control = room;
    message.msg_controllen = sizeof(room);
    cmsghdr* rider = CMSG_FIRSTHDR(&message);
    rider->cmsg_level = SOL_SOCKET;
    rider->cmsg_type = SCM_RIGHTS;
    rider->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rider), &fd, sizeof(int));
  }
  // The buffer's size is rounded up to a long, so a malicious sender can fit a second descriptor
  // in.
  static int found_in(msghdr& message) {
    const cmsghdr* rider = CMSG_FIRSTHDR(&message);
    if (rider == nullptr || rider->cmsg_type != SCM_RIGHTS) return -1;
    int fds[2] = {-1, -1};
    static_assert(CMSG_SPACE(sizeof(int)) <= CMSG_LEN(sizeof(fds)));
    std::memcpy(fds, CMSG_DATA(rider), rider->cmsg_len - CMSG_LEN(0));
    if (fds[1] >= 0) ::close(fds[1]);
    return fds[0];
  }
};

// The kernel runs this filter in the sender's context (socket(7), SO_ATTACH_FILTER). If it cannot,
// only take() checks the cookie, and a stranger can wake the progress thread.
void let_in_only(int fd, const std::array<std::byte, 16>& cookie) {
  constexpr unsigned kWords = 4;
  std::array<sock_filter, 2 * kWords + 2> steps{};
  for (unsigned word = 0; word < kWords; ++word) {
    uint32_t value = 0;
    for (unsigned byte = 0; byte < 4; ++byte)
      value = value << 8 | std::to_integer<uint32_t>(cookie[4 * word + byte]);
    steps[2 * word] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 4 * word);
    const auto to_refusal = static_cast<uint8_t>(2 * (kWords - word) - 1);
    steps[2 * word + 1] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, to_refusal);
  }
  steps[2 * kWords] = BPF_STMT(BPF_RET | BPF_K, ~0u);
  steps[2 * kWords + 1] = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{static_cast<unsigned short>(steps.size()), steps.data()};
  (void)setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
}

Error refused(const char* what) {
  return {Fault::kResource, -1,
          std::string(what) + " of the socket that wakes this process failed: " +
              std::strerror(errno) + "; raise the limit of open files (ulimit -n)"};
}

}  // namespace

Error DoorbellSocket::open() {
  fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) return refused("creation");
  auto& cookie = address_.cookie;
  if (getrandom(cookie.data(), cookie.size(), 0) != static_cast<ssize_t>(cookie.size()))
    return refused("cookie");
  let_in_only(fd_, cookie);
  // An unread ring counts against its sender's buffer: at most two for each stopped host-mate.
  const int room = 1 << 20;  // the kernel takes what it allows (net.core.wmem_max)
  (void)setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  // Bind without a name: the kernel picks a free one.
  if (bind(fd_, reinterpret_cast<const sockaddr*>(&at), sizeof(at.sun_family)) != 0)
    return refused("name");
  socklen_t length = sizeof(at);
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &length) != 0 || length != Name::kLength)
    return refused("name");
  std::memcpy(address_.name.data(), at.sun_path, address_.name.size());
  return {};
}

void DoorbellSocket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void DoorbellSocket::ring(const DoorbellAddress& there) const {
  const DoorbellAddress to = there;  // read once from memory that others write
  (void)sendto(fd_, to.cookie.data(), to.cookie.size(), MSG_DONTWAIT | MSG_NOSIGNAL, Name(to).get(),
               Name::kLength);
}

bool DoorbellSocket::hand_over(const DoorbellAddress& there, Note note, int fd,
                               const std::atomic<uint32_t>& life) const {
  // Once connected, the socket leads to the process that has the name now. If the intended process
  // still lives after that, it was the one.
  const int by = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (by < 0) return false;
  const DoorbellAddress to = there;
  bool sent = connect(by, Name(to).get(), Name::kLength) == 0;
  const uint32_t alive = life.load();
  if (sent && alive != 0 && (alive & DeathMark::kDied) == 0) {
    note.cookie = to.cookie;
    iovec vector{&note, sizeof(note)};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    Rider rider;
    if (fd >= 0) rider.put(message, fd);
    sent = sendmsg(by, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof(note));
  } else {
    sent = false;
  }
  ::close(by);
  return sent;
}

DoorbellSocket::Took DoorbellSocket::take(Note& note, int& fd) const {
  iovec vector{&note, sizeof(note)};
  Rider rider;
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = rider.room;
  message.msg_controllen = sizeof(rider.room);
  ssize_t n;
  do n = recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  fd = -1;
  if (n < 0) return Took::kNothing;
  fd = Rider::found_in(message);
  std::byte differs{0};
  for (size_t at = 0; at < note.cookie.size(); ++at)
    differs |= note.cookie[at] ^ address_.cookie[at];
  const bool is_note = n == static_cast<ssize_t>(sizeof(note)) && differs == std::byte{0} &&
                       (message.msg_flags & MSG_TRUNC) == 0;
  if (is_note) return Took::kNote;
  if (fd >= 0) ::close(std::exchange(fd, -1));
  return Took::kRing;
}

}  // namespace shoal
