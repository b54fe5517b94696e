// Keys, proofs and random numbers, all from OpenSSL's libcrypto and the kernel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

struct evp_mac_ctx_st;

namespace shoal {

using Bytes = std::span<const std::byte>;
using Digest = std::array<std::byte, 32>;

// A secret. Its memory is wiped when it is destroyed; it is moved and never copied.
class Secret {
 public:
  Secret() = default;
  explicit Secret(Bytes bytes) : bytes_(bytes.begin(), bytes.end()) {}
  Secret(Secret&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  Secret& operator=(Secret&& other) noexcept {
    bytes_.swap(other.bytes_);
    return *this;
  }
  ~Secret();

  Bytes bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// These throw: std::bad_alloc without memory, std::runtime_error if libcrypto has no SHA-256.
Digest sha256(Bytes message);
Digest hmac_sha256(Bytes key, Bytes message);

// SipHash-2-4 with a 64-bit result, for short messages; any message that does not fit is refused.
// There is no nonce, so none can repeat.
//
// Threads: one at a time.
class ShortMac {
 public:
  static constexpr size_t kKeyBytes = 16;

  explicit ShortMac(Secret key);  // of kKeyBytes; throws as above
  uint64_t of(Bytes message) const;

 private:
  struct Free {
    void operator()(evp_mac_ctx_st* context) const;
  };
  Secret key_;
  std::unique_ptr<evp_mac_ctx_st, Free> context_;
};

// Takes the same time wherever the inputs differ.
bool is_same(Bytes one, Bytes other);

// From the kernel. Ends the process if the kernel has none: a guessable number would be worse.
void fill_random(std::span<std::byte> out);

}  // namespace shoal
