// The room for encoded payloads: which peers get some, which steps wait, and its full return.
#include "engine/segments/call.h"
#include "engine/segments/encoded.h"
#include "test/check.h"

namespace shoal::test {
namespace {

constexpr size_t kBytes = 100;

// Keeps payloads for `peer` under tokens from `token` on, until there is no room. Returns how many.
uint64_t fill(Encoded& encoded, int peer, uint64_t token) {
  uint64_t n_kept = 0;
  for (auto payload = encoded.take(peer, kBytes); payload.block;
       payload = encoded.take(peer, kBytes))
    encoded.keep(token + n_kept++, peer, std::move(payload));
  return n_kept;
}

TEST("eight payloads wait in total, and one per peer") {
  Staging staging(1 << 20);
  Encoded encoded(staging, 4);
  CHECK_EQ(fill(encoded, 1, 100), 8u);
  CHECK_EQ(fill(encoded, 2, 200), 1u);
  CHECK_EQ(fill(encoded, 3, 300), 1u);
  CHECK_EQ(staging.reserved(), 10 * kBytes);
  for (uint64_t token = 100; token < 108; ++token) encoded.sent(token);
  CHECK_EQ(staging.reserved(), 2 * kBytes);
  CHECK_EQ(fill(encoded, 2, 210), 6u);
  encoded.drop_peer(2);
  encoded.sent(300);
  CHECK_EQ(staging.reserved(), 0u);
  CHECK_EQ(staging.used(), 0u);
}

TEST("a peer's first payload needs no room under the ceiling, and further ones do") {
  Staging staging(kBytes);
  CHECK(staging.reserve(kBytes));
  Encoded encoded(staging, 2);
  CHECK_EQ(fill(encoded, 1, 1), 1u);
  CHECK_EQ(staging.reserved(), kBytes);
  encoded.sent(1);
  CHECK_EQ(staging.reserved(), kBytes);
}

TEST("a payload that the link copies at once leaves nothing queued") {
  Staging staging(1 << 20);
  Encoded encoded(staging, 2);
  for (int n = 0; n < 100; ++n) {
    Encoded::Payload payload = encoded.take(1, kBytes);
    CHECK(payload.block);
    encoded.keep(7, 1, std::move(payload));
    encoded.give_back(7);
  }
  CHECK_EQ(staging.reserved(), 0u);
  CHECK_EQ(staging.used(), 0u);
}

TEST("steps queue once, earlier calls first, and each call's first scheduled step goes last") {
  Staging staging(1 << 20);
  Encoded encoded(staging, 3);
  const auto call = std::make_shared<Call>(), other = std::make_shared<Call>();
  constexpr uint64_t kLater = 9, kEarlier = 4;
  const uint64_t n_kept = fill(encoded, 1, 1);
  fill(encoded, 2, 100);
  for (int n = 0; n < 1000; ++n)
    for (const uint32_t at : {3u, 7u, 5u}) encoded.wait(1, {kLater, call, at});
  for (const uint32_t at : {5u, 6u}) encoded.wait(1, {kEarlier, other, at});
  encoded.wait(2, {kLater, call, 9});
  CHECK_EQ(encoded.sent(50).size(), 0u);  // no payload of ours
  std::vector<std::pair<uint64_t, uint32_t>> woken;
  for (const Encoded::Waiting& waiting : encoded.sent(1))
    woken.emplace_back(waiting.order, waiting.step);
  CHECK(woken == (std::vector<std::pair<uint64_t, uint32_t>>{
                     {kEarlier, 6}, {kEarlier, 5}, {kLater, 7}, {kLater, 5}, {kLater, 3}}));
  CHECK_EQ(encoded.sent(n_kept).size(), 0u);
}

}  // namespace
}  // namespace shoal::test
