// The listener for the life of a job.
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/clock.h"
#include "test/check.h"
#include "test/sockets.h"
#include "transport/acceptor.h"

namespace shoal::test {

TEST("a listener that could not be watched for want of a descriptor is retried") {
  const int listener = listen_on_loopback();
  const int watches = open("/dev/null", O_RDONLY | O_CLOEXEC);  // takes no watch
  Acceptor acceptor(
      watches, 0, {listener}, [](const Hello&) { return Progress::kRefused; },
      [](const Authenticated&) {}, {});
  CHECK(acceptor.expire(now_ns()) != Acceptor::kNever);

  const int real = epoll_create1(EPOLL_CLOEXEC);
  CHECK_EQ(dup2(real, watches), watches);  // now it does
  CHECK_EQ(acceptor.expire(now_ns() + 10 * kSecond), Acceptor::kNever);
  const int caller = connect_to(address_of(listener));
  epoll_event event;
  CHECK_EQ(epoll_wait(real, &event, 1, -1), 1);
  acceptor.on_event(event.data.u64, now_ns());
  CHECK_EQ(acceptor.n_pending(), 1u);
  for (const int fd : {caller, real, watches}) close(fd);
}

}  // namespace shoal::test
