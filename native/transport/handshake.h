// Both ends of the proof that opens every connection, without any I/O.
//
//    client                                   server
//    HELLO {epoch, rank, to_rank,
//           path, nonce, mac of "hello"}  ->
//                                         <-  CHALLENGE {nonce}
//                                             or STALE, KEY_DIFFERS {digest}, or silence
//    PROOF {mac of "client"}              ->
//                                         <-  WELCOME {mac of "server"}
//
// The mac in HELLO covers what stands before it there: whoever knows the epoch and lacks the key is
// refused at its first message, and holds no place. A recorded HELLO can be replayed; the other two
// macs cover HELLO and CHALLENGE, so a proof binds the epoch, the two ranks, the path and both
// nonces, and cannot be replayed or reflected. KEY_DIFFERS ends a job, so it holds a digest of the
// HELLO that the server saw: a client that sent another one was not refused for its key, but for a
// bit that flipped on the way, and may try again.
//
// Every message has a fixed size: no length is ever read from the wire, and an end reads exactly
// wants() bytes, so what the peer sends after the handshake is never touched. Until it is proved
// right, a peer gets at most 108 bytes read.
//
// Threads: one at a time. Throws what base/mac.h throws, and std::bad_alloc; bad bytes never throw.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "base/mac.h"

namespace shoal {

inline constexpr std::string_view kHandshakeMagic = "shoal/rv";
inline constexpr uint16_t kHandshakeVersion = 10;
using Nonce = std::array<std::byte, 16>;

// How far one end has come; all but kWaiting are final.
enum class Progress : uint8_t {
  kWaiting,
  kDone,
  kStale,       // the ends are not in the same epoch: read the records again
  kKeyDiffers,  // the client could not prove the server's key
  kRefused,     // not our protocol, or not who it should be: close without a word
};

// What a client says it is, before it has proved anything.
struct Hello {
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint32_t to_rank = 0;
  uint32_t path = 0;

  bool operator==(const Hello&) const = default;
};

Nonce fresh_nonce();

// The key of one pair of ranks in one epoch, for one use; the order of `a` and `b` is free. A proof
// made with it is worthless for another pair, another epoch or another use.
Secret pair_key(Bytes job_key, uint64_t epoch, uint32_t a, uint32_t b, std::string_view role);

// Collects one fixed-size message at a time.
class Handshake {
 public:
  virtual ~Handshake() = default;

  // How many bytes to read next, at most; 0 once progress() is final.
  size_t wants() const {
    return progress_ == Progress::kWaiting ? n_message_bytes_ - inbox_.size() : 0;
  }
  Progress progress() const { return progress_; }
  // Takes what was read and adds what to send to `reply`, often nothing.
  void feed(Bytes data, std::vector<std::byte>& reply);
  // Once it is kDone: what both ends know, nobody else, and no other connection has had.
  Secret session() const { return Secret(mac("session")); }

 protected:
  Handshake(size_t n_first_bytes, Secret key)
      : key_(std::move(key)), n_message_bytes_(n_first_bytes) {}

  virtual void take(uint16_t kind, Bytes message, std::vector<std::byte>& reply) = 0;
  void end(Progress progress) { progress_ = progress; }
  void expect(size_t n_bytes) { n_message_bytes_ = n_bytes; }
  Digest mac(std::string_view who) const;

  Secret key_;
  std::vector<std::byte> said_;  // HELLO and CHALLENGE, as far as they were said

 private:
  std::vector<std::byte> inbox_;
  size_t n_message_bytes_;
  Progress progress_ = Progress::kWaiting;
};

// The end that connects. Send hello() first, then whatever feed() replies.
class ClientHandshake final : public Handshake {
 public:
  ClientHandshake(const Hello& hello, Secret key, const Nonce& nonce = fresh_nonce());

  Bytes hello() const { return hello_; }

 private:
  void take(uint16_t kind, Bytes message, std::vector<std::byte>& reply) override;
  void take_challenge(uint16_t kind, Bytes message, std::vector<std::byte>& reply);

  std::vector<std::byte> hello_;
  bool is_challenged_ = false;
};

// The end that was connected to. Says nothing to whoever does not speak the protocol.
class ServerHandshake final : public Handshake {
 public:
  // Judges a well-formed HELLO: the key to prove, or why not (kStale, which is told to the client,
  // or kRefused, which is not). What it throws, feed() throws.
  using Admit = std::function<std::variant<Secret, Progress>(const Hello&)>;
  explicit ServerHandshake(Admit admit, const Nonce& nonce = fresh_nonce());

  // Set once admitted; believe it only when progress() is kDone. While it is kWaiting, somebody
  // who holds the key has said it, perhaps to somebody else.
  const std::optional<Hello>& hello() const { return hello_; }

 private:
  void take(uint16_t kind, Bytes message, std::vector<std::byte>& reply) override;
  void take_hello(uint16_t kind, Bytes message, std::vector<std::byte>& reply);
  void take_admitted(Bytes hello, std::vector<std::byte>& reply);

  const Admit admit_;
  const Nonce nonce_;
  std::optional<Hello> hello_;
};

}  // namespace shoal
