// The control plane's end in one process: it listens, connects, and exchanges small messages with
// peers that have proved a key. Its owner steps it, by one descriptor; nothing here blocks.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "transport/acceptor.h"
#include "transport/connector.h"
#include "transport/peer.h"

namespace shoal {

// Threads: one at a time. A child of fork() has none of its descriptors, and cannot use it.
class Endpoint {
 public:
  using PeerPtr = std::shared_ptr<Peer>;
  static constexpr int64_t kNever = Acceptor::kNever;

  // Called by step() alone; may call the endpoint and its peers, also to close them. step()
  // rethrows their exceptions, and continues with the rest the next time; judge() must not
  // throw.
  class Owner {
   public:
    virtual ~Owner() = default;
    // The key that a caller must prove, or the reason for a refusal: see ServerHandshake::Admit.
    virtual std::variant<Secret, Progress> judge(const Hello& hello) = 0;
    virtual void welcome(const PeerPtr& peer, const Hello& hello) = 0;  // a caller has proved it
    virtual void key_differs(const Hello& hello) = 0;
    virtual void take_stranger(int fd) = 0;  // owns it
    virtual void turned_away(uint64_t n_so_far, const std::string& caller) = 0;
    virtual void reached(const PeerPtr& peer, uint64_t dial) = 0;
    virtual void not_reached(const Connector::Failure& failure) = 0;  // it is dialled again
    virtual void received(const PeerPtr& peer, Frame frame) = 0;
    virtual void lost(const PeerPtr& peer, int error, const std::string& why) = 0;
  };
  struct Options {
    int64_t pending_ns = 2 * kSecond;
    int64_t dial_ns = 5 * kSecond;
    size_t most_queued = size_t{1} << 20;  // see Peer
    int64_t patience_ns = Peer::kPatient;  // see Peer
    std::vector<Acceptor::Beginning> beginnings = {};
  };

  Endpoint(Owner& owner, Options options);  // throws std::system_error without a descriptor
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;

  int fd() const { return epoll_fd_; }  // readable when step() has something to do
  // Does all work that is due, without waiting. Call it when fd() is readable, and at deadline().
  void step(int64_t now);
  int64_t deadline() const;

  void listen(int fd);  // owns it
  void shut() { acceptor_.shut(); }
  std::vector<int> hand_over() { return acceptor_.hand_over(); }
  size_t n_pending() const { return acceptor_.n_pending(); }
  uint64_t n_turned_away() const { return acceptor_.n_turned_away(); }

  // Dials until the peer is reached, with growing pauses. Returns the number of the dial.
  uint64_t connect(const Address& to, const Hello& hello, Secret key);
  void hang_up(uint64_t dial);  // nothing, if it has ended
  void close();                 // all of it, at once; idempotent

 private:
  void handle(uint64_t tag, bool has_ended, int64_t now);
  void notify_owner();
  void step_peer(uint64_t tag, bool has_ended, int64_t now);
  PeerPtr add_peer(Authenticated who, bool is_caller);
  void close_happened();
  void forsake();
  static void watch_forks();

  struct Proven {
    Authenticated who;
    bool is_caller = false;
  };
  struct TurnedAway {
    uint64_t n_so_far = 0;
    std::string caller;
  };
  // The findings of the acceptor and the connector, until the owner is notified.
  using Happened = std::variant<Proven, Hello, int, TurnedAway, Connector::Failure>;

  Owner& owner_;
  const size_t most_queued_;
  const int64_t patience_ns_;
  int epoll_fd_;
  int64_t due_ns_ = 0;  // of the acceptor and the connector
  std::deque<Happened> happened_;
  Acceptor acceptor_;
  Connector connector_;
  std::map<uint64_t, Secret> keys_;  // by dial
  std::map<uint64_t, PeerPtr> peers_;
  uint64_t n_dials_ = 0, n_peers_ = 0;
};

}  // namespace shoal
