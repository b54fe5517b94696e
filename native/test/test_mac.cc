// libcrypto's results, against the test vectors of the standards.
#include <string>

#include "base/mac.h"
#include "check.h"
#include "hex.h"

namespace shoal {
namespace {

using test::bytes;
using test::hex;

TEST("the hashes equal those of RFC 4231 and FIPS 180") {
  const std::string letter(20, '\x0b');
  CHECK_EQ(hex(hmac_sha256(bytes(letter), bytes("Hi There"))),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256(bytes("Jefe"), bytes("what do ya want for nothing?"))),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(sha256(bytes("abc"))),
           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// The key and the message of the paper: bytes 0, 1, 2 and so on. Aumasson, Bernstein: SipHash
// (2012), appendix A; the empty message is the first of the vectors of its reference code.
TEST("SipHash equals its paper's values, even when one context is used many times") {
  std::string digits;
  for (char digit = 0; digit < 16; ++digit) digits += digit;
  const ShortMac mac(Secret(bytes(digits)));
  for (int round = 0; round < 3; ++round) {
    CHECK_EQ(mac.of(bytes(digits.substr(0, 15))), 0xa129ca6149be45e5u);
    CHECK_EQ(mac.of({}), 0x726fdb47dd0e0e31u);
  }
}

TEST("bytes are equal only if their lengths match and no byte differs") {
  CHECK(is_same(bytes("secret"), bytes("secret")));
  CHECK(!is_same(bytes("secret"), bytes("secreT")));
  CHECK(!is_same(bytes("secret"), bytes("Secret")));
  CHECK(!is_same(bytes("secret"), bytes("secre")));
  CHECK(!is_same(bytes(""), bytes("s")));
}

}  // namespace
}  // namespace shoal
