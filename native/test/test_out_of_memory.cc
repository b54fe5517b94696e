// Large allocations fail from some moment on: no crash, no hang, and every rank is notified.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>

#include "engine/shell/served_links.h"
#include "test/check.h"
#include "test/cluster.h"
#include "test/ends.h"
#include "test/link_makers.h"
#include "test/pool_world.h"
#include "test/world.h"

namespace {

std::atomic<size_t> most_bytes{SIZE_MAX};
std::atomic<bool> no_scratch{false};     // only the engine's scratch is asked for quietly
std::atomic<int64_t> n_left{INT64_MAX};  // allocations until one fails
std::atomic<bool> to_the_end{false};     // and all later ones

bool fails(size_t n_bytes) {
  if (n_bytes > most_bytes) return true;
  if (n_left == INT64_MAX) return false;
  const int64_t left = n_left.fetch_sub(1);
  return left == 1 || (left < 1 && to_the_end);
}

}  // namespace

// GCC reports a mismatch if the pair is inlined on one side only.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(size_t n_bytes) {
  void* const memory = fails(n_bytes) ? nullptr : std::malloc(n_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t n_bytes) { return operator new(n_bytes); }
void* operator new(size_t n_bytes, const std::nothrow_t&) noexcept {
  return no_scratch || fails(n_bytes) ? nullptr : std::malloc(n_bytes);
}
void* operator new[](size_t n_bytes, const std::nothrow_t& quietly) noexcept {
  return operator new(n_bytes, quietly);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace shoal::test {
namespace {

// An all-reduce of 1 MiB while at most 32 KiB can be allocated at a time.
void check_all_are_notified(Kind kind, int per_host, const std::string& why) {
  Cluster cluster(2, per_host);
  Job job;
  job.kind = kind;
  job.n_elems = 256u << 10;
  job.segment_bytes = 128u << 10;
  const auto on_0 = cluster.post(0, job);
  auto memory = input_of(job, 1, 2);
  const auto plan = plan_of(job, 1, 2);
  most_bytes = 32u << 10;
  const auto on_1 = cluster.meshes[1]->post(
      *cluster.groups[1], Posting{plan, job.key, {{memory.data()}}, now_ns() + kPatience});
  CHECK(eventually([&] { return cluster.meshes[1]->wait(*on_1, kSecond); }));
  most_bytes = SIZE_MAX;
  // Rank 0 may have received everything it needs for this call; it cannot end the next one.
  const bool ended_well = cluster.wait(0, *on_0);
  job.key++;
  const auto next = cluster.post(0, job);
  CHECK(!cluster.wait(0, *next));
  for (const Call* call : {ended_well ? nullptr : on_0->call.get(), next->call.get(), on_1.get()}) {
    if (call == nullptr) continue;
    CHECK(call->error.fault == Fault::kResource);
    CHECK(call->error.text.find(why) != std::string::npos);
  }
}

// If the failure leaves no rank that could be notified, a call ends at its deadline.
constexpr int64_t kSoon = kSecond / 10;

// One allocation fails, the `nth` from now on: calls in flight end, in an error or with the right
// result.
void check_calls_end(Kind kind, int per_host, bool aborts, int64_t nth, int n_channels = 1,
                     Codec codec = Codec::kIdentity) {
  Cluster cluster(2, per_host, 0, 1, 0, n_channels);
  Job job;
  job.kind = kind;
  job.n_elems = 40'000;
  job.segment_bytes = 32u << 10;
  job.codec = codec;
  job.places = {0, 1 / per_host};
  const Bytes wanted[] = {expected(job, 0, 2), expected(job, 1, 2)};
  Bytes memory[] = {input_of(job, 0, 2), input_of(job, 1, 2)};
  const std::shared_ptr<const Plan> plans[] = {cluster.cut(plan_of(job, 0, 2)),
                                               cluster.cut(plan_of(job, 1, 2))};
  std::shared_ptr<Call> calls[2];
  n_left = nth;
  for (const int rank : {0, 1}) {
    Mesh& mesh = *cluster.meshes[static_cast<size_t>(rank)];
    Group& group = *cluster.groups[static_cast<size_t>(rank)];
    try {
      calls[rank] = mesh.post(
          group, Posting{plans[rank], 1, {{memory[rank].data()}}, now_ns() + kSoon, true});
      if (rank == 0 && aborts) mesh.abort_group(group, "enough");
    } catch (const std::bad_alloc&) {  // it was not made
    }
  }
  for (const int rank : {0, 1}) {
    const auto& call = calls[rank];
    CHECK(call == nullptr || eventually([&] { return call->is_over(); }));
    CHECK(call == nullptr || call->outcome() || memory[rank] == wanted[rank]);
  }
  n_left = INT64_MAX;
}

TEST("whichever allocation fails, every call ends and nothing crashes") {
  int64_t first = 1;  // a different one in each case: all of them would take a minute
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kRingAllReduce})
    for (const int per_host : {1, 2})
      for (const bool aborts : {false, true})
        for (int64_t nth = first++; nth < 60; nth += 8)
          check_calls_end(kind, per_host, aborts, nth);
}

TEST("whichever allocation fails, every call that is cut over channels ends too") {
  int64_t first = 1;
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kRingAllReduce})
    for (const bool aborts : {false, true})
      for (int64_t nth = first++; nth < 100; nth += 8) check_calls_end(kind, 1, aborts, nth, 2);
}

