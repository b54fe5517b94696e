#include "engine/segments/links.h"

#include <utility>

namespace shoal {
namespace {

// An honest peer provokes a handful of replies; one turn may bring 16,384 frames that each need
// one. More would let a peer that does not read fill this rank's memory.
constexpr uint32_t kMostOwed = 1u << 16;

}  // namespace

Links::Links(size_t n_peers, Traffic& traffic, const int64_t& now)
    : traffic_(traffic),
      now_(now),
      links_(n_peers),
      far_(n_peers, false),
      to_flush_(n_peers, false),
      last_sent_ns_(n_peers, 0),
      n_owed_(n_peers, 0) {
  removed_.reserve(n_peers);  // remove() is called where nothing may throw
}

void Links::set(int peer, std::unique_ptr<Link> link) {
  const auto at = static_cast<size_t>(peer);
  far_[at] = !link->shares_memory();
  links_[at] = std::move(link);
  last_sent_ns_[at] = now_;
}

void Links::remove(int peer) {
  std::erase_if(texts_, [&](const auto& entry) { return entry.second.peer == peer; });
  removed_.push_back(std::move(links_[static_cast<size_t>(peer)]));
}

bool Links::send(int peer, const Frame& frame) {
  const auto at = static_cast<size_t>(peer);
  Link* link = links_[at].get();
  if (link == nullptr) return true;
  to_flush_[at] = true;
  last_sent_ns_[at] = now_;
  traffic_[peer].n_frames_out++;
  return link->send(frame);
}

bool Links::answer(int peer, const Frame& frame) {
  const auto at = static_cast<size_t>(peer);
  if (links_[at] == nullptr) return true;
  n_owed_[at] = links_[at]->has_queued() ? n_owed_[at] + 1 : 0;
  if (n_owed_[at] > kMostOwed) return false;
  send(peer, frame);
  return true;
}

void Links::send_text(int peer, Header header, const std::string& text) {
  auto kept = std::make_shared<std::string>(text.substr(0, kMaxText));
  header.length = static_cast<uint32_t>(kept->size());
  Frame frame;
  frame.header = header;
  frame.payload = reinterpret_cast<const std::byte*>(kept->data());
  frame.token = new_token();
  texts_[frame.token] = {peer, std::move(kept)};  // before the link borrows it
  if (send(peer, frame)) texts_.erase(frame.token);
}

void Links::flush(FrameSink& sink) {
  is_unflushed_ = false;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!to_flush_[peer]) continue;
    to_flush_[peer] = false;
    Link* link = links_[peer].get();
    if (link == nullptr) continue;
    link->flush(sink);
    if (!link->is_unflushed()) continue;
    to_flush_[peer] = true;
    is_unflushed_ = true;
  }
}

}  // namespace shoal
