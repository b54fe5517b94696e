// The links with all peers, and what leaves over them.
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
  // The peer gets nothing more; its words that nobody has read are forgotten. NOT destroyed yet:
  // the link may be on the stack above.
  void remove(int peer);
  void destroy_removed() { removed_.clear(); }
  size_t size() const { return links_.size(); }
  // By mesh rank; null: this process, or a peer that left or is lost.
  Link* operator[](size_t peer) const { return links_[peer].get(); }
  Link* operator[](int peer) const { return links_[static_cast<size_t>(peer)].get(); }
  // The link crosses a network, or did while there was one.
  bool is_far(int peer) const { return far_[static_cast<size_t>(peer)]; }

  // True if the payload is free again already; else sent() will tell, if the frame has a token.
  bool send(int peer, const Frame& frame);
  // What a frame of the peer calls for, which an honest peer reads. False, and nothing is sent,
  // where it has called for a great many and has yet to read those before.
  bool answer(int peer, const Frame& frame);
  // Words for people, kept until they have left.
  void send_text(int peer, Header header, const std::string& text);
  uint64_t new_token() { return next_token_++; }
  void sent(uint64_t token) { texts_.erase(token); }
  int64_t said_ns(size_t peer) const { return said_ns_[peer]; }

  void will_flush(int peer) { to_flush_[static_cast<size_t>(peer)] = true; }
  void flush(FrameSink& sink);
  // Links could take more at once than one turn may send.
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
  std::vector<int64_t> said_ns_;
  std::vector<uint32_t> n_owed_;  // answers since the peer's link had nothing queued
  bool is_unflushed_ = false;
  std::unordered_map<uint64_t, Text> texts_;  // by token
  uint64_t next_token_ = 1;
};

}  // namespace shoal
