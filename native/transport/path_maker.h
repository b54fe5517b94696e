// Makes the lost paths of a process's links anew, for the life of a job: dials, and is dialled.
//
// Of two ranks the higher one dials, as when they met. The lower one asks it to, by a connection of
// its own: who lost a path without a sign learns so, and if nobody listens there the process is
// gone. All is proved by the job's key before it counts.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/acceptor.h"
#include "transport/connector.h"
#include "transport/path_link.h"

namespace shoal {

// Threads: step() of the lane, without the mesh's lock; all else under it. A lock of all makers
// guards the state, and is held while the process forks (forking()). It is the innermost but for
// the lane's.
class PathMaker final : public PathSource {
 public:
  struct Peer {
    int rank = -1;
    size_t n_paths = 0;
    std::vector<Address> listens_at;  // of a lower rank by path, of a higher one where to ask
    std::vector<Address> from;        // by path: this end of it
  };
  struct Options {
    uint64_t epoch = 0;
    int rank = -1;
    std::vector<std::byte> job_key;
    std::vector<int> listeners;  // owned, also on an error
    std::vector<Peer> peers;
    int64_t resume_ns = 10'000'000'000;
  };
  static Error create(Options options, std::unique_ptr<PathMaker>& out);
  ~PathMaker() override;

  int fd() const { return epoll_fd_; }  // to be read when step() has something to do

  void step();
  // Makes fd() readable at that time at the latest.
  void wake_at(int64_t when);

  // Under the mesh's lock: tells the links what has come of it. The peers whose links are to be
  // served now. `watch`: begins to watch a new path's descriptor; without that the path is none.
  using Watch = std::function<bool(int fd, int peer)>;
  std::vector<int> tell_links(FrameSink& sink, const Watch& watch);

  // PathSource
  int64_t resume_ns() const override { return resume_ns_; }
  void attached(int peer, PathLink& link) override;
  void lost(int peer, size_t path) override;
  void ended(int peer) override;

  void close();  // idempotent; fd() stays
  static std::mutex& forking();
  // In a forked child, where forking() is held.
  void forsake();

 private:
  explicit PathMaker(Options options);
  std::variant<Secret, Progress> judge(const Hello& hello) const;
  void proven(Proven who, bool dialled);
  void arm();

  struct News {
    enum class Kind : uint8_t { kMade, kGone, kAsked };
    Kind kind = Kind::kMade;
    int peer = -1;
    size_t path = 0;
    int fd = -1;      // kMade
    Secret session;   // kMade
    std::string why;  // kGone: its host answers, and it is not there any more
  };
  struct Known {
    Peer peer;
    PathLink* link = nullptr;  // null: it was not made, or has ended
  };

  const uint64_t epoch_;
  const int rank_;
  const Secret job_key_;
  const int64_t resume_ns_;
  int epoll_fd_ = -1, timer_fd_ = -1;
  std::map<int, Known> peers_;
  std::vector<News> news_;
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<Connector> connector_;
  int64_t wake_ns_ = Acceptor::kNever;  // somebody asked for it
  int64_t step_ns_ = 0;                 // when step() has something to do by itself
};

}  // namespace shoal
