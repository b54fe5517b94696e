#include "base/mac.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/params.h>
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

// libcrypto records failures per thread, where other code in this process would find them.
[[noreturn]] void throw_failure(const char* what) {
  const unsigned long code = ERR_peek_last_error();
  const bool no_memory = ERR_GET_REASON(code) == ERR_R_MALLOC_FAILURE;
  const char* reason = ERR_reason_error_string(code);
  const std::string text = reason == nullptr ? "no reason is known" : reason;
  ERR_clear_error();
  if (no_memory) throw std::bad_alloc();
  throw std::runtime_error(std::string("libcrypto cannot compute ") + what + ": " + text +
                           ". Is its default provider switched off?");
}

// Looked up once, because it takes a microsecond; never freed, because threads may outlive main().
EVP_MAC* siphash() {
  static EVP_MAC* const found = EVP_MAC_fetch(nullptr, "SIPHASH", nullptr);
  return found;
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

ShortMac::ShortMac(Secret key) : key_(std::move(key)) {
  if (siphash() == nullptr) throw_failure("SipHash");
  context_.reset(EVP_MAC_CTX_new(siphash()));
  unsigned int n_bytes = sizeof(uint64_t);
  const OSSL_PARAM size[] = {OSSL_PARAM_construct_uint(OSSL_MAC_PARAM_SIZE, &n_bytes),
                             OSSL_PARAM_construct_end()};
  if (context_ == nullptr || EVP_MAC_CTX_set_params(context_.get(), size) != 1 ||
      EVP_MAC_init(context_.get(), raw(key_.bytes()), key_.bytes().size(), nullptr) != 1)
    throw_failure("SipHash");
}

// Pass the key each time: the first versions of OpenSSL 3.0 do not restart without it. It costs 3
// ns of 80. Nothing here can fail once it has worked.
uint64_t ShortMac::of(Bytes message) const {
  uint64_t mac = 0;
  size_t n_bytes = 0;
  if (EVP_MAC_init(context_.get(), raw(key_.bytes()), key_.bytes().size(), nullptr) != 1 ||
      EVP_MAC_update(context_.get(), raw(message), message.size()) != 1 ||
      EVP_MAC_final(context_.get(), reinterpret_cast<unsigned char*>(&mac), &n_bytes,
                    sizeof(mac)) != 1 ||
      n_bytes != sizeof(mac))
    end_process({Fault::kInternal, -1, "libcrypto does not compute SipHash any more"});
  return mac;
}

void ShortMac::Free::operator()(evp_mac_ctx_st* context) const { EVP_MAC_CTX_free(context); }

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
