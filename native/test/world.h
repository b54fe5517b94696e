// Any number of engines in one thread over a FakeNet, with the callers' memory and a clock moved by
// hand.
//
// A call's memory is filled with other bytes inside on_finished, as fast as any caller could: a
// late reader gets a wrong result or checksum, and is_untouched() notices a late writer. Under the
// address sanitizer memory that is not shared is freed instead, which detects both.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/shell/engine.h"
#include "test/truth.h"

namespace shoal::test {

// One rank's side of a job: its memory while it is borrowed, and its result.
struct TestCall {
  Job job;
  std::shared_ptr<Call> handle;
  bool finished = false;
  Error error;
  Bytes result;
  Bytes left;  // in the memory of a failed call, when it went back to its owner
  int64_t finished_ns = 0;

  bool ok() const { return finished && !error; }
};

class World {
 public:
  struct Options {
    FakeNet::Options net;
    Engine::Options engine;
    uint32_t slot_quota = 3;
    double shares_buffers =
        0.5;             // 0.5; // chance that a call's buffers are regions, where memory is shared
    double idles = 0.2;  // chance that a link is not polled in a step
    int64_t step_ns = kMillisecond;
    int64_t tick_ns = 100 * kMillisecond;
  };
  static constexpr uint64_t kGroup = 7;
  static constexpr int64_t kNever = INT64_MAX;

  World(int size, const Options& options)
      : net(size, options.net), size_(size), options_(options), random_(options.net.seed + 1) {
    for (int rank = 0; rank < size; ++rank) add_rank(rank);
    std::vector<int> everyone(static_cast<size_t>(size));
    std::iota(everyone.begin(), everyone.end(), 0);
    for (int rank = 0; rank < size; ++rank)
      groups[index(rank)] = &add_group(rank, kGroup, everyone);
  }
  ~World() {
    engines.clear();
    if (!is_untouched()) fail(__FILE__, __LINE__, "memory was touched after its call had ended");
  }

  static std::string name(int rank) {
    return "rank " + std::to_string(rank) + " (host-" + std::to_string(rank) + ")";
  }

  Engine& engine(int rank) { return *engines[index(rank)]; }
  Group& add_group(int rank, uint64_t id, std::vector<int> members) {
    return engine(rank).add_group(id, std::move(members));
  }

  // The job on one rank, in the group of all; `members`: in another group, by its ranks.
  TestCall& post(int rank, const Job& job, int64_t deadline_ns = kNever) {
    return post_in(rank, *groups[index(rank)], job, deadline_ns);
  }
  TestCall& post_in(int rank, Group& group, const Job& job, int64_t deadline_ns = kNever) {
    const auto n_members = static_cast<int>(group.members.size());
    Job here = job;
    for (const int member : group.members) here.places.push_back(net.host_of(member));
    return post_plan(rank, group, here, plan_of(job, group.rank, n_members),
                     input_of(job, group.rank, n_members), deadline_ns);
  }
  // Any plan; `input` fills DATA or INPUT, whichever it uses.
  TestCall& post_plan(int rank, Group& group, const Job& job, std::shared_ptr<const Plan> plan,
                      const Bytes& input, int64_t deadline_ns = kNever) {
    auto kept = std::make_unique<Kept>();
    kept->call.job = job;
    // Half of the shared buffers lie in the middle of a larger region.
    if (random_.chance(0.5)) kept->pad = 16 * (1 + random_.below(200));
    const bool shared = options_.net.shares_memory && random_.chance(options_.shares_buffers);
    std::vector<std::vector<std::byte*>> memory(kBuffers);
    for (int buffer = 0; buffer < kScratch; ++buffer) kept->take(*plan, buffer, shared, memory);
    const auto& filled = memory[kInput].empty() ? memory[kData] : memory[kInput];
    if (!filled.empty() && !input.empty()) std::memcpy(filled[0], input.data(), input.size());
    // Half of the outputs in several chunks name each chunk by a separate pointer.
    if (plan->layout[kOutput].offset.size() > 1 && random_.chance(0.5)) {
      const ChunkLayout& layout = plan->layout[kOutput];
      for (size_t chunk = 1; chunk < layout.offset.size(); ++chunk)
        memory[kOutput].push_back(memory[kOutput][0] + layout.offset[chunk]);
    }
    Kept& entry = *calls_.emplace_back(std::move(kept));
    open_[{rank, group.id, job.key}] = &entry;
    entry.call.handle = engine(rank).post(
        group, Posting{std::move(plan), job.key, memory, deadline_ns, false, job.subject});
    if (entry.call.handle->finished && !entry.call.finished) entry.end(*entry.call.handle, now);
    return entry.call;
  }

