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
// The mac in HELLO covers all fields before it. A process that knows the epoch but not the key is
// refused at its first message, and holds no place. A recorded HELLO can be replayed. The other two
// macs cover HELLO and CHALLENGE, so a proof binds the epoch, the two ranks, the path and both
// nonces, and cannot be replayed or reflected. KEY_DIFFERS ends a job, so it holds a digest of the
// HELLO that the server received. A client that sent a different HELLO was refused because of a
// flipped bit, not because of its key, and may try again.
//
// Every message has a fixed size: no length is ever read from the wire, and an end reads exactly
// wants() bytes, so bytes that the peer sends after the handshake are never read here. At most 108
// bytes are read of a peer that has not proved the key.
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

// The state of one end; all but kWaiting are final.
enum class Progress : uint8_t {
  kWaiting,
  kDone,
  kStale,       // the ends are not in the same epoch: read the records again
  kKeyDiffers,  // the client could not prove the server's key
  kRefused,     // not our protocol, or not the expected rank: close without a reply
};

// The identity that a client claims, before it has proved anything.
struct Hello {
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint32_t to_rank = 0;
  uint32_t path = 0;

  bool operator==(const Hello&) const = default;
};

Nonce fresh_nonce();

// Returns the key of one pair of ranks in one epoch, for one use; the order of `a` and `b` is free.
// A proof made with it is worthless for another pair, epoch or use.
Secret pair_key(Bytes job_key, uint64_t epoch, uint32_t a, uint32_t b, std::string_view role);

// Collects one fixed-size message at a time.
class Handshake {
 public:
  virtual ~Handshake() = default;

  // The most bytes to read next; 0 once progress() is final.
  size_t wants() const {
    return progress_ == Progress::kWaiting ? n_message_bytes_ - inbox_.size() : 0;
  }
  Progress progress() const { return progress_; }
  // Takes the bytes that were read, and appends the bytes to send to `reply`, often none.
  void feed(Bytes data, std::vector<std::byte>& reply);
  // A secret of this connection that only its two ends know. Call it once progress() is kDone.
  Secret session() const { return Secret(mac("session")); }

 protected:
  Handshake(size_t n_first_bytes, Secret key)
      : key_(std::move(key)), n_message_bytes_(n_first_bytes) {}

  virtual void take(uint16_t kind, Bytes message, std::vector<std::byte>& reply) = 0;
  void end(Progress progress) { progress_ = progress; }
  void expect(size_t n_bytes) { n_message_bytes_ = n_bytes; }
  Digest mac(std::string_view who) const;

  Secret key_;
  std::vector<std::byte> transcript_;  // HELLO and CHALLENGE, as far as they were sent

 private:
  std::vector<std::byte> inbox_;
  size_t n_message_bytes_;
  Progress progress_ = Progress::kWaiting;
};

// The end that connects. Send hello() first, then each reply of feed().
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

// The end that was connected to. Sends nothing to a peer that does not speak the protocol.
class ServerHandshake final : public Handshake {
 public:
  // Judges a well-formed HELLO. Returns the key to prove, or kStale, which is sent to the client,
  // or kRefused, which is not. feed() throws the exceptions of this callback.
  using Admit = std::function<std::variant<Secret, Progress>(const Hello&)>;
  explicit ServerHandshake(Admit admit, const Nonce& nonce = fresh_nonce());

  // Set once admitted. Trust it only when progress() is kDone: before, it may be a recorded HELLO
  // of a process that holds the key.
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
