// The word that the kernel marks when a process dies: real processes, each killed or ended in its
// own way.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <thread>

#include "base/death_mark.h"
#include "base/page.h"
#include "base/shared_memory.h"
#include "test/check.h"

namespace shoal::test {
namespace {

const size_t kPage = page_bytes();

// Two pages that this process and its children share.
struct Page {
  Page() {
    CHECK(!create_shared_memory("page", 2 * kPage, fd));
    CHECK(!Mapping::map(fd, 2 * kPage, mapping));
  }
  ~Page() { close(fd); }
  std::atomic<uint32_t>& word(size_t page = 0) const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(mapping.data() + page * kPage);
  }
  bool is_marked(size_t page = 0) const { return (word(page).load() & DeathMark::kDied) != 0; }
  int fd = -1;
  Mapping mapping;
};

// A child that runs `body`, reports it, and waits to be killed; or runs another program.
struct Child {
  explicit Child(const std::function<void()>& body) {
    int ends[2];
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid = fork();
    if (pid == 0) {
      close(ends[0]);
      body();
      char ready = 1;
      if (write(ends[1], &ready, 1) == 1)
        while (true) pause();
    }
    close(ends[1]);
    char ready = 0;
    is_ready = read(ends[0], &ready, 1) == 1;
    close(ends[0]);
  }
  ~Child() { kill_and_wait(); }
  void kill_and_wait() {
    if (pid > 0) kill(pid, SIGKILL);
    wait();
  }
  void wait() {
    if (pid > 0) CHECK_EQ(waitpid(pid, nullptr, 0), pid);
    pid = -1;
  }
  pid_t pid = -1;
  bool is_ready = false;
};

TEST("the word of a killed process is marked, and not before it dies") {
  const Page page;
  DeathMark mark;
  Child child([&] { CHECK(!mark.set(page.fd, 0)); });
  CHECK(child.is_ready);
  CHECK(page.word().load() != 0);
  CHECK(!page.is_marked());
  child.kill_and_wait();
  CHECK(page.is_marked());
}

TEST("a process that exits without releasing its word is marked too") {
  const Page page;
  Child child([&] {
    DeathMark mark;
    CHECK(!mark.set(page.fd, 0));
    _exit(0);
  });
  child.wait();
  CHECK(page.is_marked());
}

TEST("a released word is 0 and stays 0 when the process dies") {
  const Page page;
  DeathMark first, second;
  Child child([&] {
    CHECK(!first.set(page.fd, 0));
    CHECK(!second.set(page.fd, kPage));
    first.clear();
    first.clear();
  });
  CHECK_EQ(page.word(0).load(), 0u);
  child.kill_and_wait();
  CHECK_EQ(page.word(0).load(), 0u);
  CHECK(page.is_marked(1));
}

TEST("a word outlives the thread that took it") {
  const Page page;
  DeathMark mark;
  std::thread([&] { CHECK(!mark.set(page.fd, 0)); }).join();
  CHECK(page.word().load() != 0);
  CHECK(!page.is_marked());
  mark.clear();
  CHECK_EQ(page.word().load(), 0u);
}

TEST("words can be taken again after all were released") {
  const Page page;
  for (int turn = 0; turn < 3; ++turn) {
    DeathMark mark;
    CHECK(!mark.set(page.fd, 0));
    CHECK(page.word().load() != 0);
  }
  CHECK_EQ(page.word().load(), 0u);
}

TEST("a death is marked even while a child maps the same memory") {
  const Page page;
  DeathMark mark;
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  Child child([&] {
    CHECK(!mark.set(page.fd, 0));
    if (fork() > 0) return;
    char end;  // the grandchild lives until the test closes its pipe
    close(ends[1]);
    _exit(static_cast<int>(read(ends[0], &end, 1)));
  });
  close(ends[0]);
  CHECK(child.is_ready);
  child.kill_and_wait();
  CHECK(page.is_marked());
  close(ends[1]);
}

TEST("a forked child neither holds nor releases its parent's words") {
  const Page page;
  DeathMark mark;
  CHECK(!mark.set(page.fd, 0));
  const uint32_t before = page.word().load();
  Child child([&] {
    mark.clear();
#if !defined(__SANITIZE_THREAD__)  // it forbids threads in children of threaded ones
    DeathMark own;
    CHECK(!own.set(page.fd, kPage));
    CHECK(page.word(1).load() != before);
#endif
    _exit(0);
  });
  child.wait();
  CHECK_EQ(page.word().load(), before);
#if !defined(__SANITIZE_THREAD__)
  CHECK(page.is_marked(1));
#endif
}

TEST("a process that calls exec is marked") {
  const Page page;
  DeathMark mark;
  int alive[2];
  CHECK_EQ(pipe(alive), 0);
  Child child([&] {
    CHECK(!mark.set(page.fd, 0));
    dup2(alive[0], 0);
    close(alive[1]);
    execl("/bin/sh", "sh", "-c", "read line", nullptr);
    _exit(1);
  });
  close(alive[0]);
  CHECK(!child.is_ready);  // exec closed its pipe, after it ended all other threads
  CHECK(page.is_marked());
  CHECK_EQ(kill(child.pid, 0), 0);
  close(alive[1]);
  child.wait();
}

}  // namespace
}  // namespace shoal::test