  // One turn of every running rank, in random order.
  void step() {
    net.step();
    now += options_.step_ns;
    const bool tick_due = now >= next_tick_;
    if (tick_due) next_tick_ = now + options_.tick_ns;
    for (const int rank : shuffled(size_)) {
      if (!runs(rank)) continue;
      Engine& one = engine(rank);
      for (const int peer : shuffled(size_)) {
        if (peer == rank || one.link(peer) == nullptr || random_.chance(options_.idles)) continue;
        if (unread_.count({rank, peer}) != 0) continue;
        one.link(peer)->pump(one);
      }
      // A driver sleeps once its engine reports that nothing moved.
      if (!one.progress(1 + random_.below(4096)) && one.has_work())
        fail(__FILE__, __LINE__, name(rank) + " had work left when it reported that nothing moved");
      if (!tick_due) continue;
      for (int peer = 0; peer < size_; ++peer)  // a heartbeat in shared memory, if there is any
        if (options_.net.shares_memory && peer != rank && runs(peer)) one.alive_at(peer, now);
      one.tick(now);
    }
  }
  // True once `until` holds, false after `most` steps.
  template <class Until>
  bool run(Until until, int most = 20'000) {
    for (int n = 0; n < most; ++n) {
      if (until()) return true;
      step();
    }
    return until();
  }
  bool run_all(int most = 20'000) {
    return run([&] { return n_unfinished() == 0; }, most);
  }
  void run_steps(int n_steps) {
    run([] { return false; }, n_steps);
  }
  // True if the memory of finished calls is as their owners left it: they fill it at once.
  bool is_untouched() const {
    return std::all_of(calls_.begin(), calls_.end(), [](const auto& kept) {
      return !kept->call.finished || kept->is_untouched();
    });
  }
  size_t n_unfinished() const {
    return static_cast<size_t>(std::count_if(
        calls_.begin(), calls_.end(), [](const auto& kept) { return !kept->call.finished; }));
  }

  // The process dies: its kernel closes its open descriptors.
  void kill(int rank) {
    engines[index(rank)].reset();
    for (auto& [at, kept] : open_) {
      if (std::get<0>(at) != rank || kept->call.finished) continue;
      kept->call.finished = true;
      kept->call.error = {Fault::kClosed, rank, "this rank was killed"};
      kept->is_ownerless = true;
    }
  }
  // Stopped, as by SIGSTOP: no rank is notified.
  void stop(int rank) { stopped_[index(rank)] = true; }
  // From now on, or no longer, `rank` does not read frames of `peer`.
  void stop_reading(int rank, int peer) { unread_.insert({rank, peer}); }
  void read_again(int rank, int peer) { unread_.erase({rank, peer}); }
  void go_on(int rank) { stopped_[index(rank)] = false; }
  bool runs(int rank) const { return engines[index(rank)] != nullptr && !stopped_[index(rank)]; }
  // An orderly end, as Mesh::close() does it.
  void leave(int rank) {
    Engine& one = engine(rank);
    one.say_goodbye();
    run([&] { return !one.owes_data(); });
    for (int n = 0; n < 100 && one.has_queued(); ++n) {
      net.step();
      one.pump_all();
    }
    one.close();
    engines[index(rank)].reset();
  }

  std::vector<int> shuffled(int n) {
    std::vector<int> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    for (size_t left = order.size(); left > 1; --left)
      std::swap(order[left - 1], order[random_.below(left)]);
    return order;
  }
  FakeRandom& random() { return random_; }
  int size() const { return size_; }

  FakeNet net;  // before the engines: it outlives their links
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<Group*> groups;  // of all ranks, by rank
  int64_t now = kSecond;

 private:
  static constexpr std::byte kScribble{0xee};

  static constexpr std::byte kForeign{0x11};

  struct Shared {
    std::byte* region;
    std::byte* at;  // after `pad` bytes of another owner; as many follow
    size_t n_bytes, pad;
  };

  struct Kept {
    TestCall call;
    size_t pad = 0;
    bool is_ownerless = false;  // the process died: its peers hold its remaining memory
    int result_buffer = kData;
    size_t result_bytes = 0;
    std::byte* result_at = nullptr;
    std::vector<std::vector<std::byte>> heap;
    std::vector<Shared> shared_memory;

