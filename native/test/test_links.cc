// One contract, every implementation of Link: link.h's contract, tested on each of them.
#include "test/link_makers.h"

namespace shoal::test {
namespace {

// ---- frames

TEST("frames of every size arrive whole, and in order where the link keeps order") {
  for_every_link([](Pair& pair, const Maker& maker) {
    FakeRandom random(1);
    std::vector<Bytes> payloads;
    for (const size_t n_bytes : {0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4096})
      payloads.push_back(random_bytes(random, n_bytes));
    for (int n = 0; n < 60; ++n) payloads.push_back(random_bytes(random, random.below(3000)));
    for (const size_t n_bytes : {maker.largest / 2 + 1, maker.largest - 1, maker.largest})
      payloads.push_back(random_bytes(random, n_bytes));
    uint32_t number = 0;
    for (const Bytes& payload : payloads) {
      pair.link(0).send(data_frame(payload, number, number + 1));
      if (++number % 5 == 0) pair.link(0).flush(pair.sink(0));
    }
    auto& came = pair.sink(1).came;
    CHECK(pair.run([&] { return came.size() == payloads.size(); }));
    if (!maker.in_order)
      std::sort(came.begin(), came.end(),
                [](const auto& a, const auto& b) { return a.header.segment < b.header.segment; });
    for (uint32_t at = 0; at < came.size(); ++at) check_came(came[at], payloads[at], at);
    CHECK(maker.lands == (pair.sink(1).n_receive_buffers > 0));
    CHECK(!pair.sink(0).is_over && !pair.sink(1).is_over);
  });
}

TEST("both ends can send at once") {
  for_every_link([](Pair& pair, const Maker& maker) {
    FakeRandom random(2);
    const Bytes payload = random_bytes(random, maker.largest);
    for (uint32_t number = 0; number < 20; ++number)
      for (const int end : {0, 1}) pair.link(end).send(data_frame(payload, number, number + 1));
    CHECK(
        pair.run([&] { return pair.sink(0).came.size() == 20 && pair.sink(1).came.size() == 20; }));
    for (const int end : {0, 1})
      for (const auto& came : pair.sink(end).came) check_came(came, payload, came.header.segment);
  });
}

TEST("small payloads that travel in the frame need no caller's memory") {
  for_every_link([](Pair& pair, const Maker&) {
    for (uint32_t number = 0; number < 3000; ++number) {
      Frame frame = data_frame({}, number, 0);
      frame.payload = nullptr;
      frame.carry({number, 2, 3});
      CHECK(pair.link(0).send(frame));
    }
    auto& came = pair.sink(1).came;
    CHECK(pair.run([&] { return came.size() == 3000; }));
    for (const auto& one : came) {
      Place place;
      std::memcpy(&place, one.payload.data(), sizeof(Place));
      CHECK_EQ(place.region, one.header.segment);
      CHECK_EQ(place.offset, 3u);
    }
  });
}

TEST("a payload is released by send() itself or else by exactly one sent()") {
  for_every_link([](Pair& pair, const Maker& maker) {
    FakeRandom random(3);
    std::map<uint64_t, std::unique_ptr<Bytes>> borrowed;
    std::map<uint32_t, Bytes> originals;
    // Overwritten and freed as soon as it is released.
    pair.sink(0).on_sent = [&](uint64_t token) {
      CHECK_EQ(borrowed.count(token), 1u);
      std::fill(borrowed[token]->begin(), borrowed[token]->end(), std::byte{0xee});
      borrowed.erase(token);
    };
    for (uint32_t number = 0; number < 100; ++number) {
      const size_t n_bytes = random.below(number % 10 == 0 ? maker.largest : 5000);
      auto payload = std::make_unique<Bytes>(random_bytes(random, n_bytes));
      originals[number] = *payload;
      const uint64_t token = number + 1;
      Bytes* at = payload.get();
      borrowed[token] = std::move(payload);
      if (pair.link(0).send(data_frame(*at, number, token))) borrowed.erase(token);
      if (random.chance(0.2)) pair.pump(0);
    }
    CHECK(pair.run([&] { return pair.sink(1).came.size() == 100 && borrowed.empty(); }));
    pair.settle();
    for (const auto& [token, n_times] : pair.sink(0).n_sent) CHECK_EQ(n_times, 1);
    for (const auto& came : pair.sink(1).came)
      check_came(came, originals[came.header.segment], came.header.segment);
  });
}

TEST("frames without a token are not reported as sent") {
  for_every_link([](Pair& pair, const Maker& maker) {
    const Bytes payload(maker.largest, std::byte{5});
    for (uint32_t number = 0; number < 10; ++number) pair.link(0).send(data_frame(payload, number));
    CHECK(pair.run([&] { return pair.sink(1).came.size() == 10; }));
    CHECK(pair.sink(0).n_sent.empty());
  });
}

TEST("frames queue in the link while the peer does not read, and all arrive once it does") {
  for_every_link([](Pair& pair, const Maker& maker) {
    FakeRandom random(4);
    const Bytes payload = random_bytes(random, std::min<size_t>(maker.largest, 64 << 10));
    constexpr uint32_t kFrames = 300;
    for (uint32_t number = 0; number < kFrames; ++number) {
      pair.link(0).send(data_frame(payload, number, number + 1));
      pair.link(0).flush(pair.sink(0));
    }
    const bool is_bounded =
        !has(maker.name, "fake") || has(maker.name, "little room") || has(maker.name, "fake paths");
    CHECK_EQ(pair.link(0).has_queued(), is_bounded);
    auto& came = pair.sink(1).came;
    CHECK(pair.run([&] { return came.size() == kFrames; }));
    CHECK(pair.run([&] { return !pair.link(0).has_queued(); }));
    for (const auto& one : came) check_came(one, payload, one.header.segment);
  });
}

TEST("a sink may use the link from inside its callbacks") {
  for_every_link([](Pair& pair, const Maker& maker) {
    const Bytes payload(std::min<size_t>(maker.largest, 2000), std::byte{7});
    // Answers every frame at once, and releases the memory of a call that has lent none.
    pair.sink(1).on_arrived = [&](const Header& header) {
      Frame answer = data_frame({}, header.segment);
      answer.payload = nullptr;
      pair.link(1).send(answer);
      pair.link(1).flush(pair.sink(1));
      pair.link(1).release(pair.next_token++, {});
    };
    pair.sink(0).on_sent = [&](uint64_t) { pair.link(0).has_queued(); };
    for (uint32_t number = 0; number < 200; ++number) {
      pair.link(0).send(data_frame(payload, number, number + 1));
    }
    CHECK(pair.run([&] { return pair.sink(0).came.size() == 200; }));
  });
}

// ---- the end

void check_closed(Pair& pair, int end) {
  pair.sink(end).is_over = true;  // from now on every call of the sink is a failure
  const Bytes payload(3000);
  CHECK(pair.link(end).send(data_frame(payload, 1, 9)));
  CHECK(!pair.link(end).has_queued());
  pair.link(end).flush(pair.sink(end));
  pair.link(end).pump(pair.sink(end));
  CHECK(pair.link(end).release(1, call_of(data_frame(payload, 1).header)));
  pair.link(end).close();
}

TEST("close() drops the queue without callbacks and may be called again") {
  for_every_link([](Pair& pair, const Maker& maker) {
    const Bytes payload(maker.largest, std::byte{1});
    for (uint32_t number = 0; number < 50; ++number)
      pair.link(0).send(data_frame(payload, number, number + 1));
    pair.link(1).send(data_frame(payload, 0, 1));
    pair.link(1).flush(pair.sink(1));
    pair.link(0).close();
    check_closed(pair, 0);
  });
}

TEST("frames flushed before close() arrive, and then the peer's link breaks once") {
  for_every_link([](Pair& pair, const Maker&) {
    const Bytes payload(200, std::byte{1});
    for (uint32_t number = 0; number < 5; ++number) pair.link(0).send(data_frame(payload, number));
    Frame goodbye;
    goodbye.header.type = FrameType::kGoodbye;
    pair.link(0).send(goodbye);
    while (pair.link(0).has_queued()) {
      pair.pump(0);
      pair.pump(1);
    }
    pair.link(0).close();
    pair.sink(0).is_over = true;
    CHECK(pair.run([&] { return pair.sink(1).is_over; }));
    CHECK_EQ(pair.sink(1).came.size(), 6u);
    CHECK(pair.sink(1).came.back().header.type == FrameType::kGoodbye);
    CHECK(pair.sink(1).why.fault == Fault::kPeerLost);
    CHECK_EQ(pair.sink(1).why.peer, 0);
    CHECK(has(pair.sink(1).why.text, "closed the connection"));
    pair.pump(1);
    check_closed(pair, 1);
  });
}

TEST("a link closed in the middle of a large frame breaks the peer's link once") {
  for_every_link([](Pair& pair, const Maker& maker) {
    const Bytes payload(maker.largest, std::byte{1});
    for (uint32_t number = 0; number < 20; ++number)
      pair.link(0).send(data_frame(payload, number, number + 1));
    pair.pump(0);
    pair.pump(1);
    pair.links[0].reset();
    for (int n = 0; n < 1000 && !pair.sink(1).is_over; ++n) {
      if (!pair.pump(1)) pair.wait();
    }
    CHECK(pair.sink(1).is_over);
    CHECK(has(pair.sink(1).why.text, "closed the connection"));
    for (const auto& came : pair.sink(1).came) check_came(came, payload, came.header.segment);
    CHECK(pair.sink(1).came.size() < 20 || has(maker.name, "fake"));
    check_closed(pair, 1);
  });
}

TEST("close() from inside a sink's callback ends everything there") {
  for (const char* where : {"arrived", "sent"}) {
    for_every_link([&](Pair& pair, const Maker& maker) {
      const Bytes payload(std::min<size_t>(maker.largest, 3000), std::byte{1});
      const bool by_sent = std::string(where) == "sent";
      const int end = by_sent ? 0 : 1;
      const auto close_now = [&] {
        pair.link(end).close();
        pair.sink(end).is_over = true;
      };
      if (by_sent)
        pair.sink(0).on_sent = [&](uint64_t) { close_now(); };
      else
        pair.sink(1).on_arrived = [&](const Header&) { close_now(); };
      for (uint32_t number = 0; number < 200; ++number)
        pair.link(0).send(data_frame(payload, number, number + 1));
      for (int n = 0; n < 300; ++n) {
        pair.pump(end);
        if (!pair.sink(1 - end).is_over) pair.pump(1 - end);
      }
      if (maker.borrows || !by_sent) CHECK(pair.sink(end).is_over);
    });
  }
}

TEST("a frame that the sink refuses breaks the link") {
  for_every_link([](Pair& pair, const Maker& maker) {
    if (!maker.lands) return;
    pair.sink(1).refuses = true;
    const Bytes payload(100);
    pair.link(0).send(data_frame(payload, 1));
    CHECK(pair.run([&] { return pair.sink(1).is_over; }));
    CHECK(has(pair.sink(1).why.text, "100 B that was not expected"));
    CHECK(pair.sink(1).came.empty());
  });
}

// ---- damage, in a ring

TEST("garbage in a ring breaks the link, whatever its counters claim") {
  FakeRandom random(10);
  for (int n = 0; n < 100; ++n) {
    ShmPair pair;
    RingHeader& ring = pair.arenas[1].ring(0);
    std::byte* data = pair.arenas[1].ring_data(0);
    for (size_t at = 0; at < Arena::ring_bytes(2); at += 8) {
      const uint64_t bits = random.next();
      if (random.chance(0.5)) std::memcpy(data + at, &bits, sizeof(bits));
    }
    // Some of it resembles records.
    for (size_t at = 0; at < Arena::ring_bytes(2); at += 64) {
      if (!random.chance(0.5)) continue;
      Header header;
      header.type = static_cast<FrameType>(random.below(16));
      header.length = static_cast<uint32_t>(random.below(random.chance(0.5) ? 200 : 20'000));
      std::memcpy(data + at, &header, sizeof(header));
    }
    const uint64_t tail = random.below(1000) * 64;
    ring.tail = tail;
    ring.head = random.chance(0.5) ? tail + 64 * (1 + random.below(2048)) : random.next();
    for (int turn = 0; turn < 3 && !pair.sink(1).is_over; ++turn) pair.pump(1);
    if (pair.sink(1).is_over) CHECK(has(pair.sink(1).why.text, "ring"));
  }
}

}  // namespace
}  // namespace shoal::test
