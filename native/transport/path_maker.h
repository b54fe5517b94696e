// Makes the connections of a process's links, at their first use and after each loss.
//
// Of two ranks the higher one dials. The lower one asks it to by a connection of its own, by which
// the higher rank learns that a path is missing; if the connection is refused, the process is gone.
// Every connection must prove the job key before it counts.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/acceptor.h"
#include "transport/connector.h"
#include "transport/frame.h"
#include "transport/path_link.h"

namespace shoal {

// A peer has `paths` connections for each channel of the mesh, numbered channel * paths + path.
//
// Threads: step() runs on the first channel's progress thread, without a channel's lock; all else
// under the lock of the channel concerned. One lock for all makers guards the state and is held
// while the process forks (forking()). Only the progress threads' locks are taken under it.
class PathMaker {
 public:
  static constexpr size_t kMostChannels = 8;
  static constexpr size_t kMostConnections = kMostChannels * Header::kMaxPaths;

  struct Peer {
    int rank = -1;
    size_t n_paths = 1;               // of one channel
    std::vector<Address> listens_at;  // by path, and round again where there are fewer
  };
  struct Options {
    uint64_t epoch = 0;
    int rank = -1;
    std::vector<std::byte> job_key;
    std::vector<int> listeners;  // owned, also on an error
    std::vector<Peer> peers;
    // How long a link waits for a connection after it has lost all. A shorter time fails jobs while
    // a switch restarts a port; a longer one delays the notice that a host is gone.
    int64_t resume_ns = 10'000'000'000;
    size_t n_channels = 1;
  };
  static Error create(Options options, std::unique_ptr<PathMaker>& out);
  ~PathMaker();
  PathMaker(const PathMaker&) = delete;

  int fd() const { return epoll_fd_; }  // to be read when step() has something to do

  void step();
  // Make fd() readable by the time `when`, so that step() then calls the channel.
  void wake_at(size_t channel, int64_t when);
  size_t n_channels() const { return sources_.size(); }
  // True if there is news for the channel, to be taken by notify_links().
  bool calls(size_t channel) const { return called_[channel].load(); }

  // Under the channel's lock: pass the news to its links. Returns the peers whose links must be
  // served now. `watch`: starts to poll a new path's descriptor; if that fails the path is dropped.
  // News for which there is no memory is kept for later.
  using Watch = std::function<bool(int fd, int peer)>;
  std::vector<int> notify_links(size_t channel, FrameSink& sink, const Watch& watch);

  // For the links of a channel.
  PathSource& source(size_t channel) { return sources_[channel]; }

  void close();  // idempotent; fd() stays
  static std::mutex& forking();
  // In a forked child, where forking() is held.
  void forsake();

 private:
  class Source final : public PathSource {
   public:
    Source(PathMaker& maker, size_t channel) : maker_(maker), channel_(channel) {}
    int64_t resume_ns() const override { return maker_.resume_ns_; }
    void attached(int peer, PathLink& link) override { maker_.attached(channel_, peer, link); }
    void want(int peer, size_t path) override { maker_.want(channel_, peer, path); }
    std::string last_failure(int peer) const override { return maker_.last_failure(peer); }
    void ended(int peer) override { maker_.ended(channel_, peer); }

   private:
    PathMaker& maker_;
    const size_t channel_;
  };
  explicit PathMaker(Options options);
  std::variant<Secret, Progress> judge(const Hello& hello) const;
  void proven(Authenticated who, bool dialled);
  void gone(const Hello& hello, const std::string& why);
  void attached(size_t channel, int peer, PathLink& link);
  void want(size_t channel, int peer, size_t path);
  std::string last_failure(int peer) const;
  void ended(size_t channel, int peer);
  void take_events(int64_t now);
  void arm();

  struct News {
    enum class Kind : uint8_t { kMade, kGone, kAsked };
    Kind kind = Kind::kMade;
    int peer = -1;
    size_t connection = 0;
    int fd = -1;                 // kMade, until the pipe has it
    std::unique_ptr<Pipe> pipe;  // kMade, until the link has it
    bool is_watched = false;     // kMade
    Secret session;              // kMade
    std::string why;             // kGone: its host answers, but the process is gone
  };
  struct Known {
    Peer peer;
    struct Held {
      PathLink* link = nullptr;
      bool has_ended = false;  // false without a link: its channel is not made yet
    };
    std::vector<Held> links;  // by channel
    // By connection that this rank has dialled: its local address, used to dial again.
    std::map<uint32_t, Address> from;
  };
  void notify(const Known& known, News news);
  bool pass_news(size_t channel, FrameSink& sink, const Watch& watch, std::vector<int>& peers);
  void hand_over(News& news, PathLink* link, size_t path, const Watch& watch);
  void close_news();

  const uint64_t epoch_;
  const int rank_;
  const Secret job_key_;
  const int64_t resume_ns_;
  int epoll_fd_ = -1, timer_fd_ = -1;
  std::map<int, Known> peers_;
  std::vector<Source> sources_;          // by channel
  std::vector<std::vector<News>> news_;  // by channel
  std::array<std::atomic<bool>, kMostChannels> called_{};
  std::unique_ptr<Acceptor> acceptor_;
  std::unique_ptr<Connector> connector_;
  std::array<int64_t, kMostChannels> wake_ns_;  // by channel: when it asked for it
  int64_t step_ns_ = 0;                         // when step() has something to do by itself
};

}  // namespace shoal
