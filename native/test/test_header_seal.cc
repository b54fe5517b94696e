// Sealed headers: what a seal covers, and what a relay without the key can do to a link.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>

#include "base/crc32c.h"
#include "test/links.h"
#include "transport/header_seal.h"

namespace shoal::test {
namespace {

constexpr uint64_t kWrap = uint64_t{1} << 32;

// ---- what it covers

Header some_header() {
  Header header;
  header.type = FrameType::kData;
  header.flags = kEager;
  header.payload_crc = 0x11223344;
  header.sequence = 5;
  header.acknowledged = 9;
  header.group = 3;
  header.key = 1001;
  header.descriptor = 0xcafef00d;
  header.subject = 0xdeadbeef;
  header.flow = 1;
  header.segment = 2;
  header.count = 1;
  header.length = 100;
  return header;
}

constexpr Turn kTurn{41, 7 * kWrap + 5, kWrap + 9};

// Computed by Python's hmac, and by a SipHash-2-4 in Python that passes its paper's test vectors:
// each key is the first half of HMAC(HMAC(job key, "shoal link v1", epoch, lower rank, higher rank,
// "frames up" or "frames down"), "path", path, session); the message is header[8:64], place, and
// the upper halves of both numbers. All numbers are little endian.
TEST("seals equal those of another implementation") {
  Header header = some_header();
  header.version = 3;  // whichever it is now
  CHECK_EQ(keys_of(0, 1).out(2).of(header, kTurn), 0xfda1195adc6531c6u);
  CHECK_EQ(keys_of(1, 0).out(2).of(header, kTurn), 0x1c3a4f11797a3ef3u);
  const std::string session(32, 's');
  CHECK_EQ(keys_of(0, 1).out(2, std::as_bytes(std::span(session))).of(header, kTurn),
           0xedf7f2bbc29e1be5u);
}

TEST("a header fits only its own bits, number, connection and direction") {
  Header header = some_header();
  header.seal = keys_of(0, 1).out(2).of(header, kTurn);
  const HeaderSeal in = keys_of(1, 0).in(2);
  CHECK(in.fits(header, kTurn));
  for (size_t bit = 0; bit < 8 * sizeof(header); ++bit) {
    Header damaged;
    std::byte bytes[sizeof(header)];
    std::memcpy(bytes, &header, sizeof(header));
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    std::memcpy(&damaged, bytes, sizeof(header));
    CHECK(!in.fits(damaged, kTurn));
  }
  for (const Turn& other : {Turn{42, kTurn.sequence, kTurn.acknowledged},
                            Turn{41, kTurn.sequence + kWrap, kTurn.acknowledged},
                            Turn{41, kTurn.sequence, kTurn.acknowledged - kWrap}})
    CHECK(!in.fits(header, other));
  const std::string session = "another connection";
  CHECK(!keys_of(1, 0).out(2).fits(header, kTurn));  // sent back to its sender
  CHECK(!keys_of(1, 0).in(1).fits(header, kTurn));
  CHECK(!keys_of(1, 0).in(2, std::as_bytes(std::span(session))).fits(header, kTurn));
  CHECK(!keys_of(2, 0).in(2).fits(header, kTurn));
  CHECK(!keys_of(1, 0, kEpoch + 1).in(2).fits(header, kTurn));
  CHECK(!keys_of(1, 0, kEpoch, "the key of others").in(2).fits(header, kTurn));
}

TEST("a number is recovered from its lower half and a nearby number") {
  CHECK_EQ(widen(5, 3), 5u);
  CHECK_EQ(widen(3, 5), 3u);
  CHECK_EQ(widen(2, kWrap - 2), kWrap + 2);
  CHECK_EQ(widen(0xfffffffe, kWrap + 1), kWrap - 2);
  CHECK_EQ(widen(7, 9 * kWrap), 9 * kWrap + 7);
  CHECK(widen(0xffffffff, 0) > kWrap);  // so no such frame was ever sent
}

// ---- a relay without the key

// The bytes that one end has written and the other has not read, as frames.
struct Wire {
  Bytes unframed;
  std::vector<Bytes> frames;
  Bytes readable;

  void split() {
    Header header;
    while (unframed.size() >= sizeof(header)) {
      std::memcpy(&header, unframed.data(), sizeof(header));
      const size_t n_bytes = sizeof(header) + header.length;
      if (unframed.size() < n_bytes) return;
      const auto end = unframed.begin() + static_cast<std::ptrdiff_t>(n_bytes);
      frames.emplace_back(unframed.begin(), end);
      unframed.erase(unframed.begin(), end);
    }
  }
  void pass(const Bytes& frame) { readable.insert(readable.end(), frame.begin(), frame.end()); }
};

class WirePipe final : public Pipe {
 public:
  WirePipe(Wire& out, Wire& in) : out_(out), in_(in) {}

