// The links to all peers, and the frames that leave over them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/segments/traffic.h"
#include "transport/link.h"

namespace shoal {

// Threads: under the channel's lock. `now`: of the last tick.
class Links {
 public:
  Links(size_t n_peers, Traffic& traffic, const int64_t& now);

  void set(int peer, std::unique_ptr<Link> link);
  // Drop the link to a peer and the texts queued for it. The link itself is destroyed later, since
  // it may be on the stack above.
  void remove(int peer);
  void destroy_removed() { removed_.clear(); }
  size_t size() const { return links_.size(); }
  // By mesh rank; null for this process and for peers that left or are lost.
  Link* operator[](size_t peer) const { return links_[peer].get(); }
  Link* operator[](int peer) const { return links_[static_cast<size_t>(peer)].get(); }
  // True if the peer is on another host, also after its link is gone.
  bool is_far(int peer) const { return far_[static_cast<size_t>(peer)]; }

  // True if the payload is free again; otherwise FrameSink::sent() follows, if the frame has a
  // token.
  bool send(int peer, const Frame& frame);
  // Send a reply that the peer's frame requires. False, without sending, if the peer has provoked
  // many replies and does not read them: an honest peer does.
  bool answer(int peer, const Frame& frame);
  // Send an error's text, which is kept until it has left.
  void send_text(int peer, Header header, const std::string& text);
  uint64_t new_token() { return next_token_++; }
  void sent(uint64_t token) { texts_.erase(token); }
  int64_t last_sent_ns(size_t peer) const { return last_sent_ns_[peer]; }

  void will_flush(int peer) { to_flush_[static_cast<size_t>(peer)] = true; }
  void flush(FrameSink& sink);
  // True if links could take more than one turn may send.
  bool is_unflushed() const { return is_unflushed_; }

 private:
  struct Text {
    int peer;
    std::shared_ptr<std::string> text;
  };

  Traffic& traffic_;
  const int64_t& now_;
  std::vector<std::unique_ptr<Link>> links_, removed_;
  std::vector<bool> far_, to_flush_;
  std::vector<int64_t> last_sent_ns_;
  std::vector<uint32_t> n_owed_;  // replies since the peer's link was last empty
  bool is_unflushed_ = false;
  std::unordered_map<uint64_t, Text> texts_;  // by token
  uint64_t next_token_ = 1;
};

}  // namespace shoal
