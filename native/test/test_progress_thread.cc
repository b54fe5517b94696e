// How a mesh joins the background thread, and the state after it could not.
#include <dirent.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "engine/shell/mesh.h"
#include "test/builder.h"
#include "test/check.h"
#include "test/sockets.h"

namespace shoal::test {
namespace {

int n_descriptors() {
  int n = 0;
  DIR* all = opendir("/proc/self/fd");
  while (readdir(all) != nullptr) ++n;
  closedir(all);
  return n;
}

// With a peer on another host, which listens at `there`.
Error make_mesh(const Address& there, std::shared_ptr<Mesh>& out) {
  auto arena = std::make_shared<Arena>();
  if (Error error = Arena::create(1, *arena)) return error;
  PathMaker::Options options{7, 0, {}, {listen_on_loopback()}, {{1, 1, {there}}}, kSecond};
  std::unique_ptr<PathMaker> paths;
  if (Error error = PathMaker::create(std::move(options), paths)) return error;
  return Mesh::create(0, {"rank 0", "rank 1"}, 7, {}, std::move(arena), {{1, false, 1}}, {}, out,
                      std::move(paths));
}

Error make_mesh_of_one(std::shared_ptr<Mesh>& out) {
  auto arena = std::make_shared<Arena>();
  if (Error error = Arena::create(1, *arena)) return error;
  return Mesh::create(0, {"rank 0"}, 7, {}, std::move(arena), {}, {}, out);
}

// An address without a listener.
Address nowhere() {
  const int listener = listen_on_loopback();
  const Address there = address_of(listener);
  close(listener);
  return there;
}

}  // namespace

TEST("a mesh for which no descriptors are left is refused with a reason and holds none") {
  // UBSan uses a pipe to inspect an object of a new type: it meets all types here.
  std::shared_ptr<Mesh> first;
  CHECK_EQ(make_mesh_of_one(first).text, "");
  first->close();
  first.reset();
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int n_before = n_descriptors();
  int n_refused = 0;
  for (rlim_t most = 3; most < 32; ++most) {
    const rlimit few = {most, before.rlim_max};
    std::shared_ptr<Mesh> mesh;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    const Error error = make_mesh_of_one(mesh);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    if (mesh != nullptr) mesh->close();
    n_refused += error.fault == Fault::kResource;
    CHECK(mesh != nullptr || error.fault == Fault::kResource);
    mesh.reset();
    CHECK_EQ(n_descriptors(), n_before);
  }
  CHECK(n_refused > 0);
}

TEST("a progress thread serves a mesh without callers, and detects a lost peer") {
  std::shared_ptr<Mesh> mesh;
  CHECK_EQ(make_mesh(nowhere(), mesh).text, "");
  Group& group = mesh->add_group(1, {0, 1});
  ProgramBuilder program(2);
  program.recv(1, 0);
  Plan plan;
  plan.program = program.done();
  plan.layout[kData] = equal_layout(64, 1);
  const auto sealed = seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 64, "a message");
  std::vector<std::byte> memory(64);
  const auto call =
      mesh->post(group, Posting{sealed, 1, {{memory.data()}}, now_ns() + 60 * kSecond, true});
  while (!mesh->abort_of(group)) sched_yield();
  CHECK(mesh->abort_of(group).fault == Fault::kPeerLost);
  CHECK(mesh->abort_of(group).text.find(
            "could not be connected to: no process listens at 127.0.0.1:") == 0);
  mesh->close();
}

// Another channel's progress thread may be about to wake one that is stopping.
TEST("a progress thread kicked at its start and end writes to no descriptor but its own") {
  std::atomic<bool> is_over{false};
  std::thread kicker([&] {
    while (!is_over) ProgressThread::of(0).kick();
  });
  for (int turn = 0; turn < 100; ++turn) {
    std::shared_ptr<Mesh> mesh;
    CHECK_EQ(make_mesh_of_one(mesh).text, "");
    mesh->close();
    // Takes the descriptor number that the progress thread had a moment ago.
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
