// Keys, proofs and random numbers, all from OpenSSL's libcrypto and the kernel.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace shoal {

using Bytes = std::span<const std::byte>;
using Digest = std::array<std::byte, 32>;

// A secret. Its memory is wiped when it goes; it is moved and never copied.
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

// Takes the same time wherever they differ.
bool is_same(Bytes one, Bytes other);

// From the kernel. Ends the process if the kernel has none: a number that can be guessed is worse.
void fill_random(std::span<std::byte> out);

}  // namespace shoal
