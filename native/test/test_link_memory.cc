// The contract of links on memory, tested on each kind: releasing it, and accessing the peer's.
#include <set>

#include "test/link_makers.h"

namespace shoal::test {
namespace {

bool is_of(const Recorder::Came& came, uint64_t key) {
  return came.header.type == FrameType::kData && came.header.key == key;
}

bool is_whole(const Recorder::Came& came, const Bytes& memory) {
  return std::memcmp(came.payload.data(), memory.data(), came.payload.size()) == 0;
}

// ---- releasing memory

TEST("a call that asks back its memory takes no frame of another call that lent the same memory") {
  for (uint64_t seed = 0; seed < 5; ++seed)
    for_every_link([&](Pair& pair, const Maker& maker) {
      FakeRandom random(seed);
      const Bytes shared = random_bytes(random, maker.largest);
      const uint64_t asked_at = random.below(30);
      size_t n_kept = 0;
      for (uint32_t number = 0; number < 30; ++number) {
        Frame frame = data_frame(shared, number, number + 1);
        frame.header.length = static_cast<uint32_t>(1 + random.below(shared.size()));
        frame.header.key = random.below(2);
        n_kept += frame.header.key;
        pair.link(0).send(frame);
        if (random.chance(0.3)) pair.pump(static_cast<int>(random.below(2)));
        if (number == asked_at) pair.release(0, {3, 0});
      }
      const auto came_of = [&](uint64_t key) {
        return std::count_if(pair.sink(1).came.begin(), pair.sink(1).came.end(),
                             [&](const auto& came) { return is_of(came, key); });
      };
      CHECK(pair.run([&] { return came_of(1) == static_cast<std::ptrdiff_t>(n_kept); }));
      pair.settle();
      for (const auto& came : pair.sink(1).came)
        CHECK(came.header.type == FrameType::kHeartbeat || is_whole(came, shared));
      CHECK(!pair.sink(0).is_over && !pair.sink(1).is_over);
    });
}

TEST("revoked payloads are no longer read, and other frames arrive whole") {
  for_every_link([](Pair& pair, const Maker& maker) {
    FakeRandom random(5);
    const Bytes mine = random_bytes(random, 700);
    // Some are queued, one is half sent, some are fully sent.
    auto doomed = std::make_unique<Bytes>(random_bytes(random, maker.largest));
    const Bytes original = *doomed;
    for (uint32_t number = 0; number < 30; ++number) {
      const bool is_mine = number % 3 == 0;
      Frame frame = data_frame(is_mine ? mine : *doomed, number, number + 1);
      frame.header.key = is_mine ? 1 : 0;
      pair.link(0).send(frame);
      if (number == 4) pair.pump(0);
    }
    pair.pump(1);
    pair.release(0, {3, 0});
    std::fill(doomed->begin(), doomed->end(), std::byte{0xee});
    doomed.reset();
    auto& came = pair.sink(1).came;
    const auto is_mine = [](const auto& one) { return is_of(one, 1); };
    CHECK(pair.run([&] { return std::count_if(came.begin(), came.end(), is_mine) == 10; }));
    pair.settle();
    // A released payload in flight may arrive as a heartbeat.
    std::erase_if(came, [](const auto& one) { return one.header.type == FrameType::kHeartbeat; });
    for (const auto& one : came) CHECK(is_whole(one, is_mine(one) ? mine : original));
    CHECK(!pair.sink(0).is_over && !pair.sink(1).is_over);
    CHECK(!maker.borrows || came.size() < 30);
  });
}

TEST("a revoked receive buffer is no longer written, and its frame arrives whole elsewhere") {
  for_every_link([](Pair& pair, const Maker& maker) {
    if (!maker.lands) return;
    FakeRandom random(6);
    const Bytes payload = random_bytes(random, maker.largest);
    for (uint32_t number = 0; number < 12; ++number)
      pair.link(0).send(data_frame(payload, number, number + 1));
    int n_diverted = 0;
    CHECK(pair.run([&] {
      Recorder& sink = pair.sink(1);
      if (sink.n_receive_buffers > static_cast<int>(sink.came.size()) && sink.memory() != nullptr) {
        const std::byte* asked = sink.memory().get();
        sink.on_released = [&, asked](uint64_t) {
          if (sink.memory().get() != asked) return;  // it arrived before
          sink.memory().reset();
          n_diverted++;
        };
        const uint64_t token = pair.next_token++;
        if (pair.link(1).release(token, call_of(sink.last_header))) sink.on_released(token);
      }
      return sink.came.size() == 12;
    }));
    for (const auto& came : pair.sink(1).came) check_came(came, payload, came.header.segment);
    if (has(maker.name, "tcp") || has(maker.name, "pieces")) CHECK(n_diverted > 0);
  });
}

// ---- shared memory

void add_bytes(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
  for (size_t at = 0; at < n_elems; ++at)
    out[at] = static_cast<std::byte>(static_cast<int>(a[at]) + static_cast<int>(b[at]));
}

Into into(Bytes& bytes) { return {bytes.data(), bytes.size()}; }

TEST("data put into a shared region stays there, and can be got or folded") {
  for_every_link([](Pair& pair, const Maker&) {
    if (!pair.link(0).shares_memory()) return;
    FakeRandom random(7);
    Regions::Region region;
    CHECK(!Regions::of_process().allocate(10'000, region));
    CHECK(pair.link(0).share(region.id));
    CHECK(pair.link(0).share(region.id));
    for (int n = 0; n < 50; ++n) {
      const Bytes first = random_bytes(random, 1 + random.below(5000));
      const uint64_t offset = random.below(region.size - first.size() + 1);
      CHECK(pair.put(1, first, {region.id, offset}) == Moved::kDone);
      CHECK(std::equal(first.begin(), first.end(), region.data + offset));
      Bytes got(first.size());
      CHECK(pair.get(1, {region.id, offset}, into(got)) == Moved::kDone);
      CHECK(got == first);
      Bytes sum = random_bytes(random, first.size());
      Bytes expected = sum;
      add_bytes(expected.data(), sum.data(), first.data(), sum.size());
      CHECK(pair.get(1, {region.id, offset}, {sum.data(), sum.size(), add_bytes, sum.size()}) ==
            Moved::kDone);
      CHECK(sum == expected);
    }
    Regions::of_process().release(region.data);
    CHECK(!pair.link(0).share(region.id + 1000));
    // The mapping outlives the region at its owner: a late put harms no other memory.
    CHECK(pair.put(1, Bytes(10), {region.id, 0}) == Moved::kDone);
  });
}

TEST("nothing outside a region that the peer shares can be named") {
  for_every_link([](Pair& pair, const Maker& maker) {
    Regions::Region region;
    CHECK(!Regions::of_process().allocate(10'000, region));
    Bytes here(1);
    const auto reaches = [&](int end, uint64_t offset, size_t n_bytes) {
      const Remote there{region.id, offset};
      const Moved put = pair.link(end).put(1, {}, here.data(), n_bytes, there);
      const Moved got = pair.link(end).get(2, {}, there, {here.data(), n_bytes});
      CHECK((put == Moved::kNowhere) == (got == Moved::kNowhere || got == Moved::kGone));
      return put != Moved::kNowhere;
    };
    CHECK(!reaches(1, 0, 1));
    const bool is_shared = pair.link(0).share(region.id);
    CHECK_EQ(is_shared, pair.link(0).shares_memory());
    CHECK(!pair.link(0).share(region.id + 1000));
    CHECK_EQ(reaches(1, region.size - 1, 1), is_shared);
    CHECK_EQ(reaches(1, region.size, 0), is_shared);
    CHECK(!reaches(1, region.size, 1));
    CHECK(!reaches(1, 1, region.size));
    CHECK(!reaches(1, ~uint64_t{0}, 1));
    CHECK(!reaches(1, ~uint64_t{0}, 2));
    CHECK(!reaches(1, 1, ~size_t{0}));
    CHECK(!reaches(0, 0, 1));  // one direction only
    pair.release(1, {});
    Regions::of_process().release(region.data);
    pair.link(0).tick();
    if (!has(maker.name, "shm")) return;
    CHECK(pair.get(1, {region.id, 0}, {here.data(), 1}) == Moved::kDone);
    // Looking for an unknown region reads the notes, and with them the release.
    for (const uint32_t id : {region.id + 1, region.id})
      CHECK(pair.get(1, {id, 0}, {here.data(), 1}) == Moved::kGone);
  });
}

TEST("a peer's slots are read by number and stamp, and not beyond their end") {
  ShmPair pair;
  const uint32_t last = pair.arenas[0].n_slots() - 1;
  pair.arenas[0].slots()[last * Slots::kSlotBytes + 1] = std::byte{9};
  pair.arenas[0].stamps()[last] = 41;
  Bytes got(2);
  CHECK(pair.get(1, {last, 41, true}, into(got)) == Moved::kDone);
  CHECK(got[1] == std::byte{9});
  Bytes much(Slots::kSlotBytes + 1);
  CHECK(pair.get(1, {last, 41, true}, into(much)) == Moved::kNowhere);
  CHECK(pair.get(1, {last + 1, 41, true}, into(got)) == Moved::kNowhere);
  CHECK(pair.get(1, {~0u, 41, true}, into(got)) == Moved::kNowhere);
}

TEST("a slot reused during a get makes it stale, and one reused before it is not read") {
  static std::atomic<uint64_t>* stamp = nullptr;
  ShmPair pair;
  stamp = pair.arenas[0].stamps();
  *stamp = 41;
  Bytes got(1);
  CHECK(pair.get(1, {0, 40, true}, {nullptr, 1}) == Moved::kStale);
  const auto read_as_it_changes = [](std::byte*, const std::byte*, const std::byte*, size_t) {
    *stamp = 42;
  };
  CHECK(pair.get(1, {0, 41, true}, {got.data(), 1, read_as_it_changes, 1}) == Moved::kStale);
}

TEST("each put and get ends once, and never after a call revoked its memory") {
  FakeNet::Options options = fake_options();
  options.shares_memory = true;
  options.moves_late = options.releases_late = 0.9;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    options.seed = seed;
    FakePair pair(options);
    Regions::Region region;
    CHECK(!Regions::of_process().allocate(100, region));
    CHECK(pair.link(0).share(region.id));
    FakeRandom random(seed);
    std::map<uint64_t, Bytes> mine;
    std::set<uint64_t> under_way, asked;
    for (uint64_t token = 1; token <= 100; ++token) {
      Bytes& bytes = mine[token] = Bytes(1, std::byte{1});
      const Remote there{region.id, token - 1};
      const CallId call{1, token};
      const Moved how = token % 2 == 0 ? pair.link(1).put(token, call, bytes.data(), 1, there)
                                       : pair.link(1).get(token, call, there, into(bytes));
      if (how == Moved::kLater) under_way.insert(token);
      if (random.chance(0.3)) pair.pump(1);
    }
    const auto scribble = [&](uint64_t token) {
      asked.insert(token);
      std::fill(mine[token].begin(), mine[token].end(), std::byte{0xee});
    };
    pair.sink(1).on_released = scribble;
    for (uint64_t token = 1; token <= 100; token += 1 + random.below(3))
      if (pair.link(1).release(token, {1, token})) scribble(token);
    pair.settle();
    for (const uint64_t token : under_way) {
      const bool has_ended = pair.sink(1).came_of.count(token) > 0;
      CHECK(has_ended || asked.count(token) > 0);
    }
    for (const uint64_t token : asked) CHECK(mine[token][0] == std::byte{0xee});
    for (size_t at = 0; at < 100; ++at) CHECK(region.data[at] != std::byte{0xee});
    Regions::of_process().release(region.data);
  }
}

}  // namespace
}  // namespace shoal::test