    ~Kept() { free(); }
    void take(const Plan& plan, int buffer, bool shared,
              std::vector<std::vector<std::byte*>>& memory) {
      const ChunkLayout& layout = plan.layout[buffer];
      if (layout.offset.empty()) return;
      size_t n_bytes = 0;
      for (size_t chunk = 0; chunk < layout.offset.size(); ++chunk)
        n_bytes = std::max<size_t>(n_bytes, layout.offset[chunk] + layout.n_bytes[chunk]);
      std::byte* at = nullptr;
      Regions::Region region;
      if (shared && !Regions::of_process().allocate(n_bytes + 2 * pad, region)) {
        std::fill_n(region.data, n_bytes + 2 * pad, kForeign);
        at = region.data + pad;
        shared_memory.push_back({region.data, at, n_bytes, pad});
      } else {
        at = heap.emplace_back(n_bytes).data();
      }
      memory[static_cast<size_t>(buffer)] = {at};
      if (buffer == kInput) return;
      result_at = at;
      result_bytes = n_bytes;
    }
    void end(const Call& handle, int64_t when) {
      call.finished = true;
      call.error = handle.error;
      call.finished_ns = when;
      if (!call.error && result_bytes > 0) call.result.assign(result_at, result_at + result_bytes);
      if (call.error && result_bytes > 0) call.left.assign(result_at, result_at + result_bytes);
      for (const Shared& one : shared_memory) std::fill_n(one.at, one.n_bytes, kScribble);
      for (Bytes& one : heap) std::fill(one.begin(), one.end(), kScribble);
#ifdef __SANITIZE_ADDRESS__
      heap.clear();
#endif
    }
    // True if no rank has written to memory after it went back to its owner.
    bool is_untouched() const {
      const auto all = [](const std::byte* from, size_t n_bytes, std::byte value) {
        return std::all_of(from, from + n_bytes, [&](std::byte byte) { return byte == value; });
      };
      const auto is_own = [&](const Bytes& one) { return all(one.data(), one.size(), kScribble); };
      return is_ownerless ||
             (std::all_of(heap.begin(), heap.end(), is_own) &&
              std::all_of(shared_memory.begin(), shared_memory.end(), [&](const Shared& one) {
                return all(one.region, one.pad, kForeign) && all(one.at, one.n_bytes, kScribble) &&
                       all(one.at + one.n_bytes, one.pad, kForeign);
              }));
    }
    void free() {
      heap.clear();
      for (const Shared& one : shared_memory) Regions::of_process().release(one.region);
      shared_memory.clear();
    }
  };

  static size_t index(int rank) { return static_cast<size_t>(rank); }

  void add_rank(int rank) {
    std::vector<std::string> names;
    for (int peer = 0; peer < size_; ++peer) names.push_back(name(peer));
    auto one = std::make_unique<Engine>(rank, std::move(names), options_.engine);
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank) one->set_link(peer, net.link(rank, peer), now);
    const uint32_t n_slots = options_.slot_quota * static_cast<uint32_t>(std::max(1, size_ - 1));
    if (options_.net.shares_memory) {
      // Exactly as long as the slots, and never cleared: only the used part becomes real memory.
      const size_t n_bytes = n_slots * Slots::kSlotBytes;
      std::byte* slots = arenas_.emplace_back(new std::byte[n_bytes]).get();
      auto& stamps = stamps_.emplace_back(n_slots);
      net.set_arena(rank, slots, stamps);
      one->set_slots(Slots(slots, stamps.data(), n_slots, options_.slot_quota, size_));
    }
    one->hooks.on_finished = [this, rank](Call& handle) {
      const auto found = open_.find({rank, handle.group_id, handle.key});
      if (found == open_.end() || found->second->call.finished) return;
      found->second->end(handle, now);
    };
    engines.push_back(std::move(one));
    groups.push_back(nullptr);
    stopped_.push_back(false);
  }

  const int size_;
  const Options options_;
  FakeRandom random_;
  int64_t next_tick_ = 0;
  std::vector<bool> stopped_;
  std::set<std::pair<int, int>> unread_;
  std::vector<std::unique_ptr<std::byte[]>> arenas_;
  std::deque<std::vector<std::atomic<uint64_t>>> stamps_;
  std::vector<std::unique_ptr<Kept>> calls_;
  std::map<std::tuple<int, uint64_t, uint64_t>, Kept*> open_;
};

}  // namespace shoal::test