TEST("whichever allocation fails, no encoded payload is freed while a link may send it") {
  for (const bool aborts : {false, true})
    for (int64_t nth = 1; nth < 80; nth += 2)
      check_calls_end(Kind::kRingAllReduce, 1, aborts, nth, 1, Codec::kBfloat16);
}

// A link that finds no memory for what has arrived, or counts how often it is served.
class Counted final : public Link {
 public:
  Counted(bool lacks_memory, int& n_served) : lacks_memory_(lacks_memory), n_served_(n_served) {}
  bool send(const Frame&) override { return true; }
  bool flush(FrameSink&) override { return false; }
  bool pump(FrameSink&) override {
    ++n_served_;
    if (lacks_memory_) throw std::bad_alloc();
    return true;
  }
  bool is_drained() const override { return false; }
  bool has_queued() const override { return false; }
  bool release(uint64_t, const CallId&) override { return true; }
  void close() override {}
  const char* kind() const override { return "counted"; }
  size_t max_inline() const override { return 0; }

 private:
  const bool lacks_memory_;
  int& n_served_;
};

TEST("a link that lacks memory stays listed, and keeps no other from being served") {
  Engine engine(0, {"rank 0", "rank 1", "rank 2", "rank 3"}, {});
  int n_served[4] = {};
  for (const int peer : {1, 2, 3})
    engine.set_link(peer, std::make_unique<Counted>(peer == 2, n_served[peer]), now_ns());
  ServedLinks served(engine, nullptr, 0);
  const auto lacks_memory = [&](const auto& work) {
    try {
      work();
      return false;
    } catch (const std::bad_alloc&) {
      return true;
    }
  };
  for (const int peer : {1, 2, 3})
    CHECK_EQ(lacks_memory([&] { served.serve(peer, false); }), peer == 2);
  CHECK(lacks_memory([&] { served.serve_unread(); }));
  for (const int peer : {1, 2, 3}) CHECK_EQ(n_served[peer], 2);
}