  ssize_t write(const iovec* vectors, size_t n_vectors) override {
    ssize_t n_bytes = 0;
    for (size_t at = 0; at < n_vectors; ++at) {
      const auto* from = static_cast<const std::byte*>(vectors[at].iov_base);
      out_.unframed.insert(out_.unframed.end(), from, from + vectors[at].iov_len);
      n_bytes += static_cast<ssize_t>(vectors[at].iov_len);
    }
    return n_bytes;
  }
  ssize_t read(const iovec* vectors, size_t n_vectors) override {
    ssize_t n_bytes = 0;
    for (size_t at = 0; at < n_vectors && !in_.readable.empty(); ++at) {
      const size_t n = std::min(vectors[at].iov_len, in_.readable.size());
      const auto end = in_.readable.begin() + static_cast<std::ptrdiff_t>(n);
      std::copy(in_.readable.begin(), end, static_cast<std::byte*>(vectors[at].iov_base));
      in_.readable.erase(in_.readable.begin(), end);
      n_bytes += static_cast<ssize_t>(n);
    }
    if (n_bytes > 0) return n_bytes;
    errno = EAGAIN;
    return -1;
  }
  void end(bool) override {}

 private:
  Wire& out_;
  Wire& in_;
};

// Two links with a relay between them, which does one thing to one frame of rank 0.
struct Relayed final : Pair {
  explicit Relayed(uint64_t n_before = 0) {
    for (const int end : {0, 1}) {
      Outbox::Sizes sizes;
      sizes.n_before = n_before;
      auto link = std::make_unique<TcpLink>(1 - end, 1, keys_of(end, 1 - end), sizes);
      link->add_path(0,
                     std::make_unique<WirePipe>(wires[static_cast<size_t>(end)],
                                                wires[static_cast<size_t>(1 - end)]),
                     {});
      links[static_cast<size_t>(end)] = std::move(link);
    }
  }
  ~Relayed() override { links = {}; }
  bool pump(int end) override {
    const bool moved = Pair::pump(end);
    relay();
    return moved;
  }
  void relay() {
    for (Wire& wire : wires) wire.split();
    for (const Bytes& frame : wires[1].frames) {
      wires[1].pass(frame);
      answers.push_back(frame);
    }
    wires[1].frames.clear();
    auto& frames = wires[0].frames;
    while (!frames.empty()) {
      if (n_passed == victim && harm) {
        if (!harm(*this)) return;  // needs to see more frames first
        victim = SIZE_MAX;
        continue;
      }
      pass();
    }
  }
  void pass() {
    auto& frames = wires[0].frames;
    history.push_back(frames.front());
    wires[0].pass(frames.front());
    frames.erase(frames.begin());
    n_passed++;
  }

