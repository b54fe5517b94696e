// Meshes of several ranks in one process: real arenas, rings, sockets, doorbells, threads and the
// progress thread.
//
// All timers are stretched to an hour, so work without a wake-up is not done: a wait that takes
// longer than kPatience has lost a wake-up.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "engine/shell/mesh.h"
#include "test/check.h"
#include "test/sockets.h"
#include "test/truth.h"
#include "test/values.h"

namespace shoal::test {

inline constexpr int64_t kHour = 3600 * kSecond;
// Set in the keys of calls without an order.
inline constexpr uint64_t kNamed = uint64_t{1} << 62;
inline constexpr int64_t kPatience = 60 * kSecond;  // sanitizers on a busy machine are slow

// Takes turns until the condition holds. False after kPatience.
template <class Holds>
bool eventually(Holds holds) {
  const int64_t until = now_ns() + kPatience;
  while (!holds()) {
    if (now_ns() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

class Cluster {
 public:
  static constexpr uint64_t kGroup = 7;

  // `per_host` ranks share memory; the others connect by TCP when they first need to. `resume_ns`
  // not 0: lost connections are made again. `n_channels`: between ranks of different hosts; jobs of
  // a cluster with one rank per host are cut.
  Cluster(int size, int per_host, int64_t spin_ns = 0, int n_paths = 1, int64_t resume_ns = 0,
          int n_channels = 1)
      : size_(size),
        per_host_(per_host),
        n_paths_(n_paths),
        resume_ns_(resume_ns),
        n_channels_(n_channels) {
    std::vector<std::string> names;
    for (int rank = 0; rank < size; ++rank) {
      names.push_back("rank " + std::to_string(rank));
      arenas.push_back(arena_of(rank));
    }
    Mesh::Options options;
    options.spin_ns = spin_ns;
    options.backstop_ns = kHour;
    options.n_channels = n_channels;
    options.engine.heartbeat_ns = options.engine.suspect_ns = kHour;
    options.engine.dead_ns = options.engine.stalled_ns = kHour;
    std::vector<int> everyone(static_cast<size_t>(size));
    std::iota(everyone.begin(), everyone.end(), 0);
    for (int rank = 0; rank < size && per_host < size; ++rank)
      listeners.push_back(listen_on_loopback());
    for (int rank = 0; rank < size; ++rank) {
      std::shared_ptr<Mesh> mesh;
      CHECK(!Mesh::create(rank, names, kEpoch, key(), arenas[at(rank)], peers_of(rank), options,
                          mesh, maker_of(rank)));
      meshes.push_back(mesh);
      groups.push_back(&mesh->add_group(kGroup, everyone));
    }
  }
  ~Cluster() {
    std::vector<std::thread> threads;
    for (const auto& mesh : meshes) threads.emplace_back([&] { mesh->close(); });
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(Mesh::wakeups().late.load(), 0);
  }

  // One rank's part in a call, with its memory.
  struct Part {
    Job job;
    Bytes memory, output;
    std::shared_ptr<Call> call;
  };
  std::unique_ptr<Part> post(int rank, const Job& job, bool background = false,
                             bool is_whole = false) {
    auto part = std::make_unique<Part>();
    part->job = job;
    for (int each = 0; each < size_; ++each) part->job.places.push_back(each / per_host_);
    const auto plan = is_whole ? plan_of(job, rank, size_) : cut(plan_of(job, rank, size_));
    part->memory = input_of(job, rank, size_);
    Memory memory = {{part->memory.data()}};
    if (job.has_blocks()) {
      part->output.resize(expected(job, rank, size_).size());
      memory = {{}, {part->memory.data()}, {part->output.data()}};
    }
    part->call = meshes[at(rank)]->post(
        *groups[at(rank)],
        Posting{plan, job.key, memory, now_ns() + kPatience, background, job.subject});
    return part;
  }
  bool wait(int rank, const Part& part) {
    const int64_t until = now_ns() + kPatience;
    while (!meshes[at(rank)]->wait(*part.call, until - now_ns()))
      if (now_ns() > until) return false;
    return !part.call->outcome();
  }
  static bool is_right(const Part& part, int rank, int size) {
    return (part.job.has_blocks() ? part.output : part.memory) == expected(part.job, rank, size);
  }
  // Posts, waits and compares.
  void run(int rank, const Job& job) {
    const auto part = post(rank, job);
    CHECK(wait(rank, *part));
    CHECK_EQ(part->call->error.text, "");
    CHECK(is_right(*part, rank, size_));
  }
  // All ranks, each in a thread.
  void run_all(const Job& job);
  // True once all paths between hosts are open at both ends. A connected path is not open before it
  // has proved its key and the link uses it; a link that loses its last open path is lost.
  bool has_all_paths() const {
    for (const auto& mesh : meshes) {
      const auto state = mesh->state(kPatience);
      List channels = {*state};
      if (n_channels_ > 1) std::ranges::copy(list(*state, "more"), std::back_inserter(channels));
      for (const Value& channel : channels)
        for (const Value& peer : list(channel, "peers"))
          for (const Value& path : list(peer, "paths"))
            if (text(path, "state") != "open") return false;
    }
    return true;
  }
  bool is_asleep(int rank) const {
    return (arenas[at(rank)]->header().watch.load() & kCallerSleeps) != 0;
  }

  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<std::shared_ptr<Mesh>> meshes;
  std::vector<Group*> groups;
  std::vector<int> listeners;  // by rank, borrowed: listeners for ranks of other hosts
  static const std::vector<std::byte>& key() {
    static const std::vector<std::byte> key(32, std::byte{7});
    return key;
  }
  static constexpr uint64_t kEpoch = 77;

  // The same plan over all channels, if each rank is alone on its host.
  std::shared_ptr<const Plan> cut(const std::shared_ptr<const Plan>& whole) const {
    if (n_channels_ == 1 || per_host_ > 1 || whole->by_pair) return whole;
    auto plan = std::make_shared<Plan>(*whole);
    plan->n_lanes = static_cast<uint32_t>(n_channels_);
    return plan;
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }

  // The first rank of a host creates its memory.
  std::shared_ptr<Arena> arena_of(int rank) const {
    auto arena = std::make_shared<Arena>();
    const int first = rank / per_host_ * per_host_;
    const int n_local = std::min(per_host_, size_ - first);
    if (rank == first)
      CHECK(!Arena::create(n_local, *arena));
    else
      CHECK(!Arena::enter(dup(arenas[at(first)]->memory_fd()), n_local, rank - first, *arena));
    return arena;
  }

  std::unique_ptr<PathMaker> maker_of(int rank) const {
    if (listeners.empty()) return nullptr;
    PathMaker::Options options{kEpoch, rank, key(), {listeners[at(rank)]}, {}, resume_ns_};
    options.n_channels = static_cast<size_t>(n_channels_);
    for (const PeerPlace& peer : peers_of(rank))
      if (!peer.is_local)
        options.peers.push_back({peer.rank, peer.n_paths, {address_of(listeners[at(peer.rank)])}});
    std::unique_ptr<PathMaker> maker;
    CHECK(!PathMaker::create(std::move(options), maker));
    return maker;
  }

  std::vector<PeerPlace> peers_of(int rank) const {
    std::vector<PeerPlace> peers;
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank)
        peers.push_back(
            {peer, peer / per_host_ == rank / per_host_, static_cast<size_t>(n_paths_)});
    return peers;
  }

  const int size_, per_host_, n_paths_;
  const int64_t resume_ns_;
  const int n_channels_;
};

// Runs `body` for each of `n` in a separate thread, and waits for all.
inline void in_threads(int n, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int each = 0; each < n; ++each) threads.emplace_back([&body, each] { body(each); });
  for (std::thread& thread : threads) thread.join();
}

inline void Cluster::run_all(const Job& job) {
  in_threads(size_, [&](int rank) { run(rank, job); });
}

}  // namespace shoal::test