TEST("a call fails that needs a mate's region for whose mapping there was no memory") {
  ShmPair pair;
  Regions::Region region;
  CHECK(!Regions::of_process().allocate(10'000, region));
  CHECK(pair.link(0).share(region.id));
  std::byte here;
  const auto get = [&](int end) { return pair.link(end).get(1, {}, {region.id, 0}, {&here, 1}); };
  n_left = 1;
  const Moved got = get(1);
  CHECK(n_left.exchange(INT64_MAX) < 1);
  CHECK(got == Moved::kNowhere);
  CHECK(get(0) == Moved::kGone);  // the other end lacks nothing, and waits for the reason
  Regions::of_process().release(region.data);
}

TEST("whichever allocation fails as a group's end is broadcast, every channel learns of it") {
  for (int64_t nth = 1; nth < 12; ++nth) {
    FirstErrors errors(3);
    Error why{Fault::kTimedOut, 1, std::string(100, 'x')};
    n_left = nth;
    try {
      errors.report(0, 7, true, why, 1);
    } catch (const std::bad_alloc&) {  // then the channel ends its groups once more
      n_left = INT64_MAX;
      errors.report(0, 7, true, why, 1);
    }
    n_left = INT64_MAX;
    for (const int channel : {1, 2}) {
      CHECK(errors.has_news(channel));
      CHECK_EQ(errors.take(channel, 1).size(), 1u);
    }
  }
}

// Rank 0 makes a call while the `nth` allocation and all later ones fail. A caller whose call was
// refused has its memory back.
void check_memory_is_back(int64_t nth) {
  Cluster cluster(2, 1);
  Job job;
  job.kind = Kind::kRingAllReduce;
  job.n_elems = 40'000;
  const Bytes before = input_of(job, 0, 2);
  Bytes memory[] = {before, input_of(job, 1, 2)};
  const std::shared_ptr<const Plan> plans[] = {plan_of(job, 0, 2), plan_of(job, 1, 2)};
  std::shared_ptr<Call> calls[2];
  const Memory lent[] = {{{memory[0].data()}}, {{memory[1].data()}}};
  for (const size_t rank : {0u, 1u}) {
    to_the_end = true;
    n_left = rank == 0 ? nth : INT64_MAX;
    try {
      calls[rank] = cluster.meshes[rank]->post(
          *cluster.groups[rank], Posting{plans[rank], 1, lent[rank], now_ns() + kSoon, true});
    } catch (const std::bad_alloc&) {  // it was not made
    }
    n_left = INT64_MAX;
    to_the_end = false;
  }
  for (const auto& call : calls)
    CHECK(call == nullptr || eventually([&] { return call->is_over(); }));
  if (calls[0] == nullptr) CHECK(memory[0] == before);
}

TEST("a call that could not be made for want of memory uses none of its caller's") {
  for (int64_t nth = 1; nth < 40; ++nth) check_memory_is_back(nth);
}

// A message of `n_bytes` for `rank`, from rank 0 to rank 1.
std::shared_ptr<const Plan> plan_of_message(int rank, size_t n_bytes) {
  Plan plan;
  plan.program = point_to_point(rank, 2, 0, 1);
  plan.layout[kData] = equal_layout(n_bytes, 1);
  return seal(std::move(plan), DType::kUint32, FoldOp::kSum, 1, 256, "message");
}

TEST("a receive from any rank ends whichever allocation fails as its message arrives") {
  for (int64_t nth = 1; nth < 40; ++nth) {
    World::Options options;
    options.idles = 0;
    World world(2, options);
    Bytes memory[] = {Bytes(400), Bytes(400)};
    const auto received = world.engine(1).post(
        *world.groups[1],
        Message{plan_of_message(1, 400), false, -1, 3, memory[1].data(), World::kNever});
    world.engine(0).post(*world.groups[0], Message{plan_of_message(0, 400), true, 1, 3,
                                                   memory[0].data(), World::kNever});
    world.engine(0).progress();
    n_left = nth;
    try {
      world.engine(1).link(0)->pump(world.engine(1));
    } catch (const std::bad_alloc&) {  // as a channel does
      n_left = INT64_MAX;
      world.engine(1).end_groups({Fault::kResource, 1, "no memory"}, true);
    }
    n_left = INT64_MAX;
    world.engine(1).progress();
    CHECK(received->finished);
    CHECK_EQ(world.engine(1).n_in_flight(), 0u);
  }
}

TEST("whichever allocation fails as a slot is filled, the next call has all slots") {
  for (int64_t nth = 1; nth < 40; ++nth) {
    World::Options options;
    options.net.shares_memory = true;
    options.shares_buffers = options.idles = 0;
    options.slot_quota = 1;
    World world(2, options);
    Job job;
    job.kind = Kind::kRingAllReduce;
    job.n_elems = 8192;
    job.segment_bytes = 8192;
    const TestCall* calls[] = {&world.post(0, job), &world.post(1, job)};
    int64_t left = nth;
    for (const int rank : {0, 1, 0, 1, 0, 1}) {
      world.engine(1 - rank).link(rank)->pump(world.engine(1 - rank));
      n_left = left;
      try {
        world.engine(rank).progress();
        left = n_left.exchange(INT64_MAX);
      } catch (const std::bad_alloc&) {  // as a channel does
        left = n_left = INT64_MAX;
        for (const int each : {0, 1})
          world.engine(each).end_groups({Fault::kResource, each, "no memory"}, true);
      }
    }
    CHECK(world.run_all());
    for (const int rank : {0, 1}) world.add_group(rank, 8, {0, 1});
    for (const int rank : {0, 1}) world.post_in(rank, *world.engine(rank).group(8), job);
    CHECK(world.run_all());
    CHECK(calls[0]->finished && calls[1]->finished);
  }
}

// One turn of a rank, and the number of allocations left to it.
void turn_of(World& world, int rank, int64_t& left) {
  Engine& engine = world.engine(rank);
  n_left = left;
  try {
    for (int peer = 0; peer < world.size(); ++peer)
      if (peer != rank && engine.link(peer) != nullptr) engine.link(peer)->pump(engine);
    engine.progress();
    left = n_left.exchange(INT64_MAX);
  } catch (const std::bad_alloc&) {  // as a channel does
    left = n_left = INT64_MAX;
    engine.end_groups({Fault::kResource, rank, "no memory"}, true);
  }
}

PoolJob served_job(uint64_t key) {
  PoolJob job{2, 1, key};
  job.n_elems = 200;
  job.is_uneven = true;
  return job;
}

// The server's `nth` allocation fails, as calls begin on it, take windows, move them and end.
// Returns whether it made that many.
bool ends_all_after(int64_t nth) {
  World::Options options;
  options.idles = 0;
  options.net.max_inline = options.net.copied = 0;
  options.engine.staging_bytes = 16 * 64;  // half of it for windows: calls wait for each other's
  Pool pool(2, 1, options);
  World& world = pool.world;
  pool.serve(served_job(0));
  const size_t reserved = world.engine(2).staging().reserved();
  for (uint64_t key = 1; key <= 3; ++key)
    for (const int rank : {0, 1})
      pool.calls.push_back({rank, served_job(key), &pool.post(rank, served_job(key))});
  int64_t left = nth;
  for (int turn = 0; turn < 60; ++turn)
    for (const int rank : {0, 1, 2}) {
      int64_t any_number = INT64_MAX;
      turn_of(world, rank, rank == 2 ? left : any_number);
    }
  const bool failed = left > nth;
  CHECK(world.run_all());
  world.run_steps(30);
  for (const auto& posted : pool.calls)
    CHECK(posted.call->ok() || (failed && posted.call->error.peer == 2));
  CHECK_EQ(world.engine(2).n_in_flight(), 0u);
  CHECK_EQ(world.groups[2]->served.n_in_flight, 0u);
  CHECK_EQ(world.engine(2).scratch_bytes(), 0u);
  // The buffer into which a frame was read when memory ran out is kept for the next frame.
  CHECK(world.engine(2).staging().used() <= 2 * 64);
  CHECK_EQ(world.engine(2).staging().reserved(), reserved);
  return failed;
}

TEST("whichever allocation of a server fails, its calls end and all windows are returned") {
  int64_t nth = 1;
  while (ends_all_after(nth)) ++nth;
  CHECK(nth > 100);  // the loop did not stop for want of allocations
}

// The `nth` allocation of two makers fails as two paths are made, one of them again. Returns
// whether they made that many.
bool paths_come_after(int64_t nth) {
  const std::array<int, 2> listeners = {listen_on_loopback(), listen_on_loopback()};
  End low(0, listeners[0], address_of(listeners[1])),
      high(1, listeners[1], address_of(listeners[0]));
  high.link->dial();
  int64_t left = nth;
  const auto have_all = [&] {
    for (End* end : {&low, &high}) {
      n_left = left;
      end->maker->step();
      end->notify();
      left = n_left.exchange(INT64_MAX);
      end->link->pump(end->sink);
    }
    return low.link->fds().size() == 2 && high.link->fds().size() == 2;
  };
  CHECK(eventually(have_all));
  return left < 1;
}

TEST("whichever allocation fails as paths are made, both ends end up with all of them") {
  int64_t nth = 1;
  while (paths_come_after(nth)) ++nth;
  CHECK(nth > 20);  // the loop did not stop for want of allocations
}

// The sink of a link, which records the keys of the frames that arrive.
struct Keys final : FrameSink {
  std::span<std::byte> receive_buffer(int, const Header& header) override {
    memory.resize(header.length);
    return memory;
  }
  void arrived(int, const Header& header, std::span<std::byte>) override {
    keys.push_back(header.key);
  }
  void sent(int, uint64_t) override {}
  void spoiled(int, uint64_t) override {}
  void moved(int, uint64_t, Moved) override {}
  void released(int, uint64_t) override {}
  void broken(int, const Error& error) override { CHECK_EQ(error.text, ""); }

  std::vector<std::byte> memory;
  std::vector<uint64_t> keys;
};

TEST("a call whose memory is asked back while memory is short leaves other calls' frames whole") {
  const std::array<int, 2> listeners = {listen_on_loopback(), listen_on_loopback()};
  End low(0, listeners[0], address_of(listeners[1])),
      high(1, listeners[1], address_of(listeners[0]));
  Keys at_low, at_high;
  const auto step = [&] {
    for (End* end : {&low, &high}) {
      end->maker->step();
      end->notify();
    }
    low.link->pump(at_low);
  };
  high.link->dial();
  CHECK(eventually([&] {
    step();
    high.link->pump(at_high);
    return low.link->fds().size() == 2 && high.link->fds().size() == 2;
  }));
  const Bytes payload(100'000);
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  frame.is_lent_by_call = true;
  frame.header.key = 1;
  for (frame.token = 1; frame.token <= 1000; ++frame.token) low.link->send(frame);  // 100 MB
  frame.header.key = 2;
  frame.is_bulk = true;
  low.link->send(frame);
  while (low.link->pump(at_low)) {  // until the sockets are full, in the middle of a frame
  }
  frame.header.key = 1;
  most_bytes = 0;
  low.link->release(0, call_of(frame.header));
  most_bytes = SIZE_MAX;
  CHECK(eventually([&] {
    step();
    high.link->pump(at_high);
    return std::count(at_high.keys.begin(), at_high.keys.end(), 2u) == 1;
  }));
  CHECK(at_high.keys.size() < 1000);
}

TEST("a group can be added after any of its allocations has failed") {
  for (int64_t nth = 1; nth < 16; ++nth) {
    Engine engine(0, {"rank 0", "rank 1"}, {});
    n_left = nth;
    try {
      engine.add_group(7, {0, 1});
    } catch (const std::bad_alloc&) {
      n_left = INT64_MAX;
      engine.end_groups({Fault::kResource, -1, "this process ran out of memory"}, true);
      engine.tick(now_ns());
    }
    n_left = INT64_MAX;
    if (engine.group(7) == nullptr) engine.add_group(7, {0, 1});
    CHECK_EQ(engine.group(7)->rank_of[1], 1);
  }
}

constexpr uint64_t kFrames = 200;

// An outbox with this many frames in flight, each with a borrowed payload and its number as token.
std::unique_ptr<Outbox> with_frames_on_their_way(const Bytes& payload) {
  auto outbox = std::make_unique<Outbox>(Outbox::Sizes{});
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  for (frame.token = 1; frame.token <= kFrames; ++frame.token) {
    outbox->send(frame);
    Outgoing* out = outbox->pull(0, true);
    if (frame.token % 8 == 0)
      out->n_written = 1;  // in the middle of being written
    else
      outbox->written(*out);
  }
  return outbox;
}

TEST("whichever allocation fails as frames are acknowledged, each payload is released once") {
  const Bytes payload(2000);
  for (int64_t nth = 1; nth < 12; ++nth) {
    const auto outbox = with_frames_on_their_way(payload);
    std::vector<uint64_t> tokens;
    n_left = nth;
    try {
      outbox->acknowledge(kFrames / 2, tokens);
    } catch (const std::bad_alloc&) {  // the acknowledging header is read once more
      n_left = INT64_MAX;
      outbox->acknowledge(kFrames / 2, tokens);
    }
    n_left = INT64_MAX;
    std::vector<uint64_t> expected(kFrames / 2);
    std::iota(expected.begin(), expected.end(), 1);
    CHECK(tokens == expected);
    CHECK_EQ(outbox->n_unacknowledged(), kFrames / 2);
  }
}

TEST("a call asked back without memory leaves a request to acknowledge what was sent") {
  const Bytes payload(2000);
  Outbox outbox{Outbox::Sizes{}};
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  frame.is_lent_by_call = true;
  for (frame.token = 1; frame.token <= 2; ++frame.token) outbox.send(frame);
  Outgoing* out = outbox.pull(0, true);
  outbox.written(*out);
  CHECK(!(out->frame.header.flags & kAckSoon));  // the second frame would carry the request
  most_bytes = 0;
  try {
    outbox.release(call_of(frame.header));
    CHECK(false);
  } catch (const std::bad_alloc&) {
    outbox.hollow_all(call_of(frame.header));
  }
  most_bytes = SIZE_MAX;
  outbox.lost(0);
  out = outbox.pull(1, true);
  CHECK(out->frame.header.flags & kAckSoon);
  CHECK(outbox.pull(1, true) == nullptr);
}

TEST("whichever allocation for an encoded payload fails, its room is returned") {
  Staging staging(1 << 20);
  for (int64_t nth = 1; nth < 6; ++nth) {
    Encoded encoded(staging, 2);
    n_left = nth;
    try {
      Encoded::Payload payload = encoded.take(1, 1000);
      encoded.keep(7, 1, std::move(payload));
      encoded.give_back(7);
    } catch (const std::bad_alloc&) {
    }
    CHECK(nth > 2 || n_left < 1);
    n_left = INT64_MAX;
    CHECK_EQ(staging.reserved(), 0u);
    CHECK_EQ(staging.used(), 0u);
  }
}

TEST("a path lost while memory is short has all of its frames sent again") {
  const Bytes payload(2000);
  const auto outbox = with_frames_on_their_way(payload);
  most_bytes = 0;
  outbox->lost(0);
  most_bytes = SIZE_MAX;
  for (uint32_t number = 1; number <= kFrames; ++number) {
    const Outgoing* out = outbox->pull(1, true);
    CHECK(out != nullptr && out->frame.header.sequence == number);
  }
}

TEST("want of memory for arriving data ends the groups with a reason, in whichever thread") {
  check_all_are_notified(Kind::kShardedAllReduce, 1, "ran out of memory");
}

TEST("want of memory for a call's scratch ends its group with a reason") {
  check_all_are_notified(Kind::kDirectAllReduce, 2, "B of memory left for all_reduce");
}

TEST("a call that succeeded stays so when no scratch is left for the group's next call") {
  World::Options options;
  options.idles = 0;
  options.engine.staging_bytes = 64u << 10;  // one call's scratch at a time, beyond the ceiling
  World world(3, options);
  Job job;
  job.kind = Kind::kDirectAllReduce;
  job.n_elems = 64u << 10;
  job.segment_bytes = 16u << 10;
  std::vector<TestCall*> calls;
  for (job.key = 0; job.key < 4; ++job.key)
    for (const int rank : {0, 1, 2}) calls.push_back(&world.post(rank, job));
  const auto has_scratch = [&](int rank) { return world.engine(rank).scratch_bytes() > 0; };
  CHECK(world.run([&] { return has_scratch(0) && has_scratch(1) && has_scratch(2); }));
  no_scratch = true;
  CHECK(world.run_all(60'000));
  no_scratch = false;
  CHECK(calls[0]->ok() || calls[1]->ok() || calls[2]->ok());  // the first to end
  CHECK(std::any_of(calls.begin(), calls.end(), [](const TestCall* call) { return !call->ok(); }));
  for (const int rank : {0, 1, 2}) CHECK_EQ(world.engine(rank).n_in_flight(), 0);
}

}  // namespace
}  // namespace shoal::test