  std::array<Wire, 2> wires;
  std::vector<Bytes> history, answers;  // the frames that rank 0 and rank 1 have sent
  size_t n_passed = 0, victim = SIZE_MAX;
  std::function<bool(Relayed&)> harm;
};

struct Harm {
  const char* name;
  bool (*to)(Relayed& relay, FakeRandom& random);
};

bool goes_on(Relayed& relay, const Bytes& frame) {
  relay.wires[0].pass(frame);
  return true;
}

const Harm kHarms[] = {
    {"repeats a frame at once",
     [](Relayed& relay, FakeRandom&) { return goes_on(relay, relay.history.back()); }},
    {"repeats an earlier frame",
     [](Relayed& relay, FakeRandom& random) {
       return goes_on(relay, relay.history[random.below(relay.history.size())]);
     }},
    {"drops a frame",
     [](Relayed& relay, FakeRandom&) {
       relay.wires[0].frames.erase(relay.wires[0].frames.begin());
       return !relay.wires[0].frames.empty();  // it shows when the next one arrives
     }},
    {"swaps two frames",
     [](Relayed& relay, FakeRandom&) {
       if (relay.wires[0].frames.size() < 2) return false;
       std::swap(relay.wires[0].frames[0], relay.wires[0].frames[1]);
       return true;
     }},
    {"makes up a frame, checksums and all",
     [](Relayed& relay, FakeRandom&) {
       Header header;
       std::memcpy(&header, relay.wires[0].frames[0].data(), sizeof(header));
       header.seal = FrameKeys({}, kEpoch, 0, 1)
                         .out(0)
                         .of(header, {relay.n_passed, header.sequence, header.acknowledged});
       Bytes frame = relay.wires[0].frames[0];
       std::memcpy(frame.data(), &header, sizeof(header));
       return goes_on(relay, frame);
     }},
    {"puts another payload under a header",
     [](Relayed& relay, FakeRandom& random) {
       while (relay.wires[0].frames[0].size() == sizeof(Header)) {
         relay.pass();
         if (relay.wires[0].frames.empty()) return false;
       }
       Bytes& frame = relay.wires[0].frames[0];
       Header header;
       std::memcpy(&header, frame.data(), sizeof(header));
       frame[sizeof(header) + random.below(header.length)] ^= std::byte{1};
       header.payload_crc = crc32c(0, frame.data() + sizeof(header), header.length);
       std::memcpy(frame.data(), &header, sizeof(header));
       return true;
     }},
    {"flips a bit",
     [](Relayed& relay, FakeRandom& random) {
       Bytes& frame = relay.wires[0].frames[0];
       frame[random.below(frame.size())] ^= std::byte{1} << random.below(8);
       return true;
     }},
    {"sends rank 1 its own frame back",
     [](Relayed& relay, FakeRandom&) {
       const size_t place = relay.n_passed;
       return place < relay.answers.size() && goes_on(relay, relay.answers[place]);
     }},
    {"plays the same place of an older connection",
     [](Relayed& relay, FakeRandom&) {
       Header header;
       std::memcpy(&header, relay.wires[0].frames[0].data(), sizeof(header));
       const std::string session = "older";
       header.seal = keys_of(0, 1)
                         .out(0, std::as_bytes(std::span(session)))
                         .of(header, {relay.n_passed, header.sequence, header.acknowledged});
       Bytes frame = relay.wires[0].frames[0];
       std::memcpy(frame.data(), &header, sizeof(header));
       return goes_on(relay, frame);
     }},
};

TEST("harm done by a relay is refused, and exactly the frames before it arrive unchanged") {
  for (const Harm& harm : kHarms) {
    const int before = failures_of_this_test();
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      FakeRandom random(seed);
      Relayed pair(seed % 2 == 0 ? 0 : kWrap - 10);
      pair.victim = 1 + random.below(30);
      pair.harm = [&](Relayed& relay) { return harm.to(relay, random); };
      std::vector<Bytes> payloads;
      for (uint32_t number = 0; number < 40; ++number) {
        payloads.push_back(random_bytes(random, 1 + random.below(3000)));
        pair.link(0).send(data_frame(payloads.back(), number, number + 1));
        pair.link(1).send(data_frame(payloads.front(), number));
        if (random.chance(0.3)) pair.pump(random.chance(0.5) ? 0 : 1);
      }
      CHECK(pair.run([&] { return pair.sink(1).is_over; }));
      const std::string& why = pair.sink(1).why.text;
      CHECK(has(why, "seal does not fit") || has(why, "corrupt payload"));
      const auto& came = pair.sink(1).came;
      CHECK(came.size() < payloads.size());
      for (const auto& one : came)
        check_came(one, payloads[one.header.segment], one.header.segment);
    }
    if (failures_of_this_test() > before)
      fail(__FILE__, __LINE__, std::string("a relay that ") + harm.name);
  }
}

TEST("a harmless relay is not noticed, even where numbers wrap") {
  for (const uint64_t n_before : {uint64_t{0}, kWrap - 1000, 5 * kWrap - 1}) {
    Relayed pair(n_before);
    const Bytes payload(2000, std::byte{5});
    constexpr uint32_t kFrames = 3000;
    for (uint32_t number = 0; number < kFrames; ++number)
      for (const int end : {0, 1}) pair.link(end).send(data_frame(payload, number, number + 1));
    const auto all = [&](int end) {
      return pair.sink(end).came.size() == kFrames && pair.sink(end).n_sent.size() == kFrames;
    };
    CHECK(pair.run([&] { return all(0) && all(1); }));
    for (const int end : {0, 1}) {
      for (uint32_t at = 0; at < pair.sink(end).came.size(); ++at)
        check_came(pair.sink(end).came[at], payload, at);
      for (const auto& [token, n_times] : pair.sink(end).n_sent) CHECK_EQ(n_times, 1);
      CHECK(!pair.sink(end).is_over);
    }
  }
}

// A frame that was held back for four billion frames.
TEST("a frame or acknowledgement from a full turn of the numbers ago is refused") {
  for (const FrameType type : {FrameType::kHeartbeat, FrameType::kAck})
    for (const uint64_t turns : {uint64_t{1}, uint64_t{0}}) {
      Relayed pair(kWrap);
      pair.link(1).send(Frame{});
      pair.pump(1);  // so that there is a frame to acknowledge
      Header header;
      header.type = type;
      header.sequence = type == FrameType::kAck ? 0 : 1;
      header.acknowledged = 1;
      const bool is_ack = type == FrameType::kAck;
      const Turn turn{0, is_ack ? 0 : turns * kWrap + 1, (is_ack ? turns : 1) * kWrap + 1};
      header.seal = keys_of(0, 1).out(0).of(header, turn);
      Bytes frame(sizeof(header));
      std::memcpy(frame.data(), &header, sizeof(header));
      pair.wires[0].pass(frame);
      pair.pump(1);
      CHECK_EQ(pair.sink(1).is_over, turns == 0);
    }
}

TEST("a socket's link refuses bytes recorded on it earlier") {
  const Bytes payload(100, std::byte{3});
  const Bytes bytes = bytes_of({data_frame(payload, 1)});
  Stream stream;
  stream.write(bytes.data(), bytes.size());
  CHECK_EQ(stream.sink.came.size(), 1u);
  stream.write(bytes.data(), bytes.size());
  CHECK_EQ(stream.sink.came.size(), 1u);
  CHECK(has(stream.sink.why.text, "corrupt header as frame 1 of path 0"));
}

}  // namespace
}  // namespace shoal::test
