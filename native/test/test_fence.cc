// Memory that a failed call gives back before a peer has learned of the failure.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "base/shared_memory.h"
#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

World::Options sharing(uint64_t seed) {
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = true;
  options.shares_buffers = 1;
  return options;
}

// Rank 0's call, whose memory rank 1 may write; null if this seed places the memory differently.
TestCall* granted(World& world) {
  Job job;
  job.kind = Kind::kDirectBroadcast;
  job.root = 1;
  job.n_elems = 100'000;
  job.segment_bytes = 4096;
  TestCall& call = world.post(0, job);
  world.run_steps(10);
  return call.handle->state[0].place_granted ? &call : nullptr;
}

std::string words_before_abort(const std::function<void()>& body) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char some[4096];
  for (ssize_t n; (n = read(ends[0], some, sizeof(some))) > 0;)
    text.append(some, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  return text;
}

}  // namespace

TEST("memory that the kernel refuses to take away from a peer is never given back") {
  const std::string words = words_before_abort([] {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      World world(2, sharing(seed));
      const TestCall* call = granted(world);
      if (call == nullptr) continue;
      close(Regions::of_process().whole(call->handle->chunk(kData, 0)).fd);  // nothing to map
      world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "enough"}, true);
      std::fputs("the call was given back", stderr);
    }
  });
  CHECK(words.find("cannot be taken away") != std::string::npos);
  CHECK(words.find("vm.max_map_count") != std::string::npos);
  CHECK(words.find("given back") == std::string::npos);
}

TEST("a fence takes away the granted memory and leaves its neighbours shared") {
  int n_tried = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    World world(2, sharing(seed));
    const TestCall* call = granted(world);
    if (call == nullptr) continue;
    n_tried++;
    std::byte* const data = call->handle->chunk(kData, 0);
    const uint32_t id = Regions::of_process().whole(data).id;
    world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "enough"}, true);
    CHECK_EQ(Regions::of_process().find(data, 1).id, 0u);
    CHECK_EQ(Regions::of_process().with_id(id).id, id);
    CHECK(world.run_all());
    CHECK(world.is_untouched());
  }
  CHECK(n_tried > 3);
}

}  // namespace shoal::test
