// How a mesh comes to the background thread, and what is left when it cannot.
#include <dirent.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "engine/mesh.h"
#include "test/check.h"

namespace shoal::test {
namespace {

int n_descriptors() {
  int n = 0;
  DIR* all = opendir("/proc/self/fd");
  while (readdir(all) != nullptr) ++n;
  closedir(all);
  return n;
}

Error make_mesh(int socket_fd, std::shared_ptr<Mesh>& out) {
  auto arena = std::make_shared<Arena>();
  if (Error error = Arena::create(1, *arena)) return error;
  return Mesh::create(0, {"rank 0", "rank 1"}, 7, {}, std::move(arena), {{1, {socket_fd}}}, {},
                      out);
}

// epoll refuses regular files, and a memfd is one.
int unwatchable() { return memfd_create("not a socket", MFD_CLOEXEC); }

}  // namespace

TEST("a mesh that cannot be watched is refused with the reason, and leaves no descriptor") {
  const int before = n_descriptors();
  std::shared_ptr<Mesh> mesh;
  const Error error = make_mesh(unwatchable(), mesh);
  CHECK(error.fault == Fault::kResource);
  CHECK(error.text.find("cannot watch descriptor") != std::string::npos);
  CHECK(mesh == nullptr);
  CHECK_EQ(n_descriptors(), before);
}

TEST("a mesh that is refused leaves another one served") {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  std::shared_ptr<Mesh> good, bad;
  CHECK_EQ(make_mesh(ends[0], good).text, "");
  CHECK(make_mesh(unwatchable(), bad));
  Group& group = good->add_group(1, {0, 1});
  // Only the thread can see that the peer is gone: nobody waits here.
  shutdown(ends[1], SHUT_RDWR);
  while (!good->poison_of(group)) sched_yield();
  CHECK(good->poison_of(group).fault == Fault::kPeerLost);
  good->close();
  close(ends[1]);
}

// The lane of another channel may be about to wake one that is on its way out.
TEST("a lane that is kicked while it starts and ends writes to no descriptor but its own") {
  std::atomic<bool> is_over{false};
  std::thread kicker([&] {
    while (!is_over) Lane::of(0).kick();
  });
  for (int turn = 0; turn < 100; ++turn) {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    std::shared_ptr<Mesh> mesh;
    CHECK_EQ(make_mesh(ends[0], mesh).text, "");
    close(ends[1]);
    mesh->close();
    // Takes the number that the lane's own had a moment ago.
    const int counter = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    sched_yield();
    uint64_t n = 0;
    CHECK(read(counter, &n, sizeof(n)) < 0);
    close(counter);
  }
  is_over = true;
  kicker.join();
}

}  // namespace shoal::test
