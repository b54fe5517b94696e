// The background thread: serves sockets always, and everything else while nobody waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "engine/mesh.h"

namespace shoal {

// One per process; its thread lives while there is a mesh. Never throws and never ends the process:
// an error closes a link or ends a group, nothing more.
//
// Threads: any. Never holds its own lock while it takes a mesh's.
class Lane {
 public:
  static Lane& of_process();

  // Starts the thread with the first mesh. On an error nothing is left behind.
  Error add(const std::shared_ptr<Mesh>& mesh);
  // Afterwards the lane does not touch the mesh any more. Not from the lane's own thread.
  void remove(const Mesh* mesh);
  // One more descriptor of a mesh that was added; it goes with its last copy.
  Error watch_also(const Mesh* mesh, Mesh::Watched one);
  // Wakes the thread if it sleeps.
  void kick();

 private:
  struct Entry {
    std::shared_ptr<Mesh> mesh;
    std::vector<Mesh::Watched> watched;
  };
  Error start();
  Error start_thread();
  Error enter(const std::shared_ptr<Mesh>& mesh);
  void stop();
  void close_descriptors();
  Error watch(int fd, uint64_t tag, uint32_t events);
  // Around fork(): the child has no lane and must not talk on the parent's sockets.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();
  void run();
  bool round(bool more);
  void dispatch(uint64_t tag, bool ended);

  std::mutex mutex_;
  std::mutex life_;  // add and remove, one at a time
  std::map<uint32_t, Entry> meshes_;
  uint32_t next_id_ = 1;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> asleep_{false};
  int epoll_fd_ = -1, kick_fd_ = -1;
};

}  // namespace shoal
