// Workers that send arbitrary frames to a serving engine: only their links end, or their group.
// 20,000 frames here, a million under the address sanitizer by `make test-fuzz`.
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "engine/segments/served_calls.h"
#include "test/check.h"
#include "test/duel.h"
#include "test/pool.h"

namespace shoal::test {
namespace {

constexpr uint64_t kKeys = 4;
constexpr int kServer = 2, kHonest = 3;
constexpr uint64_t kTheirs = 7, kOther = 9;  // groups: the liars', and the honest worker's

// The frame types that a worker may send a server. NOT reports of other ranks: all of a mesh trust
// each other's report that a rank is lost.
constexpr FrameType kTypes[] = {
    FrameType::kPost,     FrameType::kGrant,       FrameType::kData,          FrameType::kOffer,
    FrameType::kConsumed, FrameType::kPutComplete, FrameType::kRequestToSend, FrameType::kCredit,
    FrameType::kDisagree, FrameType::kAbort,       FrameType::kGoodbye,       FrameType::kHeartbeat,
    FrameType::kRelease,  FrameType::kUnmade,      FrameType::kCommit};

// A server from its birth to its end: ranks 0 and 1 are written by hand, the last is a worker whose
// calls in another group must give the right results.
class Life {
 public:
  explicit Life(uint64_t seed)
      : random_(seed),
        lies_(0.3 / static_cast<double>(1 + seed % 10)),
        shares_memory_(seed % 4 == 3),
        net_(4, options_for(seed, shares_memory_)) {
    for (const int liar : {0, 1}) {
      server_.set_link(liar, net_.link(kServer, liar), 0);
      ends_[liar] = net_.link(liar, kServer);
    }
    server_.set_link(kHonest, net_.link(kServer, kHonest), 0);
    worker_.set_link(kServer, net_.link(kHonest, kServer), 0);
    for (const int rank : {0, 1, kServer}) net_.set_arena(rank, slots_.get(), stamps_);
    net_.set_arena(kHonest, slots_.get() + kHalf, std::span(stamps_).subspan(kSlots));
    server_.set_slots(Slots(slots_.get(), stamps_.data(), kSlots, 1, 4));
    worker_.set_slots(Slots(slots_.get() + kHalf, stamps_.data() + kSlots, kSlots, 1, 4));
    theirs_ = &server_.add_group(kTheirs, {0, 1, kServer});
    other_ = &server_.add_group(kOther, {kHonest, kServer});
    own_ = &worker_.add_group(kOther, {kHonest, kServer});
    reserved_ = server_.staging().reserved();
    choose_job();
    server_.serve(*theirs_, plan_, 0);
    ceiling_ = server_.staging().reserved() - reserved_;
    server_.serve(*other_, plan_of(honest_, 1), 0);
  }

  // Until both liars are detected, or this many frames have been sent. Returns the number.
  uint64_t run(uint64_t n_most) {
    post_honest();
    uint64_t n = 0;
    while (n < n_most && (is_linked(0) || is_linked(1))) {
      const int from = is_linked(0) && (random_.chance(0.5) || !is_linked(1)) ? 0 : 1;
      send_from(from);
      ++n;
      if (random_.chance(0.3)) turn();
    }
    for (int left = 0; left < 20; ++left) turn();
    return n;
  }

  void check(const std::string& where) {
    // A call takes 130 turns in the median where the net delays, splits and moves late, and 202 in
    // one of 40,000 lives: a call that takes more than this never ends.
    constexpr int kMostTurns = 1000;
    post_honest();
    for (int left = 0; left < kMostTurns && !is_over(); ++left) turn();
    for (const Posted& call : posted_)
      if (!call.handle->finished || call.handle->error || *call.memory != expected(call.job))
        fail(__FILE__, __LINE__, where + ": harmed another group: " + call.handle->error.text);
    if (most_scratch_ > ceiling_ + kKeys * kKeys * job_.segment_bytes)
      fail(__FILE__, __LINE__, where + ": took " + std::to_string(most_scratch_) + " B of windows");
    server_.end_groups({Fault::kClosed, kServer, "the test is over"}, false);
    for (const int liar : {0, 1}) ends_[liar]->close();
    for (int left = 0; left < 10; ++left) turn();
    if (server_.n_in_flight() != 0 || server_.scratch_bytes() != 0)
      fail(__FILE__, __LINE__, where + ": something is left of calls that are over");
  }

