#include "base/mac.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "base/error.h"

namespace shoal {
namespace {

const unsigned char* raw(Bytes bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

// What libcrypto notes of a failure belongs to the thread: others in this process would find it.
[[noreturn]] void throw_failure(const char* what) {
  const unsigned long code = ERR_peek_last_error();
  const bool no_memory = ERR_GET_REASON(code) == ERR_R_MALLOC_FAILURE;
  const char* reason = ERR_reason_error_string(code);
  const std::string text = reason == nullptr ? "it does not say why" : reason;
  ERR_clear_error();
  if (no_memory) throw std::bad_alloc();
  throw std::runtime_error(std::string("libcrypto cannot compute ") + what + ": " + text +
                           ". Is its default provider switched off?");
}

}  // namespace

Secret::~Secret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

Digest sha256(Bytes message) {
  Digest digest;
  auto* out = reinterpret_cast<unsigned char*>(digest.data());
  if (EVP_Digest(message.data(), message.size(), out, nullptr, EVP_sha256(), nullptr) != 1)
    throw_failure("SHA-256");
  return digest;
}

Digest hmac_sha256(Bytes key, Bytes message) {
  Digest digest;
  auto* out = reinterpret_cast<unsigned char*>(digest.data());
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), raw(message), message.size(),
           out, nullptr) == nullptr)
    throw_failure("HMAC-SHA256");
  return digest;
}

bool is_same(Bytes one, Bytes other) {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

void fill_random(std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t n = getrandom(out.data(), out.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      end_process({Fault::kInternal, -1,
                   std::string("the kernel gives no random bytes (getrandom(2): ") +
                       std::strerror(errno) + ")"});
    out = out.subspan(static_cast<size_t>(n));
  }
}

}  // namespace shoal
