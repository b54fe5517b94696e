// Both ends of the handshake: which clients get in, strangers, and damage.
#include <cstdint>
#include <random>
#include <string>

#include "check.h"
#include "hex.h"
#include "transport/handshake.h"

namespace shoal {
namespace {

using Message = std::vector<std::byte>;
using test::bytes;
using test::hex;

constexpr Hello kHelloOfThree{0x1122334455667788, 3, 1, 5};

Secret key(char of = 'k') { return Secret(bytes(std::string(32, of))); }

ServerHandshake server(char of = 'k') {
  return ServerHandshake([of](const Hello&) { return key(of); });
}

// Feeds all of it, in pieces no larger than wanted.
void feed(Handshake& end, Bytes data, Message& reply) {
  while (!data.empty() && end.wants() > 0) {
    const size_t n = std::min(data.size(), end.wants());
    end.feed(data.first(n), reply);
    data = data.subspan(n);
  }
}

// Runs both ends with one bit of all their bytes flipped. Returns how many bits were sent.
size_t talk(ClientHandshake& client, ServerHandshake& server, size_t flipped = SIZE_MAX) {
  Handshake* listener = &server;
  Handshake* speaker = &client;
  Message message(client.hello().begin(), client.hello().end());
  size_t n_bits = 0;
  while (!message.empty()) {
    if (flipped >= n_bits && flipped < n_bits + 8 * message.size())
      message[(flipped - n_bits) / 8] ^= std::byte(1u << (flipped - n_bits) % 8);
    n_bits += 8 * message.size();
    Message reply;
    feed(*listener, message, reply);
    message = reply;
    std::swap(listener, speaker);
  }
  return n_bits;
}

TEST("two fresh nonces differ") { CHECK(fresh_nonce() != fresh_nonce()); }

TEST("two holders of the key both finish, and the server knows the client's identity") {
  ClientHandshake one(kHelloOfThree, key());
  ServerHandshake other = server();
  talk(one, other);
  CHECK(one.progress() == Progress::kDone);
  CHECK(other.progress() == Progress::kDone);
  CHECK(other.hello() == kHelloOfThree);
  CHECK_EQ(one.wants() + other.wants(), 0u);
}

TEST("both ends of a connection know its session, which no other connection has") {
  std::string before;
  for (int round = 0; round < 2; ++round) {
    ClientHandshake one(kHelloOfThree, key());
    ServerHandshake other = server();
    talk(one, other);
    CHECK_EQ(hex(one.session().bytes()), hex(other.session().bytes()));
    CHECK(hex(one.session().bytes()) != before);
    before = hex(one.session().bytes());
  }
}

TEST("one flipped bit never leads to a proof, nor to a report of another key") {
  for (const char of : {'k', 'x'}) {
    ClientHandshake whole(kHelloOfThree, key());
    ServerHandshake judge = server(of);
    const size_t n_bits = talk(whole, judge);
    CHECK(whole.progress() == (of == 'k' ? Progress::kDone : Progress::kKeyDiffers));
    for (size_t flipped = 0; flipped < n_bits; ++flipped) {
      ClientHandshake one(kHelloOfThree, key());
      ServerHandshake other = server(of);
      talk(one, other, flipped);
      CHECK(one.progress() != Progress::kDone);
      CHECK(one.progress() != Progress::kKeyDiffers);
    }
  }
}

TEST("a client without the key is refused at its HELLO, and a replay at its proof") {
  Message reply;
  ServerHandshake judge = server();
  feed(judge, ClientHandshake(kHelloOfThree, key('x')).hello(), reply);
  CHECK(judge.progress() == Progress::kKeyDiffers);
  ClientHandshake recorded(kHelloOfThree, key());
  ServerHandshake other = server();
  reply.clear();
  feed(other, recorded.hello(), reply);
  CHECK(other.progress() == Progress::kWaiting);
  ServerHandshake before = server();
  Message challenge, proof;
  feed(before, recorded.hello(), challenge);
  feed(recorded, challenge, proof);
  reply.clear();
  feed(other, proof, reply);
  CHECK(other.progress() == Progress::kRefused);
  CHECK(reply.empty());
}

TEST("noise of any length, even after a valid start, leads to no proof at either end") {
  std::mt19937 chance(1);
  for (int round = 0; round < 20000; ++round) {
    ClientHandshake one(kHelloOfThree, key());
    ServerHandshake other = server();
    Message reply;
    if (round % 2 == 0) feed(other, one.hello(), reply);
    Handshake& end = round % 4 < 3 ? static_cast<Handshake&>(other) : one;
    const size_t n_right = end.wants() > 12 ? chance() % 13 : 0;
    Message noise(chance() % 100);
    for (std::byte& byte : noise) byte = std::byte(chance());
    if (n_right <= noise.size()) std::copy_n(one.hello().begin(), n_right, noise.begin());
    while (end.wants() > 0 && !noise.empty()) {
      const size_t n = std::min<size_t>(noise.size(), 1 + chance() % 50);
      end.feed(Bytes(noise).first(n), reply);  // sometimes more than it wants
      noise.erase(noise.begin(), noise.begin() + static_cast<ptrdiff_t>(n));
    }
    CHECK(end.progress() != Progress::kDone);
  }
}

TEST("a finished end refuses further bytes, and an empty read changes nothing") {
  ClientHandshake one(kHelloOfThree, key());
  ServerHandshake other = server();
  talk(one, other);
  Message reply;
  other.feed({}, reply);
  CHECK(other.progress() == Progress::kDone);
  other.feed(bytes("more"), reply);
  CHECK(other.progress() == Progress::kRefused);
  CHECK(reply.empty());
}

TEST("a server that refuses sends nothing, and one in another epoch reports it") {
  for (const Progress verdict : {Progress::kRefused, Progress::kStale}) {
    ClientHandshake one(kHelloOfThree, key());
    ServerHandshake other([verdict](const Hello&) { return verdict; });
    talk(one, other);
    CHECK(other.progress() == verdict);
    CHECK(!other.hello());
    CHECK(one.progress() == (verdict == Progress::kStale ? verdict : Progress::kWaiting));
  }
}

// By Python's hmac: hmac.digest(b"k" * 32, b"shoal link v1" + struct.pack("<QII", 7, 1, 2) +
// b"link", "sha256").
TEST("a pair's key equals another implementation's, in either order of ranks") {
  const Secret job = key();
  const std::string expected = "a5a88d61dd193596bd785ee21ce3df3fcf7dcc2cbad24405777193b0d268d72f";
  CHECK_EQ(hex(pair_key(job.bytes(), 7, 1, 2, "link").bytes()), expected);
  CHECK_EQ(hex(pair_key(job.bytes(), 7, 2, 1, "link").bytes()), expected);
  CHECK(hex(pair_key(job.bytes(), 8, 1, 2, "link").bytes()) != expected);
  CHECK(hex(pair_key(job.bytes(), 7, 1, 3, "link").bytes()) != expected);
  CHECK(hex(pair_key(job.bytes(), 7, 1, 2, "store").bytes()) != expected);
}

}  // namespace
}  // namespace shoal