 private:
  static constexpr uint32_t kSlots = 4;
  static constexpr size_t kHalf = kSlots * Slots::kSlotBytes;

  static FakeNet::Options options_for(uint64_t seed, bool shares_memory) {
    FakeNet::Options options;
    options.seed = seed;
    options.shares_memory = shares_memory;
    options.max_inline = seed % 2 == 0 ? 32 : 256;  // granted, or small
    options.delays = options.splits = seed % 3 == 0 ? 0.1 : 0;
    options.moves_late = options.releases_late = seed % 5 == 0 ? 0.3 : 0;
    return options;
  }
  static Engine::Options engine_options() {
    Engine::Options options;
    options.staging_bytes = 8u << 10;  // calls wait for each other's windows
    return options;
  }
  static std::vector<std::string> names() {
    return {World::name(0), World::name(1), World::name(2), World::name(3)};
  }

  void choose_job() {
    job_.n_workers = 2;
    job_.n_elems = 1 + random_.below(random_.chance(0.5) ? 1500 : 60);
    job_.op = random_.chance(0.5) ? FoldOp::kSum : FoldOp::kAvg;
    job_.seed = random_.below(1000);
    job_.is_uneven = random_.chance(0.5);
    if (!shares_memory_ && random_.chance(0.3)) job_.codec = codec_of(job_.seed);
    plan_ = plan_of(job_, kServer);
    honest_.n_workers = 1;
    honest_.n_elems = 300;
    honest_.seed = job_.seed;
  }
  void post_honest() {
    honest_.key++;
    auto memory = std::make_unique<Bytes>(input_of(honest_, 0));
    auto handle = worker_.post(
        *own_, Posting{plan_of(honest_, 0), honest_.key, {{memory->data()}}, INT64_MAX});
    posted_.push_back({honest_, std::move(handle), std::move(memory)});
  }
  bool is_over() const {
    return std::all_of(posted_.begin(), posted_.end(),
                       [](const Posted& call) { return call.handle->finished.load(); });
  }
  bool is_linked(int liar) const { return server_.link(liar) != nullptr; }

  void turn() {
    net_.step();
    for (const int peer : {0, 1, kHonest})
      if (Link* link = server_.link(peer)) link->pump(server_);
    server_.progress();
    most_scratch_ = std::max(most_scratch_, server_.scratch_bytes());
    if (Link* link = worker_.link(kServer)) link->pump(worker_);
    worker_.progress();
    for (const int liar : {0, 1})
      if (random_.chance(0.8)) ends_[liar]->pump(sinks_[liar]);
  }

  void send_from(int from) {
    Frame frame;
    Bytes payload;
    make_plausible(from, frame, payload);
    if (random_.chance(lies_)) spoil(frame, payload);
    if (!payload.empty()) {
      frame.payload = payload.data();
      frame.header.length = static_cast<uint32_t>(payload.size());
    }
    if (frame.header.length > sizeof(Place) && payload.empty()) frame.header.length = 0;
    ends_[from]->send(frame);
    ends_[from]->flush(sinks_[from]);
  }

  // A frame that an honest worker might send next for some call.
  void make_plausible(int from, Frame& frame, Bytes& payload) {
    Header& header = frame.header;
    header.group = kTheirs;
    header.key = 1 + random_.below(kKeys);
    header.descriptor = plan_->descriptor_hash;
    const uint64_t kind = random_.below(100);
    if (kind < 8) {
      header.type = FrameType::kPost;
    } else if (kind < 62) {
      make_data(from, frame, payload);
    } else if (kind < 80) {
      header.type = FrameType::kGrant;
      header.flow = static_cast<uint32_t>(random_.below(2));
      header.segment = static_cast<uint32_t>(random_.below(30));
      frame.carry(Place{});
    } else if (kind < 88) {
      header.type = FrameType::kCommit;
    } else {
      header.type = kTypes[random_.below(std::size(kTypes))];
      header.flow = static_cast<uint32_t>(random_.below(3));
      header.segment = static_cast<uint32_t>(random_.below(10));
      header.count = static_cast<uint32_t>(random_.below(3));
      if (random_.chance(0.5)) frame.carry(Place{static_cast<uint32_t>(random_.below(5))});
    }
  }
  void make_data(int from, Frame& frame, Bytes& payload) {
    const auto& flows = plan_->program->recvs_from[static_cast<size_t>(from)];
    const auto flow = static_cast<uint32_t>(random_.below(flows.size()));
    const Step& step = plan_->program->steps[flows[flow]];
    const uint32_t n_segments = plan_->n_segments(step);
    uint32_t& next = next_[from][{frame.header.key, flow}];
    frame.header.type = FrameType::kData;
    frame.header.flow = flow;
    frame.header.segment = next;
    if (next >= n_segments) return;
    const uint64_t whole = plan_->chunk_bytes(step.buffer, step.chunk);
    const uint64_t segment = plan_->segment_bytes;
    const auto on_wire = [&](uint64_t n_bytes) {
      const auto& narrow = plan_->narrow;
      return narrow ? narrow->bytes_of(*narrow, n_bytes / sizeof(float)) : n_bytes;
    };
    const uint64_t n_bytes = on_wire(std::min<uint64_t>(segment, whole - next * segment));
    if (on_wire(whole) <= net_.options.max_inline) frame.header.flags = kEager;
    ++next;
    payload.resize(n_bytes);
    for (std::byte& byte : payload) byte = static_cast<std::byte>(random_.next());
  }

