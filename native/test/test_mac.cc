// What libcrypto computes for us, against the answers of the standards.
#include <string>

#include "base/mac.h"
#include "check.h"
#include "hex.h"

namespace shoal {
namespace {

using test::bytes;
using test::hex;

TEST("the hashes of RFC 4231 and FIPS 180 come out") {
  const std::string letter(20, '\x0b');
  CHECK_EQ(hex(hmac_sha256(bytes(letter), bytes("Hi There"))),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256(bytes("Jefe"), bytes("what do ya want for nothing?"))),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(sha256(bytes("abc"))),
           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST("bytes are the same only if they are as long and none differs") {
  CHECK(is_same(bytes("secret"), bytes("secret")));
  CHECK(!is_same(bytes("secret"), bytes("secreT")));
  CHECK(!is_same(bytes("secret"), bytes("Secret")));
  CHECK(!is_same(bytes("secret"), bytes("secre")));
  CHECK(!is_same(bytes(""), bytes("s")));
}

}  // namespace
}  // namespace shoal
