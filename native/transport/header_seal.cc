#include "transport/header_seal.h"

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "transport/handshake.h"

namespace shoal {
namespace {

Secret key_from_to(Bytes job_key, uint64_t epoch, int from, int to, int channel) {
  std::string role = from < to ? "frames up" : "frames down";
  if (channel > 0) role += ' ' + std::to_string(channel);
  return pair_key(job_key, epoch, static_cast<uint32_t>(from), static_cast<uint32_t>(to), role);
}

}  // namespace

uint64_t HeaderSeal::of(const Header& header, const Turn& turn) const {
  struct {
    std::byte header[sizeof(Header) - sizeof(Header::seal)];
    uint64_t place;
    uint32_t sequence_high, acknowledged_high;
  } covered;
  static_assert(sizeof(covered) == 72 && offsetof(Header, seal) == 0);
  std::memcpy(covered.header, reinterpret_cast<const std::byte*>(&header) + sizeof(Header::seal),
              sizeof(covered.header));
  covered.place = turn.place;
  covered.sequence_high = static_cast<uint32_t>(turn.sequence >> 32);
  covered.acknowledged_high = static_cast<uint32_t>(turn.acknowledged >> 32);
  return mac_.of(std::as_bytes(std::span(&covered, 1)));
}

FrameKeys::FrameKeys(Bytes job_key, uint64_t epoch, int rank, int peer, int channel)
    : out_(key_from_to(job_key, epoch, rank, peer, channel)),
      in_(key_from_to(job_key, epoch, peer, rank, channel)) {}

HeaderSeal FrameKeys::seal(const Secret& key, uint32_t path, Bytes session) {
  constexpr std::string_view kLabel = "path";
  std::vector<std::byte> context(kLabel.size() + sizeof(path) + session.size());
  std::memcpy(context.data(), kLabel.data(), kLabel.size());
  std::memcpy(context.data() + kLabel.size(), &path, sizeof(path));
  if (!session.empty())
    std::memcpy(context.data() + kLabel.size() + sizeof(path), session.data(), session.size());
  const Secret whole(hmac_sha256(key.bytes(), context));
  return HeaderSeal(Secret(whole.bytes().first(ShortMac::kKeyBytes)));
}

}  // namespace shoal
