#include "transport/handshake.h"

#include <algorithm>
#include <cstring>

namespace shoal {
namespace {

enum Kind : uint16_t {
  kHello = 1,
  kChallenge = 2,
  kProof = 3,
  kWelcome = 4,
  kStaleNote = 5,
  kKeyDiffersNote = 6,
};

// Every message begins with magic, version and kind, little endian and without gaps.
constexpr size_t kVersionedBytes = kHandshakeMagic.size() + sizeof(uint16_t);
constexpr size_t kPrefixBytes = kVersionedBytes + sizeof(uint16_t);
constexpr size_t kTagBytes = 16;  // of a mac or a digest that is cut short
constexpr size_t kHelloBytes = kPrefixBytes + 8 + 3 * 4 + sizeof(Nonce) + kTagBytes;
constexpr size_t kShortBytes = kPrefixBytes + kTagBytes;      // CHALLENGE, STALE, KEY_DIFFERS
constexpr size_t kLongBytes = kPrefixBytes + sizeof(Digest);  // PROOF, WELCOME
static_assert(sizeof(Nonce) == kTagBytes);

using Message = std::vector<std::byte>;

void put(Message& to, Bytes bytes) {
  const size_t at = to.size();
  to.resize(at + bytes.size());
  std::ranges::copy(bytes, to.begin() + static_cast<ptrdiff_t>(at));
}

void put(Message& to, std::string_view text) { put(to, std::as_bytes(std::span(text))); }

template <class Number>
void put_number(Message& to, Number number) {
  put(to, std::as_bytes(std::span(&number, 1)));
}

template <class Number>
Number number_at(Bytes message, size_t at) {
  Number number;
  std::memcpy(&number, message.subspan(at, sizeof(number)).data(), sizeof(number));
  return number;
}

Message versioned() {
  Message message;
  put(message, kHandshakeMagic);
  put_number(message, kHandshakeVersion);
  return message;
}

Message message_of(Kind kind, Bytes body) {
  Message message = versioned();
  put_number<uint16_t>(message, kind);
  put(message, body);
  return message;
}

Bytes tag_of(const Digest& digest) { return Bytes(digest).first(kTagBytes); }

Digest digest_of_refusal(Bytes hello) {
  Message message;
  put(message, "differs");
  put(message, hello);
  return sha256(message);
}

}  // namespace

Nonce fresh_nonce() {
  Nonce nonce;
  fill_random(nonce);
  return nonce;
}

Secret pair_key(Bytes job_key, uint64_t epoch, uint32_t a, uint32_t b, std::string_view role) {
  Message context;
  put(context, "shoal link v1");
  put_number(context, epoch);
  put_number(context, std::min(a, b));
  put_number(context, std::max(a, b));
  put(context, role);
  return Secret(hmac_sha256(job_key, context));
}

void Handshake::feed(Bytes data, std::vector<std::byte>& reply) {
  if (data.empty()) return;
  if (data.size() > wants()) return end(Progress::kRefused);
  put(inbox_, data);
  const Message expected = versioned();
  const size_t n_known = std::min(expected.size(), inbox_.size());
  if (!std::equal(expected.begin(), expected.begin() + static_cast<ptrdiff_t>(n_known),
                  inbox_.begin()))
    return end(Progress::kRefused);
  if (wants() > 0) return;
  const Message message = std::exchange(inbox_, {});
  take(number_at<uint16_t>(message, kVersionedBytes), message, reply);
}

Digest Handshake::mac(std::string_view who) const {
  Message message;
  put(message, who);
  put(message, transcript_);
  return hmac_sha256(key_.bytes(), message);
}

// ---- client

ClientHandshake::ClientHandshake(const Hello& hello, Secret key, const Nonce& nonce)
    : Handshake(kShortBytes, std::move(key)), hello_(message_of(kHello, {})) {
  put_number(hello_, hello.epoch);
  put_number(hello_, hello.rank);
  put_number(hello_, hello.to_rank);
  put_number(hello_, hello.path);
  put(hello_, nonce);
  transcript_ = hello_;
  put(hello_, tag_of(mac("hello")));
}

void ClientHandshake::take(uint16_t kind, Bytes message, std::vector<std::byte>& reply) {
  if (!is_challenged_) return take_challenge(kind, message, reply);
  const bool is_right = is_same(message.subspan(kPrefixBytes), mac("server"));
  end(kind == kWelcome && is_right ? Progress::kDone : Progress::kRefused);
}

void ClientHandshake::take_challenge(uint16_t kind, Bytes message, std::vector<std::byte>& reply) {
  if (kind == kStaleNote) return end(Progress::kStale);
  if (kind == kKeyDiffersNote &&
      is_same(message.subspan(kPrefixBytes), tag_of(digest_of_refusal(hello_))))
    return end(Progress::kKeyDiffers);
  if (kind != kChallenge) return end(Progress::kRefused);
  transcript_ = hello_;
  put(transcript_, message);
  is_challenged_ = true;
  expect(kLongBytes);
  put(reply, message_of(kProof, mac("client")));
}

// ---- server

ServerHandshake::ServerHandshake(Admit admit, const Nonce& nonce)
    : Handshake(kHelloBytes, Secret()), admit_(std::move(admit)), nonce_(nonce) {}

void ServerHandshake::take(uint16_t kind, Bytes message, std::vector<std::byte>& reply) {
  if (!hello_) return take_hello(kind, message, reply);
  if (kind != kProof || !is_same(message.subspan(kPrefixBytes), mac("client")))
    return end(Progress::kRefused);  // a HELLO that was recorded, or a bit that flipped
  put(reply, message_of(kWelcome, mac("server")));
  end(Progress::kDone);
}

void ServerHandshake::take_hello(uint16_t kind, Bytes message, std::vector<std::byte>& reply) {
  if (kind != kHello) return end(Progress::kRefused);
  Hello hello;
  hello.epoch = number_at<uint64_t>(message, kPrefixBytes);
  hello.rank = number_at<uint32_t>(message, kPrefixBytes + 8);
  hello.to_rank = number_at<uint32_t>(message, kPrefixBytes + 12);
  hello.path = number_at<uint32_t>(message, kPrefixBytes + 16);
  auto verdict = admit_(hello);
  if (Secret* key = std::get_if<Secret>(&verdict)) {
    key_ = std::move(*key);
    hello_ = hello;
    return take_admitted(message, reply);
  }
  const bool is_stale = std::get<Progress>(verdict) == Progress::kStale;
  if (is_stale) put(reply, message_of(kStaleNote, Nonce{}));
  end(is_stale ? Progress::kStale : Progress::kRefused);
}

void ServerHandshake::take_admitted(Bytes hello, std::vector<std::byte>& reply) {
  const Bytes tag = hello.last(kTagBytes);
  put(transcript_, hello.first(hello.size() - kTagBytes));
  if (!is_same(tag, tag_of(mac("hello")))) {
    put(reply, message_of(kKeyDiffersNote, tag_of(digest_of_refusal(hello))));
    return end(Progress::kKeyDiffers);
  }
  const Message challenge = message_of(kChallenge, nonce_);
  put(transcript_, tag);
  put(transcript_, challenge);
  put(reply, challenge);
  expect(kLongBytes);
}

}  // namespace shoal
