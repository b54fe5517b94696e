// The background thread: it always serves the sockets, and drives the channel while no caller
// waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"

namespace shoal {

class Channel;

// A descriptor to poll for a channel.
struct Watched {
  int fd;
  int peer;  // or Channel::kDoorbell, kPaths
};

// Progress thread k serves channel k of every mesh in the process, usually one. The thread runs
// while there is such a channel. It never throws and never ends the process: an error closes a link
// or ends a group.
//
// Threads: any. Never holds its own lock while it takes a channel's.
class ProgressThread {
 public:
  static constexpr int kMost = 8;
  static ProgressThread& of(int channel);

  // Add a channel; the first one starts the thread. After an error nothing is left behind.
  Error add(const std::shared_ptr<Channel>& channel);
  // Remove a channel. The thread may finish its round with it, and finds it closed. Must not be
  // called on the progress thread.
  void remove(const Channel* channel);
  // Poll one more descriptor of an added channel, until the last copy of the descriptor is closed.
  Error watch_also(const Channel* channel, Watched one);
  // Wake the thread if it sleeps.
  void kick();

 private:
  explicit ProgressThread(int number) : number_(number) {}
  struct Entry {
    std::shared_ptr<Channel> channel;
    std::vector<Watched> watched;
  };
  Error start();
  Error start_thread();
  Error enter(const std::shared_ptr<Channel>& channel);
  void stop();
  void close_descriptors();
  Error watch(int fd, uint64_t tag, uint32_t events);
  // Fork handlers: the child has no progress thread and must not send on the parent's sockets.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();
  void forsake();
  void run();
  bool round(bool more);
  void dispatch(uint64_t tag, bool ended);

  const int number_;
  std::mutex mutex_;
  std::mutex life_;  // add and remove, one at a time
  std::map<uint32_t, Entry> channels_;
  uint32_t next_id_ = 1;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> asleep_{false};
  int epoll_fd_ = -1;
  std::mutex kicking_;  // no other lock is taken under it
  int kick_fd_ = -1;    // another channel's progress thread may kick this one while it stops
};

}  // namespace shoal