  // Falsifies one to three fields.
  void spoil(Frame& frame, Bytes& payload) {
    for (uint64_t left = 1 + random_.below(3); left > 0; --left) {
      Header& header = frame.header;
      switch (random_.below(10)) {
        case 0:
          header.type = kTypes[random_.below(std::size(kTypes))];
          break;
        case 1:
          header.flags ^= static_cast<uint16_t>(1u << random_.below(13));
          break;
        case 2:
          header.flow = number();
          break;
        case 3:
          header.segment = number();
          break;
        case 4:
          header.count = number();
          break;
        case 5:
          header.group = random_.chance(0.5) ? kOther : random_.below(20);
          break;
        case 6:
          header.key = random_.chance(0.5) ? random_.next() : random_.below(1000);
          break;
        case 7:
          header.descriptor = random_.chance(0.3) ? number() : plan_of(honest_, 1)->descriptor_hash;
          break;
        case 8:
          header.subject = number();
          break;
        default:
          spoil_payload(frame, payload);
      }
    }
  }
  void spoil_payload(Frame& frame, Bytes& payload) {
    if (!payload.empty() && random_.chance(0.5)) return payload.resize(random_.below(2000));
    frame.carry(Place{number(), number(), random_.chance(0.5) ? random_.next() : number()});
    payload.clear();
  }
  // An extreme value, a small one, or any.
  uint32_t number() {
    constexpr uint32_t kEdges[] = {0, 1, 2, 7, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};
    if (random_.chance(0.5)) return kEdges[random_.below(std::size(kEdges))];
    return static_cast<uint32_t>(random_.chance(0.5) ? random_.below(40) : random_.next());
  }

  struct Posted {
    PoolJob job;
    std::shared_ptr<Call> handle;
    std::unique_ptr<Bytes> memory;
  };

  FakeRandom random_;
  const double lies_;  // the chance of a falsified frame
  const bool shares_memory_;
  FakeNet net_;
  std::unique_ptr<std::byte[]> slots_{new std::byte[2 * kHalf]};
  std::vector<std::atomic<uint64_t>> stamps_ = std::vector<std::atomic<uint64_t>>(2 * kSlots);
  std::vector<Posted> posted_;  // NOT after the engines, which use its memory
  Engine server_{kServer, names(), engine_options()};
  Engine worker_{kHonest, names(), engine_options()};
  Silent sinks_[2];  // one each: frames land in pieces
  std::unique_ptr<Link> ends_[2];
  Group *theirs_ = nullptr, *other_ = nullptr, *own_ = nullptr;
  PoolJob job_, honest_{1, 1, 0};
  std::shared_ptr<const Plan> plan_;
  std::map<std::pair<uint64_t, uint32_t>, uint32_t> next_[2];  // segment, by key and flow
  size_t reserved_ = 0, ceiling_ = 0, most_scratch_ = 0;
};

TEST("whatever workers send, a server survives within its bounds and serves the others correctly") {
  const uint64_t n_wanted = seeds(20'000);
  uint64_t n_frames = 0, seed = 0;
  for (; n_frames < n_wanted; ++seed) {
    Life life(seed);
    n_frames += life.run(300);
    life.check("seed " + std::to_string(seed));
  }
  std::printf("%llu frames, %llu lives\n", static_cast<unsigned long long>(n_frames),
              static_cast<unsigned long long>(seed));
}

}  // namespace
}  // namespace shoal::test
