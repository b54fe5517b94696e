// The background thread: serves sockets always, and everything else while nobody waits.
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

// A descriptor that a channel wants to be told of.
struct Watched {
  int fd;
  int peer;  // or Channel::kDoorbell, kPaths
};

// Each serves the channels of one number, of all meshes of the process: as a rule one. Its thread
// lives while there is one. Never throws and never ends the process: an error closes a link or ends
// a group, nothing more.
//
// Threads: any. Never holds its own lock while it takes a channel's.
class ProgressThread {
 public:
  static constexpr int kMost = 8;
  static ProgressThread& of(int channel);

  // Starts the thread with the first channel. On an error nothing is left behind.
  Error add(const std::shared_ptr<Channel>& channel);
  // Afterwards the progress thread does not touch the channel any more. Not from the progress
  // thread's own thread.
  void remove(const Channel* channel);
  // One more descriptor of a channel that was added; it goes with its last copy.
  Error watch_also(const Channel* channel, Watched one);
  // Wakes the thread if it sleeps.
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
  // Around fork(): the child has no progress thread and must not talk on the parent's sockets.
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
